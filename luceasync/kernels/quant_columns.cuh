// Several rows of x, loaded straight from memory: what a lane multiplies with a block.

#pragma once

#include "arranged_rows.cuh"
#include "quant_codes.cuh"
#include "quant_layout.cuh"

struct Columns {
  uint2 of[TILES][4];
};

// 2 to 8 rows, arranged, not scaled. Rows past the last repeat it, and their products are not stored; so do blocks past
// the last, whose weights are 0.
struct FewRows {
  const u8* columns;  // of a lane: the next block
  int num_blocks, block;

  __device__ __forceinline__ FewRows(const u16* x, int first_block, int num_blocks, int num_rows, int lane)
      : num_blocks(num_blocks), block(first_block) {
    int begin = RAGGED ? 0 : min(first_block, num_blocks - 1) * TILE_BYTES;
    columns = (const u8*)x + begin + (min(lane / 4, num_rows - 1) * 4 + lane % 4) * 16;
  }

  // Loads the next block; the one after it is `on` blocks further.
  __device__ __forceinline__ Columns next(int on) {
    Columns found;
    int at = RAGGED ? min(block, num_blocks - 1) * TILE_BYTES : 0;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      uint4 four = *(const uint4*)(columns + at + half * LANES_BYTES);
      found.of[0][2 * half] = make_uint2(four.x, four.y), found.of[0][2 * half + 1] = make_uint2(four.z, four.w);
    }
    if constexpr (!RAGGED) columns += on * TILE_BYTES;
    block += on;
    return found;
  }

  __device__ __forceinline__ static Columns lifted(const Columns& columns) {
    Columns found;
    found.of[0][0] = ::lifted<0>(columns.of[0][0]), found.of[0][1] = ::lifted<1>(columns.of[0][1]);
    found.of[0][2] = ::lifted<0>(columns.of[0][2]), found.of[0][3] = ::lifted<1>(columns.of[0][3]);
    return found;
  }
};

// More than 8 rows, arranged and scaled, padded to whole units of blocks.
struct ArrangedRows {
  const u8* columns;  // of a lane: the next block
  u32 sixteen_bytes;  // from 16 rows to the next

  __device__ __forceinline__ ArrangedRows(const u16* x, int first_block, int num_blocks, int, int lane)
      : columns((const u8*)x + (first_block < num_blocks ? first_block : 0) * ARRANGED_BLOCK_BYTES + lane * 16),
        sixteen_bytes((num_blocks + UNIT - 1) / UNIT * ARRANGED_UNIT_BYTES) {}

  // As in FewRows.
  __device__ __forceinline__ Columns next(int on) {
    Columns found;
#pragma unroll
    for (int i = 0; i < TILES; i++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        uint4 four = *(const uint4*)(columns + i / 2 * sixteen_bytes + i % 2 * TILE_BYTES + half * LANES_BYTES);
        found.of[i][2 * half] = make_uint2(four.x, four.y), found.of[i][2 * half + 1] = make_uint2(four.z, four.w);
      }
    columns += on * ARRANGED_BLOCK_BYTES;
    return found;
  }

  __device__ __forceinline__ static Columns lifted(const Columns& columns) { return columns; }
};

// Sums of x over the groups of a unit, or over their halves, from arranged rows.
struct GroupSums {
  uint4 of[SUM_HALVES][TILES];

  // `sums`: a lane's, for the first unit.
  __device__ __forceinline__ void load(const u8* sums, int unit, int num_units) {
#pragma unroll
    for (int half = 0; half < SUM_HALVES; half++)
#pragma unroll
      for (int i = 0; i < TILES; i++)
        of[half][i] = *(const uint4*)(sums + ((i / 2 * num_units + unit) * SUM_HALVES + half) * SUMS_UNIT_BYTES +
                                      i % 2 * LANES_BYTES);
  }
};

template <bool ARRANGED>
struct Chosen {
  using Rows = FewRows;
};
template <>
struct Chosen<true> {
  using Rows = ArrangedRows;
};
using RowsOfX = Chosen<SLOTS == 1>::Rows;
