// The emulated GPU's settings as C functions, for ctypes.
#include <dlfcn.h>

#include <cstdint>
#include <sstream>

#include "cuda/races.h"
#include "cuda/threads.h"

namespace fp8serve::emulator {

namespace {

// Whether the barrier or wait at a place (site) of the source is executed; a test can leave one out. The last
// decision is cached because the threads of a block reach the same site one after the other.
struct Decision {
  const char* file = nullptr;
  unsigned line = 0;
  bool executed = true;
} last;

Decision decide(const std::source_location& site) {
  const std::string name = name_of(site);
  settings.reached.insert(name);
  return {site.file_name(), site.line(), name != settings.left_out};
}

}  // namespace

bool is_executed(const std::source_location& site) {
  const races::Unwatched bookkeeping;
  if (site.file_name() != last.file || site.line() != last.line) last = decide(site);
  return last.executed;
}

}  // namespace fp8serve::emulator

using namespace fp8serve::emulator;  // NOLINT: all of it

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED void emulator_set_chip(int capability, int multiprocessors, int shared_bytes) {
  settings.chip = {capability, multiprocessors, shared_bytes};
}

EXPORTED void emulator_run_backwards(bool backwards) { settings.backwards = backwards; }

// From now on a simulated kernel writes this memory before each kernel that is launched early.
// ThreadSanitizer reports a kernel that accesses the memory without waiting for earlier kernels. If `at` is
// null, no memory is written any more.
EXPORTED void emulator_add_earlier_write(void* at, size_t bytes) {
  at == nullptr ? settings.earlier.clear() : settings.earlier.push_back({at, bytes});
}

EXPORTED void emulator_capture(bool capturing) { settings.capturing = capturing; }

EXPORTED void emulator_leave_out(const char* site) {
  settings.left_out = site;
  last = {};
}

// Registers static shared memory of a kernel, `offset` bytes from the start of the library.
EXPORTED void emulator_declare(size_t offset, size_t bytes) {
  Dl_info library;
  dladdr(reinterpret_cast<const void*>(&emulator_declare), &library);
  settings.declared.push_back({static_cast<char*>(library.dli_fbase) + offset, bytes});
}

// Returns the kernels launched since the last call, one per line: the offset of the kernel's code in the
// library in hexadecimal (0 for a memset), its bytes of dynamic shared memory, whether it was launched early,
// and its number of blocks.
EXPORTED const char* emulator_launches() {
  static std::string lines;
  Dl_info library;
  dladdr(reinterpret_cast<const void*>(&emulator_launches), &library);
  std::ostringstream out;
  for (const auto& [kernel, shared_bytes, early, blocks] : settings.launches) {
    const auto at = reinterpret_cast<uintptr_t>(kernel),
               base = reinterpret_cast<uintptr_t>(library.dli_fbase);
    out << std::hex << (kernel == nullptr ? 0 : at - base) << ' ' << std::dec << shared_bytes << ' ' << early
        << ' ' << blocks << '\n';
  }
  settings.launches.clear();
  return (lines = out.str()).c_str();
}

// Returns the barriers and waits that kernels have reached since the last call, one per line.
EXPORTED const char* emulator_take_reached_sites() {
  static std::string lines;
  std::ostringstream out;
  for (const std::string& site : settings.reached) out << site << '\n';
  settings.reached.clear();
  last = {};
  return (lines = out.str()).c_str();
}
