// RMS norm of rows of NORM columns (Zhang and Sennrich, 2019), in the order that makes it the same bits in
// every program.

#pragma once

#include "device_words.cuh"

// Until the kernels before are done; those behind may then begin.
__device__ __forceinline__ void wait_for_inputs() {
  if (OVERLAP) {
    wait_for_those_before();
    start_next();
  }
}

constexpr int NORM_THREADS = 128;  // whatever the program: a row's sum is the same bits

// x / rms(x) * norm, 8 columns at a time, for a row of NORM columns. All threads must come, first to
// `Norming`, which may be before x is there.
struct Norming {
  static constexpr int TURNS = NORM ? (NORM / 8 + NORM_THREADS - 1) / NORM_THREADS : 1;
  float4 weight[TURNS][2];

  static __device__ __forceinline__ int column(int turn) { return (threadIdx.x + turn * NORM_THREADS) * 8; }

  __device__ __forceinline__ Norming(const float* norm) {
#pragma unroll
    for (int turn = 0; turn < TURNS; turn++)
      if (threadIdx.x < NORM_THREADS && column(turn) < NORM) {
        weight[turn][0] = *(const float4*)(norm + column(turn));
        weight[turn][1] = *(const float4*)(norm + column(turn) + 4);
      }
  }

  template <typename Store>
  __device__ __forceinline__ void operator()(const u16* x, float eps, Store store) const {
    __shared__ float parts[NORM_THREADS / 32];
    uint4 own[TURNS];
    float sum = 0.0f;
    if (threadIdx.x < NORM_THREADS) {
#pragma unroll
      for (int turn = 0; turn < TURNS; turn++)
        own[turn] = column(turn) < NORM ? *(const uint4*)(x + column(turn)) : uint4{};
#pragma unroll
      for (int turn = 0; turn < TURNS; turn++) {
        const u32 pairs[4] = {own[turn].x, own[turn].y, own[turn].z, own[turn].w};
#pragma unroll
        for (int k = 0; k < 4; k++) {
          float low = as_float(pairs[k] << 16), high = as_float(pairs[k] & 0xffff0000);
          sum = fmaf(low, low, sum), sum = fmaf(high, high, sum);
        }
      }
#pragma unroll
      for (int far = 16; far > 0; far /= 2) sum += __shfl_xor_sync(~0u, sum, far);
      if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = sum;
    }
    __syncthreads();
    if (threadIdx.x >= NORM_THREADS) return;
    float inverse_rms = rsqrtf(((parts[0] + parts[1]) + (parts[2] + parts[3])) / NORM + eps);
#pragma unroll
    for (int turn = 0; turn < TURNS; turn++) {
      if (column(turn) >= NORM) continue;
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
