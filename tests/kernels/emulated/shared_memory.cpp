// Shared memory, copies to it, and checks of accesses.

#include <string.h>

#include "state.h"

namespace machine {

namespace {

constexpr uint8_t PAST = 0xa5;

Touch touch() { return {m.lane, warp_of(m.lane).num_syncs, own().meeting.num_syncs, own_cluster().num_syncs}; }

// Whether the running lane has synced with the one that touched this.
bool has_synced(const Touch& before) {
  if (before.lane == NOBODY || before.lane == m.lane || before.cluster != own_cluster().num_syncs) return true;
  if (program_of(before.lane) != program_of(m.lane)) return false;
  if (before.program != own().meeting.num_syncs) return true;
  Meeting& warp = warp_of(m.lane);
  return &warp == &warp_of(before.lane) && before.warp != warp.num_syncs;
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

}  // namespace

void begin_memory(Program& program) {
  uint32_t size = m.launch.shared_bytes;
  program.memory.assign(size + 16 + 2 * PAST_BYTES, PAST);
  memset(program.shared(), POISON, size);
  program.bytes.assign(size / 2, {});
}

void check_memory(Program& program) {
  uint8_t *begin = program.shared(), *end = begin + m.launch.shared_bytes;
  for (uint8_t& byte : program.memory)
    if ((&byte < begin || &byte >= end) && byte != PAST)
      fail("has written to byte %d of %u bytes of shared memory", (int)(&byte - begin), m.launch.shared_bytes);
}

uint8_t* read(uint32_t at, uint32_t num_bytes) { return read_from(own(), at, num_bytes); }

uint8_t* read_of_program(uint32_t at, uint32_t num_bytes, uint32_t rank) {
  if (rank >= m.launch.cluster) fail("reads memory of program %u of a cluster of %u", rank, m.launch.cluster);
  int there = program_of(m.lane) / m.launch.cluster * m.launch.cluster + rank, first = there * m.launch.num_threads;
  if (m.lanes[first].has_ended) fail("reads memory of %s, which has ended", lane_words(first).c_str());
  return read_from(m.programs[there], at, num_bytes);
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

}  // namespace machine
