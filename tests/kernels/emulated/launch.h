// Launches the function FUNCTION of a source file as a host does: with pointers to arguments.

#pragma once

#include <dlfcn.h>
#include <link.h>

#include <utility>

#include "machine.h"

namespace {

thread_local uint8_t first_static;  // at least one, so that they have an address

// The range of thread-local variables of this library: the static shared memory of its kernels.
int find_statics(dl_phdr_info* library, size_t, void* launch) {
  Dl_info own;
  if (!dladdr((void*)find_statics, &own) || (void*)library->dlpi_addr != own.dli_fbase) return 0;
  for (int i = 0; i < library->dlpi_phnum; i++)
    if (library->dlpi_phdr[i].p_type == PT_TLS) {
      machine::Launch& found = *(machine::Launch*)launch;
      found.begin_statics = (uint8_t*)library->dlpi_tls_data;
      found.end_statics = found.begin_statics + library->dlpi_phdr[i].p_memsz;
    }
  return 1;
}

template <typename... Types, size_t... N>
void call(void (*function)(Types...), void* const* arguments, std::index_sequence<N...>) {
  function(*(Types*)arguments[N]...);
}

template <typename... Types>
void call(void (*function)(Types...), void* const* arguments) {
  call(function, arguments, std::index_sequence_for<Types...>());
}

}  // namespace

// Empty, or the error.
extern "C" __attribute__((visibility("default"))) const char* launch(const machine::Launch* wanted, void* const* arguments) {
  machine::Launch launch = *wanted;
  first_static = 0;
  dl_iterate_phdr(find_statics, &launch);
  if (!launch.begin_statics) return "the thread's variables are nowhere";
  return machine::run(launch, [](void* arguments) { call(FUNCTION, (void* const*)arguments); }, (void*)arguments);
}
