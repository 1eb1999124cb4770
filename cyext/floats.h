#pragma once
/* Scalar bfloat16 and exp without branches, so that loops are vectorised for the instruction set that they
   are inlined into. */
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

INLINE uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

INLINE float of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

INLINE float of_bf16(uint16_t half) { return of_bits((uint32_t)half << 16); }

/* Rounded to nearest, ties to even. */
INLINE uint16_t to_bf16(float value) {
    uint32_t bits = bits_of(value);
    uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return (uint16_t)(value != value ? 0x7fc0 : rounded);
}

/* e^x within 2 units in the last place (Cephes' expf); 0 below -87.3, e^88.3 above 88.3. */
INLINE float exp_of(float x) {
    float within = x > 88.3f ? 88.3f : x;
    within = within < -87.3f ? -87.3f : within;
    float whole = within * 1.44269504f + 12582912.0f;
    int32_t power = (int32_t)(bits_of(whole) - 0x4b400000u);
    whole -= 12582912.0f;
    float rest = within - whole * 0.693359375f - whole * -2.12194440e-4f;
    float sum = 1.9875691500e-4f;
    sum = sum * rest + 1.3981999507e-3f;
    sum = sum * rest + 8.3334519073e-3f;
    sum = sum * rest + 4.1665795894e-2f;
    sum = sum * rest + 1.6666665459e-1f;
    sum = sum * rest + 5.0000001201e-1f;
    sum = sum * rest * rest + rest + 1.0f;
    float found = sum * of_bits((uint32_t)(power + 127) << 23);
    return x < -87.3f ? 0.0f : found;
}

INLINE float silu_of(float x) { return x / (1.0f + exp_of(-x)); }
