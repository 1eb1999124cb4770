// Products of few rows with a quantised matrix: out = x @ W^T, or silu(gate) * up, (+ residual).
//
// W lies in blocks of 16 rows by 64 columns, so that what a lane of a tensor core multiplies is one
// load (luceasync.kernels.quant_tiles.TiledMatrix). The warps of a program, or of a cluster of SPLITS of
// them, share the columns of its row blocks. Each copies ahead into its own ring of shared memory, and waits
// for no other until its sums are added to theirs. Codes are multiplied unscaled, exact in bfloat16; the
// float32 sum of each group is scaled afterwards.
//
// Compiled with: BITS, CODES, ZERO, GROUP, SUPERGROUP, SCALE, SMALL, MINIMUM, SMALL_MINIMUMS,
// DIVIDES, TABLE_0 to TABLE_3 for the coding; X_ROWS, MOST_WARPS, SUM_HALVES, ROW_BLOCKS, WARPS, STAGES, SPLITS,
// GOES_ON, X_AHEAD, RAGGED, PAIRED, RESIDUAL, UNDIVIDED, WEIGHS, FLOAT_OUT, OUT_LIFT, OUT_SUMS, OUT_FEW, BESIDE,
// OVERLAP, SHARED_BYTES for the program. See luceasync.kernels.quant_gemv_cuda.

#include "device_words.cuh"
#include "quant_codes.cuh"
#include "quant_columns.cuh"
#include "quant_copies.cuh"
#include "quant_layout.cuh"
#include "quant_norms.cuh"
#include "quant_results.cuh"
#include "quant_sums.cuh"
#include "overlap.cuh"

static_assert(SHARED_BYTES >= WARPS * RING_BYTES && (UNDIVIDED || SHARED_BYTES == WARPS * RING_BYTES),
              "the launcher counts other sizes");

extern "C" __global__ void __launch_bounds__(WARPS * 32, NUM_BESIDE) quant_gemv(
    const u16* x, const u8* group_sums, const u8* codes, const u8* planes, const u8* scales, const u8* small_scales,
    const u8* minimums, const u8* small_minimums, const u16* residual, void* out, u8* out_sums, int num_rows,
    int num_row_blocks, int num_blocks, int num_supers, int num_groups, int out_stride,
    const float* x_squares, float eps, const float* next_weight, u16* weighed, float* squares) {
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  u32 rank = blockIdx.x % SPLITS, group = blockIdx.x / SPLITS;
  u32 begin = shared_begin(), ring = begin + warp * RING_BYTES;
  Stored stored = {codes, planes, scales, small_scales, minimums, small_minimums, num_blocks, num_supers, num_groups};
  int num_units = (num_blocks + UNIT - 1) / UNIT;
  int first_unit = rank * WARPS + warp;  // of every STRIDE-th
  Copier copier(stored, x, group, num_row_blocks, first_unit, lane);
  auto copy_weights = [&](u32 stage) {
    if (!copier.has_next()) return;
    copier.weights(stage);
    copier.go_on(stored, first_unit);
  };
#pragma unroll
  for (int s = 0; s < STAGES - 1; s++) copy_weights(ring + s * STAGE_BYTES);
  if (BESIDE) {
    if (OVERLAP) start_next();  // x is complete: the preceding kernel requested only weights before it
  } else {
    wait_for_inputs();
  }
  Undivided undivided = {begin, (u32)num_blocks, (u32)num_rows};
  bool is_first = true;
#pragma unroll
  for (int s = 0; s < STAGES - 1; s++) {
    if (LONE && first_unit + s * STRIDE < num_units) copier.row_of_x(ring + s * STAGE_BYTES);
    if (UNDIVIDED && s == 0) undivided.copy(x_squares, WARPS - 1 - warp, lane);
    commit_copies();
  }
  NextNorm next = {next_weight, weighed, squares};
  Results results(residual, out, out_sums, next, out_stride, num_rows, num_row_blocks, rank);
  results.ask_for_residual(group);
  Place place = Place::of(lane, num_rows);
  Own own(lane);
  RowsOfX rows(x, first_unit * UNIT, num_blocks, num_rows, lane);
  Columns coming[AHEAD];
#pragma unroll
  for (int k = 0; k < AHEAD && !LONE; k++) coming[k] = rows.next(1);
  u32 stage = ring, free = ring + (STAGES - 1) * STAGE_BYTES;
  do {
    float total[ROW_BLOCKS][TILES][SLOTS][4] = {};  // [.., pair of sums, row and column of a lane]
    float lone[ROW_BLOCKS][2] = {};
    for (int unit = first_unit; unit < num_units; unit += STRIDE) {
      wait_for_copies<STAGES - 2>();
      __syncwarp();  // copies of other lanes have arrived, and what was read is free
      copy_weights(free);
      if (LONE && unit + (STAGES - 1) * STRIDE < num_units) copier.row_of_x(free);
      commit_copies();
      int first_block = unit * UNIT;
      Place at = place.in(stage);
      if constexpr (LONE) {
        add_lone(lone, at, own, first_block, num_blocks, lane);
      } else {
        add_several(total, at, first_block, num_blocks, rows, coming, group_sums + lane * 16, first_unit * UNIT, lane);
      }
      free = stage;
      stage = stage + STAGE_BYTES == ring + STAGES * STAGE_BYTES ? ring : stage + STAGE_BYTES;
    }
    if constexpr (GOES_ON) {
      wait_for_others();  // they may still be adding earlier sums
    } else {
      wait_for_all_copies();
      __syncwarp();
    }
    if (UNDIVIDED && is_first) {
      if (GOES_ON && first_unit >= num_units) {  // nothing else was copied, nor waited for
        wait_for_all_copies();
        __syncwarp();
      }
      undivided.finish(eps, WARPS - 1 - warp, lane);
      is_first = false;
    }
    put_sums((float*)(shared + warp * RING_BYTES + AT_SUMS), total, lone, lane);
    wait_for_others();
    results.put(group, begin);
    group += gridDim.x / SPLITS;
    if (GOES_ON) results.ask_for_residual(group);
  } while (GOES_ON && group * OWN < num_row_blocks);
  if constexpr (SPLITS > 1) wait_for_cluster();  // others may still read this shared memory
  if (BESIDE && OVERLAP) wait_for_those_before();  // so that a wait for this one is for both
}
