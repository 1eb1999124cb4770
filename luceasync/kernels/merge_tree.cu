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

// Of a lane's 8 columns, which are of one head.
struct Eight {
  float4 sums[2];
  float best, weight;

  __device__ __forceinline__ void add(const float4 (&more)[2], float2 weights) {
    float higher = fmaxf(best, weights.x), shrink = exp2f(best - higher), share = exp2f(weights.x - higher);
    best = higher, weight = weight * shrink + weights.y * share;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float4& sum = sums[half];
      sum.x = sum.x * shrink + more[half].x * share, sum.y = sum.y * shrink + more[half].y * share;
      sum.z = sum.z * shrink + more[half].z * share, sum.w = sum.w * shrink + more[half].w * share;
    }
  }
};

// Merges parts `warp`, warp + MERGE_WARPS ... of `count`, of which the warp has one at least.
__device__ __forceinline__ Eight merged_of_warp(const float4* sums, const float2* weights, int warp, int count) {
  Eight all;
  for (int begin = warp; begin < count; begin += AT_ONCE * MERGE_WARPS) {
    float4 more[AT_ONCE][2];
    float2 of_more[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {  // parts past the last are the last again
      u64 part = (u64)min(begin + i * MERGE_WARPS, count - 1) * NUM_QUERIES;
      of_more[i] = load_of_others(weights + part);
#pragma unroll
      for (int half = 0; half < 2; half++) more[i][half] = load_of_others(sums + part * HEAD_QUADS + half);
    }
    if (begin == warp) all = {{more[0][0], more[0][1]}, of_more[0].x, of_more[0].y};
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++)
      if ((begin != warp || i > 0) && begin + i * MERGE_WARPS < count) all.add(more[i], of_more[i]);
  }
  return all;
}

extern "C" __global__ void __launch_bounds__(MERGE_WARPS * 32) merge_tree(
    const float4* all_sums, const float2* all_weights, const u16* projected, const int* lanes, const int* row_indices,
    u8* out, u8* out_sums, int num_rows, int projected_stride) {
  __shared__ Eight of_warps[MERGE_WARPS][32];
  if (OVERLAP) start_next();
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int row = blockIdx.x / NUM_UNITS, unit = blockIdx.x % NUM_UNITS, column = unit * UNIT_COLUMNS + lane * 8;
  int entry = row / ROWS, head = column / HEAD_DIM;
  bool is_there = row < num_rows && lanes[min(row, num_rows - 1) / ROWS] >= 0 && column < COLUMNS;
  int count = Range(row_indices[min(row, num_rows - 1) / ROWS * ROWS], 0).num_splits;
  if (OVERLAP) wait_for_those_before();
  uint4 gate = {};
  if (is_there) {
    if (GATED && warp == 0)
      gate = *(const uint4*)(projected + (u64)row * projected_stride + (NUM_HEADS + 2 * KV_HEADS) * HEAD_DIM + column);
    int query = row % ROWS * GROUP + head % GROUP;
    TreeParts parts((float4*)all_sums, (float2*)all_weights, entry, head / GROUP);
    const float4* sums = parts.sums + query * HEAD_QUADS + column % HEAD_DIM / 4;
    if (warp < count) of_warps[warp][lane] = merged_of_warp(sums, parts.weights + query, warp, count);
  }
  __syncthreads();
  if (warp > 0) return;
  uint4 own = {};
  if (is_there) {
    Eight all = of_warps[0][lane];
#pragma unroll
    for (int w = 1; w < MERGE_WARPS; w++) {
      const Eight& more = of_warps[w][lane];
      if (w < count) all.add(more.sums, make_float2(more.best, more.weight));
    }
    uint2 halves[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      Part part = {all.sums[half], all.best, all.weight};
      halves[half] = finished(part, half ? make_uint2(gate.z, gate.w) : make_uint2(gate.x, gate.y));
    }
    own = make_uint4(halves[0].x, halves[0].y, halves[1].x, halves[1].y);
  }
  if constexpr (ARRANGED != 0) {
    arrange(own, row, unit, NUM_UNITS, out, out_sums);
  } else {
    if (column < COLUMNS) *(uint4*)((u16*)out + (u64)row * COLUMNS + column) = own;
  }
}
