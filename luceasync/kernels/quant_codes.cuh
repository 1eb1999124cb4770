// Decoding of codes to exact bfloat16 numbers for tensor cores, and of the scales of their groups.

#pragma once

#include "device_words.cuh"
#include "quant_layout.cuh"
#include "lifts.cuh"

__device__ __forceinline__ float e4m3_of(u32 byte) {
  return as_float((byte & 127) << 20 | (byte & 128) << 24) * 1.329227995784916e36f;  // 2^120
}

__device__ __forceinline__ float e8m0_of(u32 byte) {
  return as_float(byte < 2 ? (byte == 0 ? 0x00200000 : 0x00400000) : (byte - 1) << 23);
}

// 2^15 + a byte of a word. `base`: the bits of 2^15, opaque to the compiler, as a byte permutation has room for one
// constant, its selector.
constexpr u32 BASE = 0x47000000;
template <int BYTE>
__device__ __forceinline__ float above_base(u32 word, u32 base) {
  return as_float(__byte_perm(word, base, 0x7604 | BYTE << 4));
}

// 2^23 + a byte of a word.
template <int BYTE>
__device__ __forceinline__ float large(u32 word) {
  return as_float(__byte_perm(word, 0x4b000000, 0x7650 | BYTE));
}

// A code's bits are used as a bfloat16 number: a pattern n up to 255 is n * 2^-133. x is scaled by 2^96, which keeps
// products far from the smallest numbers, and results by 2^37. Four bits in the upper half of a byte are 16 times too
// large: the x of such a code is scaled by 2^92.
constexpr bool PLAIN = CODES == UINT || CODES == BIASED;
constexpr int CODE_EXPONENT = PLAIN ? -133 : CODES == E4M3 ? -120 : CODES == E2M1 ? -127 : 0;
constexpr int X_EXPONENT = CODE_EXPONENT == 0 ? 0 : LIFT_EXPONENT;
constexpr bool IN_PLACE = PLAIN && BITS < 8;

constexpr float LIFT = (float)((u64)1 << (CODE_EXPONENT == 0 ? 0 : -CODE_EXPONENT - X_EXPONENT));

// The number of bits by which codes are shifted left.
__host__ __device__ constexpr int shift_of(int quarter) { return IN_PLACE && quarter % 2 ? 4 : 0; }
constexpr u32 ONE = 0x3f803f80;

// x, scaled for its products.
template <int QUARTER>
__device__ __forceinline__ uint2 lifted(uint2 x) {
  if constexpr (X_EXPONENT == 0) return x;
  constexpr u32 BY = two_to(X_EXPONENT - shift_of(QUARTER));
  return make_uint2(times_bf16x2(x.x, BY), times_bf16x2(x.y, BY));
}

// The bfloat16 bits of a code of 1.
template <int QUARTER>
__host__ __device__ constexpr u32 one_of() {
  if (PLAIN) return (u32)0x00010001 << shift_of(QUARTER);
  return CODES == E4M3 ? two_to(-120) : CODES == E2M1 ? 0x00400040 : ONE;  // 2^-127 is subnormal
}

// Packs two floats that are small integers, which bfloat16 holds exactly.
__device__ __forceinline__ u32 upper_halves(float low, float high) {
  return __byte_perm(__float_as_uint(low), __float_as_uint(high), 0x7632);
}

__device__ __forceinline__ u32 table_bytes(u32 nibbles) {
  u32 near = nibbles & 0x7777, far = (nibbles & 0x8888) >> 1 | 0x3210;
  return __byte_perm(__byte_perm(TABLE_0, TABLE_1, near), __byte_perm(TABLE_2, TABLE_3, near), far);
}

// The bits of the bfloat16 number `number` * 2^-133; `number` has at most 8 bits.
__host__ __device__ constexpr u32 pattern_of(int number) {
  u32 exponent = 0;
  for (; number > 255; number /= 2) exponent++;
  return (exponent << 7) + (u32)number;
}

// Codes with the lower 4 bits `low` and high bits from bit `shift` of two 16-bit words on. A multiply-add moves them
// into place, as its pipe is less busy than that of shifts.
template <int QUARTER>
__device__ __forceinline__ u32 with_high(u32 low, u32 high, int shift) {
  u32 bits = high >> (shift & 8) & (BITS == 5 ? 0x00010001 : 0x00030003) << (shift & 7);
  int up = 4 + shift_of(QUARTER) - (shift & 7);
  return up == 0 ? low | bits : fma_bf16x2(bits, two_to(up), low);
}

// Decodes code `QUARTER` of two 16-bit words to two bfloat16 numbers; their high bits begin at bit `shift` of `high`.
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
    if constexpr (BITS == 8) a = __byte_perm(words, 0, QUARTER % 2 ? 0x4341 : 0x4240);
    if constexpr (BITS < 8) a = words >> (8 * (QUARTER / 2)) & 0x000f000f << shift_of(QUARTER);
    if constexpr (BITS == 5 || BITS == 6) a = with_high<QUARTER>(a, high, shift);
    constexpr u32 LESS = pattern_of((CODES == BIASED ? 128 : ZERO) << shift_of(QUARTER));
    if constexpr (LESS == 0 || MINIMUM != NO_MINIMUM) return a;
    return fma_bf16x2(a, ONE, 0x80008000 | LESS << 16 | LESS);
  }
}

// D or M of rows g and 8 + g.
struct Two {
  float near, far;
};

__device__ __forceinline__ Two super_of(u32 at) {
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

// The small numbers of rows g and 8 + g, PARTS bytes of a block each; those of row 8 + g start at byte FAR. For one row
// of x, those of a lane's two sums.
constexpr int FAR = PARTS == 4 ? 0 : PARTS;
struct Small {
  u32 near, far;
};

__device__ __forceinline__ Small small_of(u32 at) {
  if constexpr (LONE && PARTS == 4) {
    return {load<u16>(at), load<u16>(at + 4)};
  } else if constexpr (PARTS == 4) {
    uint2 two = load<uint2>(at);
    return {two.x, two.y};
  } else {
    u32 two = PARTS == 2 ? load<u32>(at) : load<u16>(at);
    return {two, two};
  }
}

template <int KIND, int BYTE>
__device__ __forceinline__ float scaled(float super, u32 word, u32 base) {
  // A fused multiply-add rounds only its exact result, and with a D of so few bits the subtracted term is exact too.
  if constexpr (KIND == SMALL_UINT8) {
    return fmaf(above_base<BYTE>(word, base), super, super * -32768.0f);
  } else if constexpr (KIND == SMALL_INT8) {
    float byte = above_base<BYTE>(word ^ 0x80808080, base);
    return SCALE == F32 ? super * (byte - 32896.0f) : fmaf(byte, super, super * -32896.0f);
  } else {
    return super * e4m3_of(word >> (8 * BYTE) & 255);
  }
}

// The scales of the sums of rows g and 8 + g, and the minimums that are subtracted, times sums of x.
struct Scales {
  Two scale, minimum;
};

// PART: the byte of `small` and `small_minimum`; `super`, `super_minimum`: D and M; `base`: see above_base.
template <int PART>
__device__ __forceinline__ Scales scales_of(Two super, Two super_minimum, Small small, Small small_minimum, bool ok,
                                           u32 base) {
  constexpr int BYTE = PARTS == 1 ? 0 : PART;
  Two scale = super, minimum = super_minimum;
  if constexpr (SMALL != NO_SMALL) {
    if constexpr (DIVIDES) {
      scale = {scaled<SMALL, BYTE>(1.0f, small.near, base) / super.near,
               scaled<SMALL, BYTE + FAR>(1.0f, small.far, base) / super.far};
    } else {
      scale = {scaled<SMALL, BYTE>(super.near, small.near, base),
               scaled<SMALL, BYTE + FAR>(super.far, small.far, base)};
    }
  }
  // Scales past the end are 0, unless 0 is not a scale, or one scale is shared with earlier blocks.
  if constexpr (DIVIDES || SCALE == E8M0 || ALIKE && SMALL == NO_SMALL)
    scale = {ok ? scale.near : 0.0f, ok ? scale.far : 0.0f};
  if constexpr (MINIMUM != NO_MINIMUM && ALIKE && !SMALL_MINIMUMS)
    minimum = {ok ? minimum.near : 0.0f, ok ? minimum.far : 0.0f};
  if constexpr (SMALL_MINIMUMS) {
    minimum = {scaled<SMALL_UINT8, BYTE>(minimum.near, small_minimum.near, base),
               scaled<SMALL_UINT8, BYTE + FAR>(minimum.far, small_minimum.far, base)};
  }
  constexpr int LESS = PLAIN ? (CODES == BIASED ? 128 : ZERO) : 0;  // the offset that codes still have
  if constexpr (MINIMUM != NO_MINIMUM && LESS != 0)
    minimum = {fmaf(scale.near, LESS, minimum.near), fmaf(scale.far, LESS, minimum.far)};
  return {scale, minimum};
}
