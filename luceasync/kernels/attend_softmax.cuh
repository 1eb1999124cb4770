// A warp's online softmax over units of keys and values, in base 2 (Milakov and Gimelshein, 2018), as in flash-decoding
// (Dao et al., 2023).

#pragma once

#include "attend_sizes.cuh"

// A lane has heads lane / 4 (and 8 + lane / 4), and of every 8 columns lane % 4 * 2 and the next.
template <int HALVES>
class Softmax {
 public:
  float best[HALVES], weight[HALVES];  // of a lane's own columns, until `finish`
  float total[2 * STEPS][HALVES][2];   // [.., of 8 dimensions, head, dimension]

  // `queries`: rows in shared memory. Rows past the last are undefined, and their results are not used.
  __device__ __forceinline__ Softmax(u32 queries, int lane) {
#pragma unroll
    for (int half = 0; half < HALVES; half++) best[half] = least(), weight[half] = 0.0f;
#pragma unroll
    for (int n = 0; n < 2 * STEPS; n++)
#pragma unroll
      for (int half = 0; half < HALVES; half++) total[n][half][0] = total[n][half][1] = 0.0f;
    queries_of_lane = queries + (lane % 8 + lane / 8 % 2 * 8) * ROW_BYTES + lane / 16 * 16;
    if (HALVES == 2) return;
    u32 at = queries + lane / 4 * ROW_BYTES + lane % 4 * 4;
#pragma unroll
    for (int step = 0; step < STEPS; step++)
#pragma unroll
      for (int word = 0; word < 2; word++) query[step][word] = load<u32>(at + step * 32 + word * 16);
  }

  // Scores a tile of keys, and derives the weights of its values. `is_seen(half, token)`: whether a lane's head of that
  // half sees a token; each head must see one of the first tile.
  template <typename Seen>
  __device__ __forceinline__ void add_keys(u32 tile, float scale, int lane, Seen is_seen) {
    float sums[2][2][4] = {};  // [even and odd steps, of 8 tokens, of a lane]: shorter chains of products
    u32 at = tile + (lane % 8 + lane / 16 * 8) * ROW_BYTES + lane / 8 % 2 * 16;
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
      u32 keys[4];
      load_matrices<false>(keys, at + step * 32);
      u32 a[4] = {query[step][0], 0, query[step][1], 0};
      if (HALVES == 2) load_matrices<false>(a, queries_of_lane + step * 32);
      multiply(sums[step % 2][0], a, keys[0], keys[1]);
      multiply(sums[step % 2][1], a, keys[2], keys[3]);
    }
#pragma unroll
    for (int half = 0; half < HALVES; half++) {
      float scores[2][2], higher = best[half];
#pragma unroll
      for (int k = 0; k < 4; k++) {
        int of_8 = k / 2, token = 8 * of_8 + lane % 4 * 2 + k % 2;
        float score = (sums[0][of_8][2 * half + k % 2] + sums[1][of_8][2 * half + k % 2]) * scale;
        scores[of_8][k % 2] = is_seen(half, token) ? score : least();
        higher = fmaxf(higher, scores[of_8][k % 2]);
      }
      higher = fmaxf(higher, __shfl_xor_sync(~0u, higher, 1));
      higher = fmaxf(higher, __shfl_xor_sync(~0u, higher, 2));
      shrink[half] = exp2f(best[half] - higher), best[half] = higher;
      weight[half] *= shrink[half];
#pragma unroll
      for (int of_8 = 0; of_8 < 2; of_8++) {
        float low = exp2f(scores[of_8][0] - higher), high = exp2f(scores[of_8][1] - higher);
        weight[half] += low + high;
        shares[of_8][half] = rounded(low, high);
      }
    }
  }

  // Adds the tile of values of those keys.
  __device__ __forceinline__ void add_values(u32 tile, int lane) {
    const u32 a[4] = {shares[0][0], HALVES == 2 ? shares[0][HALVES - 1] : 0, shares[1][0],
                      HALVES == 2 ? shares[1][HALVES - 1] : 0};
    u32 at = tile + lane % 16 * ROW_BYTES + lane / 16 * 16;
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
      u32 values[4];
      load_matrices<true>(values, at + step * 32);
#pragma unroll
      for (int n = 0; n < 2; n++) {
        float sums[4] = {};
#pragma unroll
        for (int k = 0; k < 2 * HALVES; k++) sums[k] = total[2 * step + n][k / 2][k % 2] * shrink[k / 2];
        multiply(sums, a, values[2 * n], values[2 * n + 1]);
#pragma unroll
        for (int k = 0; k < 2 * HALVES; k++) total[2 * step + n][k / 2][k % 2] = sums[k];
      }
    }
  }

  // Writes the sums of the first `num_heads`, float [..][SUM_COLUMNS], and their best and weight, float2, to these
  // bytes of shared memory.
  __device__ __forceinline__ void finish(u32 sums, u32 weights, int num_heads, int lane) {
#pragma unroll
    for (int half = 0; half < HALVES; half++) {
      weight[half] += __shfl_xor_sync(~0u, weight[half], 1);
      weight[half] += __shfl_xor_sync(~0u, weight[half], 2);
      int head = 8 * half + lane / 4;
      if (head >= num_heads) continue;
      if (lane % 4 == 0) *(float2*)(shared + weights + head * 8) = make_float2(best[half], weight[half]);
      u32 at = sums + (head * SUM_COLUMNS + lane % 4 * 2) * 4;
#pragma unroll
      for (int n = 0; n < 2 * STEPS; n++)
        *(float2*)(shared + at + n * 32) = make_float2(total[n][half][0], total[n][half][1]);
    }
  }

 private:
  u32 query[STEPS][2];  // [.., of 8 dimensions] of 8 heads; those of 16 are loaded again for each tile
  u32 queries_of_lane;
  u32 shares[2][HALVES];        // of a unit's tokens: [of 8, head]
  float shrink[HALVES];
};
