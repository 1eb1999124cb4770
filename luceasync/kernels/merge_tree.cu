// Merges the parts that programs of attend_tree.cu leave, gates the results, and writes them as rows or, for a product of
// 9 to 16 rows, arranged.
//
// A program has 256 columns of a row, 8 a lane, whose parts its warps share.
//
// Compiled with: GROUP, KV_HEADS, HEAD_DIM, GATED for the layer; ROWS, M_WARPS, WARPS (of attend_tree.cu), SPLITS, PAGE;
// MERGE_WARPS, OVERLAP; ARRANGED, and then LIFTS (a bit for each wanted lift) and SUMS.

#include "arranging.cuh"
#include "attend_parts.cuh"
#include "attend_tree.cuh"
#include "device_words.cuh"

constexpr int COLUMNS = NUM_HEADS * HEAD_DIM;
constexpr int UNIT_COLUMNS = 256, NUM_UNITS = (COLUMNS + UNIT_COLUMNS - 1) / UNIT_COLUMNS;
constexpr int AT_ONCE = 4;  // parts of a warp that are loaded at a time

// Merges parts `warp`, warp + MERGE_WARPS ... of `count` of a quad.
__device__ __forceinline__ Part merged_of_warp(const float4* sums, const float2* weights, int warp, int count) {
  Part parts[AT_ONCE + 1];
  parts[0] = {{0.0f, 0.0f, 0.0f, 0.0f}, least(), 0.0f};
  for (int begin = warp; begin < count; begin += AT_ONCE * MERGE_WARPS) {
    int num_new = min((count - begin + MERGE_WARPS - 1) / MERGE_WARPS, AT_ONCE);
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      if (i >= num_new) continue;
      u64 part = (u64)(begin + i * MERGE_WARPS) * NUM_QUERIES;
      parts[i + 1].sum = load_of_others(sums + part * HEAD_QUADS);
      float2 weight = load_of_others(weights + part);
      parts[i + 1].best = weight.x, parts[i + 1].weight = weight.y;
    }
    if (begin == warp) parts[0].best = parts[1].best;
    parts[0] = merged(parts, num_new + 1);
  }
  return parts[0];
}

extern "C" __global__ void __launch_bounds__(MERGE_WARPS * 32) merge_tree(
    const float4* all_sums, const float2* all_weights, const u16* projected, const int* lanes, const int* row_indices,
    u8* out, u8* out_sums, int num_rows, int projected_stride) {
  __shared__ Part of_warps[MERGE_WARPS][2][32];
  if (OVERLAP) start_next();
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int row = blockIdx.x / NUM_UNITS, unit = blockIdx.x % NUM_UNITS, column = unit * UNIT_COLUMNS + lane * 8;
  int entry = row / ROWS, head = column / HEAD_DIM;
  bool is_there = row < num_rows && lanes[min(row, num_rows - 1) / ROWS] >= 0 && column < COLUMNS;
  int row_index = row_indices[min(row, num_rows - 1) / ROWS * ROWS];
  if (OVERLAP) wait_for_those_before();
  uint4 gate = {};
  if (is_there) {
    if (GATED && warp == 0)
      gate = *(const uint4*)(projected + (u64)row * projected_stride + (NUM_HEADS + 2 * KV_HEADS) * HEAD_DIM + column);
    int count = Range(row_index, 0).num_splits, query = row % ROWS * GROUP + head % GROUP;
    TreeParts parts((float4*)all_sums, (float2*)all_weights, entry, head / GROUP);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      int quad = column % HEAD_DIM / 4 + half;
      of_warps[warp][half][lane] = merged_of_warp(parts.sums + query * HEAD_QUADS + quad, parts.weights + query, warp, count);
    }
  }
  __syncthreads();
  if (warp > 0) return;
  uint4 own = {};
  if (is_there) {
    uint2 halves[2];
    int count = min(Range(row_index, 0).num_splits, MERGE_WARPS);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      Part parts[MERGE_WARPS];
#pragma unroll
      for (int w = 0; w < MERGE_WARPS; w++) parts[w] = of_warps[w][half][lane];
      halves[half] = finished(merged(parts, count), half ? make_uint2(gate.z, gate.w) : make_uint2(gate.x, gate.y));
    }
    own = make_uint4(halves[0].x, halves[0].y, halves[1].x, halves[1].y);
  }
  if constexpr (ARRANGED != 0) {
    arrange(own, row, unit, NUM_UNITS, out, out_sums);
  } else {
    if (column < COLUMNS) *(uint4*)((u16*)out + (u64)row * COLUMNS + column) = own;
  }
}
