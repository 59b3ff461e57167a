// Ranks are threads of one process. Nothing is copied on the way: a sender offers
// pointers, the receiver copies, and the sender's complete waits until that is done.
#pragma once

#include <chrono>
#include <condition_variable>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "runtime/failure.h"
#include "runtime/transport.h"

namespace commkern {

struct Offer {
  int32_t round = 0;
  PreambleBytes preamble{};
  std::span<const ConstBytes> body;
  bool copying = false;    // the receiver reads `body` without the lock
  bool withdrawn = false;  // the sender gave up; the preamble may still be compared
};

// Shared by the endpoints of one group. The first failure poisons the group: exchanges
// that cannot complete any more throw it, and so does every later one.
class ThreadGroup {
 public:
  // Throws std::invalid_argument unless world_size >= 1 and timeout_s > 0 (seconds that
  // one complete may wait).
  ThreadGroup(int32_t world_size, double timeout_s);

  int32_t world_size() const { return world_size_; }

 private:
  friend class ThreadEndpoint;
  using Clock = std::chrono::steady_clock;
  using Mailbox = std::list<Offer>;  // an offer stays where it is while it is copied

  Mailbox& mailbox(int32_t sender, int32_t receiver) {
    return mailboxes_[size_t(sender) * size_t(world_size_) + size_t(receiver)];
  }
  void poison(Failure failure);  // keeps the first one and wakes everybody

  const int32_t world_size_;
  Clock::duration timeout_;
  std::mutex mutex_;  // guards everything below
  std::vector<Mailbox> mailboxes_;
  std::vector<std::condition_variable> wake_;  // one a rank
  std::optional<Failure> failure_;
};

// One rank of a group, used by one thread at a time. Never takes the GIL.
class ThreadEndpoint final : public Transport {
 public:
  ThreadEndpoint(std::shared_ptr<ThreadGroup> group, int32_t rank);

  int32_t rank() const { return rank_; }
  int32_t world_size() const { return group_->world_size(); }
  int64_t bytes_sent() const { return bytes_sent_; }  // preambles included

  void post(const Exchange& exchange) override;
  void complete(const Exchange& exchange) override;
  void abort(const char* reason) noexcept override;

 private:
  using Lock = std::unique_lock<std::mutex>;
  using Clock = ThreadGroup::Clock;

  bool take(Lock& lock, const Receive& receive, int32_t round);
  void wait(Lock& lock, Clock::time_point deadline, int32_t peer);

  const std::shared_ptr<ThreadGroup> group_;
  const int32_t rank_;
  std::vector<const Receive*> missing_;
  bool aborted_ = false;
  int64_t bytes_sent_ = 0;
};

}  // namespace commkern
