/* Products of bfloat16 rows with tiles, for AVX512-BF16. 16 columns of two tiles become 16 registers of
   exact code pairs, with which each row of x is multiplied in turn: float32 sums over 16 columns, then
   the scale. The order of summation does not depend on the number of rows of x. */
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16,f16c,fma")

enum { SPAN_STEPS = 8 }; /* steps whose scales are computed together, ahead of their codes */

typedef struct {
    __m512i words[2];            /* by code, up to 64 */
    __m512i low[4], high[4];     /* bytes by code, 256 */
} BfTables;

INLINE BfTables bf16_tables(const Matrix *w) {
    BfTables tables;
    uint8_t low[256], high[256];
    for (int i = 0; i < 2; i++) tables.words[i] = _mm512_loadu_si512(w->halves + 32 * i);
    for (int i = 0; i < 256; i++) low[i] = (uint8_t)w->halves[i], high[i] = (uint8_t)(w->halves[i] >> 8);
    for (int i = 0; i < 4; i++) {
        tables.low[i] = _mm512_loadu_si512(low + 64 * i);
        tables.high[i] = _mm512_loadu_si512(high + 64 * i);
    }
    return tables;
}

INLINE __m512i bf16_shifted(__m512i v, int right) {
    return right > 0 ? _mm512_srli_epi16(v, right) : right < 0 ? _mm512_slli_epi16(v, -right) : v;
}

INLINE __m512i bf16_bytes(__m512i code, const __m512i *table) {
    __m512i below = _mm512_permutex2var_epi8(table[0], code, table[1]);
    __m512i above = _mm512_permutex2var_epi8(table[2], code, table[3]);
    return _mm512_mask_blend_epi8(_mm512_movepi8_mask(code), below, above);
}

/* A tile's codes, and a cursor over its scales. */
typedef struct {
    Scales at;
    const uint8_t *codes, *planes;
    int64_t lanes;
    __mmask16 mask;
    __m512 scale[2 * SPAN_STEPS], minimum[2 * SPAN_STEPS]; /* of a span's steps, or of their halves */
} BfTile;

INLINE void bf16_begin(BfTile *tile, const Matrix *w, int64_t first, const int bits) {
    const int64_t lanes = lanes_of(w, first), columns = w->num_columns;
    tile->at = scales_begin(w, first, lanes);
    tile->codes = w->codes + first * columns * (bits == 8 ? 8 : 4) / 8;
    tile->planes = bits == 5 || bits == 6 ? w->planes + first * columns * (bits - 4) / 8 : NULL;
    tile->lanes = lanes, tile->mask = (__mmask16)((1u << lanes) - 1);
}

INLINE void bf16_scales(BfTile *tile, int64_t num_steps, const int is_fine, const int has_minimum) {
    const int64_t count = is_fine ? 2 * num_steps : num_steps;
    Scales at = tile->at;
    Reals reals = {0};
    for (int64_t i = 0; i < count; i++) {
        if (i == 0 || at.supergroup_left == at.w->supergroup) reals = reals_of_16(&at, tile->mask, has_minimum);
        tile->scale[i] = scale_of_16(&at, reals, tile->mask, &tile->minimum[i], has_minimum);
        scales_next(&at, is_fine ? STEP / 2 : STEP);
    }
    tile->at = at;
}

INLINE __m512i bf16_units(const uint8_t *units, const BfTile *tile, int64_t place) {
    return _mm512_maskz_loadu_epi32(tile->mask, units + place * tile->lanes * 4);
}

/* The column pairs of one unit: four, or two for 8-bit codes. `u` counts the units of 16 columns, the first
   or second half of step `step`. */
INLINE void bf16_pairs(__m512i *pairs, const BfTables *tables, const BfTile *tile, int64_t step, const int half,
                       const int u, const int bits) {
    const __m512i codes = bf16_units(tile->codes, tile, bits == 8 ? 8 * step + 4 * half + u : 4 * step + 2 * half + u);
    if (bits == 8) {
        const __m512i low_bytes = _mm512_set1_epi16(0x00ff);
        __m512i low = bf16_bytes(codes, tables->low), high = bf16_bytes(codes, tables->high);
        pairs[0] = _mm512_ternarylogic_epi32(low_bytes, low, _mm512_slli_epi16(high, 8), 0xca);
        pairs[1] = _mm512_ternarylogic_epi32(low_bytes, _mm512_srli_epi16(low, 8), high, 0xca);
        return;
    }
    const __m512i above = _mm512_set1_epi16(bits == 5 ? 0x10 : 0x30);
    __m512i extra = _mm512_setzero_si512();
    if (bits > 4) extra = bf16_units(tile->planes, tile, bits == 5 ? step : 2 * step + half);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        __m512i code = bf16_shifted(codes, 4 * i);
        if (bits > 4) {
            const int right = bits == 5 ? 8 * half + 4 * u + i - 4 : 8 * u + 2 * i - 4;
            code = _mm512_ternarylogic_epi32(above, bf16_shifted(extra, right), code, 0xca);
        }
        pairs[i] = bits == 6 ? _mm512_permutex2var_epi16(tables->words[0], code, tables->words[1])
                             : _mm512_permutexvar_epi16(code, tables->words[0]);
    }
}

/* Add half a step to a row's total; `sum`: of x over both halves. */
INLINE __m512 bf16_total(__m512 scale, __m512 minimum, __m512 dots, const float *sum, __m512 total, const int half,
                         const int is_fine, const int has_minimum) {
    total = _mm512_fmadd_ps(scale, dots, total);
    if (has_minimum && is_fine) /* each group of 16 has its own minimum */
        total = _mm512_fnmadd_ps(minimum, _mm512_set1_ps(sum[half]), total);
    else if (has_minimum && half)
        total = _mm512_fnmadd_ps(minimum, _mm512_set1_ps(sum[0] + sum[1]), total);
    return total;
}

/* Multiply half of step `step`, the `within`-th of its span, of `count` tiles with all rows; out[t]: of tile
   t, [rows][16]. */
INLINE void bf16_half(const BfTile *tiles, const BfTables *tables, const int32_t *x, const float *sums, int64_t num_rows,
                      float *const *out, int64_t step, int64_t within, const int half, const int count, const int bits,
                      const int is_fine, const int has_minimum) {
    const int per_unit = bits == 8 ? 2 : 4;
    __m512i pairs[2][8];
    __m512 scale[2], minimum[2]; /* copies that do not alias out */
#pragma GCC unroll 2
    for (int t = 0; t < count; t++) {
#pragma GCC unroll 4
        for (int u = 0; u < 8 / per_unit; u++) bf16_pairs(pairs[t] + per_unit * u, tables, &tiles[t], step, half, u, bits);
        scale[t] = tiles[t].scale[is_fine ? 2 * within + half : within];
        minimum[t] = tiles[t].minimum[is_fine ? 2 * within + half : within];
    }
    const int32_t *row = x + step * num_rows * 16 + 8 * half;
    const float *sum = sums + step * num_rows * 2;
    for (int64_t m = 0; m < num_rows; m++, row += 16, sum += 2) {
        __m512 dots[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) {
            const __m512bh pair = (__m512bh)_mm512_set1_epi32(row[i]);
#pragma GCC unroll 2
            for (int t = 0; t < count; t++) dots[t] = _mm512_dpbf16_ps(dots[t], (__m512bh)pairs[t][i], pair);
        }
#pragma GCC unroll 2
        for (int t = 0; t < count; t++) {
            __m512 total = _mm512_load_ps(out[t] + 16 * m);
            total = bf16_total(scale[t], minimum[t], dots[t], sum, total, half, is_fine, has_minimum);
            _mm512_store_ps(out[t] + 16 * m, total);
        }
    }
}

/* Adds the products with tile first[t] to out[t], float32 [rows][16]. x: per step [rows][32] bfloat16; sums: per
   step [rows][2] float32, of 16 columns each. Two tiles share the loads of x. */
INLINE void bf16_many(const Matrix *w, const int64_t *first, const int32_t *x, const float *sums, int64_t num_rows,
                      float *const *out, const int count, const int bits, const int is_fine, const int has_minimum) {
    const BfTables tables = bf16_tables(w);
    const int64_t num_steps = w->num_columns / STEP;
    BfTile tiles[2];
    for (int t = 0; t < count; t++) bf16_begin(&tiles[t], w, first[t], bits);
    for (int64_t begin = 0; begin < num_steps; begin += SPAN_STEPS) {
        const int64_t end = begin + SPAN_STEPS < num_steps ? begin + SPAN_STEPS : num_steps;
        for (int t = 0; t < count; t++) bf16_scales(&tiles[t], end - begin, is_fine, has_minimum);
        for (int64_t step = begin; step < end; step++) {
            bf16_half(tiles, &tables, x, sums, num_rows, out, step, step - begin, 0, count, bits, is_fine, has_minimum);
            bf16_half(tiles, &tables, x, sums, num_rows, out, step, step - begin, 1, count, bits, is_fine, has_minimum);
        }
    }
}

/* The same of few rows, whose totals stay in registers, and one tile: memory that is read in one go
   comes fastest, without being told ahead. Codes are met as they are unpacked, in a chain of sums for
   each half and row. */
INLINE void bf16_few(const Matrix *w, int64_t first, const int32_t *x, const float *sums, const int num_rows, float *out,
                     const int bits, const int is_fine, const int has_minimum) {
    const BfTables tables = bf16_tables(w);
    const int64_t num_steps = w->num_columns / STEP;
    const int per_unit = bits == 8 ? 2 : 4;
    BfTile tile;
    __m512 totals[FEW_ROWS], dots[FEW_ROWS][2];
    bf16_begin(&tile, w, first, bits);
#pragma GCC unroll 4
    for (int m = 0; m < num_rows; m++) totals[m] = _mm512_load_ps(out + 16 * m);
    for (int64_t step = 0; step < num_steps; step++, x += 16 * num_rows, sums += 2 * num_rows) {
        const int64_t within = step % SPAN_STEPS, left = num_steps - step;
        if (!within) bf16_scales(&tile, left < SPAN_STEPS ? left : SPAN_STEPS, is_fine, has_minimum);
#pragma GCC unroll 4
        for (int m = 0; m < num_rows; m++) dots[m][0] = dots[m][1] = _mm512_setzero_ps();
#pragma GCC unroll 4
        for (int u = 0; u < 8 / per_unit; u++) {
            __m512i pairs[2][4];
            bf16_pairs(pairs[0], &tables, &tile, step, 0, u, bits);
            bf16_pairs(pairs[1], &tables, &tile, step, 1, u, bits);
#pragma GCC unroll 8
            for (int i = 0; i < 2 * per_unit; i++)
#pragma GCC unroll 4
                for (int m = 0; m < num_rows; m++) {
                    const __m512bh pair = (__m512bh)_mm512_set1_epi32(x[16 * m + 8 * (i % 2) + per_unit * u + i / 2]);
                    dots[m][i % 2] = _mm512_dpbf16_ps(dots[m][i % 2], (__m512bh)pairs[i % 2][i / 2], pair);
                }
        }
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++)
#pragma GCC unroll 4
            for (int m = 0; m < num_rows; m++) {
                const int64_t i = is_fine ? 2 * within + half : within;
                totals[m] = bf16_total(tile.scale[i], tile.minimum[i], dots[m][half], sums + 2 * m, totals[m], half, is_fine,
                                       has_minimum);
            }
    }
#pragma GCC unroll 4
    for (int m = 0; m < num_rows; m++) _mm512_store_ps(out + 16 * m, totals[m]);
}

INLINE void bf16_rows(const Matrix *w, const int64_t *first, int count, const int32_t *x, const float *sums,
                      int64_t num_rows, float *const *out, const int bits, const int is_fine, const int has_minimum) {
    if (num_rows > FEW_ROWS) {
        if (count == 1) bf16_many(w, first, x, sums, num_rows, out, 1, bits, is_fine, has_minimum);
        else bf16_many(w, first, x, sums, num_rows, out, 2, bits, is_fine, has_minimum);
        return;
    }
    for (int t = 0; t < count; t++) switch (num_rows) {
        case 1: bf16_few(w, first[t], x, sums, 1, out[t], bits, is_fine, has_minimum); break;
        case 2: bf16_few(w, first[t], x, sums, 2, out[t], bits, is_fine, has_minimum); break;
        case 3: bf16_few(w, first[t], x, sums, 3, out[t], bits, is_fine, has_minimum); break;
        default: bf16_few(w, first[t], x, sums, 4, out[t], bits, is_fine, has_minimum);
    }
}

#define BF16_KIND(bits, is_fine, has_minimum)                                                \
    case (bits) * 4 + (is_fine) * 2 + (has_minimum):                                         \
        bf16_rows(w, first, count, x, sums, num_rows, out, bits, is_fine, has_minimum);      \
        break;
#define BF16_KINDS(bits) BF16_KIND(bits, 0, 0) BF16_KIND(bits, 0, 1) BF16_KIND(bits, 1, 0) BF16_KIND(bits, 1, 1)

static void bf16_multiply(const Matrix *w, const int64_t *first, int count, const void *x, const float *sums,
                          int64_t num_rows, float *const *out) {
    switch (w->bits * 4 + (w->group % STEP != 0) * 2 + (w->minimum != NO_MINIMUM)) {
        BF16_KINDS(4) BF16_KINDS(5) BF16_KINDS(6) BF16_KINDS(8)
    }
}
#pragma GCC pop_options
