// Threads for our kernels, as many as torch's setting says.
//
// Between two GEMMs of a decoding step lie some ten microseconds. A thread that goes to sleep in them is
// awake again after fifty or more, on a virtual machine after a hundred; one that spins takes a core from
// whoever shares the machine, and torch's own pool can only do the one or the other. So here:
//  * a thread that waits for work looks for it for a short while, and offers its core at every look;
//  * a thread that comes late is not waited for: the others do its tasks, and find none left for it.
#pragma once

#include <cstdint>

namespace fp8serve {

// call(context, task) for every task from 0 to `tasks` - 1, on the caller and up to `threads` - 1 others;
// done when all have returned. What a task throws is thrown here. From within a task, or while another
// thread's tasks run, everything is done by the caller.
void run_tasks(int64_t tasks, int64_t threads, void (*call)(const void*, int64_t), const void* context);

}  // namespace fp8serve
