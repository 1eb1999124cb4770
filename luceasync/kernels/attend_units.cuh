// Units of keys and values: a warp's copies of them, and its online softmax over them in base 2 (Milakov and
// Gimelshein, 2018), as in flash-decoding (Dao et al., 2023).

#pragma once

#include "attend_layout.cuh"

// Lanes copy 16 bytes of a row each, ROWS rows at a time.
constexpr int PIECES = HEAD_DIM / 8, ROWS = 32 / PIECES;
static_assert(PIECES * ROWS == 32, "the head's dimensions are no power of two");

// The units of a context that a split has: groups of WARPS units are divided evenly.
struct Range {
  int first, end, num_splits;

  __device__ __forceinline__ Range(int row_index, int split) {
    int num_units = row_index / UNIT + 1;  // the new row is the last one
    int turns = (num_units + WARPS - 1) / WARPS, turns_each = (turns + SPLITS - 1) / SPLITS;
    num_splits = (turns + turns_each - 1) / turns_each;
    first = split * turns_each * WARPS;
    end = min(first + turns_each * WARPS, num_units);
  }
  __device__ __forceinline__ int num_warps() const { return min(end - first, WARPS); }  // that have units
};

// Copies units of `keys` and `values` of one kv head of one lane.
struct Copier {
  const u16 *keys, *values;
  const int* table;  // the lane's
  int row_index, lane;

  __device__ __forceinline__ int page_of(int unit) const { return table[unit / (PAGE / UNIT)]; }

  // The offset of the row at `row_index` in `keys` and in `values`.
  __device__ __forceinline__ u64 new_row() const {
    return ((u64)page_of(row_index / UNIT) * PAGE + row_index % PAGE) * KV_DIM;
  }

  // Rows after `row_index` become zeros; the one at `row_index` is left alone, as it comes from elsewhere.
  __device__ __forceinline__ void copy(u32 tile, const u16* from, int unit, int page) const {
    int row = lane / PIECES, column = lane % PIECES;
    from += ((u64)page * PAGE + unit % (PAGE / UNIT) * UNIT + row) * KV_DIM + column * 8;
    tile += row * ROW_BYTES + column * 16;
    int num_before = row_index - (unit * UNIT + row);
    if (row_index - unit * UNIT >= UNIT) {
#pragma unroll
      for (int n = 0; n < STEPS; n++) copy_16(tile + n * ROWS * ROW_BYTES, from + n * ROWS * KV_DIM, true);
    } else {
#pragma unroll 1
      for (int n = 0; n < STEPS; n++)
        if (n * ROWS != num_before)
          copy_16(tile + n * ROWS * ROW_BYTES, from + n * ROWS * KV_DIM, n * ROWS < num_before);
    }
  }

  // Writes the new key and value into the unit that has the row at `row_index`.
  __device__ __forceinline__ void put_new(u32 begin, u32 stage) const {
    if (lane >= PIECES) return;
    u32 at = stage - begin + row_index % UNIT * ROW_BYTES + lane * 16;
    *(uint4*)(shared + at) = load<uint4>(begin + AT_NEW_KEY + lane * 16);
    *(uint4*)(shared + at + TILE_BYTES) = load<uint4>(begin + AT_NEW_VALUE + lane * 16);
  }
};

// A lane has heads lane / 4 (and 8 + lane / 4), and of every 8 columns lane % 4 * 2 and the next.
class Softmax {
 public:
  float best[HALVES], weight[HALVES];  // of a lane's own columns, until `finish`
  float total[2 * STEPS][HALVES][2];   // [.., of 8 dimensions, head, dimension]

  // `queries`: [GROUP] rows of shared memory. The other rows are undefined: their results are not used.
  __device__ __forceinline__ Softmax(u32 queries, int lane) {
#pragma unroll
    for (int half = 0; half < HALVES; half++) best[half] = least(), weight[half] = 0.0f;
#pragma unroll
    for (int n = 0; n < 2 * STEPS; n++)
#pragma unroll
      for (int half = 0; half < HALVES; half++) total[n][half][0] = total[n][half][1] = 0.0f;
    u32 at = queries + lane / 4 * ROW_BYTES + lane % 4 * 4;
#pragma unroll
    for (int step = 0; step < STEPS; step++)
#pragma unroll
      for (int word = 0; word < 2; word++)
#pragma unroll
        for (int half = 0; half < HALVES; half++)
          query[step][word][half] = load<u32>(at + half * 8 * ROW_BYTES + step * 32 + word * 16);
  }

  // Scores a tile of keys, of which the first `num_seen` count, and derives the weights of its values.
  __device__ __forceinline__ void add_keys(u32 tile, int num_seen, float scale, int lane) {
    float sums[2][2][4] = {};  // [even and odd steps, of 8 tokens, of a lane]: shorter chains of products
    u32 at = tile + (lane % 8 + lane / 16 * 8) * ROW_BYTES + lane / 8 % 2 * 16;
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
      u32 keys[4];
      load_matrices<false>(keys, at + step * 32);
      const u32(&q)[2][HALVES] = query[step];
      const u32 a[4] = {q[0][0], HALVES == 2 ? q[0][HALVES - 1] : 0, q[1][0], HALVES == 2 ? q[1][HALVES - 1] : 0};
      multiply(sums[step % 2][0], a, keys[0], keys[1]);
      multiply(sums[step % 2][1], a, keys[2], keys[3]);
    }
#pragma unroll
    for (int half = 0; half < HALVES; half++) {
      float scores[2][2], higher = best[half];
#pragma unroll
      for (int k = 0; k < 4; k++) {
        int of_8 = k / 2, token = 8 * of_8 + lane % 4 * 2 + k % 2;
        float score = (sums[0][of_8][2 * half + k % 2] + sums[1][of_8][2 * half + k % 2]) * scale;
        scores[of_8][k % 2] = token < num_seen ? score : least();
        higher = fmaxf(higher, scores[of_8][k % 2]);
      }
      higher = fmaxf(higher, __shfl_xor_sync(~0u, higher, 1));
      higher = fmaxf(higher, __shfl_xor_sync(~0u, higher, 2));
      shrink[half] = exp2f(best[half] - higher), best[half] = higher;
      weight[half] *= shrink[half];
#pragma unroll
      for (int of_8 = 0; of_8 < 2; of_8++) {
        float low = exp2f(scores[of_8][0] - higher), high = exp2f(scores[of_8][1] - higher);
        weight[half] += low + high;
        shares[of_8][half] = rounded(low, high);
      }
    }
  }

  // Adds the tile of values of those keys.
  __device__ __forceinline__ void add_values(u32 tile, int lane) {
    const u32 a[4] = {shares[0][0], HALVES == 2 ? shares[0][HALVES - 1] : 0, shares[1][0],
                      HALVES == 2 ? shares[1][HALVES - 1] : 0};
    u32 at = tile + lane % 16 * ROW_BYTES + lane / 16 * 16;
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
      u32 values[4];
      load_matrices<true>(values, at + step * 32);
#pragma unroll
      for (int n = 0; n < 2; n++) {
        float sums[4] = {};
#pragma unroll
        for (int k = 0; k < 2 * HALVES; k++) sums[k] = total[2 * step + n][k / 2][k % 2] * shrink[k / 2];
        multiply(sums, a, values[2 * n], values[2 * n + 1]);
#pragma unroll
        for (int k = 0; k < 2 * HALVES; k++) total[2 * step + n][k / 2][k % 2] = sums[k];
      }
    }
  }

  // Writes the sums to the warp's ring, and best and weight to the array of all warps.
  __device__ __forceinline__ void finish(int warp, int lane) {
#pragma unroll
    for (int half = 0; half < HALVES; half++) {
      weight[half] += __shfl_xor_sync(~0u, weight[half], 1);
      weight[half] += __shfl_xor_sync(~0u, weight[half], 2);
      int head = 8 * half + lane / 4;
      if (head >= GROUP) continue;
      if (lane % 4 == 0)
        *(float2*)(shared + AT_WEIGHTS + (warp * GROUP + head) * 8) = make_float2(best[half], weight[half]);
      u32 at = warp * RING_BYTES + (head * SUM_COLUMNS + lane % 4 * 2) * 4;
#pragma unroll
      for (int n = 0; n < 2 * STEPS; n++)
        *(float2*)(shared + at + n * 32) = make_float2(total[n][half][0], total[n][half][1]);
    }
  }

 private:
  u32 query[STEPS][2][HALVES];  // [.., of 8 dimensions, head]
  u32 shares[2][HALVES];        // of a unit's tokens: [of 8, head]
  float shrink[HALVES];
};

// A warp's units of a range, and its ring, in which STAGES of them are in flight.
class Units {
 public:
  __device__ __forceinline__ Units(const Copier& copier, const Range& range, u32 begin, int warp)
      : copier(copier), first(range.first + warp), end(range.end), begin(begin), stage(begin + warp * RING_BYTES),
        end_of_ring(stage + RING_BYTES) {}

  // Starts the first copies before anything else is waited for. All page numbers are loaded ahead of them.
  __device__ __forceinline__ void start() {
    int pages[STAGES + 1];
#pragma unroll
    for (int s = 0; s <= STAGES; s++) {
      int unit = first + s * WARPS;
      pages[s] = unit < end ? copier.page_of(unit) : 0;
    }
#pragma unroll
    for (int s = 0; s < STAGES; s++) {
      int unit = first + s * WARPS;
      if (unit < end) copier.copy(stage + s * STAGE_BYTES, copier.keys, unit, pages[s]);
      commit_copies();
      if (unit < end) copier.copy(stage + s * STAGE_BYTES + TILE_BYTES, copier.values, unit, pages[s]);
      commit_copies();
    }
    page = pages[STAGES];
  }

  // Requires the new key and value in shared memory.
  __device__ __forceinline__ void add_to(Softmax& softmax, float scale) {
    int row_index = copier.row_index, lane = copier.lane;
    for (int unit = first; unit < end; unit += WARPS) {
      int next = unit + STAGES * WARPS;
      bool has_next = next < end;
      int page_after = next + WARPS < end ? copier.page_of(next + WARPS) : 0;
      wait_for_copies<2 * STAGES - 1>();
      if (unit == row_index / UNIT) copier.put_new(begin, stage);
      __syncwarp();  // copies of other lanes have arrived
      softmax.add_keys(stage, row_index + 1 - unit * UNIT, scale, lane);
      __syncwarp();  // and all lanes have read the stage
      if (has_next) copier.copy(stage, copier.keys, next, page);
      commit_copies();
      wait_for_copies<2 * STAGES - 1>();
      __syncwarp();
      softmax.add_values(stage + TILE_BYTES, lane);
      __syncwarp();
      if (has_next) copier.copy(stage + TILE_BYTES, copier.values, next, page);
      commit_copies();
      page = page_after;
      stage = stage + STAGE_BYTES == end_of_ring ? end_of_ring - RING_BYTES : stage + STAGE_BYTES;
    }
  }

 private:
  Copier copier;
  int first, end;
  u32 begin, stage, end_of_ring;
  int page;  // of the next unit to be copied
};
