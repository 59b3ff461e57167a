// The wire format as packed structures. docs/wire-format.md specifies every byte;
// commkern.wire is its Python form. Little-endian hosts only.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

namespace commkern::wire {

static_assert(std::endian::native == std::endian::little);

inline constexpr uint16_t kVersion = 1;
inline constexpr uint32_t kPreambleMagic = 0x52504b43;  // "CKPR"
inline constexpr uint32_t kMessageMagic = 0x534d4b43;   // "CKMS"
inline constexpr uint32_t kPreambleTag = 0x434b0000;
inline constexpr uint32_t kBodyTagBase = 0x44000000;
inline constexpr uint32_t kBodyTagMask = 0x00ffffff;

inline constexpr uint16_t kKindData = 0;
inline constexpr uint16_t kKindError = 1;

inline constexpr uint16_t kFlagCrc = 1;         // last 4 bytes: CRC-32C of the rest
inline constexpr uint16_t kFlagDescriptor = 2;  // one tensor: dtype, shape, compressor
inline constexpr uint16_t kFlagNonFinite = 4;   // every parameter becomes NaN
inline constexpr uint16_t kFlagsKnown = 7;

inline constexpr int64_t kAlignment = 8;

#pragma pack(push, 1)

struct Preamble {
  uint32_t magic;
  uint16_t version;
  uint16_t kind;
  uint32_t sender;
  uint32_t world_size;
  uint64_t step;
  uint64_t body_nbytes;  // in an error preamble: whom it blames (0: the sender)
  uint32_t compressor;   // this and the next four: CRC-32C of canonical strings
  uint32_t settings;
  uint32_t names;
  uint32_t shapes;
  uint32_t dtypes;
  uint32_t round;
  uint32_t reserved;
  uint32_t crc;  // CRC-32C of the 60 bytes before it
};
static_assert(offsetof(Preamble, magic) == 0);
static_assert(offsetof(Preamble, version) == 4);
static_assert(offsetof(Preamble, kind) == 6);
static_assert(offsetof(Preamble, sender) == 8);
static_assert(offsetof(Preamble, world_size) == 12);
static_assert(offsetof(Preamble, step) == 16);
static_assert(offsetof(Preamble, body_nbytes) == 24);
static_assert(offsetof(Preamble, compressor) == 32);
static_assert(offsetof(Preamble, settings) == 36);
static_assert(offsetof(Preamble, names) == 40);
static_assert(offsetof(Preamble, shapes) == 44);
static_assert(offsetof(Preamble, dtypes) == 48);
static_assert(offsetof(Preamble, round) == 52);
static_assert(offsetof(Preamble, reserved) == 56);
static_assert(offsetof(Preamble, crc) == 60);
static_assert(sizeof(Preamble) == 64);

struct MessageHeader {
  uint32_t magic;
  uint16_t version;
  uint16_t flags;
  uint32_t section_count;
  uint32_t parameter_count;
  uint64_t step;
  uint64_t message_nbytes;  // everything, a trailing CRC included
};
static_assert(offsetof(MessageHeader, magic) == 0);
static_assert(offsetof(MessageHeader, version) == 4);
static_assert(offsetof(MessageHeader, flags) == 6);
static_assert(offsetof(MessageHeader, section_count) == 8);
static_assert(offsetof(MessageHeader, parameter_count) == 12);
static_assert(offsetof(MessageHeader, step) == 16);
static_assert(offsetof(MessageHeader, message_nbytes) == 24);
static_assert(sizeof(MessageHeader) == 32);

struct Section {
  uint32_t first_parameter;
  uint32_t parameter_count;
  uint32_t compressor;  // CRC-32C of its canonical string
  uint8_t dtype;
  uint8_t reserved[3];
  uint64_t offset;  // from the start of the message
  uint64_t nbytes;
};
static_assert(offsetof(Section, first_parameter) == 0);
static_assert(offsetof(Section, parameter_count) == 4);
static_assert(offsetof(Section, compressor) == 8);
static_assert(offsetof(Section, dtype) == 12);
static_assert(offsetof(Section, reserved) == 13);
static_assert(offsetof(Section, offset) == 16);
static_assert(offsetof(Section, nbytes) == 24);
static_assert(sizeof(Section) == 32);

// Its dtype may also be 4 (complex64) or 5 (complex128), coded as pairs of reals.
struct Descriptor {  // then ndim x u64, the compressor string, zeros to 8 bytes
  uint8_t dtype;
  uint8_t ndim;
  uint16_t compressor_nbytes;
  uint32_t reserved;
};
static_assert(offsetof(Descriptor, dtype) == 0);
static_assert(offsetof(Descriptor, ndim) == 1);
static_assert(offsetof(Descriptor, compressor_nbytes) == 2);
static_assert(offsetof(Descriptor, reserved) == 4);
static_assert(sizeof(Descriptor) == 8);

#pragma pack(pop)

constexpr uint64_t align(uint64_t nbytes) {
  return (nbytes + kAlignment - 1) / kAlignment * kAlignment;
}

// Where the parameter bits begin and how many bytes they take, padding included.
// Bit p of the field: byte p / 8, bit p % 8 from the least significant.
constexpr uint64_t bits_offset(uint32_t section_count) {
  return sizeof(MessageHeader) + uint64_t{section_count} * sizeof(Section);
}
constexpr uint64_t bits_nbytes(uint32_t parameter_count) {
  return align((uint64_t{parameter_count} + 7) / 8);
}

}  // namespace commkern::wire
