// The functions of luceasync/kernels/device_words.cuh for emulated lanes (machine.h).

#pragma once

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef unsigned long long u64;

inline float as_float(u32 bits) { return __uint_as_float(bits); }

// A pointer for writes to shared memory: `T* to = (T*)(shared + byte)`. Beyond the first T, only writes past the end
// are detected.
struct Place_in_shared {
  u32 at;

  Place_in_shared operator+(u32 bytes) const { return {at + bytes}; }
  template <typename T>
  operator T*() const {
    return (T*)machine::write(at, sizeof(T));
  }
};
struct {
  Place_in_shared operator+(u32 bytes) const { return {machine::SHARED_BEGIN + bytes}; }
} const shared;

inline u32 held(u32 number) { return number; }
inline u32 shared_begin() { return machine::SHARED_BEGIN; }

inline void copy_16(u32 at, const void* from, bool ok) { machine::copy(at, from, 16, ok); }
inline void copy_8(u32 at, const void* from, bool ok) { machine::copy(at, from, 8, ok); }
inline void copy_shared_16(u32 at, const void* from, bool ok) { machine::copy(at, from, 16, ok); }

inline void commit_copies() { machine::commit_copies(); }
template <int NUM_AFTER>
inline void wait_for_copies() {
  machine::wait_for_copies(NUM_AFTER);
}
inline void wait_for_all_copies() {
  commit_copies();
  machine::wait_for_copies(0);
}

// Kernels run one after the other.
inline void wait_for_those_before() {}
inline void start_next() {}

template <typename T>
inline T load(u32 at) {
  return *(const T*)machine::read(at, sizeof(T));
}

// A row of each lane, and the lane's result.
struct Matrices {
  const u16* row;
  u32* found;
};

template <bool TRANSPOSED>
inline void load_matrices(u32 (&m)[4], u32 at) {
  Matrices own{(const u16*)machine::read(at, 16), m};
  machine::meet_warp("a load of matrices", &own, [](void* const(&all)[machine::LANES]) {
    for (int lane = 0; lane < machine::LANES; lane++)
      for (int i = 0; i < 4; i++) {
        auto number = [&](int row, int column) {
          if (TRANSPOSED) std::swap(row, column);
          return (u32)((Matrices*)all[8 * i + row])->row[column];
        };
        int row = lane / 4, column = lane % 4 * 2;
        ((Matrices*)all[lane])->found[i] = number(row, column) | number(row, column + 1) << 16;
      }
  });
}

inline u32 arrive(u32* counter) { return (*counter)++; }
inline float4 load_of_others(const float4* from) { return *from; }
inline float2 load_of_others(const float2* from) { return *from; }

inline float load_of_program(u32 at, u32 rank) { return *(const float*)machine::read_of_program(at, 4, rank); }
inline void wait_for_cluster() { machine::sync_cluster(); }

inline float half_of(u32 bits) {
  int exponent = bits >> 10 & 31, rest = bits & 1023;
  float size = exponent == 31 ? (rest ? NAN : INFINITY)
               : exponent     ? ldexpf(1024 + rest, exponent - 25)
                              : ldexpf(rest, -24);
  return bits & 0x8000 ? -size : size;
}

// Round to nearest even. To avoid double rounding, inexact float32 intermediates are made odd.
inline u16 rounded(double number) {
  if (number != number) return 0x7fff;
  float near = (float)number;
  if (near != number && !isinf(near)) {
    if (fabs((double)near) > fabs(number)) near = as_float(__float_as_uint(near) - 1);
    near = as_float(__float_as_uint(near) | 1);
  }
  u32 bits = __float_as_uint(near);
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline u16 rounded(float number) { return rounded((double)number); }
inline u32 rounded(float low, float high) { return rounded(low) | (u32)rounded(high) << 16; }

inline float low_half(u32 pair) { return as_float(pair << 16); }
inline float high_half(u32 pair) { return as_float(pair & 0xffff0000); }

// Subnormal numbers count, as for tensor cores.
inline u32 fma_bf16x2(u32 a, u32 b, u32 c) {
  u32 low = rounded((double)low_half(a) * low_half(b) + low_half(c));
  return low | (u32)rounded((double)high_half(a) * high_half(b) + high_half(c)) << 16;
}

// A lane's part of D[16][8] += A[16][8 HALVES] B[8 HALVES][8]: words [half][row / 8] of A, and words [half] of B, each
// of two columns of A.
struct Multiplied {
  float* sums;
  u32 a[4], b[2];
};

template <int HALVES>
inline void multiply_all(void* const (&all)[machine::LANES]) {
  float a[16][8 * HALVES], b[8][8 * HALVES];
  for (int lane = 0; lane < machine::LANES; lane++) {
    const Multiplied& own = *(Multiplied*)all[lane];
    int g = lane / 4, column = lane % 4 * 2;
    for (int half = 0; half < HALVES; half++) {
      for (int r = 0; r < 2; r++) {
        u32 pair = own.a[2 * half + r];
        a[8 * r + g][8 * half + column] = low_half(pair), a[8 * r + g][8 * half + column + 1] = high_half(pair);
      }
      b[g][8 * half + column] = low_half(own.b[half]), b[g][8 * half + column + 1] = high_half(own.b[half]);
    }
  }
  for (int row = 0; row < 16; row++)
    for (int column = 0; column < 8; column++) {
      float& sum = ((Multiplied*)all[row % 8 * 4 + column / 2])->sums[row / 8 * 2 + column % 2];
      for (int k = 0; k < 8 * HALVES; k++) sum += a[row][k] * b[column][k];
    }
}

inline void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  Multiplied own{c, {a[0], a[1], a[2], a[3]}, {b0, b1}};
  machine::meet_warp("a product of 16 columns", &own, multiply_all<2>);
}
inline void multiply(float (&c)[4], u32 a0, u32 a1, u32 b0) {
  Multiplied own{c, {a0, a1}, {b0}};
  machine::meet_warp("a product of 8 columns", &own, multiply_all<1>);
}
