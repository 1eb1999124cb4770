// Copies a matrix ahead of its use, warp by warp, and loads what has arrived.

#pragma once

#include "device_words.cuh"
#include "quant_codes.cuh"
#include "quant_layout.cuh"

// The scales that one lane copies of a unit: 16 bytes in each turn.
struct Chunk {
  const u8* base;  // of the first row block
  u64 row_block_bytes;
  int stride;  // bytes from one entry to the next
  int block;   // of the unit
  bool is_super;

  // The byte offset within a row block's scales.
  __device__ __forceinline__ int offset(int first_block) const {
    return (first_block + block) / (is_super ? SUPER_BLOCKS : SMALL_BLOCKS) * stride;
  }
  // Bytes from one unit of the warp to its next one, if the distance is the same for all units.
  __device__ __forceinline__ int step() const {
    constexpr int BLOCKS = STRIDE * UNIT;
    return (is_super ? BLOCKS / SUPER_BLOCKS : BLOCKS / SMALL_BLOCKS) * stride;
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

// A group of row blocks that a program processes at a time: OWN of results, and as many of the second half if paired.
struct RowBlocks {
  u64 of[ROW_BLOCKS];

  __device__ __forceinline__ RowBlocks(u32 group, u32 num_row_blocks) {
#pragma unroll
    for (int r = 0; r < ROW_BLOCKS; r++) {
      // Rows of the second half follow all of the first. Past the end the last rows are read again, not stored.
      u32 own = group * OWN + r % OWN;
      of[r] = (own < num_row_blocks ? own : num_row_blocks - 1) + r / OWN * num_row_blocks;
    }
  }
};

// Copies the units of a warp in order, group after group if programs go on.
struct Copier {
  const u8 *codes[ROW_BLOCKS], *planes[ROW_BLOCKS], *scales[ROW_BLOCKS][CHUNK_TURNS];  // of a lane, for the next unit
  Chunk chunks[CHUNK_TURNS];
  int steps[CHUNK_TURNS];
  const u16* x;
  int lane, num_blocks, block, block_of_x;  // the first ones of the next unit
  u32 group, num_row_blocks;

  __device__ __forceinline__ Copier(const Stored& w, const u16* row, u32 group, u32 num_row_blocks, int unit, int lane)
      : lane(lane), num_blocks(w.num_blocks), block_of_x(unit * UNIT), group(group), num_row_blocks(num_row_blocks) {
    begin(w, unit);
    x = row + block * 64 + lane * 8;
  }

  // Starts a group at the warp's first unit.
  __device__ __forceinline__ void begin(const Stored& w, int unit) {
    RowBlocks row_blocks(group, num_row_blocks);
    block = unit * UNIT;
#pragma unroll
    for (int turn = 0; turn < CHUNK_TURNS; turn++) {
      chunks[turn] = chunk_of(lane + 32 * turn, w);
      steps[turn] = chunks[turn].step();
    }
#pragma unroll
    for (int r = 0; r < ROW_BLOCKS; r++) {
      u64 at = row_blocks.of[r];
      codes[r] = w.codes + (at * w.num_blocks + block) * CODE_BYTES + lane * 16;
      planes[r] = w.planes + (at * (w.num_blocks / 2) + block / 2) * (32 * PLANE_BYTES) + lane * PLANE_BYTES;
#pragma unroll
      for (int turn = 0; turn < CHUNK_TURNS; turn++)
        scales[r][turn] = chunks[turn].base + at * chunks[turn].row_block_bytes +
                          (STEADY ? chunks[turn].offset(block) : 0);
    }
  }

  // Whether there is another unit, in this group or in a later one of the program.
  __device__ __forceinline__ bool has_next() const {
    return block < num_blocks && (!GOES_ON || group * OWN < num_row_blocks);
  }

  // Moves from the last unit of a group to the first one of the program's next group.
  __device__ __forceinline__ void go_on(const Stored& w, int first_unit) {
    if (!GOES_ON || block < num_blocks) return;
    group += gridDim.x / SPLITS;
    begin(w, first_unit);
  }

  __device__ __forceinline__ bool is_there(int past) const { return !RAGGED || block + past < num_blocks; }

  __device__ __forceinline__ void weights(u32 stage) {
#pragma unroll
    for (int r = 0; r < ROW_BLOCKS; r++) {
      u32 to = stage + r * ROW_BLOCK_BYTES;
#pragma unroll
      for (int b = 0; b < UNIT * CODE_BYTES / 512; b++)
        copy_16(to + b * 512 + lane * 16, codes[r] + b * 512, is_there(b * 512 / CODE_BYTES));
      codes[r] += STRIDE * UNIT * CODE_BYTES;
      if constexpr (PLANE_BYTES > 0) {
#pragma unroll
        for (int two = 0; two < UNIT / 2; two++) {
          u32 place = to + AT_PLANES + (two * 32 + lane) * PLANE_BYTES;
          const u8* from = planes[r] + two * (32 * PLANE_BYTES);
          if constexpr (PLANE_BYTES == 8) copy_8(place, from, is_there(2 * two));
          if constexpr (PLANE_BYTES == 16) copy_16(place, from, is_there(2 * two));
        }
        planes[r] += STRIDE * UNIT / 2 * (32 * PLANE_BYTES);
      }
#pragma unroll
      for (int turn = 0; turn < CHUNK_TURNS; turn++) {
        int c = lane + 32 * turn;
        const u8* from = scales[r][turn] + (STEADY ? 0 : chunks[turn].offset(block));
        if (c < NUM_CHUNKS) copy_16(to + AT_CHUNKS + c * 16, from, is_there(chunks[turn].block));
        if constexpr (STEADY) scales[r][turn] += steps[turn];
      }
    }
    block += STRIDE * UNIT;
  }

  __device__ __forceinline__ void row_of_x(u32 stage) {
    copy_shared_16(stage + AT_X + lane * 16, x, !RAGGED || block_of_x * 64 + lane * 8 < num_blocks * 64);
    x += STRIDE * UNIT * 64, block_of_x += STRIDE * UNIT;
  }
};

// Codes of 16 rows and columns [16 QUARTER, 16 QUARTER + 16) of a block, as a tensor core needs them.
struct Words {
  uint4 codes[BITS == 8 ? 2 : 1];
  u32 high[2];
};

// Offsets of a lane's part of a stage; all further offsets are compile-time constants.
struct Place {
  u32 codes, planes, small, supers, x;
  u32 base;  // see above_base

  __device__ __forceinline__ static Place of(int lane, int num_rows) {
    int g = lane / 4, pair = lane % 4;
    int block = LONE ? PARTS == 4 ? pair / 2 : pair : 0;  // of the first span, which has its two sums
    int entry = !LONE || ALIKE ? 0 : EACH ? 2 * pair : block;
    u32 small = block * (16 * PARTS) + g * (2 * PARTS) + (LONE && PARTS == 4 ? pair % 2 * 2 : 0);
    u32 supers = AT_SUPERS * 16 + entry * (16 * SCALE_BYTES) + g * (2 * SCALE_BYTES);
    return {held(lane * 16), held(AT_PLANES + lane * PLANE_BYTES), held(AT_CHUNKS + small), held(AT_CHUNKS + supers),
            held(AT_X + g * (SUB * 2) + pair * 8), held(BASE + (num_rows >> 8 & lane))};
  }

  __device__ __forceinline__ Place in(u32 stage) const {
    return {codes + stage, planes + stage, small + stage, supers + stage, x + stage, base};
  }
};

__device__ __forceinline__ Words words_of(const Place& at, int r, int block) {
  Words words;
  u32 codes = at.codes + r * ROW_BLOCK_BYTES + block * CODE_BYTES;
  words.codes[0] = load<uint4>(codes);
  if constexpr (BITS == 8) words.codes[1] = load<uint4>(codes + 512);
  words.high[0] = words.high[1] = 0;
  u32 planes = at.planes + r * ROW_BLOCK_BYTES + block / 2 * (32 * PLANE_BYTES) + block % 2 * (PLANE_BYTES / 2);
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
