// The settings of the emulated GPU that a test makes before it runs a kernel (settings.cpp exports them to
// Python), such as the chip, the order in which the threads of a block run, and a barrier or wait to leave
// out, which simulates a mistake in a kernel.
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
  bool backwards = false;         // the last thread of a block, and the last resident block, run first
  unsigned seed = 0;              // of the order in which resident blocks run (grid.h)
  bool capturing = false;         // a graph is captured
  std::string left_out;           // "file.cu:line" of a barrier or wait
  std::set<std::string> reached;  // barriers and waits that kernels have reached
  std::vector<Memory> declared;   // static shared memory, of all kernels
  std::vector<Memory> earlier;    // a simulated kernel writes this before each kernel launched early
  std::vector<Launch> launches;   // since a test last read them
};

inline Settings settings;

// Returns "file.cu:line".
inline std::string name_of(const std::source_location& site) {
  const std::string path = site.file_name();
  return path.substr(path.rfind('/') + 1) + ":" + std::to_string(site.line());
}

// Whether the barrier or wait at `site` is to be executed.
bool is_executed(const std::source_location& site);

}  // namespace fp8serve::emulator
