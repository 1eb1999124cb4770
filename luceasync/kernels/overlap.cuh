// How kernels follow each other without gaps, as luceasync.kernels.overlap has it.

#pragma once

#include "device_words.cuh"

// Until the kernels before are done; those behind may then begin.
__device__ __forceinline__ void wait_for_inputs() {
  if (OVERLAP) {
    wait_for_those_before();
    start_next();
  }
}
