// What a test sets on the emulated GPU before it runs a kernel (settings.cpp gives it to Python): which chip
// it is, in which order the threads of a block run, and a barrier or a wait that is left out, as a mistake in
// a kernel would.
#pragma once

#include <cstddef>
#include <set>
#include <source_location>
#include <string>
#include <vector>

namespace fp8serve::emulator {

constexpr int kMostShared = 227 * 1024;  // of a block, on any chip

struct Chip {
  int capability = 89, multiprocessors = 4, shared_bytes = 99 * 1024;
};

struct Memory {
  void* at;
  size_t bytes;
};

struct Launch {
  const void* kernel;  // null: memory was set to zero
  int shared_bytes;    // dynamic
  bool early;          // it may begin before the kernels before it have ended
  unsigned blocks;
};

struct Settings {
  Chip chip;
  bool backwards = false;        // the last thread runs first
  bool capturing = false;        // a graph is captured
  std::string left_out;          // "file.cu:line" of a barrier or wait
  std::set<std::string> met;     // those that a kernel came to
  std::vector<Memory> declared;  // static shared memory, of all kernels
  std::vector<Memory> earlier;   // what is written by a kernel before each that is launched early
  std::vector<Launch> launches;  // since a test has asked for them
};

inline Settings settings;

// Whether the barrier or wait at `site` is to be obeyed.
bool obeyed(const std::source_location& site);

}  // namespace fp8serve::emulator
