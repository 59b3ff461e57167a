#include "runtime/runner.h"

#include <chrono>
#include <stdexcept>
#include <utility>

#include "core/check.h"

namespace commkern {
namespace {

using Clock = std::chrono::steady_clock;

int64_t ns_between(Clock::time_point begin, Clock::time_point end) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(end - begin).count();
}

template <class... Ts>
struct Overloaded : Ts... {
  using Ts::operator()...;
};

ConstBytes read_only(const MutableBytes& bytes) { return {bytes.data, bytes.nbytes}; }

HeaderMarks<MutableBytes> marks(const Frame& frame, const HeaderPlace& place) {
  return {frame.at(place.touched),
          place.nonfinite ? frame.at(*place.nonfinite) : MutableBytes{}};
}

}  // namespace

Runner::Runner(Plan plan)
    : plan_(std::move(plan)),
      rounds_(plan_.rounds.size()),
      sizes_(plan_.buffers.size(), -1) {}

Timing Runner::run(std::span<const MutableBytes> buffers,
                   std::span<const uint64_t> registers, Transport& transport,
                   const KernelTable& table) {
  const std::unique_lock running(running_, std::try_to_lock);
  if (!running) fail("plan: expected one run at a time, got a second one");
  try {
    const Frame frame{buffers, registers};
    check_arguments(frame);
    bind(frame);
    check_kernels(frame, table);
    write_preambles();
    return execute(frame, transport, table);
  } catch (const std::exception& error) {
    transport.abort(error.what());
    throw;
  }
}

void Runner::check_arguments(const Frame& frame) const {
  if (frame.buffers.size() != plan_.buffers.size()) {
    fail("buffers: expected ", plan_.buffers.size(), ", got ", frame.buffers.size());
  }
  if (frame.registers.size() != plan_.registers.size()) {
    fail("registers: expected ", plan_.registers.size(), ", got ",
         frame.registers.size());
  }
  for (size_t i = 0; i < frame.buffers.size(); ++i) {
    const auto& buffer = frame.buffers[i];
    const int64_t held = buffer ? buffer.nbytes : 0;
    if (held < plan_.required_nbytes[i]) {
      fail("buffer ", plan_.buffers[i], ": expected at least ",
           plan_.required_nbytes[i], " bytes, got ", held);
    }
  }
}

void Runner::bind(const Frame& frame) {
  if (plan_.step_register >= 0) step_ = frame.registers[size_t(plan_.step_register)];
  for (auto& step : plan_.steps) {
    if (auto* call = std::get_if<KernelPointer>(&step)) (*call)->bind(frame);
  }
  for (size_t i = 0; i < rounds_.size(); ++i) bind_round(frame, int32_t(i));
}

void Runner::bind_round(const Frame& frame, int32_t number) {
  const auto& round = plan_.rounds[size_t(number)];
  auto& bound = rounds_[size_t(number)];
  const auto preamble = [&](Slice all, int32_t peer) {
    all.offset += plan_.preamble_offset(number, peer);
    return frame.at(all).data;
  };
  // All pieces first: spans of them hold once the vectors stop growing.
  bound.sent.clear();
  bound.received.clear();
  for (const auto& [peer, pieces] : round.sends) {
    for (const Slice& piece : pieces) bound.sent.push_back(read_only(frame.at(piece)));
  }
  for (const auto& [peer, pieces] : round.receives) {
    for (const Slice& piece : pieces) bound.received.push_back(frame.at(piece));
  }
  bound.sends.clear();
  bound.receives.clear();
  const ConstBytes* sent = bound.sent.data();
  for (const auto& [peer, pieces] : round.sends) {
    bound.sends.push_back(
        {peer, preamble(plan_.preambles_out, peer), {sent, pieces.size()}});
    sent += pieces.size();
  }
  const MutableBytes* received = bound.received.data();
  for (const auto& [peer, pieces] : round.receives) {
    bound.receives.push_back({peer,
                              preamble(plan_.preambles_expected, peer),
                              preamble(plan_.preambles_in, peer),
                              {received, pieces.size()}});
    received += pieces.size();
  }
}

// The checks look at sizes and at whether there is a buffer at all, so they hold for
// all runs that agree in those.
void Runner::check_kernels(const Frame& frame, const KernelTable& table) {
  bool known = checked_table_ == &table;
  for (size_t i = 0; i < frame.buffers.size(); ++i) {
    const auto& buffer = frame.buffers[i];
    const int64_t size = buffer ? buffer.nbytes : -1;
    known = known && sizes_[i] == size;
    sizes_[i] = size;
  }
  if (known) return;
  checked_table_ = nullptr;
  for (size_t i = 0; i < plan_.steps.size(); ++i) {
    const auto* call = std::get_if<KernelPointer>(&plan_.steps[i]);
    if (!call) continue;
    try {
      (*call)->check(table);
    } catch (const std::invalid_argument& error) {
      fail("step ", i, " (", (*call)->name(), "): ", error.what());
    }
  }
  checked_table_ = &table;
}

void Runner::write_preambles() {
  for (size_t i = 0; i < rounds_.size(); ++i) {
    PreambleFields fields{.world_size = plan_.world_size, .step = step_};
    fields.round = int32_t(i);
    for (const Send& send : rounds_[i].sends) {
      fields.sender = plan_.rank;
      fields.body_nbytes = total_nbytes(send.body);
      write_preamble(plan_.preamble, fields, send.preamble);
    }
    for (const Receive& receive : rounds_[i].receives) {
      fields.sender = receive.peer;
      fields.body_nbytes = total_nbytes(receive.body);
      write_preamble(plan_.preamble, fields, receive.expected);
    }
  }
}

Timing Runner::execute(const Frame& frame, Transport& transport,
                       const KernelTable& table) {
  Timing timing;
  int64_t* account = &timing.purpose_ns[0];
  auto begin = Clock::now();
  const auto lap = [&begin](int64_t& total) {
    const auto now = Clock::now();
    total += ns_between(std::exchange(begin, now), now);
  };
  const Overloaded execute_step{
      [&](const KernelPointer& call) { call->run(table); },
      [&](const WriteHeader& write) {
        const auto [touched, nonfinite] = marks(frame, write);
        write.header.write(frame.at(write.message), step_,
                           {read_only(touched), read_only(nonfinite)});
      },
      [&](const ReadHeader& read) {
        read.header.read(read_only(frame.at(read.message)), step_, marks(frame, read),
                         read.sender, plan_.rank);
      },
      [&](const Post& post) {
        lap(*account);
        transport.post(exchange(post.round));
        lap(timing.exchange_ns);
      },
      [&](const Complete& complete) {
        lap(*account);
        transport.complete(exchange(complete.round));
        lap(timing.exchange_ns);
      },
      [&](const Begin& next) {
        lap(*account);
        account = &timing.purpose_ns[size_t(next.purpose)];
      },
  };
  for (const auto& step : plan_.steps) std::visit(execute_step, step);
  lap(*account);
  return timing;
}

Exchange Runner::exchange(int32_t round) const {
  const auto& bound = rounds_[size_t(round)];
  return {round, bound.sends, bound.receives};
}

}  // namespace commkern
