// CRC-32C (Castagnoli, reflected, initial and final value 0xffffffff), as iSCSI has it:
// "123456789" gives 0xe3069283.
#pragma once

#include <cstddef>
#include <cstdint>

namespace commkern {

// `value` is the checksum of what came before, 0 at the start.
uint32_t crc32c(const void* data, size_t nbytes, uint32_t value = 0);

// The table form that `crc32c` uses where the CPU has no instruction for it.
uint32_t crc32c_portable(const void* data, size_t nbytes, uint32_t value = 0);

}  // namespace commkern
