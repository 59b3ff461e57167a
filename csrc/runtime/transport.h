// How bytes move between ranks. The runner knows only this.
#pragma once

#include <cstdint>
#include <span>

#include "core/types.h"

namespace commkern {

// `preamble` and `expected` point to 64 bytes (core/wire.h), filled in by the runner. A
// body is one message in pieces, cut at the same places at both ends. It may be empty;
// its preamble travels all the same.
struct Send {
  int32_t peer = 0;
  uint8_t* preamble = nullptr;
  std::span<const ConstBytes> body;
};

struct Receive {
  int32_t peer = 0;
  uint8_t* expected = nullptr;
  uint8_t* preamble = nullptr;  // where the received one is kept
  std::span<const MutableBytes> body;
};

template <class Bytes>
int64_t total_nbytes(std::span<const Bytes> pieces) {
  int64_t nbytes = 0;
  for (const Bytes& piece : pieces) nbytes += piece.nbytes;
  return nbytes;
}

// One round of one rank: at most one send and one receive a peer.
struct Exchange {
  int32_t round = 0;
  std::span<const Send> sends;
  std::span<const Receive> receives;
};

// Every round is posted once and then completed once, in the order of the plan. What an
// exchange points to stays valid and unchanged from post until complete returns, or
// until abort returns.
class Transport {
 public:
  virtual ~Transport() = default;

  // Hands over what this rank sends. Does not wait for peers.
  virtual void post(const Exchange& exchange) = 0;

  // Returns when every receive holds its body and every send may be overwritten. A body
  // whose preamble is not the expected one is never copied. Throws Failure.
  virtual void complete(const Exchange& exchange) = 0;

  // This rank stops for `reason`: peers learn it at once instead of waiting.
  virtual void abort(const char* reason) noexcept = 0;
};

}  // namespace commkern
