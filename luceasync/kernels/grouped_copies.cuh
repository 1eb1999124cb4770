// What a warp copies of a matrix ahead, and what its lanes load of it where it has arrived.

#pragma once

#include "device_words.cuh"
#include "grouped_codes.cuh"
#include "grouped_layout.cuh"

// What one lane copies of the scales of a unit: 16 bytes in each turn.
struct Chunk {
  const u8* base;  // of the first row block
  u64 row_block_bytes;
  int stride;  // bytes from one entry to the next
  int block;   // of the unit
  bool is_super;

  __device__ __forceinline__ int entry(int first_block) const {
    return is_super ? (first_block + block) / SUPER_BLOCKS : (first_block + block) / SMALL_BLOCKS;
  }
};

struct Stored {
  const u8 *codes, *planes, *scales, *small_scales, *minimums, *small_minimums;
  int num_blocks, num_supers, num_groups;
};

__device__ __forceinline__ Chunk chunk_of(int c, const Stored& w) {
  Chunk chunk;
  chunk.is_super = c >= AT_SUPERS;
  if (chunk.is_super) {
    bool is_minimum = c >= AT_MINIMUMS;
    int at = c - (is_minimum ? AT_MINIMUMS : AT_SUPERS);
    int entry = at / SCALE_BYTES;
    constexpr int ENTRIES = EACH ? PARTS : 1;  // of a block
    chunk.block = ALIKE ? 0 : entry / ENTRIES;
    chunk.stride = ENTRIES * 16 * SCALE_BYTES;
    chunk.base = (is_minimum ? w.minimums : w.scales) + entry % ENTRIES * (16 * SCALE_BYTES) +
                 at % SCALE_BYTES * 16;
    chunk.row_block_bytes = (u64)w.num_supers * (16 * SCALE_BYTES);
  } else {
    bool is_minimum = c >= AT_SMALL_MINIMUMS;
    int at = c - (is_minimum ? AT_SMALL_MINIMUMS : 0);
    chunk.block = at / PARTS;
    chunk.stride = 16 * PARTS;
    chunk.base = (is_minimum ? w.small_minimums : w.small_scales) + at % PARTS * 16;
    chunk.row_block_bytes = (u64)(PARTS > 1 ? w.num_blocks : w.num_groups) * (16 * PARTS);
  }
  return chunk;
}

struct Copier {
  Stored w;
  const u16* x;
  int lane;
  u64 row_blocks[ROW_BLOCKS];
  Chunk chunks[CHUNK_TURNS];

  __device__ __forceinline__ void weights(int unit, u32 stage) const {
    int first_block = unit * UNIT;
#pragma unroll
    for (int r = 0; r < ROW_BLOCKS; r++) {
      u32 to = stage + r * ROW_BLOCK_BYTES;
      const u8* codes = w.codes + (row_blocks[r] * w.num_blocks + first_block) * CODE_BYTES;
#pragma unroll
      for (int b = 0; b < UNIT * CODE_BYTES / 512; b++)
        copy_16(to + b * 512 + lane * 16, codes + b * 512 + lane * 16,
                first_block + b * 512 / CODE_BYTES < w.num_blocks);
      if constexpr (PLANE_BYTES > 0) {
#pragma unroll
        for (int two = 0; two < UNIT / 2; two++) {
          u64 at = (row_blocks[r] * (w.num_blocks / 2) + unit * (UNIT / 2) + two) * 32 + lane;
          u32 place = to + AT_PLANES + (two * 32 + lane) * PLANE_BYTES;
          bool ok = first_block + 2 * two < w.num_blocks;
          if constexpr (PLANE_BYTES == 8) copy_8(place, w.planes + at * 8, ok);
          if constexpr (PLANE_BYTES == 16) copy_16(place, w.planes + at * 16, ok);
        }
      }
#pragma unroll
      for (int turn = 0; turn < CHUNK_TURNS; turn++) {
        int c = lane + 32 * turn;
        const Chunk& chunk = chunks[turn];
        if (c < NUM_CHUNKS)
          copy_16(to + AT_CHUNKS + c * 16,
                  chunk.base + row_blocks[r] * chunk.row_block_bytes + chunk.entry(first_block) * chunk.stride,
                  first_block + chunk.block < w.num_blocks);
      }
    }
  }

  __device__ __forceinline__ void row_of_x(int unit, u32 stage) const {
    int column = unit * (UNIT * 64) + lane * 8;
    copy_shared_16(stage + AT_X + lane * 16, x + column, column < w.num_blocks * 64);
  }
};

// Codes of 16 rows and of columns [16 QUARTER, 16 QUARTER + 16) of a block, as a tensor core wants them.
struct Words {
  uint4 codes[BITS == 8 ? 2 : 1];
  u32 high[2];
};

__device__ __forceinline__ Words words_of(u32 at, int block, int lane) {
  Words words;
  words.codes[0] = load<uint4>(at + block * CODE_BYTES + lane * 16);
  if constexpr (BITS == 8) words.codes[1] = load<uint4>(at + block * CODE_BYTES + 512 + lane * 16);
  words.high[0] = words.high[1] = 0;
  u32 planes = at + AT_PLANES + (block / 2 * 32 + lane) * PLANE_BYTES + block % 2 * (PLANE_BYTES / 2);
  if constexpr (BITS == 5) words.high[0] = load<u32>(planes);
  if constexpr (BITS == 6) {
    uint2 two = load<uint2>(planes);
    words.high[0] = two.x, words.high[1] = two.y;
  }
  return words;
}

template <int QUARTER>
__device__ __forceinline__ void numbers_of(u32 (&a)[4], const Words& words) {
  const uint4& four = words.codes[BITS == 8 ? QUARTER / 2 : 0];
  u32 word[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
  for (int k = 0; k < 4; k++) {  // columns by eight: k / 2; rows: k % 2
    int shift = BITS == 5 ? 4 * k + QUARTER : 8 * (k / 2) + 2 * QUARTER;
    a[k] = numbers<QUARTER>(word[k], words.high[BITS == 6 ? k % 2 : 0], shift);
  }
}

__device__ __forceinline__ void numbers_at(u32 (&a)[4], const Words& words, int quarter) {
  if (quarter == 0) numbers_of<0>(a, words);
  if (quarter == 1) numbers_of<1>(a, words);
  if (quarter == 2) numbers_of<2>(a, words);
  if (quarter == 3) numbers_of<3>(a, words);
}
