// Sizes of a layer's heads, for all programs of attention.
//
// A unit is the 16 tokens that a warp processes at a time: a tile of keys and one of values, rows of bfloat16.
// Rows are padded by 16 bytes, so that no two of eight are in the same banks.

#pragma once

#include "device_words.cuh"

constexpr int UNIT = 16;
constexpr int NUM_HEADS = KV_HEADS * GROUP;
constexpr int KV_DIM = KV_HEADS * HEAD_DIM;
constexpr int STEPS = HEAD_DIM / 16;             // of a product over a head's dimensions
constexpr int PAIRS = (HEAD_DIM / 2 + 31) / 32;  // of dimensions, of one head, that a lane has

constexpr int ROW_BYTES = HEAD_DIM * 2 + 16;
constexpr int KEYS_BYTES = UNIT * ROW_BYTES;
constexpr int SUM_COLUMNS = HEAD_DIM + 8;  // of a row of sums: stored without conflicts

__device__ __forceinline__ float least() { return as_float(0xff800000); }  // minus infinity

__device__ __forceinline__ float low_of(u32 pair) { return as_float(pair << 16); }
__device__ __forceinline__ float high_of(u32 pair) { return as_float(pair & 0xffff0000); }
