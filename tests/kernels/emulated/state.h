// The state of a launch, shared by scheduler.cpp and shared_memory.cpp.

#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <deque>
#include <memory>
#include <queue>
#include <string>
#include <vector>

#include "machine.h"

namespace machine {

constexpr uint32_t STACK_BYTES = 1 << 17;
constexpr uint32_t PAST_BYTES = 4096;  // guard zone beside shared memory
constexpr uint8_t POISON = 0xff;       // makes any float a NaN
constexpr int NOBODY = -1;

// Which lane touched two bytes of shared memory, and how often its warp, program and cluster had synced by then.
struct Touch {
  int lane = NOBODY;
  uint32_t warp, program, cluster;
};

struct Bytes {
  Touch writer, readers[2];  // the last ones
  bool is_on_its_way = false;
};

struct Copy {
  uint32_t at;
  const void* from;
  uint32_t num_bytes;
  bool ok;
};

struct Lane {
  std::unique_ptr<char[]> stack{new char[STACK_BYTES]};
  ucontext_t begin;
  jmp_buf place;
  bool has_begun, has_ended;
  const char* waits;
  std::deque<std::vector<Copy>> copies;  // groups; the last one is not committed
};

struct Meeting {
  const char* name;
  std::vector<int> lanes;
  void* all[LANES];
  uint32_t num_syncs;
};

struct Program {
  Index index;
  std::vector<uint8_t> memory, statics;
  std::vector<Bytes> bytes;
  Meeting meeting;
  std::vector<Meeting> warps;

  uint8_t* shared() { return (uint8_t*)((uintptr_t)(memory.data() + PAST_BYTES + 15) / 16 * 16); }
};

// A launch; there is one at a time.
struct Machine {
  Launch launch;
  void (*body)(void*);
  void* arguments;
  std::vector<Program> programs;  // running concurrently
  std::vector<Lane> lanes;        // all of theirs
  std::vector<Meeting> clusters;
  std::priority_queue<std::pair<uint32_t, int>> ready;  // (priority, lane)
  int lane;
  int of_statics;  // the program whose static memory is swapped in
  uint32_t lag_once_in;
  uint64_t random;
  jmp_buf scheduler, end;
  char words[512];
};
extern Machine m;

inline int program_of(int lane) { return lane / m.launch.num_threads; }
inline int thread_of(int lane) { return lane % m.launch.num_threads; }
inline Program& own() { return m.programs[program_of(m.lane)]; }
inline Meeting& own_cluster() { return m.clusters[program_of(m.lane) / m.launch.cluster]; }
inline Meeting& warp_of(int lane) { return m.programs[program_of(lane)].warps[thread_of(lane) / LANES]; }

// The position of a lane.
std::string lane_words(int lane);

// Prepare the shared memory of a program; after it has ended, check its guard zone.
void begin_memory(Program& program);
void check_memory(Program& program);

}  // namespace machine
