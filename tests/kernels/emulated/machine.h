// A GPU's programs on a CPU: each lane is a fiber that runs until it must wait for others.
//
// Lanes of a warp meet where hardware has them meet, in whatever order they come; a few clusters of
// programs run side by side, and the others after them. What hardware would leave to luck in shared memory is
// an error in words.

#pragma once

#include <stdint.h>

namespace machine {

constexpr int LANES = 32;                // of a warp
constexpr uint32_t SHARED_BEGIN = 1024;  // as kernels count: nobody may take it for 0

struct Index {
  uint32_t x, y, z;
};
// Of the lane that runs.
extern Index thread, program, num_threads, num_programs;

// Ends the launch; nothing after it runs.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

// All lanes of the warp come with something of their own; the last one acts on all of it. `name` says
// where: all must have come for the same.
using Act = void (*)(void* const (&all)[LANES]);
void meet_warp(const char* name, void* own, Act act);
// All that have come so have seen what others wrote to shared memory before.
void sync_warp();
void sync_program();
void sync_cluster();

// Shared memory. Its bytes know who wrote and who read them last. Who reads what another lane wrote, or
// writes what another lane read, must have synced with it in between; a copy belongs to the lane that
// asked for it until that lane has waited, and comes then.
uint8_t* read(uint32_t at, uint32_t num_bytes);
uint8_t* write(uint32_t at, uint32_t num_bytes);
uint8_t* read_of_program(uint32_t at, uint32_t num_bytes, uint32_t rank);
void copy(uint32_t at, const void* from, uint32_t num_bytes, bool ok);
void commit_copies();
void wait_for_copies(int num_after);

// What of the host's memory a launch may copy from.
struct Range {
  uint64_t begin, end;
};

struct Launch {
  uint32_t num_programs, num_threads, shared_bytes, cluster;
  uint64_t seed;  // of the order in which programs and lanes run
  uint32_t num_ranges;
  const Range* ranges;
  uint8_t *begin_statics, *end_statics;  // what kernels have of shared memory by themselves
};

// Empty, or what went wrong; it stays until the next launch.
const char* run(const Launch& launch, void (*body)(void*), void* arguments);

}  // namespace machine
