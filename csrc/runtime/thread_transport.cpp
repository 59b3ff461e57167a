#include "runtime/thread_transport.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <utility>

#include "core/check.h"

namespace commkern {
namespace {

constexpr double kLongestTimeout_s = 1e8;  // three years; longer would overflow a clock

Failure mismatch_of(int32_t peer, int32_t observer, const PreambleBytes& received,
                    const uint8_t* expected) {
  Failure failure(FailureKind::kMismatch, peer, observer,
                  "rank " + std::to_string(peer) + " does not match rank " +
                      std::to_string(observer));
  failure.received = received;
  std::memcpy(failure.expected.data(), expected, failure.expected.size());
  return failure;
}

}  // namespace

ThreadGroup::ThreadGroup(int32_t world_size, double timeout_s)
    : world_size_(world_size) {
  if (world_size < 1) {
    fail("world_size: expected at least 1, got ", world_size);
  }
  if (!(timeout_s > 0)) {
    fail("timeout_s: expected seconds above 0, got ", timeout_s);
  }
  timeout_ = std::chrono::duration_cast<Clock::duration>(
      std::chrono::duration<double>(std::min(timeout_s, kLongestTimeout_s)));
  mailboxes_.resize(size_t(world_size) * size_t(world_size));
  wake_ = std::vector<std::condition_variable>(size_t(world_size));
}

void ThreadGroup::poison(Failure failure) {
  if (failure_) return;
  failure_ = std::move(failure);
  for (auto& wake : wake_) wake.notify_all();
}

ThreadEndpoint::ThreadEndpoint(std::shared_ptr<ThreadGroup> group, int32_t rank)
    : group_(std::move(group)), rank_(rank) {
  if (rank < 0 || rank >= group_->world_size()) {
    fail("rank: expected 0 ... ", group_->world_size() - 1, ", got ", rank);
  }
}

void ThreadEndpoint::post(const Exchange& exchange) {
  Lock lock(group_->mutex_);
  if (group_->failure_) throw_failure();
  for (const Send& send : exchange.sends) {
    Offer offer{.round = exchange.round, .body = send.body};
    std::memcpy(offer.preamble.data(), send.preamble, offer.preamble.size());
    group_->mailbox(rank_, send.peer).push_back(offer);
    group_->wake_[size_t(send.peer)].notify_all();
  }
}

void ThreadEndpoint::complete(const Exchange& exchange) {
  Lock lock(group_->mutex_);
  const auto deadline = Clock::now() + group_->timeout_;
  missing_.clear();
  for (const Receive& receive : exchange.receives) missing_.push_back(&receive);
  for (;;) {
    // Whatever has come is taken first, so that a mismatch shows before a lost peer.
    const auto taken = std::erase_if(
        missing_, [&](const Receive* receive) { return take(lock, *receive); });
    if (missing_.empty()) break;
    if (taken == 0) wait(lock, deadline, missing_.front()->peer);
  }
  for (const Send& send : exchange.sends) {
    while (is_offered(send.peer, exchange.round)) wait(lock, deadline, send.peer);
  }
}

// Copies the peer's body if it is there. The copy itself runs without the lock.
bool ThreadEndpoint::take(Lock& lock, const Receive& receive) {
  auto& mailbox = group_->mailbox(receive.peer, rank_);
  if (mailbox.empty()) return false;
  Offer& offer = mailbox.front();
  std::memcpy(receive.preamble, offer.preamble.data(), offer.preamble.size());
  if (std::memcmp(offer.preamble.data(), receive.expected, offer.preamble.size()) !=
          0 ||
      offer.body.nbytes != receive.body.nbytes) {
    group_->poison(mismatch_of(receive.peer, rank_, offer.preamble, receive.expected));
    throw_failure();
  }
  offer.copying = true;
  lock.unlock();
  if (offer.body.nbytes > 0) {
    std::memcpy(receive.body.data, offer.body.data, size_t(offer.body.nbytes));
  }
  lock.lock();
  mailbox.pop_front();
  group_->wake_[size_t(receive.peer)].notify_all();
  return true;
}

bool ThreadEndpoint::is_offered(int32_t peer, int32_t round) {
  const auto& mailbox = group_->mailbox(rank_, peer);
  return !mailbox.empty() && mailbox.front().round <= round;
}

void ThreadEndpoint::wait(Lock& lock, Clock::time_point deadline, int32_t peer) {
  if (group_->failure_) throw_failure();
  if (Clock::now() >= deadline) {
    group_->poison(Failure(
        FailureKind::kLost, peer, rank_,
        "rank " + std::to_string(peer) + " did not answer within the time-out"));
    throw_failure();
  }
  group_->wake_[size_t(rank_)].wait_until(lock, deadline);
}

// Seen from here: the rank whose preamble was refused is told what the other one has.
void ThreadEndpoint::throw_failure() const {
  Failure failure = *group_->failure_;
  if (failure.kind == FailureKind::kMismatch && failure.peer == rank_) {
    std::swap(failure.peer, failure.observer);
    std::swap(failure.received, failure.expected);
  }
  throw failure;
}

void ThreadEndpoint::abort(const char* reason) noexcept {
  Lock lock(group_->mutex_);
  group_->poison(Failure(FailureKind::kFailed, rank_, rank_, reason));
  // The caller's memory may go away after this: withdraw what nobody has begun to
  // copy, and wait for the copies that have begun.
  for (int32_t peer = 0; peer < group_->world_size(); ++peer) {
    auto& mailbox = group_->mailbox(rank_, peer);
    while (mailbox.size() > 1 || (mailbox.size() == 1 && !mailbox.front().copying)) {
      mailbox.pop_back();
    }
    while (!mailbox.empty()) group_->wake_[size_t(rank_)].wait(lock);
  }
}

}  // namespace commkern
