// The stack of an emulated thread, and the switch from one to another. A kernel switches a million times or
// more: on x86-64 a switch saves the registers that a function must preserve, in a few nanoseconds;
// swapcontext() also asks the operating system for the signal mask, twice.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#ifndef __x86_64__
#include <ucontext.h>
#endif

namespace fp8serve::emulator {

struct Stack {
#ifdef __x86_64__
  using Place = void*;  // the stack pointer, below which the registers are saved
#else
  using Place = ucontext_t;
#endif
  static constexpr size_t kBytes = 256 * 1024;
  std::unique_ptr<char[]> memory = std::make_unique_for_overwrite<char[]>(kBytes);
  Place place;  // where the thread continues

  // The first switch to this stack calls `function`, which never returns.
  void begin_with(void (*function)()) {
#ifdef __x86_64__
    const auto end = reinterpret_cast<uintptr_t>(memory.get() + kBytes) / 16 * 16;
    auto* top = reinterpret_cast<void**>(end);
    *--top = nullptr;  // where `function` would return to
    *--top = reinterpret_cast<void*>(function);
    for (int i = 0; i < 6; ++i) *--top = nullptr;  // rbx, rbp, r12 to r15
    place = top;
#else
    getcontext(&place);
    place.uc_stack.ss_sp = memory.get();
    place.uc_stack.ss_size = kBytes;
    place.uc_link = nullptr;
    makecontext(&place, function, 0);
#endif
  }
};

// Saves this position in `from` and continues at `to`. Returns when another switch continues at `from`.
#ifdef __x86_64__
extern "C" void emulator_switch_stack(void** from, void* to);  // stack.cpp
inline void switch_stack(Stack::Place& from, const Stack::Place& to) { emulator_switch_stack(&from, to); }
#else
inline void switch_stack(Stack::Place& from, const Stack::Place& to) { swapcontext(&from, &to); }
#endif

}  // namespace fp8serve::emulator
