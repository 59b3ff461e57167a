// A compiled plan: what one rank does for one bucket layout, as data. Buffers and
// registers are named here and given at each run.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "core/types.h"
#include "core/wire.h"
#include "runtime/message_header.h"

namespace commkern {

class KernelCall;

struct Slice {
  int32_t buffer = 0;
  int64_t offset = 0;
  int64_t nbytes = 0;
};

struct Register {
  int32_t index = 0;
};

struct ResidualSlices {
  Slice version[2];
  std::optional<Slice> committed;
};

// What a plan says of one field of a kernel's Args. monostate is "none".
using FieldValue =
    std::variant<std::monostate, uint64_t, double, std::string, std::vector<Span>,
                 Slice, Register, ResidualSlices, std::vector<Slice>>;

struct KernelSpec {
  std::string name;
  std::vector<std::pair<std::string, FieldValue>> fields;  // others keep their default
};

// One message in pieces that follow each other on the wire.
struct Transfer {
  int32_t peer = 0;
  std::vector<Slice> pieces;
};

struct Round {
  std::vector<Transfer> sends;
  std::vector<Transfer> receives;
};

// Where a header is, and where what it says besides the template. Without `nonfinite`
// the message's flag is the template's.
struct HeaderPlace {
  Slice message;
  HeaderTemplate header;
  Slice touched;
  std::optional<Slice> nonfinite;
};

struct WriteHeader : HeaderPlace {};

struct ReadHeader : HeaderPlace {
  int32_t sender = 0;
};

struct Post {
  int32_t round = 0;
};

struct Complete {
  int32_t round = 0;
};

// What time is accounted to; exchanges have an account of their own.
inline constexpr std::array<std::string_view, 4> kPurposes = {"other", "compress",
                                                              "reduce", "decompress"};

// The kernel and header steps from here on are for this.
struct Begin {
  int32_t purpose = 0;
};

using StepSpec =
    std::variant<KernelSpec, WriteHeader, ReadHeader, Post, Complete, Begin>;

struct PlanSpec {
  std::vector<std::string> buffers;
  std::vector<std::string> registers;
  int32_t rank = 0;
  int32_t world_size = 1;
  wire::Preamble preamble{};  // the template: version and hashes
  std::vector<Round> rounds;
  std::vector<StepSpec> steps;
};

using Step = std::variant<std::unique_ptr<KernelCall>, WriteHeader, ReadHeader, Post,
                          Complete, Begin>;

struct Plan {
  std::vector<std::string> buffers;
  std::vector<std::string> registers;
  int32_t rank = 0;
  int32_t world_size = 1;
  wire::Preamble preamble{};
  std::vector<Round> rounds;
  std::vector<Step> steps;

  std::vector<int64_t> required_nbytes;  // of each buffer
  int32_t step_register = -1;
  Slice preambles_out, preambles_in, preambles_expected;

  // Bytes before the preamble of one round and peer in the three buffers of preambles.
  int64_t preamble_offset(int32_t round, int32_t peer) const {
    return (int64_t{round} * world_size + peer) * int64_t{sizeof(wire::Preamble)};
  }
};

// Throws std::invalid_argument for anything a run could stumble over: unknown kernels,
// fields, buffers and registers, peers outside the group, rounds not posted and
// completed exactly once. Messages name the step and both values.
Plan compile(PlanSpec spec);

}  // namespace commkern
