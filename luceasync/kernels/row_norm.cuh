// RMS norm of rows of NORM columns (Zhang and Sennrich, 2019) by WARPS warps.

#pragma once

#include "device_words.cuh"

// The sum of a row is that of its stretches of 256 columns, 8 columns a lane: its bits do not depend on the number
// of warps that share them.
constexpr int NUM_STRETCHES = NORM / 256 + (NORM % 256 != 0);
constexpr int NUM_FOURS = (NUM_STRETCHES + 3) / 4;

// A lane's share of a stretch's sum of squares.
__device__ __forceinline__ float squares_of(uint4 own) {
  const u32 pairs[4] = {own.x, own.y, own.z, own.w};
  float sum = 0.0f;
#pragma unroll
  for (int k = 0; k < 4; k++) {
    float low = as_float(pairs[k] << 16), high = as_float(pairs[k] & 0xffff0000);
    sum = fmaf(low, low, sum), sum = fmaf(high, high, sum);
  }
  return sum;
}

// The sum of all lanes.
__device__ __forceinline__ float sum_of_warp(float sum) {
#pragma unroll
  for (int far = 16; far > 0; far /= 2) sum += __shfl_xor_sync(~0u, sum, far);
  return sum;
}

// Zeros behind the sums of stretches, so that fours of them are added.
__device__ __forceinline__ void pad_stretches(float4* sums) {
  if ((int)threadIdx.x < NUM_FOURS * 4 - NUM_STRETCHES) ((float*)sums)[NUM_STRETCHES + threadIdx.x] = 0.0f;
}

__device__ __forceinline__ float inverse_rms_of(const float4* sums, float eps) {
  float4 sum = {};
#pragma unroll
  for (int k = 0; k < NUM_FOURS; k++) {
    float4 four = sums[k];
    sum.x += four.x, sum.y += four.y, sum.z += four.z, sum.w += four.w;
  }
  return rsqrtf(((sum.x + sum.y) + (sum.z + sum.w)) / NORM + eps);
}

// Two numbers times two of a norm's weights, and rounded.
__device__ __forceinline__ u32 weighed(u32 pair, float by, float low, float high) {
  return rounded(as_float(pair << 16) * by * low, as_float(pair & 0xffff0000) * by * high);
}

// x / rms(x) * norm for a row of NORM columns, of whose stretches each warp has every WARPS-th. All lanes store 8
// columns of each, zeros past NORM. All threads must call it, and construct `Norming` first, which may be before x is ready.
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
    uint4 own[TURNS];
    float inverse_rms = summed(own, x, eps);
    stored(own, inverse_rms, store);
  }

  // As above, but for 1 / rms(x), which is returned.
  template <typename Store>
  __device__ __forceinline__ float without_rms(const u16* x, float eps, Store store) const {
    uint4 own[TURNS];
    float inverse_rms = summed(own, x, eps);
    stored(own, 1.0f, store);
    return inverse_rms;
  }

 private:
  __device__ __forceinline__ float summed(uint4 (&own)[TURNS], const u16* x, float eps) const {
    __shared__ float4 sums[NORM ? NUM_FOURS : 1];  // of stretches
    pad_stretches(sums);
#pragma unroll
    for (int turn = 0; turn < TURNS; turn++)
      own[turn] = column(turn) < NORM ? *(const uint4*)(x + column(turn)) : uint4{};
#pragma unroll
    for (int turn = 0; turn < TURNS; turn++) {
      float sum = sum_of_warp(squares_of(own[turn]));
      if (threadIdx.x % 32 == 0 && stretch(turn) < NUM_STRETCHES) ((float*)sums)[stretch(turn)] = sum;
    }
    __syncthreads();
    return inverse_rms_of(sums, eps);
  }

  template <typename Store>
  __device__ __forceinline__ void stored(const uint4 (&own)[TURNS], float by, Store store) const {
#pragma unroll
    for (int turn = 0; turn < TURNS; turn++) {
      if (stretch(turn) >= NUM_STRETCHES) continue;
      const float4 &near = weight[turn][0], &far = weight[turn][1];
      const uint4& x = own[turn];
      store(column(turn), make_uint4(weighed(x.x, by, near.x, near.y), weighed(x.y, by, near.z, near.w),
                                     weighed(x.z, by, far.x, far.y), weighed(x.w, by, far.z, far.w)));
    }
  }
};
