// The shared memory of a program of attend_row.cu, and its constants.
//
// A unit is the 16 tokens that a warp processes at a time: a tile of keys and one of values, rows of bfloat16.
// Rows are padded by 16 bytes, so that no two of eight are in the same banks.

#pragma once

#include "device_words.cuh"

constexpr int UNIT = 16;
constexpr int NUM_HEADS = KV_HEADS * GROUP;
constexpr int KV_DIM = KV_HEADS * HEAD_DIM;
constexpr int STEPS = HEAD_DIM / 16;         // of a product over a head's dimensions
constexpr int HALVES = GROUP > 8 ? 2 : 1;    // of the 16 rows of a product that are heads of the group
constexpr int PAIRS = (HEAD_DIM / 2 + 31) / 32;  // of dimensions, of one head, that a lane has

constexpr int ROW_BYTES = HEAD_DIM * 2 + 16;
constexpr int TILE_BYTES = UNIT * ROW_BYTES;
constexpr int STAGE_BYTES = 2 * TILE_BYTES;  // keys, then values
constexpr int RING_BYTES = STAGES * STAGE_BYTES;  // of a warp
constexpr int AT_QUERIES = WARPS * RING_BYTES;
constexpr int AT_NEW_KEY = AT_QUERIES + 8 * HALVES * ROW_BYTES;
constexpr int AT_NEW_VALUE = AT_NEW_KEY + HEAD_DIM * 2;
constexpr int AT_WEIGHTS = AT_NEW_VALUE + HEAD_DIM * 2;  // of warps and heads: float2

// A warp's sums replace its ring once it has read all: float [GROUP][SUM_COLUMNS], stored without conflicts.
constexpr int SUM_COLUMNS = HEAD_DIM + 8;
static_assert(GROUP * SUM_COLUMNS * 4 <= RING_BYTES, "the group is larger than 16");
static_assert(SHARED_BYTES == AT_WEIGHTS + WARPS * GROUP * 8, "the launcher counts other sizes");

__device__ __forceinline__ float least() { return as_float(0xff800000); }  // minus infinity

__device__ __forceinline__ float low_of(u32 pair) { return as_float(pair << 16); }
__device__ __forceinline__ float high_of(u32 pair) { return as_float(pair & 0xffff0000); }
