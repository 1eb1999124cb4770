// The shared memory of a program of attend_row.cu, and its constants.

#pragma once

#include "attend_sizes.cuh"

constexpr int HALVES = GROUP > 8 ? 2 : 1;  // of the 16 rows of a product that are heads of the group

constexpr int STAGE_BYTES = 2 * KEYS_BYTES;       // keys, then values
constexpr int RING_BYTES = STAGES * STAGE_BYTES;  // of a warp
constexpr int AT_QUERIES = WARPS * RING_BYTES;
constexpr int AT_NEW_KEY = AT_QUERIES + 8 * HALVES * ROW_BYTES;
constexpr int AT_NEW_VALUE = AT_NEW_KEY + HEAD_DIM * 2;
constexpr int AT_WEIGHTS = AT_NEW_VALUE + HEAD_DIM * 2;  // of warps and heads: float2

// A warp's sums replace its ring once it has read all: float [GROUP][SUM_COLUMNS].
static_assert(GROUP * SUM_COLUMNS * 4 <= RING_BYTES, "the group is larger than 16");
static_assert(SHARED_BYTES == AT_WEIGHTS + WARPS * GROUP * 8, "the launcher counts other sizes");
