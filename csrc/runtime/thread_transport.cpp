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

auto find(std::list<Offer>& mailbox, int32_t round) {
  return std::find_if(mailbox.begin(), mailbox.end(),
                      [round](const Offer& offer) { return offer.round == round; });
}

Failure mismatch_of(int32_t peer, int32_t observer, const PreambleBytes& received,
                    const uint8_t* expected) {
  Failure failure(FailureKind::kMismatch, peer, observer,
                  "rank " + std::to_string(peer) + " does not match rank " +
                      std::to_string(observer));
  failure.received = received;
  std::memcpy(failure.expected.data(), expected, failure.expected.size());
  return failure;
}

bool same_cut(std::span<const ConstBytes> sent, std::span<const MutableBytes> wanted) {
  return std::equal(sent.begin(), sent.end(), wanted.begin(), wanted.end(),
                    [](const auto& mine, const auto& theirs) {
                      return mine.nbytes == theirs.nbytes;
                    });
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
  if (aborted_) throw *group_->failure_;
  for (const Send& send : exchange.sends) {
    Offer offer;
    offer.round = exchange.round;
    offer.body = send.body;
    std::memcpy(offer.preamble.data(), send.preamble, offer.preamble.size());
    group_->mailbox(rank_, send.peer).push_back(offer);
    group_->wake_[size_t(send.peer)].notify_all();
    bytes_sent_ += int64_t(offer.preamble.size()) + total_nbytes(send.body);
  }
}

void ThreadEndpoint::complete(const Exchange& exchange) {
  Lock lock(group_->mutex_);
  const auto deadline = Clock::now() + group_->timeout_;
  missing_.clear();
  for (const Receive& receive : exchange.receives) missing_.push_back(&receive);
  for (;;) {
    // Whatever has come is looked at first: a mismatch of our own is the best cause.
    const auto taken = std::erase_if(missing_, [&](const Receive* receive) {
      return take(lock, *receive, exchange.round);
    });
    if (missing_.empty()) break;
    if (taken == 0) wait(lock, deadline, missing_.front()->peer);
  }
  for (const Send& send : exchange.sends) {
    auto& mailbox = group_->mailbox(rank_, send.peer);
    while (find(mailbox, exchange.round) != mailbox.end()) {
      wait(lock, deadline, send.peer);
    }
  }
}

// Copies the peer's body if it is there. The copy itself runs without the lock.
bool ThreadEndpoint::take(Lock& lock, const Receive& receive, int32_t round) {
  auto& mailbox = group_->mailbox(receive.peer, rank_);
  const auto found = find(mailbox, round);
  if (found == mailbox.end()) return false;
  Offer& offer = *found;
  std::memcpy(receive.preamble, offer.preamble.data(), offer.preamble.size());
  const bool matches =
      std::memcmp(offer.preamble.data(), receive.expected, offer.preamble.size()) == 0;
  if (matches && offer.withdrawn) return false;  // its body may be gone
  if (!matches || !same_cut(offer.body, receive.body)) {
    const auto failure =
        mismatch_of(receive.peer, rank_, offer.preamble, receive.expected);
    group_->poison(failure);
    throw failure;
  }
  offer.copying = true;
  lock.unlock();
  for (size_t i = 0; i < offer.body.size(); ++i) {
    const auto& [data, nbytes] = offer.body[i];
    if (nbytes > 0) std::memcpy(receive.body[i].data, data, size_t(nbytes));
  }
  lock.lock();
  mailbox.erase(found);
  group_->wake_[size_t(receive.peer)].notify_all();
  return true;
}

void ThreadEndpoint::wait(Lock& lock, Clock::time_point deadline, int32_t peer) {
  if (group_->failure_) throw *group_->failure_;
  if (Clock::now() >= deadline) {
    group_->poison(Failure(
        FailureKind::kLost, peer, rank_,
        "rank " + std::to_string(peer) + " did not answer within the time-out"));
    throw *group_->failure_;
  }
  group_->wake_[size_t(rank_)].wait_until(lock, deadline);
}

void ThreadEndpoint::abort(const char* reason) noexcept {
  Lock lock(group_->mutex_);
  aborted_ = true;
  group_->poison(Failure(FailureKind::kFailed, rank_, rank_, reason));
  // The caller's memory may go away after this.
  for (int32_t peer = 0; peer < group_->world_size(); ++peer) {
    auto& mailbox = group_->mailbox(rank_, peer);
    for (auto& offer : mailbox) offer.withdrawn = true;
    while (std::any_of(mailbox.begin(), mailbox.end(),
                       [](const Offer& offer) { return offer.copying; })) {
      group_->wake_[size_t(rank_)].wait(lock);
    }
  }
}

}  // namespace commkern
