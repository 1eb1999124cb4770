// A head's RMS norm (Zhang and Sennrich, 2019) and rotation (Su et al., 2021), by one warp. Dimensions d and
// d + HALF rotate together; numbers are rounded to bfloat16 after the norm and after the rotation.

#pragma once

#include "attend_sizes.cuh"

// The first dimension of the n-th pair of a lane.
__device__ __forceinline__ int first_of_pair(int lane, int n) { return 2 * (lane + 32 * n); }
__device__ __forceinline__ bool is_dim(int d) { return HEAD_DIM % 64 == 0 || d < HEAD_DIM; }
__device__ __forceinline__ bool turns(int d) { return d < 2 * HALF; }
__device__ __forceinline__ int partner_of(int d) { return d < HALF ? d + HALF : d - HALF; }
// Whether a lane has both dimensions of each rotated pair, so that it loads each angle once.
constexpr bool HAS_PARTNERS = PAIRS == 2 && HALF == 64;

struct Angles {
  float2 cos[PAIRS], sin[PAIRS];

  __device__ __forceinline__ Angles() {}

  // The cosines and sines of a row, HALF of each.
  __device__ __forceinline__ Angles(const float* all_cos, const float* all_sin, int lane) {
#pragma unroll
    for (int n = 0; n < PAIRS; n++) {
      if (HAS_PARTNERS && n > 0) {
        cos[n] = cos[0], sin[n] = sin[0];
        continue;
      }
      int d = first_of_pair(lane, n), angle = d < HALF ? d : d - HALF;
      cos[n] = turns(d) ? *(const float2*)(all_cos + angle) : make_float2(1.0f, 1.0f);
      sin[n] = turns(d) ? *(const float2*)(all_sin + angle) : make_float2(0.0f, 0.0f);
    }
  }
};

// A head. Its loads are issued long before its first sum, so that the sum does not delay them.
class Head {
 public:
  // `weight`: float [HEAD_DIM], or null for none.
  __device__ __forceinline__ void load_norm(const float* weight, int lane) {
    is_normed = weight != nullptr;
#pragma unroll
    for (int n = 0; n < PAIRS; n++) {
      int d = first_of_pair(lane, n);
      if (is_normed && is_dim(d)) norm[n] = *(const float2*)(weight + d);
      if (!HAS_PARTNERS && is_normed && turns(d)) partner_norm[n] = *(const float2*)(weight + partner_of(d));
    }
  }

  __device__ __forceinline__ void load(const u16* x, int lane) {
#pragma unroll
    for (int n = 0; n < PAIRS; n++) {
      int d = first_of_pair(lane, n);
      own[n] = is_dim(d) ? *(const u32*)(x + d) : 0;
      if (!HAS_PARTNERS) partner[n] = turns(d) ? *(const u32*)(x + partner_of(d)) : 0;
    }
  }

  // Hands each pair and its first dimension to `store`.
  template <typename Store>
  __device__ __forceinline__ void finish(const Angles& angles, float eps, int lane, Store store) {
    if (is_normed) {
      float sum = 0.0f;
#pragma unroll
      for (int n = 0; n < PAIRS; n++) sum += low_of(own[n]) * low_of(own[n]) + high_of(own[n]) * high_of(own[n]);
#pragma unroll
      for (int far = 16; far > 0; far /= 2) sum += __shfl_xor_sync(~0u, sum, far);
      float inverse_rms = rsqrtf(sum / HEAD_DIM + eps);
#pragma unroll
      for (int n = 0; n < PAIRS; n++) {
        int d = first_of_pair(lane, n);
        if (is_dim(d)) own[n] = scaled(own[n], inverse_rms, norm[n]);
        if (!HAS_PARTNERS && turns(d)) partner[n] = scaled(partner[n], inverse_rms, partner_norm[n]);
      }
    }
#pragma unroll
    for (int n = 0; n < PAIRS; n++) {
      int d = first_of_pair(lane, n);
      float sign = d < HALF ? -1.0f : 1.0f;
      u32 other = HAS_PARTNERS ? own[PAIRS - 1 - n] : partner[n];
      // A no-op for dimensions that do not rotate: cos is 1 there, and sin 0.
      u32 turned = rounded(low_of(own[n]) * angles.cos[n].x + sign * low_of(other) * angles.sin[n].x,
                           high_of(own[n]) * angles.cos[n].y + sign * high_of(other) * angles.sin[n].y);
      if (is_dim(d)) store(d, turned);
    }
  }

 private:
  bool is_normed;
  float2 norm[PAIRS], partner_norm[PAIRS];
  u32 own[PAIRS], partner[PAIRS];

  static __device__ __forceinline__ u32 scaled(u32 pair, float inverse_rms, float2 weight) {
    return rounded(low_of(pair) * inverse_rms * weight.x, high_of(pair) * inverse_rms * weight.y);
  }
};
