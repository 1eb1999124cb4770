// Attention of up to 16 new rows per lane that form a tree: each sees the lane's rows, its ancestors and itself. Head
// norms, rotation and flash-decoding (Dao et al., 2023) over one of up to SPLITS parts of the context, in one launch.
// merge_tree.cu merges the parts.
//
// Nothing of the lane is written: new keys and values go to scratch rows. A program takes all rows and heads of a kv
// head's group, or a block of them, through its part of the lane's pages, whose copies start before the preceding kernel
// has ended. Each program norms and rotates its queries by itself: with so few rows, a launch would take longer.
//
// Compiled with: GROUP, KV_HEADS, HEAD_DIM, HALF (of the rotated dimensions) for the layer; ROWS; WARPS, M_WARPS, STAGES,
// SPLITS, PAGE, OVERLAP, SHARED_BYTES for the program. See luceasync.kernels.tree_attention_cuda.

#include "attend_heads.cuh"
#include "attend_parts.cuh"
#include "attend_softmax.cuh"
#include "attend_tree.cuh"
#include "device_words.cuh"

static_assert(AT_WEIGHTS + KEY_GROUPS * QUERIES_EACH * 8 == SHARED_BYTES, "the launcher counts other sizes");
static_assert(KEY_GROUPS * GROUP_SUM_BYTES <= AT_QUERIES, "sums replace the tiles");

constexpr int PIECES = HEAD_DIM / 8;  // of 16 bytes, of a row of keys
constexpr int QUERIES_WARP = (QUERIES_EACH + WARPS - 1) / WARPS, KEYS_WARP = (ROWS + WARPS - 1) / WARPS;
constexpr int VALUE_TURNS = (NEW_ROWS * PIECES + WARPS * 32 - 1) / (WARPS * 32);

// Copies tiles of keys and values of one kv head of one lane.
struct TileCopier {
  const u16 *keys, *values;
  const int* table;  // the lane's
  int row_index;

  // Rows from `row_index` on become zeros.
  __device__ __forceinline__ void copy(u32 stage, int tile) const {
    u64 begin = ((u64)table[tile / (PAGE / TOKENS)] * PAGE + tile % (PAGE / TOKENS) * TOKENS) * KV_DIM;
#pragma unroll
    for (int turn = 0; turn < (TOKENS * PIECES + WARPS * 32 - 1) / (WARPS * 32); turn++) {
      int piece = threadIdx.x + turn * WARPS * 32, row = piece / PIECES, column = piece % PIECES;
      if (piece >= TOKENS * PIECES) continue;
      u64 from = begin + (u64)row * KV_DIM + column * 8;
      u32 to = stage + row * ROW_BYTES + column * 16;
      bool ok = tile * TOKENS + row < row_index;
      copy_16(to, keys + from, ok);
      copy_16(to + TOKENS * ROW_BYTES, values + from, ok);
    }
  }
};

// The rows of an entry, and where their heads go.
struct NewRows {
  const u16* projected;  // of its first row
  const float *cos, *sin;
  int kv_head, stride;

  __device__ __forceinline__ const u16* head(int row, int head) const {
    return projected + (u64)row * stride + head * HEAD_DIM;
  }
};

// Heads number `first`, first + 1 ... of `num_heads`, which a warp norms and rotates. All that they need is loaded before
// the first of them is stored: each load would be waited for by itself.
template <int EACH>
struct OwnHeads {
  Head heads[EACH];
  Angles angles[EACH];
  u32 first, num_heads;

  // `row_of`, `head_of`: of a number.
  template <typename RowOf, typename HeadOf>
  __device__ __forceinline__ OwnHeads(const NewRows& rows, const float* norm, u32 first, u32 num_heads, int lane,
                                      RowOf row_of, HeadOf head_of)
      : first(first), num_heads(num_heads) {
#pragma unroll
    for (u32 turn = 0; turn < EACH; turn++) {
      u32 number = min(first + turn, num_heads - 1);
      heads[turn].load_norm(norm, lane);
      heads[turn].load(rows.head(row_of(number), head_of(number)), lane);
      angles[turn] = Angles(rows.cos + row_of(number) * HALF, rows.sin + row_of(number) * HALF, lane);
    }
  }

  // `store(number, dimension, pair)`.
  template <typename Store>
  __device__ __forceinline__ void finish(float eps, int lane, Store store) {
#pragma unroll
    for (u32 turn = 0; turn < EACH; turn++) {
      u32 number = first + turn;
      bool is_own = number < num_heads;
      heads[turn].finish(angles[turn], eps, lane, [&](int d, u32 pair) {
        if (is_own) store(number, d, pair);
      });
    }
  }
};

extern "C" __global__ void __launch_bounds__(WARPS * 32) attend_tree(
    const u16* projected, const float* query_norm, const float* key_norm, const u16* keys, const u16* values,
    const int* lanes, const int* row_indices, const int* tables, const float* cos, const float* sin, const u8* ancestors,
    u16* new_keys, u16* new_values, u16* queries, float4* sums, float2* weights, float eps, float scale,
    int projected_stride, int num_places, int table_stride) {
  if (OVERLAP) start_next();
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int num_each = gridDim.x / SPLITS;  // the first parts of all contexts come first
  int split = blockIdx.x / num_each, group = blockIdx.x % num_each;
  int block = group % BLOCKS, kv_head = group / BLOCKS % KV_HEADS, entry = group / BLOCKS / KV_HEADS;
  int row = lanes[entry], row_index = row_indices[entry * ROWS];
  Range range(row_index, split);
  if (row < 0 || split >= range.num_splits) {
    if (OVERLAP && split == 0) wait_for_those_before();  // so that a wait for this one is for them too
    return;
  }
  u64 own_begin = (u64)row * num_places * KV_DIM + kv_head * HEAD_DIM;
  TileCopier copier = {keys + own_begin, values + own_begin, tables + (u64)row * table_stride, row_index};
  u32 begin = shared_begin();
  // Start early: keys and values of earlier steps. They are complete, as the preceding kernel has waited for all before.
#pragma unroll
  for (int s = 0; s < STAGES; s++) {
    if (range.first + s < range.end) copier.copy(begin + s * STAGE_BYTES, range.first + s);
    commit_copies();
  }
  if (OVERLAP) wait_for_those_before();

  int first_row = entry * ROWS;
  u32 first_query = block * QUERIES_EACH;
  NewRows rows = {projected + (u64)first_row * projected_stride, cos + first_row * HALF, sin + first_row * HALF, kv_head,
                  projected_stride};
  bool has_new = split == 0, keeps_new = has_new && block == 0;
  int num_own = min(NUM_QUERIES - (int)first_query, QUERIES_EACH);
  auto row_of = [&](u32 query) { return (first_query + query) / GROUP; };
  auto head_of = [&](u32 query) { return kv_head * GROUP + (first_query + query) % GROUP; };
  auto itself = [](u32 row) { return row; };
  auto key_head = [&](u32) { return NUM_HEADS + kv_head; };
  OwnHeads<QUERIES_WARP> own(rows, query_norm, warp * QUERIES_WARP, num_own, lane, row_of, head_of);
  if (has_new) {
    OwnHeads<KEYS_WARP> own_keys(rows, key_norm, warp * KEYS_WARP, ROWS, lane, itself, key_head);
    uint4 own_values[VALUE_TURNS];
#pragma unroll
    for (u32 turn = 0; turn < VALUE_TURNS; turn++) {
      u32 piece = threadIdx.x + turn * WARPS * 32, number = piece / PIECES, d = piece % PIECES * 8;
      own_values[turn] = {};  // of rows past the last
      if (number < ROWS) own_values[turn] = *(const uint4*)(rows.head(number, NUM_HEADS + KV_HEADS + kv_head) + d);
    }
    own_keys.finish(eps, lane, [&](u32 number, int d, u32 pair) {
      *(u32*)(shared + AT_NEW_KEYS + number * ROW_BYTES + d * 2) = pair;
      if (keeps_new) *(u32*)(new_keys + ((u64)(first_row + number) * KV_HEADS + kv_head) * HEAD_DIM + d) = pair;
    });
#pragma unroll
    for (u32 turn = 0; turn < VALUE_TURNS; turn++) {
      u32 piece = threadIdx.x + turn * WARPS * 32, number = piece / PIECES, d = piece % PIECES * 8;
      if (number >= NEW_ROWS) continue;
      *(uint4*)(shared + AT_NEW_VALUES + number * ROW_BYTES + d * 2) = own_values[turn];
      if (keeps_new && number < ROWS)
        *(uint4*)(new_values + ((u64)(first_row + number) * KV_HEADS + kv_head) * HEAD_DIM + d) = own_values[turn];
    }
  }
  own.finish(eps, lane, [&](u32 query, int d, u32 pair) {
    *(u32*)(shared + AT_QUERIES + query * ROW_BYTES + d * 2) = pair;
    if (!queries || !has_new) return;
    u64 place = (u64)(first_row + row_of(query)) * NUM_HEADS + head_of(query);
    *(u32*)(queries + place * HEAD_DIM + d) = pair;
  });
  int m_warp = warp % M_WARPS, key_group = warp / M_WARPS;
  bool sees_new = has_new && key_group == 0;
  u32 seen = 0;  // of new rows, a bit for each of a lane's scores
#pragma unroll
  for (int bit = 0; bit < 8; bit++) {
    int of = min((int)(first_query + m_warp * 16 + bit / 4 * 8 + lane / 4) / GROUP, ROWS - 1);
    int token = bit / 2 % 2 * 8 + lane % 4 * 2 + bit % 2;
    if (sees_new && token < ROWS && ancestors[(u64)(first_row + of) * ROWS + token]) seen |= 1u << bit;
  }
  __syncthreads();

  Softmax<2> softmax(begin + AT_QUERIES + m_warp * 16 * ROW_BYTES, lane);
  if (sees_new) {
    softmax.add_keys(begin + AT_NEW_KEYS, scale, lane, [&](int half, int token) {
      return seen >> (half * 4 + token / 8 * 2 + token % 2) & 1;
    });
    softmax.add_values(begin + AT_NEW_VALUES, lane);
  }
  u32 stage = begin;
#pragma unroll 1
  for (int tile = range.first; tile < range.end; tile++) {
    wait_for_copies<STAGES - 1>();
    __syncthreads();  // copies of other lanes have arrived
#pragma unroll 1
    for (int unit = key_group; unit < UNITS; unit += KEY_GROUPS) {
      int num_seen = row_index - (tile * TOKENS + unit * UNIT);
      if (num_seen <= 0) break;
      u32 at = stage + unit * KEYS_BYTES;
      softmax.add_keys(at, scale, lane, [&](int, int token) { return token < num_seen; });
      softmax.add_values(at + TOKENS * ROW_BYTES, lane);
    }
    __syncthreads();  // and all have read the stage
    if (tile + STAGES < range.end) copier.copy(stage, tile + STAGES);
    commit_copies();
    stage = stage + STAGE_BYTES == begin + STAGES * STAGE_BYTES ? begin : stage + STAGE_BYTES;
  }
  wait_for_all_copies();

  int num_units = (min(row_index, range.end * TOKENS) - range.first * TOKENS + UNIT - 1) / UNIT;
  int num_groups = max(min(num_units, KEY_GROUPS), 1);  // that have any
  int own_queries = key_group * QUERIES_EACH + m_warp * 16;
  if (key_group < num_groups)
    softmax.finish(AT_SUMS + own_queries * SUM_COLUMNS * 4, AT_WEIGHTS + own_queries * 8, 16, lane);
  __syncthreads();
  TreeParts parts(sums, weights, entry, kv_head);
#pragma unroll 1
  for (int quad = threadIdx.x; quad < num_own * HEAD_QUADS; quad += WARPS * 32) {
    int query = quad / HEAD_QUADS, column = quad % HEAD_QUADS * 4;
    Part of_groups[KEY_GROUPS];
#pragma unroll
    for (int g = 0; g < KEY_GROUPS; g++) {
      if (g >= num_groups) continue;
      uint4 sum = load<uint4>(begin + AT_SUMS + ((g * QUERIES_EACH + query) * SUM_COLUMNS + column) * 4);
      uint2 weight = load<uint2>(begin + AT_WEIGHTS + (g * QUERIES_EACH + query) * 8);
      of_groups[g].sum = make_float4(as_float(sum.x), as_float(sum.y), as_float(sum.z), as_float(sum.w));
      of_groups[g].best = as_float(weight.x), of_groups[g].weight = as_float(weight.y);
    }
    Part all = merged(of_groups, num_groups);
    u64 place = (u64)split * NUM_QUERIES + first_query + query;
    parts.sums[place * HEAD_QUADS + quad % HEAD_QUADS] = all.sum;
    if (column == 0) parts.weights[place] = make_float2(all.best, all.weight);
  }
}
