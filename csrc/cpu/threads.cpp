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

constexpr auto kSpinTime =
    std::chrono::microseconds(500);  // a thread without work spins for this long, then sleeps
constexpr int kSpinsPerYield = 32;

void pause() {
#if FP8_X86
  __builtin_ia32_pause();
#endif
}

// Spins until is_done(), at most for kSpinTime; returns whether it is.
template <class F>
bool spin_until(const F& is_done) {
  const auto end = std::chrono::steady_clock::now() + kSpinTime;
  do {
    for (int i = 0; i < kSpinsPerYield; ++i, pause()) {
      if (is_done()) return true;
    }
    sched_yield();
  } while (std::chrono::steady_clock::now() < end);
  return false;
}

// The tasks of one call. Each thread starts with a share of consecutive tasks, which read memory in order,
// and then takes tasks that are left in the shares of the others.
class Job {
 public:
  Job(int64_t tasks, int64_t threads, void (*call)(const void*, int64_t), const void* context)
      : num_threads(threads), call_(call), context_(context), count_(std::min(threads, kMaxShares)) {
    for (int64_t i = 0; i < count_; ++i) {
      shares_[i].next = tasks * i / count_;
      shares_[i].end = tasks * (i + 1) / count_;
    }
  }

  void run(int64_t first_share) {
    try {
      for (int64_t i = 0; i < count_; ++i) run_share(shares_[(first_share + i) % count_]);
    } catch (...) {
      for (int64_t i = 0; i < count_; ++i) shares_[i].next = shares_[i].end;
      if (!failed_.exchange(true)) error = std::current_exception();
    }
  }

  const int64_t num_threads;
  std::exception_ptr error{};

 private:
  static constexpr int64_t kMaxShares = 64;
  struct alignas(64) Share {
    std::atomic<int64_t> next;
    int64_t end;
  };

  void run_share(Share& share) {
    for (int64_t i = share.next++; i < share.end; i = share.next++) call_(context_, i);
  }

  void (*call_)(const void*, int64_t);
  const void* context_;
  int64_t count_;
  Share shares_[kMaxShares];
  std::atomic<bool> failed_{false};
};

class ThreadPool {
 public:
  void run(Job& job) {
    if (in_use_.exchange(true, std::memory_order_acquire)) return job.run(0);
    start_workers(job.num_threads - 1);
    job_ = &job;
    active_workers_.store(0, std::memory_order_release);
    ++jobs_;
    jobs_.notify_all();
    job.run(0);
    wait_for_workers();
    in_use_.store(false, std::memory_order_release);
  }

 private:
  // A bit of active_workers_: no further worker may join the job.
  static constexpr int32_t kClosed = 1 << 30;

  // If the system cannot create more threads, the existing ones do the work.
  void start_workers(int64_t count) try {
    for (; workers_ < count; ++workers_) std::thread([this, i = workers_] { work(i); }).detach();
  } catch (const std::system_error&) {
  }

  // Lets no further worker into the job and waits for those inside: afterwards `job_` may be destroyed.
  void wait_for_workers() {
    int32_t left = active_workers_.fetch_or(kClosed, std::memory_order_acq_rel) | kClosed;
    spin_until([&] { return (left = active_workers_.load(std::memory_order_acquire)) == kClosed; });
    for (; left != kClosed; left = active_workers_.load(std::memory_order_acquire))
      active_workers_.wait(left);
  }

  bool enter_job() {
    int32_t seen = active_workers_.load(std::memory_order_relaxed);
    while ((seen & kClosed) == 0) {
      if (active_workers_.compare_exchange_weak(seen, seen + 1, std::memory_order_acquire)) return true;
    }
    return false;
  }

  [[noreturn]] void work(int64_t worker) {
    for (uint32_t seen = 0;;) {
      if (!spin_until([&] { return jobs_.load(std::memory_order_acquire) != seen; })) jobs_.wait(seen);
      seen = jobs_.load(std::memory_order_acquire);
      if (!enter_job()) continue;
      if (worker < job_->num_threads - 1) job_->run(worker + 1);
      active_workers_.fetch_sub(1, std::memory_order_release);
      active_workers_.notify_all();
    }
  }

  std::atomic<bool> in_use_{false};
  std::atomic<uint32_t> jobs_{0};                 // number of jobs so far
  std::atomic<int32_t> active_workers_{kClosed};  // that run the job
  Job* job_ = nullptr;
  int64_t workers_ = 0;
};

// Never destroyed: its workers wait in it until the process ends. A forked child has none of them and gets a
// pool of its own.
ThreadPool* pool = nullptr;

void make_pool() { pool = new ThreadPool; }

ThreadPool& thread_pool() {
  [[maybe_unused]] static const bool is_ready =
      (make_pool(), pthread_atfork(nullptr, nullptr, make_pool) == 0);
  return *pool;
}

}  // namespace

void run_tasks(int64_t tasks, int64_t threads, void (*call)(const void*, int64_t), const void* context) {
  const int64_t num_threads = std::min(tasks, threads);
  if (num_threads < 2) {
    for (int64_t i = 0; i < tasks; ++i) call(context, i);
    return;
  }
  Job job(tasks, num_threads, call, context);
  thread_pool().run(job);
  if (job.error) std::rethrow_exception(job.error);
}

}  // namespace fp8serve
