// Attention of one new row per lane, in one launch: head norms, rotation, the write into the lane's page, and
// flash-decoding (Dao et al., 2023) over the lane's pages.
//
// A program takes one kv head's group of query heads through one of up to SPLITS parts of the context. Which
// part depends on the context's length alone. Copies of earlier keys and values start before the preceding
// kernel has ended. Each warp copies units of 16 tokens into its own ring of shared memory, and waits for no
// other until its sums are added to theirs. The last program of a kv head to finish merges all parts.
//
// Compiled with: GROUP, KV_HEADS, HEAD_DIM, HALF (of the rotated dimensions), GATED, NEWEST (0: no ring) for the
// layer; WARPS, STAGES, SPLITS, FEW (whether rows are arranged, as up to 8
// of a product), OVERLAP, SHARED_BYTES for the program. See luceasync.kernels.attention_cuda.

#include "arranged_rows.cuh"
#include "attend_heads.cuh"
#include "attend_layout.cuh"
#include "attend_merge.cuh"
#include "attend_softmax.cuh"
#include "attend_units.cuh"
#include "device_words.cuh"

// The warps share the heads of the group, the new key and the new value.
constexpr int TURNS = (GROUP + 1 + WARPS - 1) / WARPS;
constexpr int KEY = GROUP, VALUE_WARP = (GROUP + 1) % WARPS;

extern "C" __global__ void __launch_bounds__(WARPS * 32) attend_row(
    const u16* projected, const float* query_norm, const float* key_norm, u16* keys, u16* values, const int* lanes,
    const int* row_indices, const int* tables, const float* cos, const float* sin, u16* ring, float4* sums,
    float2* weights, u32* arrivals, u16* out, float eps, float scale, int projected_stride, int num_places,
    int table_stride) {
  __shared__ u32 num_before;
  if (OVERLAP) start_next();
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int num_each = gridDim.x / SPLITS;  // the first parts of all contexts come first
  int split = blockIdx.x / num_each, group = blockIdx.x % num_each;
  int entry = group / KV_HEADS, kv_head = group % KV_HEADS;
  int row = lanes[entry], row_index = row_indices[entry];
  uint2* results = (uint2*)out + (FEW ? 0 : (u64)group * QUADS);
  auto place_of_quad = [&](int quad) -> u32 {
    return FEW ? place_of<1>(entry, (kv_head * QUADS + quad) * 4) / 8 : quad;
  };
  if (row < 0) {  // padding
    if (split > 0) return;
    if (OVERLAP) wait_for_those_before();
#pragma unroll 1
    for (int quad = threadIdx.x; quad < QUADS; quad += WARPS * 32) results[place_of_quad(quad)] = make_uint2(0, 0);
    return;
  }
  Range range(row_index, split);
  if (split >= range.num_splits) return;
  bool has_newest = split == range.num_splits - 1;
  u64 own_begin = (u64)row * num_places * KV_DIM + kv_head * HEAD_DIM;
  keys += own_begin, values += own_begin;
  Copier copier = {keys, values, tables + (u64)row * table_stride, row_index, lane};
  u32 begin = shared_begin();

  // Start early: keys and values of earlier steps, and weights. They are complete, as the preceding kernel has
  // waited for all before it.
  Units units(copier, range, begin, warp);
  units.start();
  u64 new_row = has_newest ? copier.new_row() : 0;
  Head heads[TURNS];
  auto is_own = [&](int head) { return head < GROUP || (head == KEY && has_newest); };
#pragma unroll
  for (int turn = 0; turn < TURNS; turn++) {
    int head = warp + turn * WARPS;
    if (is_own(head)) heads[turn].load_norm(head == KEY ? key_norm : query_norm, lane);
  }
  if (OVERLAP) wait_for_those_before();

  const u16* x = projected + (u64)entry * projected_stride;
  Angles angles(cos + entry * HALF, sin + entry * HALF, lane);
#pragma unroll
  for (int turn = 0; turn < TURNS; turn++) {
    int head = warp + turn * WARPS;
    if (is_own(head))
      heads[turn].load(x + (head == KEY ? NUM_HEADS + kv_head : kv_head * GROUP + head) * HEAD_DIM, lane);
  }
  if (has_newest && warp == VALUE_WARP)
#pragma unroll
    for (int n = 0; n < PAIRS; n++) {
      int d = first_of_pair(lane, n);
      if (!is_dim(d)) continue;
      u32 pair = *(const u32*)(x + (NUM_HEADS + KV_HEADS + kv_head) * HEAD_DIM + d);
      *(u32*)(values + new_row + d) = pair;
      *(u32*)(shared + AT_NEW_VALUE + d * 2) = pair;
    }
#pragma unroll
  for (int turn = 0; turn < TURNS; turn++) {
    int head = warp + turn * WARPS;
    if (!is_own(head)) continue;
    u32 at = head == KEY ? AT_NEW_KEY : AT_QUERIES + head * ROW_BYTES;
    u16* kept = nullptr;
    if (head == KEY) kept = keys + new_row;
    if (NEWEST && head != KEY && has_newest) {
      u64 place = (u64)row * NEWEST + row_index % max(NEWEST, 1);
      kept = ring + (place * NUM_HEADS + kv_head * GROUP + head) * HEAD_DIM;
    }
    heads[turn].finish(angles, eps, lane, [&](int d, u32 pair) {
      *(u32*)(shared + at + d * 2) = pair;
      if (kept) *(u32*)(kept + d) = pair;
    });
  }
  __syncthreads();

  Softmax<HALVES> softmax(begin + AT_QUERIES, lane);
  units.add_to(softmax, scale);
  int num_warps = range.num_warps();
  if (warp < num_warps) softmax.finish(warp * RING_BYTES, AT_WEIGHTS + warp * GROUP * 8, GROUP, lane);
  __syncthreads();

  auto gate_of = [&](int quad) {
    const u16* gates = x + (NUM_HEADS + 2 * KV_HEADS + kv_head * GROUP) * HEAD_DIM;
    return GATED ? ((const uint2*)gates)[quad] : make_uint2(0, 0);
  };
  if (range.num_splits == 1) {
#pragma unroll 1
    for (int quad = threadIdx.x; quad < QUADS; quad += WARPS * 32) {
      uint2 gate = gate_of(quad);
      results[place_of_quad(quad)] = finished(merged_warps(begin, quad, num_warps), gate);
    }
    return;
  }
  Parts parts = {sums + (u64)group * SPLITS * QUADS, weights + (u64)group * SPLITS * GROUP};
#pragma unroll 1
  for (int quad = threadIdx.x; quad < QUADS; quad += WARPS * 32)
    parts.store(split, quad, merged_warps(begin, quad, num_warps));
  __syncthreads();
  if (threadIdx.x == 0) num_before = arrive(arrivals + group);
  __syncthreads();
  if (num_before + 1 < range.num_splits) return;
  if (threadIdx.x == 0) arrivals[group] = 0;  // for the next launch
#pragma unroll 1
  for (int quad = threadIdx.x; quad < QUADS; quad += WARPS * 32) {
    uint2 gate = gate_of(quad);
    results[place_of_quad(quad)] = finished(parts.merged_splits(quad, range.num_splits), gate);
  }
}
