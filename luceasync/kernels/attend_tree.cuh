// How a context is divided among programs of attend_tree.cu, what they leave for merge_tree.cu, and their shared memory.
//
// Queries are pairs of a row and a head of the kv head's group: query q is row q / GROUP, head q % GROUP. A program has
// M_WARPS * 16 of them, 16 a warp, and tiles of TOKENS tokens, whose units KEY_GROUPS of its warps share.

#pragma once

#include "attend_sizes.cuh"

constexpr int TOKENS = 64;
constexpr int UNITS = TOKENS / UNIT;  // of a tile
static_assert(PAGE % TOKENS == 0, "a tile is in one page");

constexpr int NUM_QUERIES = ROWS * GROUP;  // of a kv head
constexpr int QUERIES_EACH = M_WARPS * 16;
constexpr int BLOCKS = (NUM_QUERIES + QUERIES_EACH - 1) / QUERIES_EACH;  // programs that share a kv head's queries
constexpr int KEY_GROUPS = WARPS / M_WARPS;
constexpr int NEW_ROWS = 16;  // a unit: room for the new keys and values
static_assert(ROWS <= NEW_ROWS && WARPS == M_WARPS * KEY_GROUPS && KEY_GROUPS <= UNITS, "few rows");

constexpr int STAGE_BYTES = 2 * TOKENS * ROW_BYTES;  // keys, then values
constexpr int AT_QUERIES = STAGES * STAGE_BYTES;
constexpr int AT_NEW_KEYS = AT_QUERIES + QUERIES_EACH * ROW_BYTES;
constexpr int AT_NEW_VALUES = AT_NEW_KEYS + NEW_ROWS * ROW_BYTES;
constexpr int AT_WEIGHTS = AT_NEW_VALUES + NEW_ROWS * ROW_BYTES;  // of key groups and queries: float2
// Sums replace the tiles: float [key groups][queries][SUM_COLUMNS].
constexpr int AT_SUMS = 0;
constexpr int GROUP_SUM_BYTES = QUERIES_EACH * SUM_COLUMNS * 4;

// The tiles of a context that a split has: tiles are divided evenly.
struct Range {
  int first, end, num_splits;

  __device__ __forceinline__ Range(int row_index, int split) {
    int num_tiles = (row_index + TOKENS - 1) / TOKENS;
    int each = max((num_tiles + SPLITS - 1) / SPLITS, 1);
    num_splits = max((num_tiles + each - 1) / each, 1);
    first = split * each, end = min(first + each, num_tiles);
  }
};

constexpr int HEAD_QUADS = HEAD_DIM / 4;

// What programs leave of the queries of a kv head.
struct TreeParts {
  float4* sums;     // [splits][NUM_QUERIES][HEAD_QUADS]
  float2* weights;  // [splits][NUM_QUERIES]: best, weight

  __device__ __forceinline__ TreeParts(float4* all_sums, float2* all_weights, int entry, int kv_head) {
    u64 place = ((u64)entry * KV_HEADS + kv_head) * SPLITS * NUM_QUERIES;
    sums = all_sums + place * HEAD_QUADS, weights = all_weights + place;
  }
};
