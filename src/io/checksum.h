// checksum.h — XXH64, the checksum of everything that is kept in files: 64 bits, about as fast as memory is read.
// It finds torn writes and flipped bits; it is no signature. Source: Y. Collet, xxHash specification 0.1.1, XXH64.
#pragma once

#include <cstddef>
#include <cstdint>

namespace interlace {

uint64_t Checksum(const void* data, size_t size, uint64_t seed = 0);
// Copies and gives Checksum(from, size), in one pass.
uint64_t CopyAndChecksum(void* to, const void* from, size_t size);

}  // namespace interlace
