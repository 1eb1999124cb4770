// Prepares rows of x for products: norms them, and arranges more than 8 of them.
//
// Compiled with: NORM (columns of a row that is normed, else 0), OVERLAP; WARPS (of a program), LIFTS (a bit for
// each wanted lift), SUMS. See luceasync.kernels.prepared_rows.

#include "arranging.cuh"
#include "device_words.cuh"
#include "overlap.cuh"
#include "row_norm.cuh"

// Up to 8 rows, one program each. Meanwhile the following product requests its weights.
extern "C" __global__ void rms_norm(const u16* x, const float* norm, u16* out, float eps) {
  u64 row = (u64)blockIdx.x * NORM;
  if (OVERLAP) start_next();
  if constexpr (NORM != 0) {
    Norming norming(norm);
    if (OVERLAP) wait_for_those_before();
    norming(x + row, eps, [&](int column, uint4 normed) {
      if (column < NORM) *(uint4*)(out + row + column) = normed;
    });
  }
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
