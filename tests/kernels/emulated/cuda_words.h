// The extensions of CUDA C++ that our kernels use.

#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#include <utility>

#include "machine.h"

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
// Each program has its own, which are swapped in while one of its lanes runs. They are contiguous, as they are the only
// thread-local variables: compilers do not let templates name a section.
#define __shared__ static thread_local

#define threadIdx machine::thread
#define blockIdx machine::program
#define blockDim machine::num_threads
#define gridDim machine::num_programs

struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

inline float __uint_as_float(uint32_t bits) {
  float found;
  memcpy(&found, &bits, 4);
  return found;
}
inline uint32_t __float_as_uint(float number) {
  uint32_t found;
  memcpy(&found, &number, 4);
  return found;
}

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline float __expf(float x) { return expf(x); }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }

// Four of the eight bytes of high and low, by nibbles of `selector`, whose sign bits are not used.
inline uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t selector) {
  uint64_t both = (uint64_t)high << 32 | low;
  uint32_t found = 0;
  for (int i = 0; i < 4; i++) found |= (uint32_t)(both >> (selector >> (4 * i) & 7) * 8 & 255) << (8 * i);
  return found;
}
inline uint32_t __funnelshift_l(uint32_t low, uint32_t high, uint32_t shift) {
  return ((uint64_t)high << 32 | low) << (shift & 31) >> 32;
}

inline void __syncthreads() { machine::sync_program(); }
inline void __syncwarp() { machine::sync_warp(); }

struct Shuffled {
  uint32_t own, found;
  int from;
};

inline uint32_t shuffled(uint32_t own, int from) {
  Shuffled each{own, 0, from};
  machine::meet_warp("a shuffle", &each, [](void* const(&all)[machine::LANES]) {
    for (void* lane : all) {
      Shuffled& own = *(Shuffled*)lane;
      own.found = ((Shuffled*)all[own.from])->own;
    }
  });
  return each.found;
}
inline uint32_t __shfl_xor_sync(uint32_t lanes, uint32_t own, int far) {
  if (lanes != ~0u) machine::fail("a shuffle among some lanes of a warp");
  return shuffled(own, threadIdx.x % machine::LANES ^ far);
}
inline float __shfl_xor_sync(uint32_t lanes, float own, int far) {
  return __uint_as_float(__shfl_xor_sync(lanes, __float_as_uint(own), far));
}
