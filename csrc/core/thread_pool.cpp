#include "core/thread_pool.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "core/mxcsr.h"

namespace commkern {
namespace {

struct Job {
  RangeFn fn = nullptr;
  void* context = nullptr;
  int64_t count = 0;
  int64_t shares = 0;
};

void run_share(const Job& job, int64_t share) {
  const FloatStateGuard guard;
  const int64_t base = job.count / job.shares;
  const int64_t rest = job.count % job.shares;
  const int64_t begin = share * base + std::min(share, rest);
  job.fn(job.context, begin, begin + base + (share < rest ? 1 : 0));
}

class Pool {
 public:
  // False where the pool is busy: the caller then works alone.
  bool try_run(const Job& job) {
    const std::unique_lock<std::mutex> running(running_, std::try_to_lock);
    if (!running.owns_lock()) return false;
    grow(static_cast<size_t>(job.shares) - 1);
    publish(job);
    run_share(job, 0);
    finish(job);
    return true;
  }

 private:
  // Where the system refuses a thread, the caller works through its share.
  void grow(size_t wanted) {
    while (workers_.size() < wanted) {
      const int64_t share = static_cast<int64_t>(workers_.size()) + 1;
      try {
        workers_.emplace_back([this, share, seen = generation_] { work(share, seen); });
      } catch (const std::system_error&) {
        return;
      }
    }
  }

  void publish(const Job& job) {
    const std::lock_guard<std::mutex> lock(mutex_);
    job_ = job;
    job_.shares = job.shares;
    pending_ = std::min(job.shares - 1, static_cast<int64_t>(workers_.size()));
    ++generation_;
    wake_.notify_all();
  }

  void finish(const Job& job) {
    for (auto share = static_cast<int64_t>(workers_.size()) + 1; share < job.shares;
         ++share) {
      run_share(job, share);
    }
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [this] { return pending_ == 0; });
  }

  void work(int64_t share, uint64_t seen) {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return generation_ != seen; });
      seen = generation_;
      if (share >= job_.shares) continue;
      const Job job = job_;
      lock.unlock();
      run_share(job, share);
      lock.lock();
      if (--pending_ == 0) done_.notify_one();
    }
  }

  std::mutex running_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable done_;
  std::vector<std::thread> workers_;
  Job job_;
  int64_t pending_ = 0;
  uint64_t generation_ = 0;
};

std::atomic<int> thread_count{1};
std::atomic<Pool*> current{nullptr};

// The child has none of the parent's threads and perhaps a locked mutex of theirs: it
// forgets that pool, never touches it.
void forget_pool() { current.store(nullptr); }

// Never destroyed: threads may still wait in it when the process ends.
Pool& pool() {
  static const int registered = pthread_atfork(nullptr, nullptr, forget_pool);
  (void)registered;
  Pool* found = current.load(std::memory_order_acquire);
  if (found != nullptr) return *found;
  Pool* fresh = new Pool;
  if (current.compare_exchange_strong(found, fresh)) return *fresh;
  delete fresh;
  return *found;
}

}  // namespace

void parallel_for(int64_t count, int64_t grain, RangeFn fn, void* context) {
  if (count <= 0) return;
  const int64_t wanted = count / std::max<int64_t>(grain, 1);
  const int64_t shares = std::clamp<int64_t>(wanted, 1, num_threads());
  const Job job{fn, context, count, shares};
  if (shares > 1 && pool().try_run(job)) return;
  run_share(Job{fn, context, count, 1}, 0);
}

int num_threads() { return thread_count.load(std::memory_order_relaxed); }

void set_num_threads(int count) { thread_count.store(std::max(count, 1)); }

}  // namespace commkern
