#include "cpu/threads.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <system_error>
#include <thread>

#include "cpu/features.h"

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

// What there is to do. Every thread that has entered begins with a share of its own, so that its tasks follow
// one another, as does what they read, and then takes what is left of the others' shares.
class Job {
 public:
  Job(int64_t tasks, int64_t most, void (*call)(const void*, int64_t), const void* context)
      : threads(most), call_(call), context_(context), count_(std::min(most, kShares)) {
    for (int64_t i = 0; i < count_; ++i) {
      shares_[i].next = tasks * i / count_;
      shares_[i].end = tasks * (i + 1) / count_;
    }
  }

  void work(int64_t member) {
    try {
      for (int64_t i = 0; i < count_; ++i) take(shares_[(member + i) % count_]);
    } catch (...) {
      for (int64_t i = 0; i < count_; ++i) shares_[i].next = shares_[i].end;
      if (!failed_.exchange(true)) problem = std::current_exception();
    }
  }

  const int64_t threads;
  std::exception_ptr problem{};

 private:
  static constexpr int64_t kShares = 64;
  struct alignas(64) Share {
    std::atomic<int64_t> next;
    int64_t end;
  };

  void take(Share& share) {
    for (int64_t i = share.next++; i < share.end; i = share.next++) call_(context_, i);
  }

  void (*call_)(const void*, int64_t);
  const void* context_;
  int64_t count_;
  Share shares_[kShares];
  std::atomic<bool> failed_{false};
};

class Crew {
 public:
  void run(Job& job) {
    if (busy_.exchange(true, std::memory_order_acquire)) return job.work(0);
    hire(job.threads - 1);
    job_ = &job;
    inside_.store(0, std::memory_order_release);
    ++calls_;
    calls_.notify_all();
    job.work(0);
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
      if (member < job_->threads - 1) job_->work(member + 1);
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
  const int64_t useful = std::min(tasks, threads);
  if (useful < 2) {
    for (int64_t i = 0; i < tasks; ++i) call(context, i);
    return;
  }
  Job job(tasks, useful, call, context);
  the_crew().run(job);
  if (job.problem) std::rethrow_exception(job.problem);
}

}  // namespace fp8serve
