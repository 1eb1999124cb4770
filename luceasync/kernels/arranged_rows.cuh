// The order of more than 8 arranged rows of x: sixteen by sixteen, as lanes of tensor cores load them, in whole units
// of 256 columns, with zeros for rows and columns past the last. Or of up to 8, in whole blocks of 64 columns; rows past
// the last hold anything.
//
// Columns, [block of 64][tile of 8 rows][half][lane][4 words]: a lane's words are from row lane / 4 and
// columns 4 (lane % 4) to 4 (lane % 4) + 3 of quarter 2 half, and of the next quarter.
// Sums of groups of 32 columns, [unit][tile][lane][4 words]: of row lane / 4 and groups 2 (lane % 4) and the
// next, as three bfloat16 numbers each, which hold all bits of a float32 number; the fourth word is unused. Or
// sums of halves of these groups, [unit][half][tile][lane][4 words].

#pragma once

#include "device_words.cuh"

constexpr int ARRANGED_ROWS = 16;                    // that lie together
constexpr int LANES_BYTES = 512;                     // one load of a warp
constexpr int TILE_BYTES = 2 * LANES_BYTES;          // of a block's columns
constexpr int ARRANGED_BLOCK_BYTES = 2 * TILE_BYTES;
constexpr int ARRANGED_UNIT_BYTES = 4 * ARRANGED_BLOCK_BYTES;
constexpr int SUMS_UNIT_BYTES = 2 * LANES_BYTES;  // of whole groups, or of one half

// The byte offset of a number within the columns of 16 rows and one lift, or, with one tile, of up to 8 rows.
template <int TILES_OF_BLOCK = 2>
__device__ __forceinline__ u32 place_of(u32 row, u32 column) {
  u32 quarter = column / 16 % 4, lane = row % 8 * 4 + column % 16 / 4;
  return column / 64 * (TILES_OF_BLOCK * TILE_BYTES) + row / 8 * TILE_BYTES + quarter / 2 * LANES_BYTES + lane * 16 +
         quarter % 2 * 8 + column % 4 * 2;
}

// The byte offset of the sum of the half group at `column`, within all sums of 16 rows: of its first part; the next parts
// are a word apart each.
__device__ __forceinline__ u32 place_of_half(u32 row, u32 column) {
  u32 group = column / 32 % 8, lane = row % 8 * 4 + group / 2;
  return (column / 256 * 2 + column / 16 % 2) * SUMS_UNIT_BYTES + row / 8 * LANES_BYTES + lane * 16 + group % 2 * 2;
}
