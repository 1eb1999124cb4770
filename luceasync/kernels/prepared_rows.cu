// Prepares rows of x for products: weighs up to 8 of them for a norm; norms and arranges more.
//
// Compiled with: NORM (columns of a row that is normed, else 0), OVERLAP; WARPS (of a program), LIFTS (a bit for
// each wanted lift), SUMS, FEW (whether weighed rows are arranged). See luceasync.kernels.prepared_rows.

#include "arranging.cuh"
#include "device_words.cuh"
#include "overlap.cuh"
#include "row_norm.cuh"

// Stores 8 columns of one of up to 8 arranged rows.
__device__ __forceinline__ void store_few(u8* columns, u32 row, u32 column, uint4 own) {
  columns += place_of<1>(row, column);
  *(uint2*)columns = make_uint2(own.x, own.y), *(uint2*)(columns + 16) = make_uint2(own.z, own.w);
}

// Up to 8 rows [rows, num_columns], weighed to the same bits as by a product before them (quant_norms.cuh). A warp has
// 256 columns of a row. Meanwhile the following product requests its weights.
extern "C" __global__ void weigh_rows(const u16* x, const float* norm, u16* weighed, float* squares,
                                      int num_columns) {
  if (OVERLAP) start_next();
  int each = (num_columns + WARPS * 256 - 1) / (WARPS * 256);  // programs of a row
  int column = blockIdx.x % each * (WARPS * 256) + threadIdx.x * 8;
  bool is_there = column < num_columns;
  u64 at = (u64)(blockIdx.x / each) * num_columns + column;
  float4 near = {}, far = {};
  if (is_there) near = *(const float4*)(norm + column), far = *(const float4*)(norm + column + 4);
  if (OVERLAP) wait_for_those_before();
  uint4 own = is_there ? *(const uint4*)(x + at) : uint4{};
  const float by[8] = {near.x, near.y, near.z, near.w, far.x, far.y, far.z, far.w};
  const u32 pairs[4] = {own.x, own.y, own.z, own.w};
  float sums[4];
  u32 found[4];
#pragma unroll
  for (int k = 0; k < 4; k++) {
    float low = as_float(pairs[k] << 16), high = as_float(pairs[k] & 0xffff0000);
    sums[k] = low * low + high * high;  // both squares are exact
    found[k] = rounded(low * by[2 * k], high * by[2 * k + 1]);
  }
  float sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  sum += __shfl_xor_sync(~0u, sum, 1);
  if (!is_there) return;
  if constexpr (FEW) {
    uint4 four = make_uint4(found[0], found[1], found[2], found[3]);
    store_few((u8*)weighed, blockIdx.x / each, column, four);
  } else {
    *(uint4*)(weighed + at) = make_uint4(found[0], found[1], found[2], found[3]);
  }
  if (threadIdx.x % 2 == 0) squares[at / 16] = sum;
}

// 2 to 8 rows [rows, num_columns], arranged as they are. A warp has 256 columns of a row.
extern "C" __global__ void arrange_few(const u16* x, u8* columns, int num_columns) {
  if (OVERLAP) start_next();
  int each = (num_columns + WARPS * 256 - 1) / (WARPS * 256);  // programs of a row
  int row = blockIdx.x / each, column = blockIdx.x % each * (WARPS * 256) + threadIdx.x * 8;
  if (OVERLAP) wait_for_those_before();
  if (column < num_columns) store_few(columns, row, column, *(const uint4*)(x + (u64)row * num_columns + column));
}

// More than 8 rows [num_rows, num_columns], in sixteens. A warp arranges a unit of one row. A program that norms has a
// whole row, as each column depends on all of them.
extern "C" __global__ void __launch_bounds__(WARPS * 32) arrange_rows(
    const u16* x, const float* norm, u8* columns, u8* sums, float eps, int num_rows, int num_columns) {
  int num_units = (num_columns + 255) / 256, num_sixteens = (num_rows + ARRANGED_ROWS - 1) / ARRANGED_ROWS;
  int num_padded = num_sixteens * ARRANGED_ROWS, row = blockIdx.x % num_padded, sixteen = row / ARRANGED_ROWS;
  int first_unit = blockIdx.x / num_padded * WARPS + threadIdx.x / 32;
  bool is_there = row < num_rows;
  x += (u64)row * num_columns;
  Norming norming(norm);
  wait_for_inputs();
  auto store = [&](int column, uint4 own) {
    int unit = sixteen * num_units + column / 256;
    arrange(own, row % ARRANGED_ROWS, unit, num_sixteens * num_units, columns, sums);
  };
  if (NORM != 0 && is_there) return norming(x, eps, store);
  for (int unit = first_unit; unit < num_units; unit += gridDim.x / num_padded * WARPS) {
    int column = unit * 256 + threadIdx.x % 32 * 8;
    store(column, is_there && column < num_columns ? *(const uint4*)(x + column) : uint4{});
  }
}
