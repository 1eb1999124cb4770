// Units of keys and values: a warp's copies of them, and its softmax over them.

#pragma once

#include "attend_layout.cuh"
#include "attend_softmax.cuh"

// Lanes copy 16 bytes of a row each, ROWS rows at a time.
constexpr int PIECES = HEAD_DIM / 8, ROWS = 32 / PIECES;
static_assert(PIECES * ROWS == 32, "the head's dimensions are no power of two");

// The units of a context that belong to a split: groups of WARPS units are divided evenly among the splits.
struct Range {
  int first, end, num_splits;

  __device__ __forceinline__ Range(int row_index, int split) {
    int num_units = row_index / UNIT + 1;  // the new row is the last one
    int turns = (num_units + WARPS - 1) / WARPS, turns_each = (turns + SPLITS - 1) / SPLITS;
    num_splits = (turns + turns_each - 1) / turns_each;
    first = split * turns_each * WARPS;
    end = min(first + turns_each * WARPS, num_units);
  }
  __device__ __forceinline__ int num_warps() const { return min(end - first, WARPS); }  // with at least one unit
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

  // Rows after `row_index` become zeros. The row at `row_index` is left alone: it is written separately.
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
    *(uint4*)(shared + at + KEYS_BYTES) = load<uint4>(begin + AT_NEW_VALUE + lane * 16);
  }
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
      if (unit < end) copier.copy(stage + s * STAGE_BYTES + KEYS_BYTES, copier.values, unit, pages[s]);
      commit_copies();
    }
    page = pages[STAGES];
  }

  // Requires the new key and value in shared memory.
  __device__ __forceinline__ void add_to(Softmax<HALVES>& softmax, float scale) {
    int row_index = copier.row_index, lane = copier.lane;
    for (int unit = first; unit < end; unit += WARPS) {
      int next = unit + STAGES * WARPS;
      bool has_next = next < end;
      int page_after = next + WARPS < end ? copier.page_of(next + WARPS) : 0;
      wait_for_copies<2 * STAGES - 1>();
      if (unit == row_index / UNIT) copier.put_new(begin, stage);
      __syncwarp();  // copies of other lanes have arrived
      int num_seen = row_index + 1 - unit * UNIT;
      softmax.add_keys(stage, scale, lane, [&](int, int token) { return token < num_seen; });
      __syncwarp();  // and all lanes have read the stage
      if (has_next) copier.copy(stage, copier.keys, next, page);
      commit_copies();
      wait_for_copies<2 * STAGES - 1>();
      __syncwarp();
      softmax.add_values(stage + KEYS_BYTES, lane);
      __syncwarp();
      if (has_next) copier.copy(stage + KEYS_BYTES, copier.values, next, page);
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
