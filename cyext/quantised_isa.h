/* Instantiates quantised_floats.h for each instruction set. */
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,f16c,fma")
#define NAME(name) avx512_##name
#define LANES 16
#define V __m512
#define VI __m512i
INLINE VI avx512_units(const uint8_t *units, int64_t count) {
    return _mm512_maskz_loadu_epi32((__mmask16)(count < 16 ? (1u << count) - 1 : 0xffff), units);
}
INLINE VI avx512_right(VI v, const int count) { return _mm512_srli_epi32(v, (unsigned)count); }
INLINE VI avx512_right_by(VI v, int count) { return _mm512_srl_epi32(v, _mm_cvtsi32_si128(count)); }
INLINE VI avx512_left(VI v, const int count) { return _mm512_slli_epi32(v, (unsigned)count); }
INLINE VI avx512_and(VI v, int mask) { return _mm512_and_si512(v, _mm512_set1_epi32(mask)); }
INLINE VI avx512_or(VI a, VI b) { return _mm512_or_si512(a, b); }
INLINE V avx512_all(float value) { return _mm512_set1_ps(value); }
INLINE V avx512_add(V a, V b) { return _mm512_add_ps(a, b); }
INLINE V avx512_mul(V a, V b) { return _mm512_mul_ps(a, b); }
INLINE V avx512_fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
INLINE V avx512_sub(V a, V b) { return _mm512_sub_ps(a, b); }
INLINE V avx512_load(const float *from) { return _mm512_load_ps(from); }
INLINE void avx512_store(float *to, V value) { _mm512_store_ps(to, value); }
INLINE V avx512_of_table(const Matrix *w, VI code) {
    return _mm512_permutexvar_ps(code, _mm512_loadu_ps(w->numbers));
}
INLINE V avx512_of_integer(const Matrix *w, VI code) {
    return _mm512_sub_ps(_mm512_cvtepi32_ps(code), _mm512_set1_ps(w->zero));
}
INLINE V avx512_of_byte(const Matrix *w, VI code) {
    if (w->codes_kind == UINT8) return avx512_of_integer(w, avx512_and(code, 255));
    VI high = _mm512_slli_epi32(code, 24);
    if (w->codes_kind == INT8) return _mm512_cvtepi32_ps(_mm512_srai_epi32(high, 24));
    VI size = avx512_left(avx512_and(code, 0x7f), 20);
    V number = _mm512_mul_ps(_mm512_castsi512_ps(size), _mm512_set1_ps(0x1p120f));
    return _mm512_or_ps(number, _mm512_castsi512_ps(avx512_and(high, (int)0x80000000)));
}
INLINE V avx512_scale(const Scales *at, int64_t lane, V *minimum, const int has_minimum) {
    (void)lane; /* a register has all 16 rows */
    const __mmask16 mask = (__mmask16)((1u << at->lanes) - 1);
    return scale_of_16(at, reals_of_16(at, mask, has_minimum), mask, minimum, has_minimum);
}
#include "quantised_floats.h"
#undef NAME
#undef LANES
#undef V
#undef VI
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#define NAME(name) avx2_##name
#define LANES 8
#define V __m256
#define VI __m256i
INLINE VI avx2_units(const uint8_t *units, int64_t count) {
    if (count >= 8) return _mm256_loadu_si256((const __m256i *)units);
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_maskload_epi32((const int *)units, _mm256_cmpgt_epi32(_mm256_set1_epi32((int)count), lanes));
}
INLINE VI avx2_right(VI v, const int count) { return _mm256_srli_epi32(v, count); }
INLINE VI avx2_right_by(VI v, int count) { return _mm256_srl_epi32(v, _mm_cvtsi32_si128(count)); }
INLINE VI avx2_left(VI v, const int count) { return _mm256_slli_epi32(v, count); }
INLINE VI avx2_and(VI v, int mask) { return _mm256_and_si256(v, _mm256_set1_epi32(mask)); }
INLINE VI avx2_or(VI a, VI b) { return _mm256_or_si256(a, b); }
INLINE V avx2_all(float value) { return _mm256_set1_ps(value); }
INLINE V avx2_add(V a, V b) { return _mm256_add_ps(a, b); }
INLINE V avx2_mul(V a, V b) { return _mm256_mul_ps(a, b); }
INLINE V avx2_fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
INLINE V avx2_sub(V a, V b) { return _mm256_sub_ps(a, b); }
INLINE V avx2_load(const float *from) { return _mm256_load_ps(from); }
INLINE void avx2_store(float *to, V value) { _mm256_store_ps(to, value); }
INLINE V avx2_of_table(const Matrix *w, VI code) {
    V below = _mm256_permutevar8x32_ps(_mm256_loadu_ps(w->numbers), code);
    V above = _mm256_permutevar8x32_ps(_mm256_loadu_ps(w->numbers + 8), code);
    return _mm256_blendv_ps(below, above, _mm256_castsi256_ps(_mm256_slli_epi32(code, 28)));
}
INLINE V avx2_of_integer(const Matrix *w, VI code) {
    return _mm256_sub_ps(_mm256_cvtepi32_ps(code), _mm256_set1_ps(w->zero));
}
INLINE V avx2_of_byte(const Matrix *w, VI code) {
    if (w->codes_kind == UINT8) return avx2_of_integer(w, avx2_and(code, 255));
    VI high = _mm256_slli_epi32(code, 24);
    if (w->codes_kind == INT8) return _mm256_cvtepi32_ps(_mm256_srai_epi32(high, 24));
    VI size = avx2_left(avx2_and(code, 0x7f), 20);
    V number = _mm256_mul_ps(_mm256_castsi256_ps(size), _mm256_set1_ps(0x1p120f));
    return _mm256_or_ps(number, _mm256_castsi256_ps(avx2_and(high, (int)0x80000000)));
}
/* D s of the rows from `lane` on, and M m if there is a minimum. Simple, as few machines use it. */
INLINE V avx2_scale(const Scales *at, int64_t lane, V *minimum, const int has_minimum) {
    float scales[8] __attribute__((aligned(32))) = {0}, minimums[8] __attribute__((aligned(32))) = {0};
    const Matrix *w = at->w;
    for (int64_t i = 0; i < 8 && lane + i < at->lanes; i++) {
        int64_t real = at->supergroup * at->lanes + lane + i, place = at->group * at->lanes + lane + i;
        float scale = real_at(w, at->scales, real), least = scale;
        if (at->minimums) least = real_at(w, at->minimums, real);
        if (at->small_minimums) least *= (float)at->small_minimums[place];
        if (w->small) {
            float small = small_of(w, at->small_scales[place]);
            scale = w->divides ? small / scale : scale * small;
        }
        scales[i] = scale, minimums[i] = least;
    }
    if (has_minimum) *minimum = _mm256_load_ps(minimums);
    return _mm256_load_ps(scales);
}
#include "quantised_floats.h"
#undef NAME
#undef LANES
#undef V
#undef VI
#pragma GCC pop_options
