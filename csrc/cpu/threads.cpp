#include "cpu/threads.h"

#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <chrono>
#include <exception>
#include <system_error>
#include <thread>

#include "cpu/isa.h"

namespace fp8serve {
namespace {

constexpr auto kPatience = std::chrono::microseconds(500);  // of a thread without work, before it sleeps
constexpr int kLooks = 32;                                  // between two offers of its core

void pause() {
#if FP8_X86
  __builtin_ia32_pause();
#endif
}

// Waits until found() for a while without sleeping.
template <class F>
bool look_for(const F& found) {
  const auto end = std::chrono::steady_clock::now() + kPatience;
  do {
    for (int i = 0; i < kLooks; ++i, pause()) {
      if (found()) return true;
    }
    sched_yield();
  } while (std::chrono::steady_clock::now() < end);
  return false;
}

// What there is to do. Every thread that has entered takes the next task until none is left.
struct Job {
  void (*call)(const void*, int64_t);
  const void* context;
  int64_t tasks, threads;
  std::atomic<int64_t> next{0};
  std::atomic<bool> failed{false};
  std::exception_ptr problem{};

  void work() {
    try {
      for (int64_t i = next++; i < tasks; i = next++) call(context, i);
    } catch (...) {
      next = tasks;
      if (!failed.exchange(true)) problem = std::current_exception();
    }
  }
};

class Crew {
 public:
  void run(Job& job) {
    if (busy_.exchange(true, std::memory_order_acquire)) return job.work();
    hire(job.threads - 1);
    job_ = &job;
    inside_.store(0, std::memory_order_release);
    ++calls_;
    calls_.notify_all();
    job.work();
    close();
    busy_.store(false, std::memory_order_release);
  }

 private:
  static constexpr int32_t kClosed = 1 << 30;  // nobody may enter any more

  // Where the system gives no more threads, those that there are do the work.
  void hire(int64_t wanted) try {
    for (; members_ < wanted; ++members_) std::thread([this, i = members_] { serve(i); }).detach();
  } catch (const std::system_error&) {
  }

  // Waits for those inside; everyone else stays out, and `job_` may go.
  void close() {
    int32_t left = inside_.fetch_or(kClosed, std::memory_order_acq_rel) | kClosed;
    look_for([&] { return (left = inside_.load(std::memory_order_acquire)) == kClosed; });
    for (; left != kClosed; left = inside_.load(std::memory_order_acquire)) inside_.wait(left);
  }

  bool enter() {
    int32_t seen = inside_.load(std::memory_order_relaxed);
    while ((seen & kClosed) == 0) {
      if (inside_.compare_exchange_weak(seen, seen + 1, std::memory_order_acquire)) return true;
    }
    return false;
  }

  [[noreturn]] void serve(int64_t member) {
    for (uint32_t seen = 0;;) {
      if (!look_for([&] { return calls_.load(std::memory_order_acquire) != seen; })) calls_.wait(seen);
      seen = calls_.load(std::memory_order_acquire);
      if (!enter()) continue;
      if (member < job_->threads - 1) job_->work();
      inside_.fetch_sub(1, std::memory_order_release);
      inside_.notify_all();
    }
  }

  std::atomic<bool> busy_{false};
  std::atomic<uint32_t> calls_{0};
  std::atomic<int32_t> inside_{kClosed};
  Job* job_ = nullptr;
  int64_t members_ = 0;
};

// Never destroyed: its threads wait in it until the process ends. A forked child has none of them.
Crew* crew = nullptr;

void begin() { crew = new Crew; }

Crew& the_crew() {
  [[maybe_unused]] static const bool begun = (begin(), pthread_atfork(nullptr, nullptr, begin) == 0);
  return *crew;
}

}  // namespace

void run_tasks(int64_t tasks, int64_t threads, void (*call)(const void*, int64_t), const void* context) {
  Job job{call, context, tasks, threads};
  tasks > 1 && threads > 1 ? the_crew().run(job) : job.work();
  if (job.problem) std::rethrow_exception(job.problem);
}

}  // namespace fp8serve
