// Scaling of bfloat16 numbers by powers of two, two at once.

#pragma once

#include "device_words.cuh"

constexpr int LIFT_EXPONENT = 96;  // of rows of x

// The power of two that scales a quarter of 16 columns of x: for table codes, for codes that are bfloat16 bits as they
// are, and for codes of up to 6 bits in place (quant_codes.cuh).
constexpr int NUM_LIFTS = 3;
__host__ __device__ constexpr int exponent_of(int lift, int quarter) {
  return lift == 0 ? 0 : LIFT_EXPONENT - (lift == 2 && quarter % 2 ? 4 : 0);
}

// Ampere has no plain bfloat16 product.
__device__ __forceinline__ u32 times_bf16x2(u32 a, u32 b) { return fma_bf16x2(a, b, 0x80008000); }

// A power of two as a bfloat16 number, twice.
__host__ __device__ constexpr u32 two_to(int exponent) {
  return (u32)(127 + exponent) << 7 | (u32)(127 + exponent) << 23;
}
