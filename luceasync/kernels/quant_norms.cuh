// RMS norms (Zhang and Sennrich, 2019) around products of up to 8 rows, without launches of their own: the product
// that makes a row also stores it times the weights of the norm, and the squares of its numbers summed by 16 columns;
// the next product divides its results by the root mean square.

#pragma once

#include "arranged_rows.cuh"
#include "device_words.cuh"
#include "quant_layout.cuh"

// Rows of x that are still to be divided by their root mean squares. A warp has every WARPS-th of them.
struct Undivided {
  u32 begin, num_blocks, num_rows;

  // Copies a warp's sums of squares, [rows, num_blocks * 4]; the caller commits them.
  __device__ __forceinline__ void copy(const float* squares, int warp, int lane) const {
#pragma unroll 1
    for (u32 row = warp; row < num_rows; row += WARPS)
#pragma unroll 1
      for (u32 block = lane; block < num_blocks; block += 32)
        copy_16(place_of(row) + block * 16, squares + (row * num_blocks + block) * 4, true);
  }

  // Requires the warp's copies. Leaves what results are multiplied by, for all warps.
  __device__ __forceinline__ void finish(float eps, int warp, int lane) const {
#pragma unroll 1
    for (u32 row = warp; row < num_rows; row += WARPS) {
      float sum = 0.0f;
      for (u32 i = lane; i < num_blocks * 4; i += 32) sum += as_float(load<u32>(place_of(row) + i * 4));
#pragma unroll
      for (int far = 16; far > 0; far /= 2) sum += __shfl_xor_sync(~0u, sum, far);
      if (lane == 0) *(float*)(shared + AT_FACTORS + row * 4) = rsqrtf(sum / (num_blocks * 64) + eps);
    }
  }

  __device__ __forceinline__ static float factor(u32 row) { return *(const float*)(shared + AT_FACTORS + row * 4); }

 private:
  __device__ __forceinline__ u32 place_of(u32 row) const { return begin + AT_SQUARES + row * num_blocks * 16; }
};

// What a product stores of its results for the norm that comes next.
struct NextNorm {
  const float* weight;
  u16* weighed;    // [rows, outputs], arranged if there may be several
  float* squares;  // [rows, outputs / 16]

  // `number`: rounded. All lanes must call it; each half of a warp has 16 columns of a row, which are stored if `ok`.
  __device__ __forceinline__ void store(u32 row, u32 column, u32 num_outputs, u16 number, float by, bool ok) const {
    float found = as_float((u32)number << 16), square = found * found;
#pragma unroll
    for (int far = 1; far < 16; far *= 2) square += __shfl_xor_sync(~0u, square, far);
    if (!ok) return;
    u64 place = (u64)row * num_outputs + column;
    *(u16*)((u8*)weighed + (LONE ? place * 2 : place_of<1>(row, column))) = rounded(found * by);
    if (column % 16 == 0) squares[place / 16] = square;
  }
};
