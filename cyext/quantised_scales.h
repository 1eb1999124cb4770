/* A cursor over the scales and minimums of a tile, which moves on with its columns. */
typedef struct {
    const Matrix *w;
    const uint8_t *scales, *small_scales, *minimums, *small_minimums; /* of the tile */
    int64_t lanes, group, supergroup;                                 /* current indices */
    int64_t group_left, supergroup_left;                              /* columns */
} Scales;

INLINE Scales scales_begin(const Matrix *w, int64_t first, int64_t lanes) {
    int64_t reals = first * w->num_supergroups * scale_bytes(w), smalls = first * w->num_groups;
    Scales at = {w, w->scales + reals, NULL, NULL, NULL, lanes, 0, 0, w->group, w->supergroup};
    if (w->small_scales) at.small_scales = w->small_scales + smalls;
    if (w->minimums) at.minimums = w->minimums + reals;
    if (w->small_minimums) at.small_minimums = w->small_minimums + smalls;
    return at;
}

INLINE void scales_next(Scales *at, int64_t num_columns) {
    if ((at->group_left -= num_columns) == 0) at->group++, at->group_left = at->w->group;
    if ((at->supergroup_left -= num_columns) == 0) at->supergroup++, at->supergroup_left = at->w->supergroup;
}

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,f16c,fma")

INLINE __m512 avx512_reals(const Scales *at, const uint8_t *reals, __mmask16 mask) {
    int64_t place = at->supergroup * at->lanes;
    __m512i bits;
    switch (at->w->scale) {
    case FP16: return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, reals + 2 * place));
    case BF16:
        bits = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, reals + 2 * place));
        return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
    case FP32: return _mm512_maskz_loadu_ps(mask, reals + 4 * place);
    default: /* see of_e8m0 */
        bits = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(mask, reals + place));
        __m512i small = _mm512_sllv_epi32(_mm512_set1_epi32(0x00200000), bits);
        __m512i plain = _mm512_slli_epi32(_mm512_sub_epi32(bits, _mm512_set1_epi32(1)), 23);
        return _mm512_castsi512_ps(
            _mm512_mask_blend_epi32(_mm512_cmplt_epu32_mask(bits, _mm512_set1_epi32(2)), plain, small));
    }
}

INLINE __m512 avx512_smalls(const Scales *at, __mmask16 mask) {
    __m128i bytes = _mm_maskz_loadu_epi8(mask, at->small_scales + at->group * at->lanes);
    if (at->w->small == UINT8) return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes));
    __m512i wide = _mm512_cvtepi8_epi32(bytes);
    if (at->w->small == INT8) return _mm512_cvtepi32_ps(wide);
    __m512i size = _mm512_slli_epi32(_mm512_and_si512(wide, _mm512_set1_epi32(0x7f)), 20);
    __m512 number = _mm512_mul_ps(_mm512_castsi512_ps(size), _mm512_set1_ps(0x1p120f));
    __m512i sign = _mm512_and_si512(wide, _mm512_set1_epi32((int)0x80000000));
    return _mm512_or_ps(number, _mm512_castsi512_ps(sign));
}

typedef struct {
    __m512 scale, minimum;
} Reals; /* D and M of 16 rows */

INLINE Reals reals_of_16(const Scales *at, __mmask16 mask, const int has_minimum) {
    Reals found;
    found.minimum = found.scale = avx512_reals(at, at->scales, mask);
    if (has_minimum && at->minimums) found.minimum = avx512_reals(at, at->minimums, mask);
    return found;
}

/* D s of 16 rows, and M m if there is a minimum. */
INLINE __m512 scale_of_16(const Scales *at, Reals reals, __mmask16 mask, __m512 *minimum, const int has_minimum) {
    if (has_minimum) {
        *minimum = reals.minimum;
        if (at->small_minimums) {
            __m128i bytes = _mm_maskz_loadu_epi8(mask, at->small_minimums + at->group * at->lanes);
            *minimum = _mm512_mul_ps(*minimum, _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes)));
        }
    }
    if (!at->small_scales) return reals.scale;
    __m512 small = avx512_smalls(at, mask);
    return at->w->divides ? _mm512_maskz_div_ps(mask, small, reals.scale) : _mm512_mul_ps(reals.scale, small);
}
#pragma GCC pop_options
