// Softmaxes over parts of a context, merged. Parts are added in a fixed order, whichever is ready first, so every run gives
// the same bits.

#pragma once

#include "attend_sizes.cuh"

// Of a quad: 4 dimensions of a head.
struct Part {
  float4 sum;
  float best, weight;
};

template <int N>
__device__ __forceinline__ Part merged(const Part (&parts)[N], int count) {
  float best = parts[0].best;
#pragma unroll
  for (int i = 1; i < N; i++)
    if (i < count) best = fmaxf(best, parts[i].best);
  Part all = {{0.0f, 0.0f, 0.0f, 0.0f}, best, 0.0f};
#pragma unroll
  for (int i = 0; i < N; i++) {
    if (i >= count) continue;
    float share = exp2f(parts[i].best - best);
    all.weight += parts[i].weight * share;
    all.sum.x += parts[i].sum.x * share, all.sum.y += parts[i].sum.y * share;
    all.sum.z += parts[i].sum.z * share, all.sum.w += parts[i].sum.w * share;
  }
  return all;
}

// The result of a quad: normalised by its weight, and gated.
__device__ __forceinline__ uint2 finished(const Part& part, uint2 gate) {
  float4 sum = part.sum;
  float one = 1.0f / part.weight;
  sum.x *= one, sum.y *= one, sum.z *= one, sum.w *= one;
  if (GATED) {
    sum.x /= 1.0f + __expf(-low_of(gate.x)), sum.y /= 1.0f + __expf(-high_of(gate.x));
    sum.z /= 1.0f + __expf(-low_of(gate.y)), sum.w /= 1.0f + __expf(-high_of(gate.y));
  }
  return make_uint2(rounded(sum.x, sum.y), rounded(sum.z, sum.w));
}
