// The layout of a quantised matrix, and of a program's shared memory, as compile-time constants.
// luceasync.kernels.quant_tiling.shared_of counts the same bytes.

#pragma once

enum { UINT, BIASED, E4M3, E2M1, LOOKED_UP };         // CODES
enum { F16, BF16, F32, E8M0 };                        // SCALE: of D and M
enum { NO_SMALL, SMALL_UINT8, SMALL_INT8, SMALL_E4M3 };  // SMALL
enum { NO_MINIMUM, OWN_MINIMUM, SCALE_MINIMUM };      // MINIMUM

constexpr int UNIT = 4;  // blocks that a warp processes at a time: 256 columns
constexpr int PARTS = GROUP == 16 || GROUP == 32 ? 64 / GROUP : 1;  // scales of a block
constexpr int SUB = GROUP == 16 ? 16 : 32;                          // columns that are summed, and then scaled
constexpr int SUBS = 64 / SUB;                                      // of a block
constexpr int QUARTERS = SUB / 16;                                  // 16 columns each: a tensor core's
constexpr int SPANS = UNIT * SUBS / 8;                              // of 8 such sums, in a unit
constexpr bool EACH = SUPERGROUP == 16 || SUPERGROUP == 32;         // as many D as groups
constexpr int WHOLE = 1 << 30;                                      // blocks of a row
constexpr int SMALL_BLOCKS = PARTS > 1 ? 1 : GROUP == 0 ? WHOLE : GROUP / 64;
constexpr int SUPER_BLOCKS = EACH ? 1 : SUPERGROUP == 0 ? WHOLE : SUPERGROUP / 64;
constexpr bool ALIKE = !EACH && SUPER_BLOCKS % UNIT == 0;           // one D for all of a unit
// Whether a lane copies the same parts of every unit, so that it only advances.
constexpr bool STEADY = (SMALL_BLOCKS == WHOLE || UNIT % SMALL_BLOCKS == 0) &&
                        (SUPER_BLOCKS == WHOLE || UNIT % SUPER_BLOCKS == 0);
constexpr int STRIDE = WARPS * SPLITS;                              // units from one of a warp's to its next
constexpr int NUM_SUPERS = EACH ? UNIT * PARTS : ALIKE ? 1 : UNIT;  // of a unit

constexpr int CODE_BYTES = BITS == 8 ? 1024 : 512;                  // of a block
constexpr int PLANE_BYTES = BITS == 5 ? 8 : BITS == 6 ? 16 : 0;     // of two blocks, for a lane
constexpr int SCALE_BYTES = SCALE == F32 ? 4 : SCALE == E8M0 ? 1 : 2;

// Scales are copied 16 bytes at a time: 16 rows have SCALE_BYTES or PARTS such chunks.
constexpr int SMALL_CHUNKS = SMALL == NO_SMALL ? 0 : UNIT * PARTS;
constexpr int SMALL_MINIMUM_CHUNKS = SMALL_MINIMUMS ? UNIT * PARTS : 0;
constexpr int SUPER_CHUNKS = NUM_SUPERS * SCALE_BYTES;
constexpr int MINIMUM_CHUNKS = MINIMUM == OWN_MINIMUM ? SUPER_CHUNKS : 0;
constexpr int AT_SMALL_MINIMUMS = SMALL_CHUNKS;
constexpr int AT_SUPERS = AT_SMALL_MINIMUMS + SMALL_MINIMUM_CHUNKS;
constexpr int AT_MINIMUMS = AT_SUPERS + SUPER_CHUNKS;
constexpr int NUM_CHUNKS = AT_MINIMUMS + MINIMUM_CHUNKS;
constexpr int CHUNK_TURNS = (NUM_CHUNKS + 31) / 32;

constexpr bool LONE = X_ROWS == 1;
constexpr int TILES = LONE ? 1 : X_ROWS / 8;  // of 8 rows of x
constexpr int SLOTS = X_ROWS <= 8 ? 4 : 1;    // sums that are added up last: up to 8 rows those of one
// Programs per multiprocessor that there are to be registers for: MOST_WARPS, or for one row as many as fit the largest
// shared memory.
constexpr int MOST_BYTES = 227 * 1024;
constexpr int BY_WARPS = MOST_WARPS > WARPS ? MOST_WARPS / WARPS : 1, BY_BYTES = MOST_BYTES / (SHARED_BYTES + 1024);
constexpr int NUM_BESIDE = !LONE || BY_WARPS < BY_BYTES ? BY_WARPS : LONE && BY_BYTES > 0 ? BY_BYTES : 1;
constexpr int BLOCKS_UNROLLED = SLOTS == 1 && BITS == 8 ? 2 : UNIT;  // as there are registers for
// Blocks of x that are in flight, in registers; the next unit's may be among them, but not the one after it.
constexpr int AHEAD = X_AHEAD;
// Many rows: minimums are multiplied with sums of x for all groups of a unit at once.
constexpr bool BY_UNIT = SLOTS == 1 && PARTS == 2 && ALIKE && MINIMUM == OWN_MINIMUM && SMALL_MINIMUMS &&
                         (CODES == BIASED ? 128 : ZERO) == 0;
constexpr bool SUMMED = MINIMUM != NO_MINIMUM && !BY_UNIT;  // several rows: sums of x go with each group

constexpr int AT_PLANES = UNIT * CODE_BYTES;
constexpr int AT_CHUNKS = AT_PLANES + UNIT / 2 * 32 * PLANE_BYTES;
constexpr int ROW_BLOCK_BYTES = AT_CHUNKS + NUM_CHUNKS * 16;
constexpr int AT_X = ROW_BLOCKS * ROW_BLOCK_BYTES;
constexpr int STAGE_BYTES = AT_X + (LONE ? UNIT * 128 : 0);  // one row of x comes with the weights
constexpr int WIDTH = ROW_BLOCKS * 16;
constexpr int SUM_STRIDE = LONE ? WIDTH : WIDTH + 4;  // of a row of sums: rows are apart in the banks
constexpr int SUM_BYTES = X_ROWS * SUM_STRIDE * 4;    // of a warp: where its ring was, or behind it
constexpr int AT_SUMS = GOES_ON ? STAGES * STAGE_BYTES : 0;
constexpr int RING_BYTES = AT_SUMS + SUM_BYTES > STAGES * STAGE_BYTES ? AT_SUMS + SUM_BYTES : STAGES * STAGE_BYTES;

// Rows that are still to be divided by their root mean squares: sums of their squares, then what results are multiplied
// by, behind the rings.
constexpr int AT_SQUARES = WARPS * RING_BYTES;
constexpr int AT_FACTORS = SHARED_BYTES - X_ROWS * 4;
static_assert(AHEAD < UNIT, "a warp finds its next unit while it is in this one");
static_assert(!UNDIVIDED || SLOTS == 4, "of up to 8 rows");

constexpr int OWN = PAIRED ? ROW_BLOCKS / 2 : ROW_BLOCKS;  // row blocks of results
constexpr bool ARRANGES = OUT_LIFT >= 0;                   // results, as rows of the product that is next
static_assert(!ARRANGES || SLOTS == 1 && OWN == 1 && !RESIDUAL && !FLOAT_OUT, "more than 8 rows, 16 columns at a time");
static_assert(!OUT_FEW || X_ROWS == 8 && !RESIDUAL && !FLOAT_OUT && !WEIGHS, "up to 8 rows, arranged");
static_assert(!WEIGHS || SLOTS == 4 && !ARRANGES && !FLOAT_OUT && !PAIRED, "up to 8 rows for a norm");
