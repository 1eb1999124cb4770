// Merges the softmaxes of a program's warps, then those of all programs of a kv head.

#pragma once

#include "attend_layout.cuh"
#include "attend_parts.cuh"

constexpr int QUADS = GROUP * HEAD_DIM / 4;  // of a kv head's results: 4 dimensions of a head
constexpr int TOGETHER = GROUP > 8 ? 8 : 16;  // parts that are loaded at a time

// Merges the results of the first `num_warps` warps, which `Softmax::finish` has stored.
__device__ __forceinline__ Part merged_warps(u32 begin, int quad, int num_warps) {
  int head = quad / (HEAD_DIM / 4), column = quad % (HEAD_DIM / 4) * 4;
  Part parts[WARPS];
#pragma unroll
  for (int w = 0; w < WARPS; w++) {
    if (w >= num_warps) continue;
    uint4 sum = load<uint4>(begin + w * RING_BYTES + (head * SUM_COLUMNS + column) * 4);
    uint2 weight = load<uint2>(begin + AT_WEIGHTS + (w * GROUP + head) * 8);
    parts[w].sum = make_float4(as_float(sum.x), as_float(sum.y), as_float(sum.z), as_float(sum.w));
    parts[w].best = as_float(weight.x), parts[w].weight = as_float(weight.y);
  }
  return merged(parts, num_warps);
}

// What each program stores for the last one to finish.
struct Parts {
  float4* sums;     // [splits][QUADS]
  float2* weights;  // [splits][GROUP]: best, weight

  __device__ __forceinline__ void store(int split, int quad, const Part& part) const {
    sums[split * QUADS + quad] = part.sum;
    int head = quad / (HEAD_DIM / 4);
    if (quad % (HEAD_DIM / 4) == 0) weights[split * GROUP + head] = make_float2(part.best, part.weight);
  }

  __device__ __forceinline__ Part merged_splits(int quad, int count) const {
    Part parts[TOGETHER + 1];
    for (int begin = 0; begin < count; begin += TOGETHER) {
      bool is_first = begin == 0;
      int num_new = min(count - begin, TOGETHER);
#pragma unroll
      for (int i = 0; i < TOGETHER; i++) {
        if (i >= num_new) continue;
        parts[i + 1].sum = load_of_others(sums + (begin + i) * QUADS + quad);
        float2 weight = load_of_others(weights + (begin + i) * GROUP + quad / (HEAD_DIM / 4));
        parts[i + 1].best = weight.x, parts[i + 1].weight = weight.y;
      }
      if (is_first) parts[0] = {{0.0f, 0.0f, 0.0f, 0.0f}, parts[1].best, 0.0f};
      parts[0] = merged(parts, num_new + 1);
    }
    return parts[0];
  }
};
