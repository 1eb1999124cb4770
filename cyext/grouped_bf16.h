/* Products of bfloat16 rows with tiles, for AVX512-BF16. 16 columns of two tiles become 16 registers of
   pairs of exact codes, which every row of x is multiplied with in turn: float32 sums of 16 columns,
   then the scale. The order of sums is the same however many rows x has. */
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16,f16c,fma")

typedef struct {
    __m512i words[2];            /* by code, up to 64 of them */
    __m512i low[4], high[4];     /* bytes by code, 256 of them */
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

INLINE __m512i bf16_units(const uint8_t *units, int64_t place, int64_t lanes, __mmask16 mask) {
    return _mm512_maskz_loadu_epi32(mask, units + place * lanes * 4);
}

INLINE __m512i bf16_shifted(__m512i v, int right) {
    return right > 0 ? _mm512_srli_epi16(v, right) : right < 0 ? _mm512_slli_epi16(v, -right) : v;
}

INLINE __m512i bf16_bytes(__m512i code, const __m512i *table) {
    __m512i below = _mm512_permutex2var_epi8(table[0], code, table[1]);
    __m512i above = _mm512_permutex2var_epi8(table[2], code, table[3]);
    return _mm512_mask_blend_epi8(_mm512_movepi8_mask(code), below, above);
}

/* Where a tile's codes are, and its scales as its columns go by. */
typedef struct {
    Scales at;
    const uint8_t *codes, *planes;
    int64_t lanes;
    __mmask16 mask;
} BfTile;

INLINE BfTile bf16_begin(const Matrix *w, int64_t first, const int bits) {
    const int64_t lanes = lanes_of(w, first), columns = w->num_columns;
    BfTile tile = {scales_begin(w, first, lanes), w->codes + first * columns * (bits == 8 ? 8 : 4) / 8, NULL, lanes,
                   (__mmask16)((1u << lanes) - 1)};
    if (bits == 5 || bits == 6) tile.planes = w->planes + first * columns * (bits - 4) / 8;
    return tile;
}

/* Pairs of columns 2 i, 2 i + 1 of 16 columns, the first or second half of step `step`. */
INLINE void bf16_pairs(__m512i *pairs, const BfTables *tables, const BfTile *tile, int64_t step, const int half,
                       const int bits) {
    const int64_t lanes = tile->lanes, units = bits == 8 ? 4 : 2, unit = (2 * step + half) * units;
#pragma GCC unroll 4
    for (int i = 0; i < units; i++) /* what is met 16 steps later */
        _mm_prefetch((const char *)tile->codes + (unit + i + 32 * units) * lanes * 4, _MM_HINT_T0);
    if (bits == 8) {
        const __m512i low_bytes = _mm512_set1_epi16(0x00ff);
#pragma GCC unroll 4
        for (int b = 0; b < 4; b++) {
            __m512i code = bf16_units(tile->codes, unit + b, lanes, tile->mask);
            __m512i low = bf16_bytes(code, tables->low), high = bf16_bytes(code, tables->high);
            pairs[2 * b] = _mm512_ternarylogic_epi32(low_bytes, low, _mm512_slli_epi16(high, 8), 0xca);
            pairs[2 * b + 1] = _mm512_ternarylogic_epi32(low_bytes, _mm512_srli_epi16(low, 8), high, 0xca);
        }
        return;
    }
    __m512i extra = _mm512_setzero_si512();
    if (bits > 4) {
        const int64_t place = bits == 5 ? step : 2 * step + half;
        _mm_prefetch((const char *)tile->planes + (place + 16 * (bits - 4)) * lanes * 4, _MM_HINT_T0);
        extra = bf16_units(tile->planes, place, lanes, tile->mask);
    }
    const __m512i above = _mm512_set1_epi16(bits == 5 ? 0x10 : 0x30);
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        __m512i code = bf16_shifted(bf16_units(tile->codes, unit + i / 4, lanes, tile->mask), 4 * (i % 4));
        if (bits > 4) {
            const int right = bits == 5 ? 8 * half + i - 4 : 2 * i - 4;
            code = _mm512_ternarylogic_epi32(above, bf16_shifted(extra, right), code, 0xca);
        }
        pairs[i] = bits == 6 ? _mm512_permutex2var_epi16(tables->words[0], code, tables->words[1])
                             : _mm512_permutexvar_epi16(code, tables->words[0]);
    }
}

/* A half of step `step` of `count` tiles meets all rows; out[t]: float32 [rows][16] of tile t. */
INLINE void bf16_half(BfTile *tiles, const BfTables *tables, const int32_t *x, const float *sums, int64_t num_rows,
                      float *const *out, __m512 *scale, __m512 *minimum, int64_t step, const int half,
                      const int count, const int bits, const int is_fine, const int has_minimum) {
    __m512i pairs[2][8];
#pragma GCC unroll 2
    for (int t = 0; t < count; t++) {
        bf16_pairs(pairs[t], tables, &tiles[t], step, half, bits);
        if (is_fine || !half) scale[t] = scale_of_16(&tiles[t].at, tiles[t].mask, &minimum[t], has_minimum);
        scales_next(&tiles[t].at, 16);
    }
    __m512 own_scale[2], own_minimum[2]; /* what out is written to is not these */
#pragma GCC unroll 2
    for (int t = 0; t < count; t++) own_scale[t] = scale[t], own_minimum[t] = minimum[t];
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
            __m512 total = _mm512_fmadd_ps(own_scale[t], dots[t], _mm512_load_ps(out[t] + 16 * m));
            if (has_minimum && is_fine) /* a group of 16 has a minimum of its own */
                total = _mm512_fnmadd_ps(own_minimum[t], _mm512_set1_ps(sum[half]), total);
            else if (has_minimum && half)
                total = _mm512_fnmadd_ps(own_minimum[t], _mm512_set1_ps(sum[0] + sum[1]), total);
            _mm512_store_ps(out[t] + 16 * m, total);
        }
    }
}

/* x: of each step [rows][32] bfloat16; sums: of each step [rows][2] float32, of 16 columns each. Adds to
   out[t], float32 [rows][16], what tile first[t] gives. Two tiles share what is read of x. */
INLINE void bf16_tiles(const Matrix *w, const int64_t *first, const uint8_t *x, const float *sums, int64_t num_rows,
                       float *const *out, const int count, const int bits, const int is_fine, const int has_minimum) {
    const BfTables tables = bf16_tables(w);
    BfTile tiles[2];
    __m512 scale[2], minimum[2]; /* of a step, or of each half of it */
    for (int t = 0; t < count; t++) tiles[t] = bf16_begin(w, first[t], bits);
    for (int64_t step = 0; step < w->num_columns / STEP; step++) {
        bf16_half(tiles, &tables, (const int32_t *)x, sums, num_rows, out, scale, minimum, step, 0, count, bits, is_fine,
                  has_minimum);
        bf16_half(tiles, &tables, (const int32_t *)x, sums, num_rows, out, scale, minimum, step, 1, count, bits, is_fine,
                  has_minimum);
    }
}

#define BF16_KIND(bits, is_fine, has_minimum)                                                               \
    case (bits) * 4 + (is_fine) * 2 + (has_minimum):                                                       \
        if (num_rows == 1 && count == 2)                                                                     \
            bf16_tiles(w, first, x, sums, 1, out, 2, bits, is_fine, has_minimum);                            \
        else if (count == 1) bf16_tiles(w, first, x, sums, num_rows, out, 1, bits, is_fine, has_minimum);    \
        else bf16_tiles(w, first, x, sums, num_rows, out, 2, bits, is_fine, has_minimum);                    \
        break;
#define BF16_KINDS(bits) BF16_KIND(bits, 0, 0) BF16_KIND(bits, 0, 1) BF16_KIND(bits, 1, 0) BF16_KIND(bits, 1, 1)

static void bf16_multiply(const Matrix *w, const int64_t *first, int count, const void *x, const float *sums,
                          int64_t num_rows, float *const *out) {
    switch (w->bits * 4 + (w->group % STEP != 0) * 2 + (w->minimum != NO_MINIMUM)) {
        BF16_KINDS(4) BF16_KINDS(5) BF16_KINDS(6) BF16_KINDS(8)
    }
}
#pragma GCC pop_options
