// Prepares rows of x for products: weighs up to 8 of them for a norm; norms and arranges more.
//
// Compiled with: NORM (columns of a row that is normed, else 0), OVERLAP; WARPS (of a program), LIFTS (a bit for
// each wanted lift), SUMS. See luceasync.kernels.prepared_rows.

#include "arranging.cuh"
#include "device_words.cuh"
#include "overlap.cuh"
#include "row_norm.cuh"

// Up to 8 rows [rows, num_columns], as a product before them would weigh them (quant_norms.cuh), to the same bits. A warp
// has 256 columns of a row. Meanwhile the following product requests its weights.
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
  *(uint4*)(weighed + at) = make_uint4(found[0], found[1], found[2], found[3]);
  if (threadIdx.x % 2 == 0) squares[at / 16] = sum;
}

// 9 to 16 rows [num_rows, num_columns]. A warp arranges a unit of one row. A program that norms has a whole row,
// as each column depends on all of them.
extern "C" __global__ void __launch_bounds__(WARPS * 32) arrange_rows(
    const u16* x, const float* norm, u8* columns, u8* sums, float eps, int num_rows, int num_columns) {
  int row = blockIdx.x % ARRANGED_ROWS, num_units = (num_columns + 255) / 256;
  int first_unit = blockIdx.x / ARRANGED_ROWS * WARPS + threadIdx.x / 32;
  bool is_there = row < num_rows;
  x += (u64)row * num_columns;
  Norming norming(norm);
  wait_for_inputs();
  auto store = [&](int column, uint4 own) { arrange(own, row, column / 256, num_units, columns, sums); };
  if (NORM != 0 && is_there) return norming(x, eps, store);
  for (int unit = first_unit; unit < num_units; unit += gridDim.x / ARRANGED_ROWS * WARPS) {
    int column = unit * 256 + threadIdx.x % 32 * 8;
    store(column, is_there && column < num_columns ? *(const uint4*)(x + column) : uint4{});
  }
}
