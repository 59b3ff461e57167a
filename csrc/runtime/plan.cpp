#include "runtime/plan.h"

#include <algorithm>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "core/check.h"
#include "runtime/kernel_call.h"

namespace commkern {
namespace {

int32_t find(const std::vector<std::string>& names, std::string_view name) {
  const auto at = std::find(names.begin(), names.end(), name);
  return at == names.end() ? -1 : int32_t(at - names.begin());
}

void check_group(const Plan& plan) {
  if (plan.world_size < 1 || plan.rank < 0 || plan.rank >= plan.world_size) {
    fail("rank: expected 0 ... ", plan.world_size - 1, ", got ", plan.rank);
  }
  if (plan.preamble.magic != wire::kPreambleMagic) {
    fail("preamble template's magic: expected ", wire::kPreambleMagic, ", got ",
         plan.preamble.magic);
  }
}

void check_peer(const Plan& plan, int32_t peer) {
  if (peer < 0 || peer >= plan.world_size || peer == plan.rank) {
    fail("peer: expected one of 0 ... ", plan.world_size - 1, " but ", plan.rank,
         ", got ", peer);
  }
}

void check_transfers(const Plan& plan, const std::vector<Transfer>& transfers,
                     PlanNames& names) {
  std::vector<bool> seen(size_t(plan.world_size), false);
  for (const auto& [peer, pieces] : transfers) {
    check_peer(plan, peer);
    for (const Slice& piece : pieces) names.use(piece);
    if (seen[size_t(peer)])
      fail("peer: expected one transfer each way, got two: ", peer);
    seen[size_t(peer)] = true;
  }
}

// Every round: posted once, then completed once.
class RoundOrder {
 public:
  explicit RoundOrder(size_t rounds) : state_(rounds, 0) {}

  void advance(int32_t round, int from) {
    if (round < 0 || size_t(round) >= state_.size()) {
      fail("round: expected 0 ... ", int64_t(state_.size()) - 1, ", got ", round);
    }
    if (state_[size_t(round)] != from) out_of_order(size_t(round));
    ++state_[size_t(round)];
  }

  void require_all_completed() const {
    for (size_t round = 0; round < state_.size(); ++round) {
      if (state_[round] != 2) out_of_order(round);
    }
  }

 private:
  [[noreturn]] static void out_of_order(size_t round) {
    fail("round ", round, ": expected one post and then one complete");
  }

  std::vector<int> state_;
};

void check_header(const HeaderPlace& place) {
  const auto& [message, header, touched, nonfinite] = place;
  if (uint64_t(message.nbytes) < header.held_nbytes()) {
    fail("message: expected a slice of at least ", header.held_nbytes(), " bytes, got ",
         message.nbytes);
  }
  if (touched.nbytes < header.parameter_count()) {
    fail("touched: expected at least ", header.parameter_count(), " bytes, got ",
         touched.nbytes);
  }
  if (nonfinite && nonfinite->nbytes < 1) {
    fail("nonfinite: expected at least 1 byte, got ", nonfinite->nbytes);
  }
}

// Turns the specification's steps into runnable ones, checking each.
class StepCompiler {
 public:
  StepCompiler(const Plan& plan, PlanNames& names)
      : plan_(plan), names_(names), order_(plan.rounds.size()) {}

  Step operator()(KernelSpec&& kernel) { return make_kernel_call(kernel, names_); }

  Step operator()(WriteHeader&& write) {
    use_header(write);
    return std::move(write);
  }

  Step operator()(ReadHeader&& read) {
    use_header(read);
    check_peer(plan_, read.sender);
    return std::move(read);
  }

  Step operator()(Post&& post) {
    order_.advance(post.round, 0);
    return post;
  }

  Step operator()(Complete&& complete) {
    order_.advance(complete.round, 1);
    return complete;
  }

  Step operator()(Begin&& begin) {
    if (begin.purpose < 0 || size_t(begin.purpose) >= kPurposes.size()) {
      fail("purpose: expected 0 ... ", kPurposes.size() - 1, ", got ", begin.purpose);
    }
    return begin;
  }

  void require_all_completed() const { order_.require_all_completed(); }

 private:
  void use_header(const HeaderPlace& place) {
    names_.use(place.message);
    names_.use(place.touched);
    if (place.nonfinite) names_.use(*place.nonfinite);
    check_header(place);
    if (plan_.step_register < 0) fail("headers: expected a register called step");
  }

  const Plan& plan_;
  PlanNames& names_;
  RoundOrder order_;
};

Slice preamble_buffer(const Plan& plan, std::string_view name, PlanNames& names) {
  const Slice slice{find(plan.buffers, name), 0,
                    plan.preamble_offset(int32_t(plan.rounds.size()), 0)};
  if (slice.buffer < 0) fail("exchanges: expected a buffer called ", name);
  return names.use(slice);
}

void compile_rounds(Plan& plan, PlanNames& names) {
  if (plan.rounds.empty()) return;
  for (const auto& round : plan.rounds) {
    check_transfers(plan, round.sends, names);
    check_transfers(plan, round.receives, names);
  }
  if (plan.step_register < 0) fail("exchanges: expected a register called step");
  plan.preambles_out = preamble_buffer(plan, "preambles_out", names);
  plan.preambles_in = preamble_buffer(plan, "preambles_in", names);
  plan.preambles_expected = preamble_buffer(plan, "preambles_expected", names);
}

}  // namespace

Plan compile(PlanSpec spec) {
  Plan plan;
  plan.buffers = std::move(spec.buffers);
  plan.registers = std::move(spec.registers);
  plan.rank = spec.rank;
  plan.world_size = spec.world_size;
  plan.preamble = spec.preamble;
  plan.rounds = std::move(spec.rounds);
  check_group(plan);
  plan.step_register = find(plan.registers, "step");
  PlanNames names(plan.buffers, plan.registers);
  compile_rounds(plan, names);
  StepCompiler compiler(plan, names);
  for (auto& step : spec.steps) {
    try {
      plan.steps.push_back(
          std::visit([&](auto& kind) { return compiler(std::move(kind)); }, step));
    } catch (const std::invalid_argument& error) {
      fail("step ", plan.steps.size(), ": ", error.what());
    }
  }
  compiler.require_all_completed();
  plan.required_nbytes = names.required_nbytes();
  return plan;
}

}  // namespace commkern
