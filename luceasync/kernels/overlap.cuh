// Kernels that follow each other without gaps: see luceasync.kernels.overlap.

#pragma once

#include "device_words.cuh"

// Waits until the preceding kernels are done, then lets the next one begin.
__device__ __forceinline__ void wait_for_inputs() {
  if (OVERLAP) {
    wait_for_those_before();
    start_next();
  }
}
