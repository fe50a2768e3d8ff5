// Prefix identity: a chained, keyed 128-bit hash of tokens.
//
// Each block's tokens (and the hash before it) go through NH, the universal hash of UMAC (RFC 4418), in two
// independent passes of 128 bits; SipHash-1-3 with a 128-bit result turns that, keyed, into the next hash. NH
// does the bulk at several bytes a cycle and collides with probability about 2^-64 a pass for a secret key;
// SipHash makes the result unpredictable without the key.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace quickturn::control {

struct Hash128 {
  std::uint64_t lo = 0;
  std::uint64_t hi = 0;
  friend bool operator==(const Hash128&, const Hash128&) = default;
};

class PrefixHasher {
 public:
  PrefixHasher(std::array<std::uint8_t, 16> key, std::int32_t block_tokens, std::string_view model_salt);

  // The hash before the first block: model, adapter and tenant.
  Hash128 root(std::string_view adapter, std::string_view cache_salt) const;

  // The hash after one block; `tokens` has block_tokens entries.
  Hash128 next(const Hash128& before, std::span<const std::int32_t> tokens) const;

  // The hash before a block behind which other content stands, such as an image for its placeholder tokens.
  Hash128 with_content(const Hash128& before, std::uint64_t position, std::uint64_t digest) const;

 private:
  Hash128 sip(std::span<const std::uint64_t> words) const;
  Hash128 text(const Hash128& before, std::string_view text) const;

  std::array<std::uint64_t, 2> key_;
  std::vector<std::uint64_t> nh_key_;
  Hash128 model_;
};

}  // namespace quickturn::control
