// Describes the emulated GPU to ThreadSanitizer: its threads are fibers, barriers order their accesses, and
// accesses of the emulator itself are ignored. Without -fsanitize=thread all these functions do nothing.
//
// Two accesses of one block race unless there is a barrier between them that both threads pass:
// __syncthreads(), or __syncwarp() within a warp. Shuffles and matrix instructions order nothing. An
// asynchronous copy counts as a write when it is issued and again when the thread waits for it, because it
// may land at any time between. So does a bulk copy (mbarrier.h), which reads only what was written before
// the launch.
//
// Resident blocks (grid.h) race unless a release and an acquire of the same word are between their accesses:
// store_release() or add_release(), and load_acquire(); or an atomic operation after a __threadfence(), and
// one before another __threadfence(). A cluster's barrier orders the accesses of its threads. An access to
// the shared memory of a block that has not begun, or has ended, is a race, too. The blocks of an ordinary
// launch run one after the other, so races between them are not found.
#pragma once

#include <cstddef>

#ifdef __SANITIZE_THREAD__
#include <sanitizer/tsan_interface.h>
extern "C" {
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
void __tsan_read_range(void* at, unsigned long bytes);
void __tsan_write_range(void* at, unsigned long bytes);
}
#endif

namespace fp8serve::emulator::races {

#ifdef __SANITIZE_THREAD__
inline void* this_fiber() { return __tsan_get_current_fiber(); }
inline void* new_fiber() { return __tsan_create_fiber(0); }
// Does not synchronize: only happens_before and happens_after order fibers. Always inlined, because a
// function has to return on the fiber on which it was called.
__attribute__((always_inline)) inline void before_switch_to(void* fiber) {
  __tsan_switch_to_fiber(fiber, __tsan_switch_to_fiber_no_sync);
}
inline void happens_before(void* point) { __tsan_release(point); }
inline void happens_after(void* point) { __tsan_acquire(point); }
inline void reads(const void* at, size_t bytes) { __tsan_read_range(const_cast<void*>(at), bytes); }
inline void writes(void* at, size_t bytes) { __tsan_write_range(at, bytes); }
inline void stop_watching() { AnnotateIgnoreReadsBegin("", 0), AnnotateIgnoreWritesBegin("", 0); }
inline void watch() { AnnotateIgnoreWritesEnd("", 0), AnnotateIgnoreReadsEnd("", 0); }
#else
inline void* this_fiber() { return nullptr; }
inline void* new_fiber() { return nullptr; }
inline void before_switch_to(void*) {}
inline void happens_before(void*) {}
inline void happens_after(void*) {}
inline void reads(const void*, size_t) {}
inline void writes(void*, size_t) {}
inline void stop_watching() {}
inline void watch() {}
#endif

// ThreadSanitizer ignores accesses while an object of this type exists: for those of the emulator itself.
struct Unwatched {
  Unwatched() { stop_watching(); }
  ~Unwatched() { watch(); }
  Unwatched(const Unwatched&) = delete;
};

}  // namespace fp8serve::emulator::races
