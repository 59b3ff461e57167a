#include "runtime/message_header.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "core/check.h"
#include "core/crc32c.h"
#include "runtime/failure.h"

namespace commkern {
namespace {

using std::to_string;

template <class T>
T load(const uint8_t* bytes) {
  T value;
  std::memcpy(&value, bytes, sizeof(T));
  return value;
}

// Empty where both are equal.
std::string difference(const char* field, uint64_t expected, uint64_t received) {
  if (expected == received) return {};
  return std::string(field) + ": expected " + to_string(expected) + ", got " +
         to_string(received);
}

std::string header_difference(const wire::MessageHeader& expected,
                              const wire::MessageHeader& received) {
  std::string text;
  const auto compare = [&](const char* field, uint64_t mine, uint64_t theirs) {
    if (text.empty()) text = difference(field, mine, theirs);
  };
  compare("magic", expected.magic, received.magic);
  compare("version", expected.version, received.version);
  compare("flags", expected.flags, received.flags);
  compare("sections", expected.section_count, received.section_count);
  compare("parameters", expected.parameter_count, received.parameter_count);
  compare("step", expected.step, received.step);
  compare("message size", expected.message_nbytes, received.message_nbytes);
  return text;
}

std::string bytes_difference(const char* what, const uint8_t* expected,
                             const uint8_t* received, uint64_t begin, uint64_t end) {
  for (uint64_t i = begin; i < end; ++i) {
    if (expected[i] == received[i]) continue;
    const auto where = "byte " + to_string(i) + " (" + what + ")";
    return difference(where.c_str(), expected[i], received[i]);
  }
  return {};
}

// Bits behind the last parameter are zero, as pack_header writes them.
std::string padding_difference(const uint8_t* bits, uint64_t count, uint64_t nbytes) {
  for (uint64_t bit = count; bit < 8 * nbytes; ++bit) {
    if (bits[bit / 8] >> (bit % 8) & 1) {
      return "padding of the parameter bits: expected 0, got 1 in bit " +
             to_string(bit);
    }
  }
  return {};
}

uint32_t crc_of(const uint8_t* message, uint64_t message_nbytes) {
  return crc32c(message, message_nbytes - sizeof(uint32_t));
}

}  // namespace

HeaderTemplate::HeaderTemplate(std::vector<uint8_t> bytes) : bytes_(std::move(bytes)) {
  if (bytes_.size() < sizeof(wire::MessageHeader)) {
    fail("header template: expected at least ", sizeof(wire::MessageHeader),
         " bytes, got ", bytes_.size());
  }
  const auto expect = [](const char* field, uint64_t expected, uint64_t got) {
    const auto text = difference(field, expected, got);
    if (!text.empty()) fail("header template: ", text);
  };
  expect("magic", wire::kMessageMagic, header().magic);
  expect("version", wire::kVersion, header().version);
  const uint64_t trailer = header().flags & wire::kFlagCrc ? sizeof(uint32_t) : 0;
  if (bytes_.size() < bits_end() || bytes_.size() + trailer > header().message_nbytes) {
    fail("header template: expected at least ", bits_end(),
         " bytes and at most its message size of ", header().message_nbytes, ", got ",
         bytes_.size());
  }
}

wire::MessageHeader HeaderTemplate::header() const {
  return load<wire::MessageHeader>(bytes_.data());
}

void HeaderTemplate::write(MutableBytes message, uint64_t step,
                           const HeaderMarks<ConstBytes>& marks) const {
  const auto& [touched, nonfinite] = marks;
  std::memcpy(message.data, bytes_.data(), bytes_.size());
  std::memcpy(message.data + offsetof(wire::MessageHeader, step), &step, sizeof(step));
  const auto is_set = [](uint8_t byte) { return byte != 0; };
  if (std::any_of(nonfinite.data, nonfinite.data + nonfinite.nbytes, is_set)) {
    const uint16_t flags = header().flags | wire::kFlagNonFinite;
    std::memcpy(message.data + offsetof(wire::MessageHeader, flags), &flags,
                sizeof(flags));
  }
  uint8_t* bits = message.data + bits_begin();
  std::memset(bits, 0, bits_end() - bits_begin());
  for (int64_t p = 0; p < parameter_count(); ++p) {
    bits[p / 8] |= uint8_t((touched.data[p] != 0) << (p % 8));
  }
  if (header().flags & wire::kFlagCrc) {
    const uint32_t crc = crc_of(message.data, held_nbytes());
    std::memcpy(message.data + held_nbytes() - sizeof(crc), &crc, sizeof(crc));
  }
}

void HeaderTemplate::read(ConstBytes message, uint64_t step,
                          const HeaderMarks<MutableBytes>& marks, int32_t sender,
                          int32_t rank) const {
  const auto& [touched, nonfinite] = marks;
  const uint16_t open_flags = nonfinite.nbytes > 0 ? wire::kFlagNonFinite : 0;
  const std::string text = difference_from(message.data, step, open_flags);
  if (!text.empty()) {
    throw Failure(FailureKind::kCorrupt, sender, rank,
                  "message from rank " + to_string(sender) + ": " + text);
  }
  const uint8_t* bits = message.data + bits_begin();
  for (int64_t p = 0; p < parameter_count(); ++p) {
    touched.data[p] |= bits[p / 8] >> (p % 8) & 1;
  }
  if (load<wire::MessageHeader>(message.data).flags & open_flags) nonfinite.data[0] = 1;
}

std::string HeaderTemplate::difference_from(const uint8_t* received, uint64_t step,
                                            uint16_t open_flags) const {
  auto expected = header();
  expected.step = step;
  const auto got = load<wire::MessageHeader>(received);
  expected.flags |= got.flags & open_flags;
  std::string text = header_difference(expected, got);
  if (!text.empty()) return text;
  text = bytes_difference("section table", bytes_.data(), received,
                          sizeof(wire::MessageHeader), bits_begin());
  if (!text.empty()) return text;
  text = padding_difference(received + bits_begin(), expected.parameter_count,
                            bits_end() - bits_begin());
  if (!text.empty()) return text;
  text = bytes_difference("descriptor", bytes_.data(), received, bits_end(),
                          bytes_.size());
  if (!text.empty() || !(expected.flags & wire::kFlagCrc)) return text;
  return difference("CRC-32C", crc_of(received, held_nbytes()),
                    load<uint32_t>(received + held_nbytes() - sizeof(uint32_t)));
}

void write_preamble(wire::Preamble preamble, const PreambleFields& fields,
                    uint8_t* destination) {
  preamble.sender = uint32_t(fields.sender);
  preamble.world_size = uint32_t(fields.world_size);
  preamble.step = fields.step;
  preamble.body_nbytes = uint64_t(fields.body_nbytes);
  preamble.round = uint32_t(fields.round);
  preamble.crc = crc32c(&preamble, offsetof(wire::Preamble, crc));
  std::memcpy(destination, &preamble, sizeof(preamble));
}

}  // namespace commkern
