// Adding the sums of warps, and writing results.

#pragma once

#include "arranged_rows.cuh"
#include "device_words.cuh"
#include "quant_codes.cuh"
#include "quant_layout.cuh"
#include "quant_norms.cuh"

// A warp's sum, in the program of this rank in the cluster.
__device__ __forceinline__ float sum_of(u32 at, u32 rank) {
  return SPLITS == 1 ? as_float(load<u32>(at)) : load_of_program(at, rank);
}

// Waits for all warps whose sums are added.
__device__ __forceinline__ void wait_for_others() {
  if constexpr (SPLITS == 1) __syncthreads();
  if constexpr (SPLITS > 1) wait_for_cluster();
}

// Stores a warp's sums, [rows of x, rows of the weight].
__device__ __forceinline__ void put_sums(float* sums, const float (&total)[ROW_BLOCKS][TILES][SLOTS][4],
                                         const float (&lone)[ROW_BLOCKS][2], int lane) {
  int g = lane / 4;
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
}

// Writes more than 8 rows of results arranged for the next product, with zeros in rows past the last. Half a warp has 16
// columns of a row.
struct Arranging {
  u8 *columns, *sums;
  u32 num_units;

  __device__ __forceinline__ void store(u32 row, u32 column, u16 number) const {
    u32 sixteen = row / ARRANGED_ROWS, own = row % ARRANGED_ROWS;
    float found = as_float((u32)number << 16);
    float by = as_float(two_to(exponent_of(OUT_LIFT, column / 16 % 2)) & 0xffff0000);
    *(u16*)(columns + sixteen * num_units * ARRANGED_UNIT_BYTES + place_of(own, column)) = rounded(found * by);
    if constexpr (OUT_SUMS != 0) {
#pragma unroll
      for (int far = 1; far < 16; far *= 2) found += __shfl_xor_sync(~0u, found, far);
      found *= as_float(two_to(LIFT_EXPONENT) & 0xffff0000);
      if (column % 16 != 0) return;
      u8* at = sums + sixteen * num_units * (2 * SUMS_UNIT_BYTES) + place_of_half(own, column);
#pragma unroll
      for (int k = 0; k < 3; k++) {
        u16 part = rounded(found);
        *(u16*)(at + 4 * k) = part;
        found -= as_float((u32)part << 16);
      }
    }
  }
};

// The results of a group of row blocks that a thread stores: every STRIDE-th.
struct Results {
  const u16* residual;
  void* out;
  Arranging arranging;
  NextNorm next;
  int out_stride;
  u32 num_rows, num_outputs, num_results, first;
  u16 before;   // the residual of the next result, loaded ahead
  float weight;  // of the next norm, for the next result

  __device__ __forceinline__ Results(const u16* residual, void* out, u8* out_sums, const NextNorm& next,
                                     int out_stride, int num_rows, int num_row_blocks, u32 rank)
      : residual(residual), out(out), arranging({(u8*)out, out_sums, (u32)num_row_blocks / 16}), next(next),
        out_stride(out_stride), num_rows(num_rows),
        num_outputs(num_row_blocks * 16), num_results((ARRANGES ? X_ROWS : num_rows) * OWN * 16),
        first(rank * (WARPS * 32) + threadIdx.x) {}

  // Loads the residual of a group's first result, while the group is multiplied.
  __device__ __forceinline__ void ask_for_residual(u32 group) {
    before = residual_of(group, first), weight = weight_of(group, first);
  }

  // Requires the sums of all warps.
  __device__ __forceinline__ void put(u32 group, u32 begin) {
    // Whole warps sum squares.
    u32 end = WEIGHS ? (num_results + 31) / 32 * 32 : num_results;
    for (u32 e = first; e < end; e += STRIDE * 32) {
      bool ok = (!WEIGHS || e < num_results) && column_of(group, e) < num_outputs;
      u32 m = e / (OWN * 16), n = e % (OWN * 16), at = begin + AT_SUMS + (m * SUM_STRIDE + n) * 4;
      float result = 0.0f, up = 0.0f;
#pragma unroll
      for (u32 w = 0; w < STRIDE; w++) {
        if (WEIGHS && e >= num_results) continue;
        u32 there = at + w % WARPS * RING_BYTES;
        result += sum_of(there, w / WARPS);
        if (PAIRED) up += sum_of(there + OWN * 64, w / WARPS);
      }
      result *= LIFT, up *= LIFT;
      if (UNDIVIDED && (!WEIGHS || e < num_results)) result *= Undivided::factor(m), up *= Undivided::factor(m);
      if (PAIRED) result = result / (1.0f + __expf(-result)) * up;
      if (RESIDUAL) result += as_float((u32)before << 16);
      if constexpr (ARRANGES) {
        arranging.store(m, column_of(group, e), m < num_rows ? rounded(result) : (u16)0);
      } else if (ok) {
        u64 place = (u64)m * out_stride + column_of(group, e);
        if (OUT_FEW) {
          *(u16*)((u8*)out + place_of<1>(m, column_of(group, e))) = rounded(result);
        } else if (FLOAT_OUT) {
          ((float*)out)[place] = result;
        } else {
          ((u16*)out)[place] = rounded(result);
        }
      }
      if constexpr (WEIGHS) next.store(m, column_of(group, e), num_outputs, rounded(result), weight, ok);
      before = residual_of(group, e + STRIDE * 32), weight = weight_of(group, e + STRIDE * 32);
    }
  }

 private:
  static __device__ __forceinline__ u32 column_of(u32 group, u32 e) { return group * (OWN * 16) + e % (OWN * 16); }

  __device__ __forceinline__ float weight_of(u32 group, u32 e) const {
    return WEIGHS && column_of(group, e) < num_outputs ? next.weight[column_of(group, e)] : 0.0f;
  }

  __device__ __forceinline__ u16 residual_of(u32 group, u32 e) const {
    bool ok = RESIDUAL && (e < num_results) & (column_of(group, e) < num_outputs);
    return ok ? residual[(u64)(e / (OWN * 16)) * num_outputs + column_of(group, e)] : (u16)0;
  }
};
