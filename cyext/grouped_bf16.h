/* Products of bfloat16 rows with a tile, for AVX512-BF16. 32 columns of 16 rows become 16 registers
   of pairs of exact codes, which every row of x is multiplied with in turn: float32 sums of 16
   columns, then the scale. The order of sums is the same however many rows x has. */
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

/* Pairs of columns 2 i, 2 i + 1 of step `step`, as bfloat16. */
INLINE void bf16_pairs(__m512i *pairs, const BfTables *tables, const uint8_t *codes, const uint8_t *planes,
                       int64_t step, int64_t lanes, __mmask16 mask, const int bits) {
    if (bits == 8) {
        const __m512i low_bytes = _mm512_set1_epi16(0x00ff);
#pragma GCC unroll 16
        for (int b = 0; b < 8; b++) {
            __m512i code = bf16_units(codes, 8 * step + b, lanes, mask);
            __m512i low = bf16_bytes(code, tables->low), high = bf16_bytes(code, tables->high);
            pairs[2 * b] = _mm512_ternarylogic_epi32(low_bytes, low, _mm512_slli_epi16(high, 8), 0xca);
            pairs[2 * b + 1] = _mm512_ternarylogic_epi32(low_bytes, _mm512_srli_epi16(low, 8), high, 0xca);
        }
        return;
    }
    __m512i extra[2];
    if (bits == 5) extra[0] = extra[1] = bf16_units(planes, step, lanes, mask);
    if (bits == 6)
        for (int h = 0; h < 2; h++) extra[h] = bf16_units(planes, 2 * step + h, lanes, mask);
    const __m512i above = _mm512_set1_epi16(bits == 5 ? 0x10 : 0x30);
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
        __m512i code = bf16_shifted(bf16_units(codes, 4 * step + i / 4, lanes, mask), 4 * (i % 4));
        if (bits > 4) {
            int right = bits == 5 ? i - 4 : 2 * (i % 8) - 4;
            code = _mm512_ternarylogic_epi32(above, bf16_shifted(extra[i / 8], right), code, 0xca);
        }
        pairs[i] = bits == 6 ? _mm512_permutex2var_epi16(tables->words[0], code, tables->words[1])
                             : _mm512_permutexvar_epi16(code, tables->words[0]);
    }
}

INLINE __m512 bf16_dot(const __m512i *pairs, const int32_t *x) {
    __m512 sum = _mm512_setzero_ps();
#pragma GCC unroll 16
    for (int i = 0; i < 8; i++)
        sum = _mm512_dpbf16_ps(sum, (__m512bh)pairs[i], (__m512bh)_mm512_set1_epi32(x[i]));
    return sum;
}

/* x: of each step [rows][32] bfloat16; sums: of each step [rows][2] float32, of 16 columns each.
   Adds to out, float32 [rows][16]. */
INLINE void bf16_tile(const Matrix *w, int64_t first, const uint8_t *x, const float *sums, int64_t num_rows,
                      float *out, const int bits, const int is_fine, const int has_minimum) {
    const int64_t lanes = lanes_of(w, first), stride = w->num_columns;
    const __mmask16 mask = (__mmask16)((1u << lanes) - 1);
    const uint8_t *codes = w->codes + first * stride * (bits == 8 ? 8 : 4) / 8;
    const uint8_t *planes = bits == 8 ? NULL : w->planes + first * stride * (bits - 4) / 8;
    const BfTables tables = bf16_tables(w);
    Scales at = scales_begin(w, first, lanes);
    __m512i pairs[16];
    for (int64_t step = 0; step < stride / STEP; step++) {
        for (int line = 0; line < (bits == 8 ? 8 : 4); line++) /* what is read some steps on */
            _mm_prefetch((const char *)codes + ((step + 16) * (bits == 8 ? 8 : 4) + line) * lanes * 4, _MM_HINT_T0);
        if (bits == 5 || bits == 6)
            for (int line = 0; line < bits - 4; line++)
                _mm_prefetch((const char *)planes + ((step + 16) * (bits - 4) + line) * lanes * 4, _MM_HINT_T0);
        bf16_pairs(pairs, &tables, codes, planes, step, lanes, mask, bits);
        __m512 minimum[2], scale[2];
        scale[0] = scale_of_16(&at, mask, &minimum[0], has_minimum);
        scales_next(&at, 16);
        if (is_fine) scale[1] = scale_of_16(&at, mask, &minimum[1], has_minimum);
        scales_next(&at, 16);
        const int32_t *row = (const int32_t *)x + step * num_rows * 16;
        const float *sum = sums + step * num_rows * 2;
        for (int64_t m = 0; m < num_rows; m++, row += 16, sum += 2) {
            __m512 first_half = bf16_dot(pairs, row), second = bf16_dot(pairs + 8, row + 8);
            __m512 total = _mm512_load_ps(out + 16 * m);
            if (is_fine) {
                total = _mm512_fmadd_ps(scale[0], first_half, total);
                total = _mm512_fmadd_ps(scale[1], second, total);
                if (has_minimum) {
                    total = _mm512_fnmadd_ps(minimum[0], _mm512_set1_ps(sum[0]), total);
                    total = _mm512_fnmadd_ps(minimum[1], _mm512_set1_ps(sum[1]), total);
                }
            } else {
                total = _mm512_fmadd_ps(scale[0], _mm512_add_ps(first_half, second), total);
                if (has_minimum)
                    total = _mm512_fnmadd_ps(minimum[0], _mm512_set1_ps(sum[0] + sum[1]), total);
            }
            _mm512_store_ps(out + 16 * m, total);
        }
    }
}

#define BF16_KIND(bits, is_fine, has_minimum)                                                          \
    case (bits) * 4 + (is_fine) * 2 + (has_minimum):                                                  \
        if (num_rows == 1) bf16_tile(w, first, x, sums, 1, out, bits, is_fine, has_minimum);            \
        else bf16_tile(w, first, x, sums, num_rows, out, bits, is_fine, has_minimum);                   \
        break;
#define BF16_KINDS(bits) BF16_KIND(bits, 0, 0) BF16_KIND(bits, 0, 1) BF16_KIND(bits, 1, 0) BF16_KIND(bits, 1, 1)

static void bf16_multiply(const Matrix *w, int64_t first, const void *x, const float *sums, int64_t num_rows,
                          float *out) {
    switch (w->bits * 4 + (w->group % STEP != 0) * 2 + (w->minimum != NO_MINIMUM)) {
        BF16_KINDS(4) BF16_KINDS(5) BF16_KINDS(6) BF16_KINDS(8)
    }
}
#pragma GCC pop_options
