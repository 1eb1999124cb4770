// Products of few rows with a quantised matrix: out = x @ W^T, or silu(gate) * up, (+ residual).
//
// W lies in blocks of 16 rows by 64 columns, so that what a lane of a tensor core multiplies is one
// load (luceasync.kernels.grouped_rows.Tiled). The warps of a program share the columns of its row
// blocks; each copies what it needs ahead into its own ring of shared memory, and waits for nobody
// until its sums are added to the others'. Codes are multiplied as they are, exact in bfloat16; each
// group is summed in float32, and scaled then.
//
// Compiled with: BITS, CODES, ZERO, GROUP, SUPERGROUP, SCALE, SMALL, MINIMUM, SMALL_MINIMUMS,
// DIVIDES, TABLE_0 to TABLE_3 (the form); X_ROWS, ROW_BLOCKS, WARPS, STAGES, PAIRED, RESIDUAL,
// FLOAT_OUT, NORM, OVERLAP, SHARED_BYTES (the program). luceasync.kernels.grouped_cuda says what they
// mean.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

enum { UINT, BIASED, E4M3, E2M1, LOOKED_UP };         // CODES
enum { F16, BF16, F32, E8M0 };                        // SCALE: of D and M
enum { NO_SMALL, SMALL_UINT8, SMALL_INT8, SMALL_E4M3 };  // SMALL
enum { NO_MINIMUM, OWN_MINIMUM, SCALE_MINIMUM };      // MINIMUM

constexpr int UNIT = 4;  // blocks that a warp takes at a time: 256 columns
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
constexpr int BLOCKS_UNROLLED = SLOTS == 1 ? 2 : UNIT;
constexpr bool RING_X = LONE && !NORM;        // x comes with the weights

constexpr int AT_PLANES = UNIT * CODE_BYTES;
constexpr int AT_CHUNKS = AT_PLANES + UNIT / 2 * 32 * PLANE_BYTES;
constexpr int ROW_BLOCK_BYTES = AT_CHUNKS + NUM_CHUNKS * 16;
constexpr int AT_X = ROW_BLOCKS * ROW_BLOCK_BYTES;
constexpr int STAGE_BYTES = AT_X + (RING_X ? UNIT * 128 : 0);
constexpr int WIDTH = ROW_BLOCKS * 16;
constexpr int SUM_STRIDE = LONE ? WIDTH : WIDTH + 4;  // of a row of sums: rows are apart in the banks
constexpr int SUM_BYTES = X_ROWS * SUM_STRIDE * 4;    // of a warp, where its ring was
constexpr int RING_BYTES = STAGES * STAGE_BYTES > SUM_BYTES ? STAGES * STAGE_BYTES : SUM_BYTES;
constexpr int AT_ROW = WARPS * RING_BYTES;  // the row of x, normed
constexpr int ROW_BYTES = NORM ? (NORM + UNIT * 64 - 1) / (UNIT * 64) * (UNIT * 128) : 0;

// A code's bits are a bfloat16 number as they are: patterns up to 255 are as many times 2^-133. Rows of x
// are taken 2^96 times, so that products are far from the smallest numbers, and results 2^37 times. A
// code of 4 bits in the upper half of a byte stands 16 times too large: its x is taken 2^92 times.
constexpr bool PLAIN = CODES == UINT || CODES == BIASED;
constexpr int CODE_EXPONENT = PLAIN ? -133 : CODES == E4M3 ? -120 : CODES == E2M1 ? -127 : 0;
constexpr int X_EXPONENT = CODE_EXPONENT == 0 ? 0 : 96;
constexpr bool IN_PLACE = PLAIN && BITS == 4;
constexpr int OWN = PAIRED ? ROW_BLOCKS / 2 : ROW_BLOCKS;  // row blocks of results

__device__ __forceinline__ float as_float(u32 bits) { return __uint_as_float(bits); }

extern __shared__ __align__(16) u8 shared[];

__device__ __forceinline__ u32 address(u32 at) { return (u32)__cvta_generic_to_shared(shared) + at; }

// Copies: 16 or 8 bytes of weights that nobody else wants, or of x, which others on the
// multiprocessor read too. Not `ok`: zeros.
__device__ __forceinline__ void copy_16(u32 at, const void* from, bool ok) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address(at)), "l"(from), "r"(ok ? 16 : 0));
}
__device__ __forceinline__ void copy_8(u32 at, const void* from, bool ok) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(address(at)), "l"(from), "r"(ok ? 8 : 0));
}
__device__ __forceinline__ void copy_shared_16(u32 at, const void* from, bool ok) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;" ::"r"(address(at)), "l"(from), "r"(ok ? 16 : 0));
}

// Of shared memory, at a byte.
template <typename T>
__device__ __forceinline__ T load(u32 at) {
  return *(const T*)(shared + at);
}

__device__ __forceinline__ float half_of(u32 bits) {
  float v;
  asm("{ .reg .f16 h; mov.b16 h, %1; cvt.f32.f16 %0, h; }" : "=f"(v) : "h"((u16)bits));
  return v;
}

__device__ __forceinline__ float e4m3_of(u32 byte) {
  return as_float((byte & 127) << 20 | (byte & 128) << 24) * 1.329227995784916e36f;  // 2^120
}

__device__ __forceinline__ float e8m0_of(u32 byte) {
  return as_float(byte < 2 ? (byte == 0 ? 0x00200000 : 0x00400000) : (byte - 1) << 23);
}

// 2^23 + a byte of a word.
template <int BYTE>
__device__ __forceinline__ float large(u32 word) {
  return as_float(__byte_perm(word, 0x4b000000, 0x7650 | BYTE));
}

__device__ __forceinline__ void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ u32 fma_bf16x2(u32 a, u32 b, u32 c) {
  u32 d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

__device__ __forceinline__ u16 rounded(float number) {
  u16 found;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(found) : "f"(number));
  return found;
}

// Ampere has no product by itself.
__device__ __forceinline__ u32 times_bf16x2(u32 a, u32 b) { return fma_bf16x2(a, b, 0x80008000); }

// A power of two as a bfloat16 number, twice.
__host__ __device__ constexpr u32 two_to(int exponent) { return (u32)(127 + exponent) << 7 | (u32)(127 + exponent) << 23; }
__host__ __device__ constexpr int shift_of(int quarter) { return IN_PLACE && quarter % 2 ? 4 : 0; }  // by which codes are too large
constexpr u32 ONE = 0x3f803f80;

// x, as its products want it.
template <int QUARTER>
__device__ __forceinline__ uint2 lifted(uint2 x) {
  if constexpr (X_EXPONENT == 0) return x;
  constexpr u32 BY = two_to(X_EXPONENT - shift_of(QUARTER));
  return make_uint2(times_bf16x2(x.x, BY), times_bf16x2(x.y, BY));
}

// What a code of 1 is.
template <int QUARTER>
__host__ __device__ constexpr u32 one_of() {
  if (PLAIN) return (u32)0x00010001 << shift_of(QUARTER);
  return CODES == E4M3 ? two_to(-120) : CODES == E2M1 ? 0x00400040 : ONE;  // 2^-127 is no normal number
}

// Two floats whose numbers are whole and small: bfloat16 has all their bits.
__device__ __forceinline__ u32 upper_halves(float low, float high) {
  return __byte_perm(__float_as_uint(low), __float_as_uint(high), 0x7632);
}

__device__ __forceinline__ u32 table_bytes(u32 nibbles) {
  u32 near = nibbles & 0x7777, far = (nibbles & 0x8888) >> 1 | 0x3210;
  return __byte_perm(__byte_perm(TABLE_0, TABLE_1, near), __byte_perm(TABLE_2, TABLE_3, near), far);
}

// Codes `QUARTER` of two words of 16 bits, as two bfloat16 numbers; `high`: their high bits, which
// begin at bit `shift`.
template <int QUARTER>
__device__ __forceinline__ u32 numbers(u32 words, u32 high, int shift) {
  if constexpr (CODES == E4M3) {
    u32 a = words >> (8 * (QUARTER % 2));
    return (a & 0x007f007f) << 4 | (a & 0x00800080) << 8;
  } else if constexpr (CODES == E2M1) {
    u32 a = words >> (4 * QUARTER);
    return (a & 0x00070007) << 6 | (a & 0x00080008) << 12;
  } else if constexpr (CODES == LOOKED_UP) {
    u32 low = table_bytes(words), up = table_bytes(words >> 16);
    return upper_halves(large<QUARTER>(low) - 8388736.0f, large<QUARTER>(up) - 8388736.0f);
  } else {
    u32 a;
    if constexpr (BITS == 8) a = words >> (8 * (QUARTER % 2)) & 0x00ff00ff;
    if constexpr (BITS == 4) a = words >> (8 * (QUARTER / 2)) & 0x000f000f << shift_of(QUARTER);
    if constexpr (BITS == 5 || BITS == 6) {
      u32 mask = BITS == 5 ? 0x00100010 : 0x00300030;
      a = words >> (4 * QUARTER) & 0x000f000f;
      a |= __funnelshift_l(high, high, 4 - shift & 31) & mask;
    }
    constexpr u32 LESS = (CODES == BIASED ? 128 : ZERO) << shift_of(QUARTER);
    if constexpr (LESS == 0 || MINIMUM != NO_MINIMUM) return a;
    return fma_bf16x2(a, ONE, 0x80008000 | LESS << 16 | LESS);
  }
}

// D or M of rows g and 8 + g.
struct Two {
  float near, far;
};

__device__ __forceinline__ Two super_of(u32 chunks, int entry, int g) {
  u32 at = chunks + entry * (16 * SCALE_BYTES) + g * (2 * SCALE_BYTES);
  if constexpr (SCALE == F32) {
    uint2 two = load<uint2>(at);
    return {as_float(two.x), as_float(two.y)};
  } else if constexpr (SCALE == E8M0) {
    u32 two = load<u16>(at);
    return {e8m0_of(two & 255), e8m0_of(two >> 8)};
  } else {
    u32 two = load<u32>(at);
    if constexpr (SCALE == BF16) return {as_float(two << 16), as_float(two & 0xffff0000)};
    return {half_of(two), half_of(two >> 16)};
  }
}

// The small numbers of row g and of row 8 + g, PARTS bytes of a block each or the two of a pair.
struct Small {
  u32 near, far;
};

__device__ __forceinline__ Small small_of(u32 chunks, int block, int g) {
  u32 at = chunks + block * (16 * PARTS) + g * (2 * PARTS);
  if constexpr (PARTS == 4) {
    uint2 two = load<uint2>(at);
    return {two.x, two.y};
  } else if constexpr (PARTS == 2) {
    u32 two = load<u32>(at);
    return {two, two >> 16};
  } else {
    u32 two = load<u16>(at);
    return {two, two >> 8};
  }
}

// Of sums 2 pair and 2 pair + 1 of a span.
__device__ __forceinline__ Small small_of_pair(u32 chunks, int span, int g, int pair) {
  if constexpr (PARTS == 4) {
    u32 at = chunks + (2 * span + pair / 2) * 64 + g * 8 + pair % 2 * 2;
    return {load<u16>(at), load<u16>(at + 4)};
  } else {
    return small_of(chunks, pair, g);
  }
}

template <int KIND, int BYTE>
__device__ __forceinline__ float scaled(float super, u32 word) {
  if constexpr (KIND == SMALL_UINT8) {
    // The sum is exact before it is rounded, where a fused product is one.
    return fmaf(large<BYTE>(word), super, super * -8388608.0f);
  } else if constexpr (KIND == SMALL_INT8) {
    return super * (large<BYTE>(word ^ 0x80808080) - 8388736.0f);
  } else {
    return super * e4m3_of(word >> (8 * BYTE) & 255);
  }
}

// The scale of a sum of row g and of row 8 + g, and what is taken off for each 1 of x.
struct Scales {
  Two scale, minimum;
};

// PART: of the bytes of `small` and `small_minimum`; `super`, `super_minimum`: D and M.
template <int PART>
__device__ __forceinline__ Scales scales_of(Two super, Two super_minimum, Small small, Small small_minimum, bool ok) {
  constexpr int BYTE = PARTS == 1 ? 0 : PART;
  Two scale = super, minimum = super_minimum;
  if constexpr (SMALL != NO_SMALL) {
    if constexpr (DIVIDES) {
      scale = {scaled<SMALL, BYTE>(1.0f, small.near) / super.near, scaled<SMALL, BYTE>(1.0f, small.far) / super.far};
    } else {
      scale = {scaled<SMALL, BYTE>(super.near, small.near), scaled<SMALL, BYTE>(super.far, small.far)};
    }
  }
  // Past the end scales are 0: not where that is no scale, nor where one is for blocks before it too.
  if constexpr (DIVIDES || SCALE == E8M0 || ALIKE && SMALL == NO_SMALL)
    scale = {ok ? scale.near : 0.0f, ok ? scale.far : 0.0f};
  if constexpr (MINIMUM != NO_MINIMUM && ALIKE && !SMALL_MINIMUMS)
    minimum = {ok ? minimum.near : 0.0f, ok ? minimum.far : 0.0f};
  if constexpr (SMALL_MINIMUMS) {
    minimum = {scaled<SMALL_UINT8, BYTE>(minimum.near, small_minimum.near),
               scaled<SMALL_UINT8, BYTE>(minimum.far, small_minimum.far)};
  }
  constexpr int LESS = PLAIN ? (CODES == BIASED ? 128 : ZERO) : 0;  // which the codes still have
  if constexpr (MINIMUM != NO_MINIMUM && LESS != 0)
    minimum = {fmaf(scale.near, LESS, minimum.near), fmaf(scale.far, LESS, minimum.far)};
  return {scale, minimum};
}

// What one lane copies of the scales of a unit: 16 bytes in each turn.
struct Chunk {
  const u8* base;  // of the first row block
  u64 row_block_bytes;
  int stride;  // bytes from one entry to the next
  int block;   // of the unit
  bool is_super;

  __device__ __forceinline__ int entry(int first_block) const {
    return is_super ? (first_block + block) / SUPER_BLOCKS : (first_block + block) / SMALL_BLOCKS;
  }
};

struct Stored {
  const u8 *codes, *planes, *scales, *small_scales, *minimums, *small_minimums;
  int num_blocks, num_supers, num_groups;
};

__device__ __forceinline__ Chunk chunk_of(int c, const Stored& w) {
  Chunk chunk;
  chunk.is_super = c >= AT_SUPERS;
  if (chunk.is_super) {
    bool is_minimum = c >= AT_MINIMUMS;
    int at = c - (is_minimum ? AT_MINIMUMS : AT_SUPERS);
    int entry = at / SCALE_BYTES;
    constexpr int ENTRIES = EACH ? PARTS : 1;  // of a block
    chunk.block = ALIKE ? 0 : entry / ENTRIES;
    chunk.stride = ENTRIES * 16 * SCALE_BYTES;
    chunk.base = (is_minimum ? w.minimums : w.scales) + entry % ENTRIES * (16 * SCALE_BYTES) +
                 at % SCALE_BYTES * 16;
    chunk.row_block_bytes = (u64)w.num_supers * (16 * SCALE_BYTES);
  } else {
    bool is_minimum = c >= AT_SMALL_MINIMUMS;
    int at = c - (is_minimum ? AT_SMALL_MINIMUMS : 0);
    chunk.block = at / PARTS;
    chunk.stride = 16 * PARTS;
    chunk.base = (is_minimum ? w.small_minimums : w.small_scales) + at % PARTS * 16;
    chunk.row_block_bytes = (u64)(PARTS > 1 ? w.num_blocks : w.num_groups) * (16 * PARTS);
  }
  return chunk;
}

struct Copier {
  Stored w;
  const u16* x;
  int lane;
  u64 row_blocks[ROW_BLOCKS];
  Chunk chunks[CHUNK_TURNS];

  __device__ __forceinline__ void weights(int unit, u32 stage) const {
    int first_block = unit * UNIT;
#pragma unroll
    for (int r = 0; r < ROW_BLOCKS; r++) {
      u32 to = stage + r * ROW_BLOCK_BYTES;
      const u8* codes = w.codes + (row_blocks[r] * w.num_blocks + first_block) * CODE_BYTES;
#pragma unroll
      for (int b = 0; b < UNIT * CODE_BYTES / 512; b++)
        copy_16(to + b * 512 + lane * 16, codes + b * 512 + lane * 16,
                first_block + b * 512 / CODE_BYTES < w.num_blocks);
      if constexpr (PLANE_BYTES > 0) {
#pragma unroll
        for (int two = 0; two < UNIT / 2; two++) {
          u64 at = (row_blocks[r] * (w.num_blocks / 2) + unit * (UNIT / 2) + two) * 32 + lane;
          u32 place = to + AT_PLANES + (two * 32 + lane) * PLANE_BYTES;
          bool ok = first_block + 2 * two < w.num_blocks;
          if constexpr (PLANE_BYTES == 8) copy_8(place, w.planes + at * 8, ok);
          if constexpr (PLANE_BYTES == 16) copy_16(place, w.planes + at * 16, ok);
        }
      }
#pragma unroll
      for (int turn = 0; turn < CHUNK_TURNS; turn++) {
        int c = lane + 32 * turn;
        const Chunk& chunk = chunks[turn];
        if (c < NUM_CHUNKS)
          copy_16(to + AT_CHUNKS + c * 16,
                  chunk.base + row_blocks[r] * chunk.row_block_bytes + chunk.entry(first_block) * chunk.stride,
                  first_block + chunk.block < w.num_blocks);
      }
    }
  }

  __device__ __forceinline__ void row_of_x(int unit, u32 stage) const {
    int column = unit * (UNIT * 64) + lane * 8;
    copy_shared_16(stage + AT_X + lane * 16, x + column, column < w.num_blocks * 64);
  }
};

// Codes of 16 rows and of columns [16 QUARTER, 16 QUARTER + 16) of a block, as a tensor core wants them.
struct Words {
  uint4 codes[BITS == 8 ? 2 : 1];
  u32 high[2];
};

__device__ __forceinline__ Words words_of(u32 at, int block, int lane) {
  Words words;
  words.codes[0] = load<uint4>(at + block * CODE_BYTES + lane * 16);
  if constexpr (BITS == 8) words.codes[1] = load<uint4>(at + block * CODE_BYTES + 512 + lane * 16);
  words.high[0] = words.high[1] = 0;
  u32 planes = at + AT_PLANES + (block / 2 * 32 + lane) * PLANE_BYTES + block % 2 * (PLANE_BYTES / 2);
  if constexpr (BITS == 5) words.high[0] = load<u32>(planes);
  if constexpr (BITS == 6) {
    uint2 two = load<uint2>(planes);
    words.high[0] = two.x, words.high[1] = two.y;
  }
  return words;
}

template <int QUARTER>
__device__ __forceinline__ void numbers_of(u32 (&a)[4], const Words& words) {
  const uint4& four = words.codes[BITS == 8 ? QUARTER / 2 : 0];
  u32 word[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
  for (int k = 0; k < 4; k++) {  // columns by eight: k / 2; rows: k % 2
    int shift = BITS == 5 ? 4 * k + QUARTER : 8 * (k / 2) + 2 * QUARTER;
    a[k] = numbers<QUARTER>(word[k], words.high[BITS == 6 ? k % 2 : 0], shift);
  }
}

__device__ __forceinline__ void numbers_at(u32 (&a)[4], const Words& words, int quarter) {
  if (quarter == 0) numbers_of<0>(a, words);
  if (quarter == 1) numbers_of<1>(a, words);
  if (quarter == 2) numbers_of<2>(a, words);
  if (quarter == 3) numbers_of<3>(a, words);
}

__device__ __forceinline__ void clear(float (&c)[4]) { c[0] = c[1] = c[2] = c[3] = 0.0f; }

// Sums of x: products with a matrix of ones, in the codes' own measure.
template <int QUARTER>
__device__ __forceinline__ void add_sums(float (&sums)[4], u32 b0, u32 b1) {
  const u32 ones[4] = {one_of<QUARTER>(), one_of<QUARTER>(), one_of<QUARTER>(), one_of<QUARTER>()};
  multiply(sums, ones, b0, b1);
}

__device__ __forceinline__ void add_sums_at(float (&sums)[4], int quarter, u32 b0, u32 b1) {
  if (shift_of(quarter) == 0) add_sums<0>(sums, b0, b1);
  if (shift_of(quarter) != 0) add_sums<1>(sums, b0, b1);
}

// One row of x: the 8 columns of a tensor core's product are 8 sums of a span, so that a lane has two
// of each row, and scales them alone.
__device__ __forceinline__ void add_lone(float (&total)[ROW_BLOCKS][2], u32 stage, u32 x, int first_block,
                                         int num_blocks, int lane) {
  int g = lane / 4, pair = lane % 4;
#pragma unroll
  for (int span = 0; span < SPANS; span++) {
    uint2 own[QUARTERS];  // of sum g
#pragma unroll
    for (int q = 0; q < QUARTERS; q++)
      own[q] = load<uint2>(x + (span * 8 + g) * (SUB * 2) + q * 32 + pair * 8);
    // Of groups of 16 columns two follow each other, so that g says which quarter they are.
    if constexpr (QUARTERS == 2) {
      own[0] = lifted<0>(own[0]), own[QUARTERS - 1] = lifted<1>(own[QUARTERS - 1]);
    } else {
      uint2 even = lifted<0>(own[0]), odd = lifted<1>(own[0]);
      own[0] = g % 2 ? odd : even;
    }
    float products[ROW_BLOCKS][4], sums[4];
    clear(sums);
#pragma unroll
    for (int r = 0; r < ROW_BLOCKS; r++) clear(products[r]);
#pragma unroll
    for (int block = 0; block < UNIT / SPANS; block++) {
      Words words[ROW_BLOCKS];
#pragma unroll
      for (int r = 0; r < ROW_BLOCKS; r++)
        words[r] = words_of(stage + r * ROW_BLOCK_BYTES, span * (UNIT / SPANS) + block, lane);
#pragma unroll
      for (int quarter = 0; quarter < 4; quarter++) {
        bool is_own = g == block * SUBS + quarter / QUARTERS;
        u32 one = is_own ? ONE : 0;  // a product, where the other pipe is busy with codes
        u32 b0 = times_bf16x2(own[quarter % QUARTERS].x, one), b1 = times_bf16x2(own[quarter % QUARTERS].y, one);
        if constexpr (MINIMUM != NO_MINIMUM) add_sums_at(sums, quarter, b0, b1);
#pragma unroll
        for (int r = 0; r < ROW_BLOCKS; r++) {
          u32 a[4];
          numbers_at(a, words[r], quarter);
          multiply(products[r], a, b0, b1);
        }
      }
    }
    int block = PARTS == 4 ? 2 * span + pair / 2 : pair;
    bool ok = first_block + block < num_blocks;
#pragma unroll
    for (int r = 0; r < ROW_BLOCKS; r++) {
      u32 chunks = stage + r * ROW_BLOCK_BYTES + AT_CHUNKS;
      Small small = {0, 0}, small_minimum = {0, 0};
      if constexpr (SMALL != NO_SMALL) small = small_of_pair(chunks, span, g, pair);
      if constexpr (SMALL_MINIMUMS) small_minimum = small_of_pair(chunks + AT_SMALL_MINIMUMS * 16, span, g, pair);
#pragma unroll
      for (int e = 0; e < 2; e++) {
        int entry = EACH ? span * 8 + 2 * pair + e : ALIKE ? 0 : block;
        Two super = super_of(chunks + AT_SUPERS * 16, entry, g), super_minimum = super;
        if constexpr (MINIMUM == OWN_MINIMUM) super_minimum = super_of(chunks + AT_MINIMUMS * 16, entry, g);
        Scales s = e == 0 ? scales_of<0>(super, super_minimum, small, small_minimum, ok)
                          : scales_of<1>(super, super_minimum, small, small_minimum, ok);
        total[r][0] = fmaf(products[r][e], s.scale.near, total[r][0]);
        total[r][1] = fmaf(products[r][2 + e], s.scale.far, total[r][1]);
        if constexpr (MINIMUM != NO_MINIMUM) {
          total[r][0] = fmaf(-sums[e], s.minimum.near, total[r][0]);
          total[r][1] = fmaf(-sums[e], s.minimum.far, total[r][1]);
        }
      }
    }
  }
}

// Several rows of x, straight from memory: what a lane multiplies of a block. Rows past the last are
// the last one, whose products nobody stores, as are blocks, whose weights are 0.
struct Columns {
  uint2 of[TILES][4];
};

__device__ __forceinline__ Columns lifted(const Columns& columns) {
  Columns found;
#pragma unroll
  for (int i = 0; i < TILES; i++) {
    found.of[i][0] = lifted<0>(columns.of[i][0]), found.of[i][1] = lifted<1>(columns.of[i][1]);
    found.of[i][2] = lifted<0>(columns.of[i][2]), found.of[i][3] = lifted<1>(columns.of[i][3]);
  }
  return found;
}

struct Rows {
  const u16* of[TILES];
  int num_blocks;

  __device__ __forceinline__ Rows(const u16* x, int num_blocks, int num_rows, int lane) : num_blocks(num_blocks) {
#pragma unroll
    for (int i = 0; i < TILES; i++)
      of[i] = x + (u64)min(8 * i + lane / 4, num_rows - 1) * (num_blocks * 64) + lane % 4 * 4;
  }

  __device__ __forceinline__ Columns columns(int block) const {
    Columns found;
    int at = min(block, num_blocks - 1) * 64;
#pragma unroll
    for (int i = 0; i < TILES; i++)
#pragma unroll
      for (int q = 0; q < 4; q++) found.of[i][q] = *(const uint2*)(of[i] + at + q * 16);
    return found;
  }
};

template <int PART>
__device__ __forceinline__ void add_part(float (&total)[ROW_BLOCKS][TILES][SLOTS][4], u32 stage, int block, bool ok, int g,
                                         const Words (&words)[ROW_BLOCKS], const Columns& columns) {
  constexpr int FIRST = PART * QUARTERS;
  float sums[TILES][4];
#pragma unroll
  for (int i = 0; i < TILES; i++) {
    clear(sums[i]);
    if constexpr (MINIMUM != NO_MINIMUM)
#pragma unroll
      for (int q = 0; q < QUARTERS; q++)
        add_sums_at(sums[i], FIRST + q, columns.of[i][FIRST + q].x, columns.of[i][FIRST + q].y);
  }
  int slot = SLOTS == 1 ? 0 : (block * SUBS + PART) % 8 / 2;  // as lanes divide the sums of one row
#pragma unroll
  for (int r = 0; r < ROW_BLOCKS; r++) {
    u32 chunks = stage + r * ROW_BLOCK_BYTES + AT_CHUNKS;
    int entry = EACH ? block * PARTS + PART : ALIKE ? 0 : block;
    Two super = super_of(chunks + AT_SUPERS * 16, entry, g), super_minimum = super;
    if constexpr (MINIMUM == OWN_MINIMUM) super_minimum = super_of(chunks + AT_MINIMUMS * 16, entry, g);
    Small small = {0, 0}, small_minimum = {0, 0};
    if constexpr (SMALL != NO_SMALL) small = small_of(chunks, block, g);
    if constexpr (SMALL_MINIMUMS) small_minimum = small_of(chunks + AT_SMALL_MINIMUMS * 16, block, g);
    Scales s = scales_of<PART>(super, super_minimum, small, small_minimum, ok);
    float products[TILES][4];
#pragma unroll
    for (int i = 0; i < TILES; i++) clear(products[i]);
#pragma unroll
    for (int q = 0; q < QUARTERS; q++) {
      u32 a[4];
      numbers_at(a, words[r], FIRST + q);
#pragma unroll
      for (int i = 0; i < TILES; i++) multiply(products[i], a, columns.of[i][FIRST + q].x, columns.of[i][FIRST + q].y);
    }
#pragma unroll
    for (int i = 0; i < TILES; i++)
#pragma unroll
      for (int k = 0; k < 4; k++) {
        float& sum = total[r][i][slot][k];
        sum = fmaf(products[i][k], k < 2 ? s.scale.near : s.scale.far, sum);
        if constexpr (MINIMUM != NO_MINIMUM) sum = fmaf(-sums[i][k], k < 2 ? s.minimum.near : s.minimum.far, sum);
      }
  }
}

// Until the kernels before are done; those behind may then begin.
__device__ __forceinline__ void wait_for_inputs() {
  if (OVERLAP) {
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;");
  }
}

constexpr float LIFT = (float)((u64)1 << (CODE_EXPONENT == 0 ? 0 : -CODE_EXPONENT - X_EXPONENT));
constexpr int NORM_THREADS = 128;  // whatever the program: a row's sum is the same bits

// x / rms(x) * norm, 8 columns at a time, for a row of NORM columns. All threads must come, first to
// `Norming`, which may be before x is there.
struct Norming {
  static constexpr int TURNS = NORM ? (NORM / 8 + NORM_THREADS - 1) / NORM_THREADS : 1;
  float4 weight[TURNS][2];

  static __device__ __forceinline__ int column(int turn) { return (threadIdx.x + turn * NORM_THREADS) * 8; }

  __device__ __forceinline__ Norming(const float* norm) {
#pragma unroll
    for (int turn = 0; turn < TURNS; turn++)
      if (threadIdx.x < NORM_THREADS && column(turn) < NORM) {
        weight[turn][0] = *(const float4*)(norm + column(turn));
        weight[turn][1] = *(const float4*)(norm + column(turn) + 4);
      }
  }

  template <typename Store>
  __device__ __forceinline__ void operator()(const u16* x, float eps, Store store) const {
    __shared__ float parts[NORM_THREADS / 32];
    uint4 own[TURNS];
    float sum = 0.0f;
    if (threadIdx.x < NORM_THREADS) {
#pragma unroll
      for (int turn = 0; turn < TURNS; turn++)
        own[turn] = column(turn) < NORM ? *(const uint4*)(x + column(turn)) : uint4{};
#pragma unroll
      for (int turn = 0; turn < TURNS; turn++) {
        const u32 pairs[4] = {own[turn].x, own[turn].y, own[turn].z, own[turn].w};
#pragma unroll
        for (int k = 0; k < 4; k++) {
          float low = as_float(pairs[k] << 16), high = as_float(pairs[k] & 0xffff0000);
          sum = fmaf(low, low, sum), sum = fmaf(high, high, sum);
        }
      }
#pragma unroll
      for (int far = 16; far > 0; far /= 2) sum += __shfl_xor_sync(~0u, sum, far);
      if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = sum;
    }
    __syncthreads();
    if (threadIdx.x >= NORM_THREADS) return;
    float inverse_rms = rsqrtf(((parts[0] + parts[1]) + (parts[2] + parts[3])) / NORM + eps);
#pragma unroll
    for (int turn = 0; turn < TURNS; turn++) {
      if (column(turn) >= NORM) continue;
      const float* each = &weight[turn][0].x;
      const u32 pairs[4] = {own[turn].x, own[turn].y, own[turn].z, own[turn].w};
      u32 normed[4];
#pragma unroll
      for (int k = 0; k < 4; k++) {
        u32 low = rounded(as_float(pairs[k] << 16) * inverse_rms * each[2 * k]);
        normed[k] = low | rounded(as_float(pairs[k] & 0xffff0000) * inverse_rms * each[2 * k + 1]) << 16;
      }
      store(column(turn), make_uint4(normed[0], normed[1], normed[2], normed[3]));
    }
  }
};

// Several rows, for a product that takes them as they are: a block of NORM_THREADS each.
extern "C" __global__ void rms_norm(const u16* x, const float* norm, u16* out, float eps) {
  u64 row = (u64)blockIdx.x * NORM;
  if constexpr (NORM != 0) {
    Norming norming(norm);
    wait_for_inputs();
    norming(x + row, eps, [&](int column, uint4 normed) { *(uint4*)(out + row + column) = normed; });
  }
}

static_assert(SHARED_BYTES == AT_ROW + ROW_BYTES, "who launches has counted otherwise");

extern "C" __global__ void __launch_bounds__(WARPS * 32) grouped_rows(
    const u16* x, const u8* codes, const u8* planes, const u8* scales, const u8* small_scales,
    const u8* minimums, const u8* small_minimums, const u16* residual, const float* norm, void* out,
    float eps, int num_rows, int num_row_blocks, int num_blocks, int num_supers, int num_groups,
    int out_stride) {
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4;
  u32 ring = warp * RING_BYTES;
  Copier copier;
  copier.w = {codes, planes, scales, small_scales, minimums, small_minimums, num_blocks, num_supers, num_groups};
  copier.x = x, copier.lane = lane;
#pragma unroll
  for (int r = 0; r < ROW_BLOCKS; r++) {
    // Rows of a second half follow all first ones; past the end the last are read, and not stored.
    u32 own = blockIdx.x * OWN + r % OWN;
    copier.row_blocks[r] = (own < num_row_blocks ? own : num_row_blocks - 1) + r / OWN * num_row_blocks;
  }
#pragma unroll
  for (int turn = 0; turn < CHUNK_TURNS; turn++) copier.chunks[turn] = chunk_of(lane + 32 * turn, copier.w);

  int num_units = (num_blocks + UNIT - 1) / UNIT;  // of which a warp takes every WARPS-th
#pragma unroll
  for (int s = 0; s < STAGES - 1; s++)
    if (warp + s * WARPS < num_units) copier.weights(warp + s * WARPS, ring + s * STAGE_BYTES);
  Norming norming(norm);
  wait_for_inputs();
#pragma unroll
  for (int s = 0; s < STAGES - 1; s++) {
    if (RING_X && warp + s * WARPS < num_units) copier.row_of_x(warp + s * WARPS, ring + s * STAGE_BYTES);
    asm volatile("cp.async.commit_group;");
  }
  // Results of a thread: the first one's residual is on its way meanwhile.
  u32 num_outputs = num_row_blocks * 16, num_results = num_rows * OWN * 16;
  auto column_of = [&](u32 e) { return blockIdx.x * (OWN * 16) + e % (OWN * 16); };
  auto residual_of = [&](u32 e) {
    bool ok = RESIDUAL && e < num_results && column_of(e) < num_outputs;
    return ok ? residual[(u64)(e / (OWN * 16)) * num_outputs + column_of(e)] : (u16)0;
  };
  u16 before = residual_of(threadIdx.x);
  if constexpr (NORM != 0) {
    norming(x, eps, [](int column, uint4 normed) { *(uint4*)(shared + AT_ROW + column * 2) = normed; });
    constexpr int PAST = (ROW_BYTES - NORM * 2) / 16;
    if ((int)threadIdx.x < PAST) *(uint4*)(shared + AT_ROW + NORM * 2 + threadIdx.x * 16) = {};
    __syncthreads();
  }
  float total[ROW_BLOCKS][TILES][SLOTS][4] = {};  // [.., pair of sums, row and column of a lane]
  float lone[ROW_BLOCKS][2] = {};
  Rows rows(x, num_blocks, num_rows, lane);
  Columns coming;
  if constexpr (!LONE) coming = rows.columns(warp * UNIT);
  u32 stage = ring, free = ring + (STAGES - 1) * STAGE_BYTES;
  for (int unit = warp; unit < num_units; unit += WARPS) {
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
    __syncwarp();  // what others have copied is here, and what was read before is free
    if (unit + (STAGES - 1) * WARPS < num_units) {
      copier.weights(unit + (STAGES - 1) * WARPS, free);
      if constexpr (RING_X) copier.row_of_x(unit + (STAGES - 1) * WARPS, free);
    }
    asm volatile("cp.async.commit_group;");
    int first_block = unit * UNIT;
    if constexpr (LONE) {
      u32 at = RING_X ? stage + AT_X : AT_ROW + first_block * 128;
      add_lone(lone, stage, at, first_block, num_blocks, lane);
    } else {
#pragma unroll BLOCKS_UNROLLED
      for (int block = 0; block < UNIT; block++) {
        Columns columns = lifted(coming);
        coming = rows.columns(block + 1 < UNIT ? first_block + block + 1 : first_block + WARPS * UNIT);
        Words words[ROW_BLOCKS];
#pragma unroll
        for (int r = 0; r < ROW_BLOCKS; r++) words[r] = words_of(stage + r * ROW_BLOCK_BYTES, block, lane);
        bool ok = first_block + block < num_blocks;
        add_part<0>(total, stage, block, ok, g, words, columns);
        add_part<1>(total, stage, block, ok, g, words, columns);
        if constexpr (SUBS == 4) {
          add_part<2 % SUBS>(total, stage, block, ok, g, words, columns);
          add_part<3 % SUBS>(total, stage, block, ok, g, words, columns);
        }
      }
    }
    free = stage;
    stage = stage + STAGE_BYTES == ring + STAGES * STAGE_BYTES ? ring : stage + STAGE_BYTES;
  }
  asm volatile("cp.async.wait_all;" ::: "memory");
  __syncwarp();

  // [rows of x, rows of the weight]: of each warp, then their sum.
  float* sums = (float*)(shared + ring);
#pragma unroll
  for (int r = 0; r < ROW_BLOCKS; r++) {
    if constexpr (LONE) {
#pragma unroll
      for (int k = 0; k < 2; k++) {
        float sum = lone[r][k];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        if (lane % 4 == 0) sums[16 * r + g + 8 * k] = sum;
      }
    } else {
#pragma unroll
      for (int i = 0; i < TILES; i++)
#pragma unroll
        for (int k = 0; k < 4; k++) {
          int m = 8 * i + lane % 4 * 2 + k % 2, n = 16 * r + g + k / 2 * 8;
          const float(&of)[SLOTS][4] = total[r][i];
          float sum = of[0][k];
          if constexpr (SLOTS == 4) sum = (sum + of[1][k]) + (of[2][k] + of[3][k]);
          sums[m * SUM_STRIDE + n] = sum;
        }
    }
  }
  __syncthreads();
  for (u32 e = threadIdx.x; e < num_results; e += WARPS * 32) {
    u32 m = e / (OWN * 16), n = e % (OWN * 16);
    float result = 0.0f, up = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      const float* of_warp = (const float*)(shared + w * RING_BYTES) + m * SUM_STRIDE + n;
      result += of_warp[0];
      if (PAIRED) up += of_warp[OWN * 16];
    }
    result *= LIFT, up *= LIFT;
    if (PAIRED) result = result / (1.0f + __expf(-result)) * up;
    if (RESIDUAL) result += as_float((u32)before << 16);
    if (column_of(e) < num_outputs) {
      u64 place = (u64)m * out_stride + column_of(e);
      if (FLOAT_OUT) {
        ((float*)out)[place] = result;
      } else {
        ((u16*)out)[place] = rounded(result);
      }
    }
    before = residual_of(e + WARPS * 32);
  }
}
