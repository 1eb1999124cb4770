// GPU features as functions: asynchronous copies, shared memory, tensor cores. All PTX is in this file, so that
// tests can replace it by other bodies of these functions and run the kernels on CPUs.

#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

__device__ __forceinline__ float as_float(u32 bits) { return __uint_as_float(bits); }

extern __shared__ __align__(16) u8 shared[];

// Keeps a number in a register, so that the compiler does not recompute it at each use.
__device__ __forceinline__ u32 held(u32 number) {
  u32 found;
  asm volatile("mov.u32 %0, %1;" : "=r"(found) : "r"(number));
  return found;
}

// The start of shared memory, in the address space that `at` below refers to.
__device__ __forceinline__ u32 shared_begin() { return held((u32)__cvta_generic_to_shared(shared)); }

// Copy 16 or 8 bytes of weights, which no other program reads, or of x, which others on the multiprocessor
// read too. Zeros unless `ok`.
__device__ __forceinline__ void copy_16(u32 at, const void* from, bool ok) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(ok ? 16 : 0));
}
__device__ __forceinline__ void copy_8(u32 at, const void* from, bool ok) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(at), "l"(from), "r"(ok ? 8 : 0));
}
__device__ __forceinline__ void copy_shared_16(u32 at, const void* from, bool ok) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(ok ? 16 : 0));
}

// A lane's copies since its last commit are a group; it waits for all of its groups but the last NUM_AFTER. It may
// read what other lanes copied once they have waited too, after a sync.
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;"); }
template <int NUM_AFTER>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(NUM_AFTER) : "memory");
}
__device__ __forceinline__ void wait_for_all_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Overlapping kernels: wait until the preceding ones are done; let the next one begin once every program has
// called this.
__device__ __forceinline__ void wait_for_those_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void start_next() { asm volatile("griddepcontrol.launch_dependents;"); }

// Loads and stores of shared memory.
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

// Four matrices of 8 rows of 8 bf16 numbers (NVIDIA's ldmatrix): lane 8 i + r has the address of row r of
// the i-th. Of each matrix, or of its transpose if TRANSPOSED, a lane gets row lane / 4, columns lane % 4 * 2 and the
// next.
template <bool TRANSPOSED>
__device__ __forceinline__ void load_matrices(u32 (&m)[4], u32 at) {
  if (TRANSPOSED) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(at)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
                 : "r"(at)
                 : "memory");
  }
}

// Adds 1 to a counter of all programs; returns its former value. Releases what this program has written, and
// acquires what earlier ones have: for all threads that have synced with this one.
__device__ __forceinline__ u32 arrive(u32* counter) {
  u32 before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}

// Loads what other programs of this launch have written, bypassing the caches of this multiprocessor.
__device__ __forceinline__ float4 load_of_others(const float4* from) { return __ldcg(from); }
__device__ __forceinline__ float2 load_of_others(const float2* from) { return __ldcg(from); }

// Loads from the shared memory of another program of the cluster.
__device__ __forceinline__ float load_of_program(u32 at, u32 rank) {
  u32 there;
  float v;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(rank));
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(there));
  return v;
}

// Waits for all threads of the cluster; what they have written is visible.
__device__ __forceinline__ void wait_for_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ float half_of(u32 bits) {
  float v;
  asm("{ .reg .f16 h; mov.b16 h, %1; cvt.f32.f16 %0, h; }" : "=f"(v) : "h"((u16)bits));
  return v;
}

__device__ __forceinline__ void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// A product with 8 columns of the weight.
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

// Two of them in one word.
__device__ __forceinline__ u32 rounded(float low, float high) {
  u32 found;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(found) : "f"(high), "f"(low));
  return found;
}
