// Chooses which lane runs until it waits or ends: a random one of those that can run. Now and then a lane lags behind
// until all others wait.

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "state.h"

namespace machine {

Index thread, program, num_threads, num_programs;
Machine m;

namespace {

constexpr size_t TOGETHER = 12;  // clusters that run concurrently

uint32_t below(uint32_t limit) {
  m.random ^= m.random << 13, m.random ^= m.random >> 7, m.random ^= m.random << 17;
  return (m.random >> 32) % limit;
}

void be_ready(int lane) {
  bool lags = below(m.lag_once_in) == 0;
  m.ready.push({lags ? 0 : 1 + below(1 << 30), lane});
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

// Returns whether this lane was the last one, which lets all others go on.
bool come(Meeting& meeting, size_t num_lanes, const char* name) {
  if (!meeting.lanes.empty() && strcmp(meeting.name, name) != 0)
    fail("waits at %s, where %s waits at %s", name, lane_words(meeting.lanes[0]).c_str(), meeting.name);
  meeting.name = name;
  meeting.lanes.push_back(m.lane);
  if (meeting.lanes.size() < num_lanes) return false;
  for (int lane : meeting.lanes)
    if (lane != m.lane) be_ready(lane);
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
  program.index = {index, 0, 0};
  begin_memory(program);
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

// Starts the first clusters of programs.
void run_together(const std::vector<uint32_t>& firsts) {
  uint32_t size = m.launch.cluster;
  m.programs.resize(firsts.size() * size), m.lanes.resize(m.programs.size() * m.launch.num_threads);
  m.clusters.resize(firsts.size());
  for (uint32_t i = 0; i < m.programs.size(); i++) begin(m.programs[i], firsts[i / size] + i % size);
  for (Meeting& cluster : m.clusters) begin(cluster);
  m.of_statics = NOBODY;
  m.ready = {};
  m.lag_once_in = 16 << below(12);  // lanes that lag rarely also start late
  for (size_t i = 0; i < m.lanes.size(); i++) begin(m.lanes[i]), be_ready(i);
  while (!m.ready.empty()) {
    int lane = m.ready.top().second;
    m.ready.pop();
    go_on(lane);
  }
  size_t num_ended = 0;
  for (size_t i = 0; i < m.lanes.size(); i++) num_ended += m.lanes[i].has_ended;
  for (size_t i = 0; i < m.lanes.size(); i++) {
    m.lane = i;
    if (!m.lanes[i].has_ended)
      fail("waits at %s for ever: of %zu lanes %zu have ended", m.lanes[i].waits, m.lanes.size(), num_ended);
    if (thread_of(i) == 0) check_memory(own());
  }
}

}  // namespace

std::string lane_words(int lane) {
  int at = thread_of(lane);
  return "program " + std::to_string(m.programs[program_of(lane)].index.x) + ", warp " + std::to_string(at / LANES) +
         ", lane " + std::to_string(at % LANES);
}

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
void sync_cluster() { sync(own_cluster(), m.launch.cluster * m.launch.num_threads, "a sync of the cluster"); }

const char* run(const Launch& launch, void (*body)(void*), void* arguments) {
  m.launch = launch, m.body = body, m.arguments = arguments;
  m.random = launch.seed * 0x9e3779b97f4a7c15 + 1;
  m.words[0] = 0;
  num_threads = {launch.num_threads, 1, 1}, num_programs = {launch.num_programs, 1, 1};
  std::vector<uint32_t> others, together;
  for (uint32_t first = 0; first < launch.num_programs; first += launch.cluster) others.push_back(first);
  if (_setjmp(m.end) != 0) return m.words;
  while (!others.empty()) {
    for (together.clear(); !others.empty() && together.size() < TOGETHER; others.pop_back()) {
      std::swap(others[below(others.size())], others.back());
      together.push_back(others.back());
    }
    run_together(together);
  }
  return m.words;
}

}  // namespace machine
