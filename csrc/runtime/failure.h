// What a peer did: the one exception that transports and header checks throw. Mistakes
// of the caller are std::invalid_argument.
#pragma once

#include <array>
#include <cstdint>
#include <exception>
#include <string>
#include <utility>

#include "core/wire.h"

namespace commkern {

using PreambleBytes = std::array<uint8_t, sizeof(wire::Preamble)>;

enum class FailureKind {
  kMismatch,  // `peer` sent `received` where `observer` expected `expected`
  kLost,      // `peer` did not come before the time-out
  kFailed,    // `peer` stopped with an error of its own
  kCorrupt,   // `peer` sent a message that is not what the plan says
};

struct Failure final : std::exception {
  Failure(FailureKind kind, int32_t peer, int32_t observer, std::string text)
      : kind(kind), peer(peer), observer(observer), text(std::move(text)) {}
  const char* what() const noexcept override { return text.c_str(); }

  FailureKind kind;
  int32_t peer;
  int32_t observer;  // the rank that saw it; a third rank may be told of it
  std::string text;
  PreambleBytes received{};
  PreambleBytes expected{};
};

}  // namespace commkern
