// Headers of messages and preambles: filled in from templates before they are sent,
// compared with the same templates when they arrive.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/types.h"
#include "core/wire.h"

namespace commkern {

// What a header says of its message besides the template. `touched` holds one byte per
// parameter, non-zero for a set bit. Any byte of `nonfinite` that is not zero sets the
// message's flag; without these bytes the flag is the template's.
template <class Bytes>
struct HeaderMarks {
  Bytes touched;
  Bytes nonfinite;
};

// All that precedes the bodies of one message, with step and parameter bits left open,
// and the non-finite flag where there are bytes for it.
class HeaderTemplate {
 public:
  // Throws std::invalid_argument unless `bytes` is a header with its section table and
  // parameter bits.
  explicit HeaderTemplate(std::vector<uint8_t> bytes);

  // What `write` and `read` need of a message: all of it for its CRC, else what
  // precedes the bodies, which may lie elsewhere.
  uint64_t held_nbytes() const {
    return header().flags & wire::kFlagCrc ? header().message_nbytes : bytes_.size();
  }
  int64_t parameter_count() const { return header().parameter_count; }

  // The bodies must be complete already: a message whose flag asks for it is sealed
  // with its CRC-32C here.
  void write(MutableBytes message, uint64_t step,
             const HeaderMarks<ConstBytes>& marks) const;

  // ORs what was received into `marks` (the flag into the first byte of `nonfinite`).
  // Throws Failure (kCorrupt, naming `sender`) where anything else differs from the
  // template; `rank` is the reader's.
  void read(ConstBytes message, uint64_t step, const HeaderMarks<MutableBytes>& marks,
            int32_t sender, int32_t rank) const;

 private:
  wire::MessageHeader header() const;
  std::string difference_from(const uint8_t* received, uint64_t step,
                              uint16_t open_flags) const;
  uint64_t bits_begin() const { return wire::bits_offset(header().section_count); }
  uint64_t bits_end() const {
    return bits_begin() + wire::bits_nbytes(header().parameter_count);
  }

  std::vector<uint8_t> bytes_;
};

// What one rank says of one round's body to one peer, besides the template's hashes.
struct PreambleFields {
  int32_t sender = 0;
  int32_t world_size = 0;
  uint64_t step = 0;
  int64_t body_nbytes = 0;
  int32_t round = 0;
};

void write_preamble(wire::Preamble preamble, const PreambleFields& fields,
                    uint8_t* destination);

}  // namespace commkern
