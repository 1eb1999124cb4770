// A function of a source file, by its name FUNCTION, as a host launches it: with pointers to arguments.

#pragma once

#include <utility>

#include "machine.h"

extern uint8_t __start_statics[] __attribute__((weak)), __stop_statics[] __attribute__((weak));

namespace {

template <typename... Types, size_t... N>
void call(void (*function)(Types...), void* const* arguments, std::index_sequence<N...>) {
  function(*(Types*)arguments[N]...);
}

template <typename... Types>
void call(void (*function)(Types...), void* const* arguments) {
  call(function, arguments, std::index_sequence_for<Types...>());
}

}  // namespace

// Empty, or what went wrong.
extern "C" __attribute__((visibility("default"))) const char* launch(const machine::Launch* wanted, void* const* arguments) {
  machine::Launch launch = *wanted;
  launch.begin_statics = __start_statics, launch.end_statics = __stop_statics;
  return machine::run(launch, [](void* arguments) { call(FUNCTION, (void* const*)arguments); }, (void*)arguments);
}
