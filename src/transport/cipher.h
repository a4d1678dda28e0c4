// cipher.h — AES-256-GCM of the frames that go one way on one connection, by the platform's libcrypto. That is opened
// when it is asked for, so that nothing links to it and machines without it run everything else.
//
// A frame is one GCM message. Header and bytes are encrypted, and the tag takes the place of the checksum behind them
// (frame_sum.h): a frame that was changed, repeated, left out or put elsewhere is an error. The nonce is the frame's
// number, which a connection uses once; every kFramesOfKey frames have a key of their own, made of the connection's, so
// that no key encrypts more than it should however long a run is. Source: NIST SP 800-38D.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/result.h"
#include "transport/frame_sum.h"

namespace interlace {

// Looks for the first of these libraries, or for the platform's. Error: none is here; says what to install.
Status FindCrypto(const std::vector<std::string>& names = {});

class Cipher {
 public:
  static constexpr uint64_t kFramesOfKey = 1 << 16;
  static constexpr uint64_t kMostBytes = uint64_t{63} << 30;  // of a message: GCM's counter ends at 64 GiB
  static constexpr size_t kKeyBytes = 32, kNonceBytes = 12;

  // `key`: of the connection and the direction, 32 bytes. FindCrypto must have succeeded.
  Cipher(std::string key, bool encrypts);
  Cipher(const Cipher&) = delete;
  ~Cipher();

  void Begin(uint64_t number);
  // `size` bytes that follow on the message's last; `to` may be `from`. What is decrypted counts only after Verify.
  void Apply(const void* from, void* to, size_t size);
  FrameTag Tag();                    // of what was encrypted
  bool Verify(const FrameTag& tag);  // what was decrypted is what was encrypted, and the message has this number

  // A message with this very key and nonce, for the vectors of the standard.
  void BeginWith(const std::string& key, const std::array<unsigned char, kNonceBytes>& nonce);

 private:
  const std::string key_;
  const bool encrypts_;
  uint64_t first_ = 1;  // frame of the key that is set; not a multiple of kFramesOfKey: none is
  void* context_;       // libcrypto's
};

}  // namespace interlace
