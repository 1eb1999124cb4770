// A warp arranges a unit of 256 columns of a row of x for products of more than 8 rows: see arranged_rows.cuh.
//
// Compiled with: LIFTS (a bit for each wanted lift), SUMS.

#pragma once

#include "arranged_rows.cuh"
#include "device_words.cuh"
#include "lifts.cuh"

// The sum of a group of 32 columns, of which four lanes have 8 each.
__device__ __forceinline__ float sum_of_group(uint4 own) {
  const u32 pairs[4] = {own.x, own.y, own.z, own.w};
  float sum = 0.0f;
#pragma unroll
  for (int k = 0; k < 4; k++) sum += as_float(pairs[k] << 16) + as_float(pairs[k] & 0xffff0000);
  sum += __shfl_xor_sync(~0u, sum, 1);
  sum += __shfl_xor_sync(~0u, sum, 2);
  return sum * as_float(two_to(LIFT_EXPONENT) & 0xffff0000);
}

// Arranges a warp's unit of one row; `own` are a lane's 8 columns. `columns`: of all lifts in turn.
__device__ __forceinline__ void arrange(uint4 own, int row, int unit, int num_units, u8* columns, u8* sums) {
  int lane = threadIdx.x % 32, tile = row / 8, first_lane = row % 8 * 4;
  // The neighbouring lane, 16 columns away, has the next numbers of the same lane of a tensor core.
  bool is_odd = lane & 2;
  u32 x = __shfl_xor_sync(~0u, is_odd ? own.x : own.z, 2), y = __shfl_xor_sync(~0u, is_odd ? own.y : own.w, 2);
  uint4 words = is_odd ? make_uint4(x, y, own.z, own.w) : make_uint4(own.x, own.y, x, y);
  int to_lane = first_lane + 2 * (lane & 1) + is_odd;
  columns += (u64)unit * ARRANGED_UNIT_BYTES + lane / 8 * ARRANGED_BLOCK_BYTES + tile * TILE_BYTES +
             lane / 4 % 2 * LANES_BYTES + to_lane * 16;
#pragma unroll
  for (int lift = 0; lift < NUM_LIFTS; lift++) {
    if (!(LIFTS >> lift & 1)) continue;
    u32 even = two_to(exponent_of(lift, 0)), odd = two_to(exponent_of(lift, 1));
    *(uint4*)columns = make_uint4(times_bf16x2(words.x, even), times_bf16x2(words.y, even),
                                  times_bf16x2(words.z, odd), times_bf16x2(words.w, odd));
    columns += (u64)num_units * ARRANGED_UNIT_BYTES;
  }
  if constexpr (SUMS != 0) {
    float near = sum_of_group(own), far = __shfl_xor_sync(~0u, near, 4);
    u32 parts[3];
#pragma unroll
    for (int k = 0; k < 3; k++) {
      parts[k] = rounded(near, far);
      near -= as_float(parts[k] << 16), far -= as_float(parts[k] & 0xffff0000);
    }
    sums += (u64)unit * SUMS_UNIT_BYTES + tile * LANES_BYTES + (first_lane + lane / 8) * 16;
    if (lane % 8 == 0) *(uint4*)sums = make_uint4(parts[0], parts[1], parts[2], 0);
  }
}
