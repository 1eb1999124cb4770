// Products of what has arrived with rows of x, scaled and summed.

#pragma once

#include "grouped_copies.cuh"

__device__ __forceinline__ void clear(float (&c)[4]) { c[0] = c[1] = c[2] = c[3] = 0.0f; }

// Sums of x: products with a matrix of ones, in the codes' own measure.
template <int QUARTER>
__device__ __forceinline__ void add_sums(float (&sums)[4], u32 b0, u32 b1) {
  const u32 ones[4] = {one_of<QUARTER>(), one_of<QUARTER>(), one_of<QUARTER>(), one_of<QUARTER>()};
  multiply(sums, ones, b0, b1);
}

__device__ __forceinline__ void add_sums_at(float (&sums)[4], int quarter, u32 b0, u32 b1) {
  if (shift_of(quarter) == 0) add_sums<0>(sums, b0, b1);
  if (shift_of(quarter) != 0) add_sums<1>(sums, b0, b1);
}

// One row of x: the 8 columns of a tensor core's product are 8 sums of a span, so that a lane has two
// of each row, and scales them alone.
__device__ __forceinline__ void add_lone(float (&total)[ROW_BLOCKS][2], u32 stage, u32 x, int first_block,
                                         int num_blocks, int lane) {
  int g = lane / 4, pair = lane % 4;
#pragma unroll
  for (int span = 0; span < SPANS; span++) {
    uint2 own[QUARTERS];  // of sum g
#pragma unroll
    for (int q = 0; q < QUARTERS; q++)
      own[q] = load<uint2>(x + (span * 8 + g) * (SUB * 2) + q * 32 + pair * 8);
    // Of groups of 16 columns two follow each other, so that g says which quarter they are.
    if constexpr (QUARTERS == 2) {
      own[0] = lifted<0>(own[0]), own[QUARTERS - 1] = lifted<1>(own[QUARTERS - 1]);
    } else {
      uint2 even = lifted<0>(own[0]), odd = lifted<1>(own[0]);
      own[0] = g % 2 ? odd : even;
    }
    float products[ROW_BLOCKS][4], sums[4];
    clear(sums);
#pragma unroll
    for (int r = 0; r < ROW_BLOCKS; r++) clear(products[r]);
#pragma unroll
    for (int block = 0; block < UNIT / SPANS; block++) {
      Words words[ROW_BLOCKS];
#pragma unroll
      for (int r = 0; r < ROW_BLOCKS; r++)
        words[r] = words_of(stage + r * ROW_BLOCK_BYTES, span * (UNIT / SPANS) + block, lane);
#pragma unroll
      for (int quarter = 0; quarter < 4; quarter++) {
        bool is_own = g == block * SUBS + quarter / QUARTERS;
        u32 one = is_own ? ONE : 0;  // a product, where the other pipe is busy with codes
        u32 b0 = times_bf16x2(own[quarter % QUARTERS].x, one), b1 = times_bf16x2(own[quarter % QUARTERS].y, one);
        if constexpr (MINIMUM != NO_MINIMUM) add_sums_at(sums, quarter, b0, b1);
#pragma unroll
        for (int r = 0; r < ROW_BLOCKS; r++) {
          u32 a[4];
          numbers_at(a, words[r], quarter);
          multiply(products[r], a, b0, b1);
        }
      }
    }
    int block = PARTS == 4 ? 2 * span + pair / 2 : pair;
    bool ok = first_block + block < num_blocks;
#pragma unroll
    for (int r = 0; r < ROW_BLOCKS; r++) {
      u32 chunks = stage + r * ROW_BLOCK_BYTES + AT_CHUNKS;
      Small small = {0, 0}, small_minimum = {0, 0};
      if constexpr (SMALL != NO_SMALL) small = small_of_pair(chunks, span, g, pair);
      if constexpr (SMALL_MINIMUMS) small_minimum = small_of_pair(chunks + AT_SMALL_MINIMUMS * 16, span, g, pair);
#pragma unroll
      for (int e = 0; e < 2; e++) {
        int entry = EACH ? span * 8 + 2 * pair + e : ALIKE ? 0 : block;
        Two super = super_of(chunks + AT_SUPERS * 16, entry, g), super_minimum = super;
        if constexpr (MINIMUM == OWN_MINIMUM) super_minimum = super_of(chunks + AT_MINIMUMS * 16, entry, g);
        Scales s = e == 0 ? scales_of<0>(super, super_minimum, small, small_minimum, ok)
                          : scales_of<1>(super, super_minimum, small, small_minimum, ok);
        total[r][0] = fmaf(products[r][e], s.scale.near, total[r][0]);
        total[r][1] = fmaf(products[r][2 + e], s.scale.far, total[r][1]);
        if constexpr (MINIMUM != NO_MINIMUM) {
          total[r][0] = fmaf(-sums[e], s.minimum.near, total[r][0]);
          total[r][1] = fmaf(-sums[e], s.minimum.far, total[r][1]);
        }
      }
    }
  }
}

// Several rows of x, straight from memory: what a lane multiplies of a block. Rows past the last are
// the last one, whose products nobody stores, as are blocks, whose weights are 0.
struct Columns {
  uint2 of[TILES][4];
};

__device__ __forceinline__ Columns lifted(const Columns& columns) {
  Columns found;
#pragma unroll
  for (int i = 0; i < TILES; i++) {
    found.of[i][0] = lifted<0>(columns.of[i][0]), found.of[i][1] = lifted<1>(columns.of[i][1]);
    found.of[i][2] = lifted<0>(columns.of[i][2]), found.of[i][3] = lifted<1>(columns.of[i][3]);
  }
  return found;
}

struct Rows {
  const u16* of[TILES];
  int num_blocks;

  __device__ __forceinline__ Rows(const u16* x, int num_blocks, int num_rows, int lane) : num_blocks(num_blocks) {
#pragma unroll
    for (int i = 0; i < TILES; i++)
      of[i] = x + (u64)min(8 * i + lane / 4, num_rows - 1) * (num_blocks * 64) + lane % 4 * 4;
  }

  __device__ __forceinline__ Columns columns(int block) const {
    Columns found;
    int at = min(block, num_blocks - 1) * 64;
#pragma unroll
    for (int i = 0; i < TILES; i++)
#pragma unroll
      for (int q = 0; q < 4; q++) found.of[i][q] = *(const uint2*)(of[i] + at + q * 16);
    return found;
  }
};

template <int PART>
__device__ __forceinline__ void add_part(float (&total)[ROW_BLOCKS][TILES][SLOTS][4], u32 stage, int block, bool ok, int g,
                                         const Words (&words)[ROW_BLOCKS], const Columns& columns) {
  constexpr int FIRST = PART * QUARTERS;
  float sums[TILES][4];
#pragma unroll
  for (int i = 0; i < TILES; i++) {
    clear(sums[i]);
    if constexpr (MINIMUM != NO_MINIMUM)
#pragma unroll
      for (int q = 0; q < QUARTERS; q++)
        add_sums_at(sums[i], FIRST + q, columns.of[i][FIRST + q].x, columns.of[i][FIRST + q].y);
  }
  int slot = SLOTS == 1 ? 0 : (block * SUBS + PART) % 8 / 2;  // as lanes divide the sums of one row
#pragma unroll
  for (int r = 0; r < ROW_BLOCKS; r++) {
    u32 chunks = stage + r * ROW_BLOCK_BYTES + AT_CHUNKS;
    int entry = EACH ? block * PARTS + PART : ALIKE ? 0 : block;
    Two super = super_of(chunks + AT_SUPERS * 16, entry, g), super_minimum = super;
    if constexpr (MINIMUM == OWN_MINIMUM) super_minimum = super_of(chunks + AT_MINIMUMS * 16, entry, g);
    Small small = {0, 0}, small_minimum = {0, 0};
    if constexpr (SMALL != NO_SMALL) small = small_of(chunks, block, g);
    if constexpr (SMALL_MINIMUMS) small_minimum = small_of(chunks + AT_SMALL_MINIMUMS * 16, block, g);
    Scales s = scales_of<PART>(super, super_minimum, small, small_minimum, ok);
    float products[TILES][4];
#pragma unroll
    for (int i = 0; i < TILES; i++) clear(products[i]);
#pragma unroll
    for (int q = 0; q < QUARTERS; q++) {
      u32 a[4];
      numbers_at(a, words[r], FIRST + q);
#pragma unroll
      for (int i = 0; i < TILES; i++) multiply(products[i], a, columns.of[i][FIRST + q].x, columns.of[i][FIRST + q].y);
    }
#pragma unroll
    for (int i = 0; i < TILES; i++)
#pragma unroll
      for (int k = 0; k < 4; k++) {
        float& sum = total[r][i][slot][k];
        sum = fmaf(products[i][k], k < 2 ? s.scale.near : s.scale.far, sum);
        if constexpr (MINIMUM != NO_MINIMUM) sum = fmaf(-sums[i][k], k < 2 ? s.minimum.near : s.minimum.far, sum);
      }
  }
}
