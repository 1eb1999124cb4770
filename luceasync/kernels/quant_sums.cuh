// Products of arrived blocks with rows of x, scaled and summed.

#pragma once

#include "quant_columns.cuh"
#include "quant_copies.cuh"

__device__ __forceinline__ void clear(float (&c)[4]) { c[0] = c[1] = c[2] = c[3] = 0.0f; }

// Sums of x: products with a matrix of ones, in the scale of codes.
template <int QUARTER>
__device__ __forceinline__ void add_sums(float (&sums)[4], u32 b0, u32 b1) {
  const u32 ones[4] = {one_of<QUARTER>(), one_of<QUARTER>(), one_of<QUARTER>(), one_of<QUARTER>()};
  multiply(sums, ones, b0, b1);
}

__device__ __forceinline__ void add_sums_at(float (&sums)[4], int quarter, u32 b0, u32 b1) {
  if (shift_of(quarter) == 0) add_sums<0>(sums, b0, b1);
  if (shift_of(quarter) != 0) add_sums<1>(sums, b0, b1);
}

// The ones that a lane multiplies for one row of x: 1 for the columns of its own sum, of the 8 that it takes part in.
struct Own {
  u32 ones[8];  // of sum j: 1, twice, or 0

  __device__ __forceinline__ explicit Own(int lane) {
#pragma unroll
    for (int j = 0; j < 8; j++) ones[j] = LONE ? held(lane / 4 == j ? ONE : 0) : 0;
  }
};

// One row of x: the 8 columns of a tensor core's product are the 8 sums of a span, so that a lane has two of each
// row, and scales them by itself.
__device__ __forceinline__ void add_lone(float (&total)[ROW_BLOCKS][2], const Place& at, const Own& is_own,
                                         int first_block, int num_blocks, int lane) {
  int g = lane / 4, pair = lane % 4;
#pragma unroll
  for (int span = 0; span < SPANS; span++) {
    uint2 own[QUARTERS];  // of sum g
#pragma unroll
    for (int q = 0; q < QUARTERS; q++) own[q] = load<uint2>(at.x + span * (8 * SUB * 2) + q * 32);
    // Groups of 16 columns come in pairs, so g determines the quarter.
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
    if constexpr (MINIMUM != NO_MINIMUM) {
      if constexpr (QUARTERS == 2) {
        add_sums<0>(sums, own[0].x, own[0].y), add_sums<1>(sums, own[QUARTERS - 1].x, own[QUARTERS - 1].y);
      } else {
        bool is_odd = g % 2;
        add_sums<0>(sums, is_odd ? 0 : own[0].x, is_odd ? 0 : own[0].y);
        add_sums<1>(sums, is_odd ? own[0].x : 0, is_odd ? own[0].y : 0);
      }
    }
#pragma unroll
    for (int block = 0; block < UNIT / SPANS; block++) {
      Words words[ROW_BLOCKS];
#pragma unroll
      for (int r = 0; r < ROW_BLOCKS; r++) words[r] = words_of(at, r, span * (UNIT / SPANS) + block);
#pragma unroll
      for (int quarter = 0; quarter < 4; quarter++) {
        u32 one = is_own.ones[block * SUBS + quarter / QUARTERS];  // a product: the other pipe is busy with codes
        u32 b0 = times_bf16x2(own[quarter % QUARTERS].x, one), b1 = times_bf16x2(own[quarter % QUARTERS].y, one);
#pragma unroll
        for (int r = 0; r < ROW_BLOCKS; r++) {
          u32 a[4];
          numbers_at(a, words[r], quarter);
          multiply(products[r], a, b0, b1);
        }
      }
    }
    int block = PARTS == 4 ? 2 * span + pair / 2 : pair;
    bool ok = !RAGGED || first_block + block < num_blocks;
#pragma unroll
    for (int r = 0; r < ROW_BLOCKS; r++) {
      u32 own_small = at.small + r * ROW_BLOCK_BYTES + span * (2 * 16 * PARTS);
      u32 own_supers = at.supers + r * ROW_BLOCK_BYTES;
      Small small = {0, 0}, small_minimum = {0, 0};
      if constexpr (SMALL != NO_SMALL) small = small_of(own_small);
      if constexpr (SMALL_MINIMUMS) small_minimum = small_of(own_small + AT_SMALL_MINIMUMS * 16);
#pragma unroll
      for (int e = 0; e < 2; e++) {
        int entry = EACH ? span * 8 + e : ALIKE || SPANS == 1 ? 0 : 2 * span;
        u32 supers = own_supers + entry * (16 * SCALE_BYTES);
        Two super = super_of(supers), super_minimum = super;
        if constexpr (MINIMUM == OWN_MINIMUM) super_minimum = super_of(supers + (AT_MINIMUMS - AT_SUPERS) * 16);
        Scales s = e == 0 ? scales_of<0>(super, super_minimum, small, small_minimum, ok, at.base)
                          : scales_of<1>(super, super_minimum, small, small_minimum, ok, at.base);
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

// D and M of a unit's rows, if one is for all of it.
struct Supers {
  Two scale[ROW_BLOCKS], minimum[ROW_BLOCKS];

  __device__ __forceinline__ void load(const Place& at, int entry) {
#pragma unroll
    for (int r = 0; r < ROW_BLOCKS; r++) {
      u32 supers = at.supers + r * ROW_BLOCK_BYTES + entry * (16 * SCALE_BYTES);
      scale[r] = minimum[r] = super_of(supers);
      if constexpr (MINIMUM == OWN_MINIMUM && !BY_UNIT) minimum[r] = super_of(supers + (AT_MINIMUMS - AT_SUPERS) * 16);
    }
  }
};

struct Smalls {
  Small scale[ROW_BLOCKS], minimum[ROW_BLOCKS];

  __device__ __forceinline__ void load(const Place& at, int block) {
#pragma unroll
    for (int r = 0; r < ROW_BLOCKS; r++) {
      u32 small = at.small + r * ROW_BLOCK_BYTES + block * (16 * PARTS);
      scale[r] = minimum[r] = {0, 0};
      if constexpr (SMALL != NO_SMALL) scale[r] = small_of(small);
      if constexpr (SMALL_MINIMUMS && !BY_UNIT) minimum[r] = small_of(small + AT_SMALL_MINIMUMS * 16);
    }
  }
};

// One row block: part PART of a block of columns.
template <int PART>
__device__ __forceinline__ void add_product(float (&total)[TILES][SLOTS][4], const Scales& s, const Words& words,
                                            const Columns& columns, const float (&sums)[TILES][4], int slot) {
  float products[TILES][4];
#pragma unroll
  for (int i = 0; i < TILES; i++) clear(products[i]);
#pragma unroll
  for (int q = PART * QUARTERS; q < (PART + 1) * QUARTERS; q++) {
    u32 a[4];
    numbers_at(a, words, q);
#pragma unroll
    for (int i = 0; i < TILES; i++) multiply(products[i], a, columns.of[i][q].x, columns.of[i][q].y);
  }
#pragma unroll
  for (int i = 0; i < TILES; i++)
#pragma unroll
    for (int k = 0; k < 4; k++) {
      float& sum = total[i][slot][k];
      sum = fmaf(products[i][k], k < 2 ? s.scale.near : s.scale.far, sum);
      if constexpr (SUMMED) sum = fmaf(-sums[i][k], k < 2 ? s.minimum.near : s.minimum.far, sum);
    }
}

template <int PART>
__device__ __forceinline__ void add_part(float (&total)[ROW_BLOCKS][TILES][SLOTS][4], const Place& at, int block,
                                         bool ok, Supers& supers, const Smalls& smalls,
                                         const Words (&words)[ROW_BLOCKS], const Columns& columns) {
  if constexpr (EACH) supers.load(at, block * PARTS + PART);
  float sums[TILES][4];
#pragma unroll
  for (int i = 0; i < TILES; i++) {
    clear(sums[i]);
    if constexpr (SUMMED)
#pragma unroll
      for (int q = PART * QUARTERS; q < (PART + 1) * QUARTERS; q++)
        add_sums_at(sums[i], q, columns.of[i][q].x, columns.of[i][q].y);
  }
  int slot = SLOTS == 1 ? 0 : (block * SUBS + PART) % 8 / 2;  // as lanes divide the sums of a single row
#pragma unroll
  for (int r = 0; r < ROW_BLOCKS; r++) {
    Scales s = scales_of<PART>(supers.scale[r], supers.minimum[r], smalls.scale[r], smalls.minimum[r], ok, at.base);
    add_product<PART>(total[r], s, words[r], columns, sums, slot);
  }
}

// Subtracts M m for each 1 of x: plain small numbers m, times sums of x.
__device__ __forceinline__ void take_minimums(float (&total)[ROW_BLOCKS][TILES][SLOTS][4], const Place& at, int lane,
                                              const GroupSums& groups) {
#pragma unroll
  for (int r = 0; r < ROW_BLOCKS; r++) {
    // Groups 2 (lane % 4) and the next, of rows g and 8 + g.
    u32 m = load<u32>(at.small + r * ROW_BLOCK_BYTES + AT_SMALL_MINIMUMS * 16 + lane % 4 * (16 * PARTS));
    u32 near = __byte_perm(m, 0, 0x4140), far = __byte_perm(m, 0, 0x4342);
    Two minimum = super_of(at.supers + r * ROW_BLOCK_BYTES + (AT_MINIMUMS - AT_SUPERS) * 16);
#pragma unroll
    for (int i = 0; i < TILES; i++) {
      float less[4];
      clear(less);
#pragma unroll
      for (int half = 0; half < SUM_HALVES; half++) {
        multiply(less, near, far, groups.of[half][i].x);
        multiply(less, near, far, groups.of[half][i].y);
        multiply(less, near, far, groups.of[half][i].z);
      }
#pragma unroll
      for (int k = 0; k < 4; k++)
        total[r][i][0][k] = fmaf(-less[k], k < 2 ? minimum.near : minimum.far, total[r][i][0][k]);
    }
  }
}

// A block of columns.
__device__ __forceinline__ void add_block(float (&total)[ROW_BLOCKS][TILES][SLOTS][4], const Place& at, int block,
                                          bool ok, Supers& supers, const Columns& columns) {
  Words words[ROW_BLOCKS];
#pragma unroll
  for (int r = 0; r < ROW_BLOCKS; r++) words[r] = words_of(at, r, block);
  Smalls smalls;
  smalls.load(at, block);
  if constexpr (!ALIKE && !EACH) supers.load(at, block);
  add_part<0>(total, at, block, ok, supers, smalls, words, columns);
  add_part<1>(total, at, block, ok, supers, smalls, words, columns);
  if constexpr (SUBS == 4) {
    add_part<2 % SUBS>(total, at, block, ok, supers, smalls, words, columns);
    add_part<3 % SUBS>(total, at, block, ok, supers, smalls, words, columns);
  }
}

// A unit of several rows of x. `coming`: the columns of its first blocks, then those of the next unit; `back`: from
// the last block of a group to the warp's first one.
__device__ __forceinline__ void add_several(float (&total)[ROW_BLOCKS][TILES][SLOTS][4], const Place& at,
                                            int first_block, int num_blocks, RowsOfX& rows, Columns (&coming)[AHEAD],
                                            const u8* group_sums, int back, int lane) {
  Supers supers;
  GroupSums groups;
  if constexpr (BY_UNIT) groups.load(group_sums, first_block / UNIT, (num_blocks + UNIT - 1) / UNIT);
  if constexpr (ALIKE) supers.load(at, 0);
#pragma unroll BLOCKS_UNROLLED
  for (int block = 0; block < UNIT; block++) {
    Columns columns = rows.lifted(coming[0]);
    // After the last block comes the warp's next unit, which may be in the next group; if there is none, the block is
    // read again.
    bool is_last = first_block + STRIDE * UNIT >= num_blocks;
    int next = block + AHEAD, on = 1;
    if (next == UNIT - 1) on = !is_last ? (STRIDE - 1) * UNIT + 1 : GOES_ON ? back - (first_block + next) : 0;
    if (!GOES_ON && is_last && next >= UNIT) on = 0;
#pragma unroll
    for (int k = 0; k + 1 < AHEAD; k++) coming[k] = coming[k + 1];
    coming[AHEAD - 1] = rows.next(on);
    bool ok = !RAGGED || first_block + block < num_blocks;
    add_block(total, at, block, ok, supers, columns);
  }
  if constexpr (BY_UNIT) take_minimums(total, at, lane, groups);
}
