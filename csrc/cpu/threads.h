// The thread pool of the CPU kernels, with as many threads as torch is set to use.
//
// A decoding step leaves about ten microseconds between two GEMMs. A thread that sleeps in between needs
// fifty or more to wake up, on a virtual machine a hundred; one that spins endlessly takes a core from all
// other processes. torch's own pool can only do one or the other. In this pool:
//  * a worker without work spins for a short while, yielding its core again and again, and then sleeps;
//  * no thread waits for a worker that wakes up late: the others do its tasks.
#pragma once

#include <cstdint>

namespace fp8serve {

// Runs call(context, task) for every task from 0 to `tasks` - 1, on the caller and up to `threads` - 1
// workers, and returns when all are done. Rethrows the exception of a task that fails. Called from within a
// task, or while another thread uses the pool, it runs all tasks on the caller.
void run_tasks(int64_t tasks, int64_t threads, void (*call)(const void*, int64_t), const void* context);

}  // namespace fp8serve
