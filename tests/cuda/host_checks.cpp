// Tests the parts of the CUDA launches that are plain C++, with a fake runtime and a fake driver.
#include <cstdio>
#include <vector>

#include "cuda/chips.h"
#include "cuda/descriptor.h"
#include "cuda/early.h"
#include "cuda/shared_memory.h"

namespace {

int failures = 0;
void expect(bool holds, const char* what) {
  if (!holds) std::printf("FAILED: %s\n", what), ++failures;
}

// A fake GPU. It refuses a block whose static and dynamic shared memory exceed 48 KiB, unless `allow` was
// called for that size.
struct Gpu {
  static inline int current = 0, declared = 0, requests = 0;
  static inline int allowed[2] = {};
  static int device() { return current; }
  static int static_bytes(const void*) { return declared; }
  static void allow(const void*, int bytes) { allowed[current] = bytes, ++requests; }
  static bool launches(int dynamic) { return dynamic + declared <= 48 * 1024 || dynamic <= allowed[current]; }
};

bool launches(fp8serve::SharedMemory<Gpu>& memory, const void* kernel, int dynamic) {
  memory.need(kernel, dynamic);
  return Gpu::launches(dynamic);
}

void shared_memory() {
  fp8serve::SharedMemory<Gpu> memory;
  int norm_backward = 0, sample = 0;
  Gpu::declared = 256;  // two arrays of 32 floats
  expect(launches(memory, &norm_backward, 4 * 12224), "the last width that needs no permission");
  expect(Gpu::requests == 0, "no permission was requested");
  for (int width : {12225, 12250, 12288}) {
    expect(launches(memory, &norm_backward, 4 * width), "norm_backward at 12225 to 12288");
  }
  expect(Gpu::requests == 3, "a larger size asks again");
  expect(launches(memory, &norm_backward, 4 * 12225) && Gpu::requests == 3, "a smaller size does not ask");
  Gpu::current = 1;
  expect(launches(memory, &norm_backward, 4 * 12288) && Gpu::requests == 4,
         "permission is requested on every device");
  Gpu::declared = 2000;
  Gpu::allowed[1] = 0;
  expect(launches(memory, &sample, 48 * 1024), "exactly 48 KiB beside what is declared");
}

struct Chip {
  static inline int current = 0, requests = 0;
  static int device() { return current; }
  static int virtual_architecture(const void* kernel) { return ++requests, *static_cast<const int*>(kernel); }
};

void early_launches() {
  using fp8serve::gemm_switches;
  fp8serve::EarlyLaunches<Chip> launches;
  const int hopper = 90, blackwell = 120, ada = 89;
  expect(launches.possible(&hopper) && launches.possible(&blackwell),
         "code for Hopper and Blackwell may start early");
  expect(!launches.possible(&ada), "code for Ada never starts early, whatever the chip");
  expect(launches.possible(&hopper) && Chip::requests == 3,
         "the architecture of a kernel is queried only once");
  Chip::current = 1;
  expect(launches.possible(&hopper) && Chip::requests == 4, "the architecture is queried on each device");
  expect(gemm_switches.turn_off("overlap") && !launches.possible(&hopper),
         "switching overlap off disables early launches");
  expect(gemm_switches.turn_off("") && launches.possible(&hopper), "an empty list switches overlap on again");
}

void chips() {
  using fp8serve::family_of, fp8serve::runs_on;
  expect(family_of(103) == 100 && family_of(121) == 120 && family_of(90) == 90, "families");
  expect(family_of(89) == 89 && family_of(110) == 110, "chips without a family here");
  expect(runs_on(103, 100, true) && runs_on(121, 120, true), "a family's code runs on its members");
  expect(!runs_on(103, 100, false) && runs_on(100, 100, false), "code for one chip runs only on that chip");
  expect(!runs_on(120, 100, true) && !runs_on(89, 90, true), "code does not run on chips of another family");
}

void descriptors() {
  struct alignas(64) {
    unsigned long long words[16];
  } descriptor{};
  expect(!fp8serve::is_encoded(descriptor), "a descriptor that the driver left alone");
  descriptor.words[15] = 1;
  expect(fp8serve::is_encoded(descriptor), "a descriptor that the driver wrote");
}

}  // namespace

int main() {
  shared_memory();
  early_launches();
  chips();
  descriptors();
  return failures;
}
