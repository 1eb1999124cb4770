// What GPUs have of their own, as functions: asynchronous copies, shared memory, tensor cores.

#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

__device__ __forceinline__ float as_float(u32 bits) { return __uint_as_float(bits); }

extern __shared__ __align__(16) u8 shared[];

// A number that is held, and not made again wherever it is wanted.
__device__ __forceinline__ u32 held(u32 number) {
  u32 found;
  asm volatile("mov.u32 %0, %1;" : "=r"(found) : "r"(number));
  return found;
}

// Where shared memory begins, as copies and loads of it count: `at` below.
__device__ __forceinline__ u32 shared_begin() { return held((u32)__cvta_generic_to_shared(shared)); }

// Copies: 16 or 8 bytes of weights that nobody else wants, or of x, which others on the
// multiprocessor read too. Not `ok`: zeros.
__device__ __forceinline__ void copy_16(u32 at, const void* from, bool ok) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(ok ? 16 : 0));
}
__device__ __forceinline__ void copy_8(u32 at, const void* from, bool ok) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(at), "l"(from), "r"(ok ? 8 : 0));
}
__device__ __forceinline__ void copy_shared_16(u32 at, const void* from, bool ok) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(ok ? 16 : 0));
}

// Of shared memory.
template <typename T>
__device__ __forceinline__ T load(u32 at);
template <>
__device__ __forceinline__ u16 load<u16>(u32 at) {
  u16 v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(at));
  return v;
}
template <>
__device__ __forceinline__ u32 load<u32>(u32 at) {
  u32 v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at));
  return v;
}
template <>
__device__ __forceinline__ uint2 load<uint2>(u32 at) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(at));
  return v;
}
template <>
__device__ __forceinline__ uint4 load<uint4>(u32 at) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at));
  return v;
}

// Of the shared memory of another program of the cluster.
__device__ __forceinline__ float load_of_program(u32 at, u32 rank) {
  u32 there;
  float v;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(rank));
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(there));
  return v;
}

// All threads of all its programs have come, and what they have written is there.
__device__ __forceinline__ void wait_for_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
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

// Of 8 columns of the weight.
__device__ __forceinline__ void multiply(float (&c)[4], u32 a0, u32 a1, u32 b0) {
  asm(
      "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(b0));
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

// Two of them, in a word.
__device__ __forceinline__ u32 rounded(float low, float high) {
  u32 found;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(found) : "f"(high), "f"(low));
  return found;
}

// Ampere has no product by itself.
__device__ __forceinline__ u32 times_bf16x2(u32 a, u32 b) { return fma_bf16x2(a, b, 0x80008000); }
