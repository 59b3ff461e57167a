// A small persistent pool of threads with a static split. Plain C interface, so that
// kernel objects (one per ISA) share it without sharing inline code.
#pragma once

#include <cstdint>

namespace commkern {

// One thread's share: units [begin, end).
using RangeFn = void (*)(void* context, int64_t begin, int64_t end);

// Runs fn over [0, count) on at most one thread per `grain` units and returns when all
// is done. Every share runs with round-to-nearest and denormals kept. `fn` must not
// throw. Where another thread already uses the pool, the caller does all the work; so
// calls from many threads, and nested calls, never wait for one another.
void parallel_for(int64_t count, int64_t grain, RangeFn fn, void* context);

// Threads that work on one call, the caller's included; 1 to begin with. Safe after
// fork(): the child starts with no threads of its own and makes them at need.
int num_threads();
void set_num_threads(int count);

}  // namespace commkern
