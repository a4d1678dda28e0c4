#include "transport/cipher.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "base/digest.h"

namespace interlace {

namespace {

// OpenSSL's functions that are used, as it has declared them since 1.1.0 (openssl/evp.h); its types stay unknown here.
struct Crypto {
  void* (*EVP_CIPHER_CTX_new)() = nullptr;
  void (*EVP_CIPHER_CTX_free)(void* context) = nullptr;
  const void* (*EVP_aes_256_gcm)() = nullptr;
  int (*EVP_CipherInit_ex)(void* context, const void* cipher, void* engine, const unsigned char* key,
                           const unsigned char* nonce, int encrypts) = nullptr;
  int (*EVP_CipherUpdate)(void* context, unsigned char* to, int* to_bytes, const unsigned char* from,
                          int from_bytes) = nullptr;
  int (*EVP_CipherFinal_ex)(void* context, unsigned char* to, int* to_bytes) = nullptr;
  int (*EVP_CIPHER_CTX_ctrl)(void* context, int what, int bytes, void* data) = nullptr;
};
constexpr int kGetTag = 0x10, kSetTag = 0x11;  // EVP_CTRL_AEAD_*

Result<Crypto> LoadCrypto(const std::vector<std::string>& names) {
  for (const std::string& name : names) {
    void* const library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) continue;
    Crypto crypto;
    bool all = true;
    const auto find = [&](auto& function, const char* symbol) {
      function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, symbol));
      all = all && function != nullptr;
    };
    find(crypto.EVP_CIPHER_CTX_new, "EVP_CIPHER_CTX_new");
    find(crypto.EVP_CIPHER_CTX_free, "EVP_CIPHER_CTX_free");
    find(crypto.EVP_aes_256_gcm, "EVP_aes_256_gcm");
    find(crypto.EVP_CipherInit_ex, "EVP_CipherInit_ex");
    find(crypto.EVP_CipherUpdate, "EVP_CipherUpdate");
    find(crypto.EVP_CipherFinal_ex, "EVP_CipherFinal_ex");
    find(crypto.EVP_CIPHER_CTX_ctrl, "EVP_CIPHER_CTX_ctrl");
    if (all) return crypto;
    dlclose(library);
  }
  std::string looked;
  for (const std::string& name : names) looked += (looked.empty() ? "" : ", ") + name;
  return MakeError("encryption needs OpenSSL's libcrypto, and none is here (looked for ", looked,
                   "); install OpenSSL, for example: apt-get install libssl3, dnf install openssl-libs; or leave "
                   "INTERLACE_ENCRYPT out");
}

const Result<Crypto>& FoundCrypto() {
  static const Result<Crypto> found = LoadCrypto({"libcrypto.so.3", "libcrypto.so.1.1", "libcrypto.so"});
  return found;
}

const unsigned char* BytesAt(const void* data) { return static_cast<const unsigned char*>(data); }

}  // namespace

Status FindCrypto(const std::vector<std::string>& names) {
  INTERLACE_TRY(names.empty() ? FoundCrypto() : LoadCrypto(names));
  return Ok{};
}

Cipher::Cipher(std::string key, bool encrypts)
    : key_(std::move(key)), encrypts_(encrypts), context_(FoundCrypto()->EVP_CIPHER_CTX_new()) {
  CHECK(key_.size() == kKeyBytes && context_ != nullptr);
  CHECK(FoundCrypto()->EVP_CipherInit_ex(context_, FoundCrypto()->EVP_aes_256_gcm(), nullptr, nullptr, nullptr,
                                         encrypts_ ? 1 : 0) == 1);
}

Cipher::~Cipher() { FoundCrypto()->EVP_CIPHER_CTX_free(context_); }

void Cipher::BeginWith(const std::string& key, const std::array<unsigned char, kNonceBytes>& nonce) {
  const unsigned char* const changed = key.empty() ? nullptr : BytesAt(key.data());
  CHECK(FoundCrypto()->EVP_CipherInit_ex(context_, nullptr, nullptr, changed, nonce.data(), encrypts_ ? 1 : 0) == 1);
}

void Cipher::Begin(uint64_t number) {
  std::array<unsigned char, kNonceBytes> nonce = {};
  std::memcpy(nonce.data(), &number, sizeof number);
  std::string key;  // the one that is set, unless another's frames begin
  if (const uint64_t first = number / kFramesOfKey * kFramesOfKey; first != first_) {
    key = Hmac(key_, "frames from " + std::to_string(first));
    first_ = first;
  }
  BeginWith(key, nonce);
}

void Cipher::Apply(const void* from, void* to, size_t size) {
  constexpr size_t kAtOnce = 1 << 30;
  for (size_t at = 0; at < size; at += kAtOnce) {
    int done = 0;
    CHECK(FoundCrypto()->EVP_CipherUpdate(context_, static_cast<unsigned char*>(to) + at, &done, BytesAt(from) + at,
                                          static_cast<int>(std::min(kAtOnce, size - at))) == 1);
  }
}

FrameTag Cipher::Tag() {
  FrameTag tag = {};
  int none = 0;
  CHECK(FoundCrypto()->EVP_CipherFinal_ex(context_, nullptr, &none) == 1);
  CHECK(FoundCrypto()->EVP_CIPHER_CTX_ctrl(context_, kGetTag, sizeof tag, tag.data()) == 1);
  return tag;
}

bool Cipher::Verify(const FrameTag& tag) {
  FrameTag given = tag;
  int none = 0;
  CHECK(FoundCrypto()->EVP_CIPHER_CTX_ctrl(context_, kSetTag, sizeof given, given.data()) == 1);
  return FoundCrypto()->EVP_CipherFinal_ex(context_, nullptr, &none) == 1;
}

}  // namespace interlace
