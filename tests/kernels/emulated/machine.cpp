#include "machine.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <ucontext.h>

#include <deque>
#include <memory>
#include <string>
#include <vector>

namespace machine {

Index thread, program, num_threads, num_programs;

namespace {

constexpr uint32_t STACK_BYTES = 1 << 17;
constexpr uint32_t PAST_BYTES = 4096;       // beside shared memory, which nobody may write to
constexpr uint8_t POISON = 0xff, PAST = 0xa5;  // of every float pattern a NaN
constexpr int NOBODY = -1;

// Who touched two bytes of shared memory, and how often its warp, program and cluster had synced by then.
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

// All of a launch; there is one at a time.
struct Machine {
  Launch launch;
  void (*body)(void*);
  void* arguments;
  std::vector<Lane> lanes;  // of a cluster
  std::vector<Program> programs;
  Meeting cluster;
  std::vector<int> ready;
  int lane;
  int of_statics;  // whose are in their place
  uint64_t random;
  jmp_buf scheduler, end;
  char words[512];
};
Machine m;

uint32_t below(uint32_t limit) {
  m.random ^= m.random << 13, m.random ^= m.random >> 7, m.random ^= m.random << 17;
  return (m.random >> 32) % limit;
}

int program_of(int lane) { return lane / m.launch.num_threads; }
int thread_of(int lane) { return lane % m.launch.num_threads; }
Program& own() { return m.programs[program_of(m.lane)]; }
Meeting& warp_of(int lane) { return m.programs[program_of(lane)].warps[thread_of(lane) / LANES]; }

Touch touch() { return {m.lane, warp_of(m.lane).num_syncs, own().meeting.num_syncs, m.cluster.num_syncs}; }

// Whether the lane that runs has synced with who touched this.
bool has_synced(const Touch& before) {
  if (before.lane == NOBODY || before.lane == m.lane || before.cluster != m.cluster.num_syncs) return true;
  if (program_of(before.lane) != program_of(m.lane)) return false;
  if (before.program != own().meeting.num_syncs) return true;
  Meeting& warp = warp_of(m.lane);
  return &warp == &warp_of(before.lane) && before.warp != warp.num_syncs;
}

std::string lane_words(int lane) {
  int at = thread_of(lane);
  return "program " + std::to_string(m.programs[program_of(lane)].index.x) + ", warp " + std::to_string(at / LANES) +
         ", lane " + std::to_string(at % LANES);
}

void check_place(uint32_t at, uint32_t num_bytes, const char* verb) {
  if (at < SHARED_BEGIN || at + num_bytes > SHARED_BEGIN + m.launch.shared_bytes)
    fail("%s %u bytes at %d of %u bytes of shared memory", verb, num_bytes, (int)(at - SHARED_BEGIN), m.launch.shared_bytes);
  if (at % num_bytes) fail("%s %u bytes at %d of shared memory, which is no multiple", verb, num_bytes, (int)(at - SHARED_BEGIN));
}

template <typename Act>
void each_of(Program& program, uint32_t at, uint32_t num_bytes, Act act) {
  for (uint32_t byte = (at - SHARED_BEGIN) / 2; byte < (at - SHARED_BEGIN + num_bytes) / 2; byte++) act(program.bytes[byte], 2 * byte);
}

void check_arrived(const Bytes& bytes, uint32_t at, const char* verb) {
  if (bytes.is_on_its_way)
    fail("%s byte %u of shared memory, for which a copy of %s is on its way", verb, at, lane_words(bytes.writer.lane).c_str());
}

void check_free(const Bytes& bytes, uint32_t at, const char* verb) {
  check_arrived(bytes, at, verb);
  for (const Touch& reader : bytes.readers)
    if (!has_synced(reader))
      fail("%s byte %u of shared memory, which %s has read without a sync since", verb, at, lane_words(reader.lane).c_str());
}

uint8_t* read_from(Program& program, uint32_t at, uint32_t num_bytes) {
  check_place(at, num_bytes, "reads");
  each_of(program, at, num_bytes, [](Bytes& bytes, uint32_t at) {
    check_arrived(bytes, at, "reads");
    if (!has_synced(bytes.writer))
      fail("reads byte %u of shared memory, which %s has written without a sync since", at, lane_words(bytes.writer.lane).c_str());
    if (bytes.readers[0].lane != m.lane) bytes.readers[1] = bytes.readers[0];
    bytes.readers[0] = touch();
  });
  return program.shared() + (at - SHARED_BEGIN);
}

void take_in(const Copy& copy) {
  uint8_t* to = own().shared() + (copy.at - SHARED_BEGIN);
  copy.ok ? (void)memcpy(to, copy.from, copy.num_bytes) : (void)memset(to, 0, copy.num_bytes);
  each_of(own(), copy.at, copy.num_bytes, [](Bytes& bytes, uint32_t) { bytes.writer = touch(), bytes.is_on_its_way = false; });
}

void put_statics(int program) {
  if (program == m.of_statics) return;
  size_t size = m.launch.end_statics - m.launch.begin_statics;
  if (m.of_statics != NOBODY) memcpy(m.programs[m.of_statics].statics.data(), m.launch.begin_statics, size);
  memcpy(m.launch.begin_statics, m.programs[program].statics.data(), size);
  m.of_statics = program;
}

void wait(const char* name) {
  m.lanes[m.lane].waits = name;
  if (_setjmp(m.lanes[m.lane].place) == 0) _longjmp(m.scheduler, 1);
}

// Returns whether this lane was the last one; all others go on then too.
bool come(Meeting& meeting, size_t num_lanes, const char* name) {
  if (!meeting.lanes.empty() && strcmp(meeting.name, name) != 0)
    fail("waits at %s, where %s waits at %s", name, lane_words(meeting.lanes[0]).c_str(), meeting.name);
  meeting.name = name;
  meeting.lanes.push_back(m.lane);
  if (meeting.lanes.size() < num_lanes) return false;
  for (int lane : meeting.lanes)
    if (lane != m.lane) m.ready.push_back(lane);
  meeting.lanes.clear();
  return true;
}

void sync(Meeting& meeting, size_t num_lanes, const char* name) {
  if (come(meeting, num_lanes, name)) {
    meeting.num_syncs++;
  } else {
    wait(name);
  }
}

void live() {
  m.body(m.arguments);
  Lane& lane = m.lanes[m.lane];
  for (const auto& group : lane.copies)
    if (!group.empty()) fail("ends while its copies are on their way");
  lane.has_ended = true;
  _longjmp(m.scheduler, 1);
}

void go_on(int lane) {
  m.lane = lane;
  Program& program = own();
  machine::program = program.index, thread = {(uint32_t)thread_of(lane), 0, 0};
  put_statics(program_of(lane));
  if (_setjmp(m.scheduler) != 0) return;
  Lane& own = m.lanes[lane];
  if (own.has_begun) _longjmp(own.place, 1);
  own.has_begun = true;
  setcontext(&own.begin);
}

void begin(Meeting& meeting) { meeting.lanes.clear(), meeting.num_syncs = 0; }

void begin(Program& program, uint32_t index) {
  uint32_t size = m.launch.shared_bytes;
  program.index = {index, 0, 0};
  program.memory.assign(size + 16 + 2 * PAST_BYTES, PAST);
  memset(program.shared(), POISON, size);
  program.bytes.assign(size / 2, {});
  program.statics.assign(m.launch.end_statics - m.launch.begin_statics, POISON);
  program.warps.resize(m.launch.num_threads / LANES);
  begin(program.meeting);
  for (Meeting& warp : program.warps) begin(warp);
}

void begin(Lane& lane) {
  lane.has_begun = lane.has_ended = false;
  lane.copies.assign(1, {});
  getcontext(&lane.begin);
  lane.begin.uc_stack.ss_sp = lane.stack.get(), lane.begin.uc_stack.ss_size = STACK_BYTES, lane.begin.uc_link = nullptr;
  makecontext(&lane.begin, live, 0);
}

void check_ended(int program) {
  Program& own = m.programs[program];
  for (const uint8_t* at = own.memory.data(); at < own.memory.data() + own.memory.size(); at++)
    if ((at < own.shared() || at >= own.shared() + m.launch.shared_bytes) && *at != PAST)
      fail("has written to byte %d of %u bytes of shared memory", (int)(at - own.shared()), m.launch.shared_bytes);
}

void run_cluster(uint32_t first) {
  for (uint32_t i = 0; i < m.programs.size(); i++) begin(m.programs[i], first + i);
  begin(m.cluster);
  m.of_statics = NOBODY;
  m.ready.clear();
  for (size_t i = 0; i < m.lanes.size(); i++) begin(m.lanes[i]), m.ready.push_back(i);
  while (!m.ready.empty()) {
    std::swap(m.ready[below(m.ready.size())], m.ready.back());
    int lane = m.ready.back();
    m.ready.pop_back();
    go_on(lane);
  }
  size_t num_ended = 0;
  for (size_t i = 0; i < m.lanes.size(); i++) num_ended += m.lanes[i].has_ended;
  for (size_t i = 0; i < m.lanes.size(); i++) {
    m.lane = i;
    if (!m.lanes[i].has_ended)
      fail("waits at %s for ever: of %zu lanes %zu have ended", m.lanes[i].waits, m.lanes.size(), num_ended);
    if (thread_of(i) == 0) check_ended(program_of(i));
  }
}

}  // namespace

void fail(const char* format, ...) {
  int size = snprintf(m.words, sizeof m.words, "%s ", lane_words(m.lane).c_str());
  va_list rest;
  va_start(rest, format);
  vsnprintf(m.words + size, sizeof m.words - size, format, rest);
  va_end(rest);
  _longjmp(m.end, 1);
}

void meet_warp(const char* name, void* own, Act act) {
  Meeting& warp = warp_of(m.lane);
  warp.all[thread_of(m.lane) % LANES] = own;
  come(warp, LANES, name) ? act(warp.all) : wait(name);
}
void sync_warp() { sync(warp_of(m.lane), LANES, "a sync of the warp"); }
void sync_program() { sync(own().meeting, m.launch.num_threads, "a sync of the program"); }
void sync_cluster() { sync(m.cluster, m.lanes.size(), "a sync of the cluster"); }

uint8_t* read(uint32_t at, uint32_t num_bytes) { return read_from(own(), at, num_bytes); }

uint8_t* read_of_program(uint32_t at, uint32_t num_bytes, uint32_t rank) {
  if (rank >= m.launch.cluster) fail("reads memory of program %u of a cluster of %u", rank, m.launch.cluster);
  int first = rank * m.launch.num_threads;
  if (m.lanes[first].has_ended) fail("reads memory of %s, which has ended", lane_words(first).c_str());
  return read_from(m.programs[rank], at, num_bytes);
}

uint8_t* write(uint32_t at, uint32_t num_bytes) {
  check_place(at, num_bytes, "writes");
  each_of(own(), at, num_bytes, [](Bytes& bytes, uint32_t at) {
    check_free(bytes, at, "writes");
    bytes.writer = touch();
  });
  return own().shared() + (at - SHARED_BEGIN);
}

void copy(uint32_t at, const void* from, uint32_t num_bytes, bool ok) {
  check_place(at, num_bytes, "copies");
  uint64_t begin = (uint64_t)from;
  bool is_inside = false;
  for (uint32_t i = 0; i < m.launch.num_ranges; i++)
    is_inside |= m.launch.ranges[i].begin <= begin && begin + num_bytes <= m.launch.ranges[i].end;
  if (ok && !is_inside) fail("copies %u bytes from outside of all tensors", num_bytes);
  if (ok && begin % num_bytes) fail("copies %u bytes from where no such number is aligned", num_bytes);
  each_of(own(), at, num_bytes, [](Bytes& bytes, uint32_t at) {
    check_free(bytes, at, "copies to");
    if (!has_synced(bytes.writer))
      fail("copies to byte %u of shared memory, which %s has written without a sync since", at, lane_words(bytes.writer.lane).c_str());
    bytes.writer = touch(), bytes.is_on_its_way = true;
  });
  m.lanes[m.lane].copies.back().push_back({at, from, num_bytes, ok});
}

void commit_copies() { m.lanes[m.lane].copies.push_back({}); }

void wait_for_copies(int num_after) {
  auto& copies = m.lanes[m.lane].copies;
  while ((int)copies.size() - 1 > num_after) {
    for (const Copy& copy : copies.front()) take_in(copy);
    copies.pop_front();
  }
}

const char* run(const Launch& launch, void (*body)(void*), void* arguments) {
  m.launch = launch, m.body = body, m.arguments = arguments;
  m.random = launch.seed * 0x9e3779b97f4a7c15 + 1;
  m.lanes.resize(launch.cluster * launch.num_threads);
  m.programs.resize(launch.cluster);
  m.words[0] = 0;
  num_threads = {launch.num_threads, 1, 1}, num_programs = {launch.num_programs, 1, 1};
  std::vector<uint32_t> order;
  for (uint32_t i = 0; i < launch.num_programs / launch.cluster; i++) order.push_back(i * launch.cluster);
  if (_setjmp(m.end) != 0) return m.words;
  for (; !order.empty(); order.pop_back()) {
    std::swap(order[below(order.size())], order.back());
    run_cluster(order.back());
  }
  return m.words;
}

}  // namespace machine
