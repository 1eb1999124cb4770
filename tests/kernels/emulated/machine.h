// A GPU's programs on a CPU: each lane is a fiber that runs until it must wait for others.
//
// Lanes of a warp meet where hardware makes them meet, in any order. A few clusters of programs run concurrently, and
// the others after them. A race in shared memory is an error.

#pragma once

#include <stdint.h>

namespace machine {

constexpr int LANES = 32;                // of a warp
constexpr uint32_t SHARED_BEGIN = 1024;  // in kernels' addresses; not 0, so that mixing it up shows

struct Index {
  uint32_t x, y, z;
};
// The running lane.
extern Index thread, program, num_threads, num_programs;

// Ends the launch with an error.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

// All lanes of the warp arrive with an argument each; the last one acts on all of them. `name` identifies the call,
// which must be the same for all.
using Act = void (*)(void* const (&all)[LANES]);
void meet_warp(const char* name, void* own, Act act);
// Lanes that have synced see what the others wrote to shared memory before.
void sync_warp();
void sync_program();
void sync_cluster();

// Shared memory records the last writer and readers of its bytes. A lane that reads what another wrote, or writes what
// another read, must have synced with it in between. A copy belongs to the lane that started it until that lane has
// waited, and arrives then.
uint8_t* read(uint32_t at, uint32_t num_bytes);
uint8_t* write(uint32_t at, uint32_t num_bytes);
uint8_t* read_of_program(uint32_t at, uint32_t num_bytes, uint32_t rank);
void copy(uint32_t at, const void* from, uint32_t num_bytes, bool ok);
void commit_copies();
void wait_for_copies(int num_after);

// The host memory that a launch may copy from.
struct Range {
  uint64_t begin, end;
};

struct Launch {
  uint32_t num_programs, num_threads, shared_bytes, cluster;
  uint64_t seed;  // of the order in which programs and lanes run
  uint32_t num_ranges;
  const Range* ranges;
  uint8_t *begin_statics, *end_statics;  // the static shared memory of kernels
};

// Empty, or the error, which stays until the next launch.
const char* run(const Launch& launch, void (*body)(void*), void* arguments);

}  // namespace machine
