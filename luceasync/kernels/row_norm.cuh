// RMS norm of rows of NORM columns (Zhang and Sennrich, 2019) by WARPS warps.

#pragma once

#include "device_words.cuh"

// The sum of a row is that of its stretches of 256 columns, 8 columns a lane: its bits do not depend on the number
// of warps that share them.
constexpr int NUM_STRETCHES = NORM / 256 + (NORM % 256 != 0);
constexpr int NUM_FOURS = (NUM_STRETCHES + 3) / 4;

// x / rms(x) * norm for a row of NORM columns, of whose stretches each warp has every WARPS-th. All lanes store 8
// columns of each, zeros past NORM. All threads must call it. They must construct `Norming` first, which may
// happen before x is ready.
struct Norming {
  static constexpr int TURNS = NORM ? (NUM_STRETCHES + WARPS - 1) / WARPS : 1;
  float4 weight[TURNS][2];

  static __device__ __forceinline__ int stretch(int turn) { return threadIdx.x / 32 + turn * WARPS; }
  static __device__ __forceinline__ int column(int turn) { return stretch(turn) * 256 + threadIdx.x % 32 * 8; }

  __device__ __forceinline__ Norming(const float* norm) {
#pragma unroll
    for (int turn = 0; turn < TURNS; turn++)
#pragma unroll
      for (int half = 0; half < 2; half++)
        weight[turn][half] = column(turn) < NORM ? *(const float4*)(norm + column(turn) + 4 * half) : float4{};
  }

  template <typename Store>
  __device__ __forceinline__ void operator()(const u16* x, float eps, Store store) const {
    __shared__ float4 sums[NORM ? NUM_FOURS : 1];  // of stretches; zeros past the end
    if ((int)threadIdx.x < NUM_FOURS * 4 - NUM_STRETCHES) ((float*)sums)[NUM_STRETCHES + threadIdx.x] = 0.0f;
    uint4 own[TURNS];
#pragma unroll
    for (int turn = 0; turn < TURNS; turn++)
      own[turn] = column(turn) < NORM ? *(const uint4*)(x + column(turn)) : uint4{};
#pragma unroll
    for (int turn = 0; turn < TURNS; turn++) {
      const u32 pairs[4] = {own[turn].x, own[turn].y, own[turn].z, own[turn].w};
      float sum = 0.0f;
#pragma unroll
      for (int k = 0; k < 4; k++) {
        float low = as_float(pairs[k] << 16), high = as_float(pairs[k] & 0xffff0000);
        sum = fmaf(low, low, sum), sum = fmaf(high, high, sum);
      }
#pragma unroll
      for (int far = 16; far > 0; far /= 2) sum += __shfl_xor_sync(~0u, sum, far);
      if (threadIdx.x % 32 == 0 && stretch(turn) < NUM_STRETCHES) ((float*)sums)[stretch(turn)] = sum;
    }
    __syncthreads();
    float4 sum = {};
#pragma unroll
    for (int k = 0; k < NUM_FOURS; k++) {
      float4 four = sums[k];
      sum.x += four.x, sum.y += four.y, sum.z += four.z, sum.w += four.w;
    }
    float inverse_rms = rsqrtf(((sum.x + sum.y) + (sum.z + sum.w)) / NORM + eps);
#pragma unroll
    for (int turn = 0; turn < TURNS; turn++) {
      if (stretch(turn) >= NUM_STRETCHES) continue;
      const float* each = &weight[turn][0].x;
      const u32 pairs[4] = {own[turn].x, own[turn].y, own[turn].z, own[turn].w};
      u32 normed[4];
#pragma unroll
      for (int k = 0; k < 4; k++) {
        float low = as_float(pairs[k] << 16) * inverse_rms * each[2 * k];
        normed[k] = rounded(low, as_float(pairs[k] & 0xffff0000) * inverse_rms * each[2 * k + 1]);
      }
      store(column(turn), make_uint4(normed[0], normed[1], normed[2], normed[3]));
    }
  }
};
