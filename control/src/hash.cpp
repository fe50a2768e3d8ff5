#include "quickturn/control/hash.hpp"

#include <bit>
#include <cstring>

namespace quickturn::control {

namespace {

using u64 = std::uint64_t;
__extension__ using u128 = unsigned __int128;

struct Sip {
  u64 v0, v1, v2, v3;

  explicit Sip(const std::array<u64, 2>& key)
      : v0(key[0] ^ 0x736f6d6570736575ULL),
        v1(key[1] ^ 0x646f72616e646f6dULL ^ 0xee),
        v2(key[0] ^ 0x6c7967656e657261ULL),
        v3(key[1] ^ 0x7465646279746573ULL) {}

  void round() {
    v0 += v1, v1 = std::rotl(v1, 13) ^ v0, v0 = std::rotl(v0, 32);
    v2 += v3, v3 = std::rotl(v3, 16) ^ v2;
    v0 += v3, v3 = std::rotl(v3, 21) ^ v0;
    v2 += v1, v1 = std::rotl(v1, 17) ^ v2, v2 = std::rotl(v2, 32);
  }
  void absorb(u64 word) {
    v3 ^= word;
    round();
    v0 ^= word;
  }
  Hash128 finish(u64 length) {
    absorb(length);
    v2 ^= 0xee;
    round(), round(), round();
    const u64 lo = v0 ^ v1 ^ v2 ^ v3;
    v1 ^= 0xdd;
    round(), round(), round();
    return {lo, v0 ^ v1 ^ v2 ^ v3};
  }
};

u64 load64(const void* from) {
  u64 word;
  std::memcpy(&word, from, sizeof word);
  return word;
}

}  // namespace

PrefixHasher::PrefixHasher(std::array<std::uint8_t, 16> key, std::int32_t block_tokens,
                           std::string_view model_salt)
    : key_{load64(key.data()), load64(key.data() + 8)} {
  // Words of two tokens, pairs of words, the hash before as one more pair, and one pair more for the second
  // pass (Toeplitz).
  const std::size_t pairs = (static_cast<std::size_t>(block_tokens) + 3) / 4 + 1;
  nh_key_.resize(2 * (pairs + 1));
  for (std::size_t i = 0; i < nh_key_.size(); i += 2) {
    const std::array<u64, 2> counter{0x6e68, i};
    const Hash128 word = sip(counter);
    nh_key_[i] = word.lo;
    nh_key_[i + 1] = word.hi;
  }
  model_ = text({}, model_salt);
}

Hash128 PrefixHasher::sip(std::span<const std::uint64_t> words) const {
  Sip sip(key_);
  for (const u64 word : words) sip.absorb(word);
  return sip.finish(words.size());
}

Hash128 PrefixHasher::text(const Hash128& before, std::string_view text) const {
  Sip sip(key_);
  sip.absorb(before.lo);
  sip.absorb(before.hi);
  for (std::size_t at = 0; at < text.size(); at += 8) {
    u64 word = 0;
    std::memcpy(&word, text.data() + at, std::min<std::size_t>(8, text.size() - at));
    sip.absorb(word);
  }
  return sip.finish(0x100 + text.size());
}

Hash128 PrefixHasher::root(std::string_view adapter, std::string_view cache_salt) const {
  return text(text(model_, adapter), cache_salt);
}

Hash128 PrefixHasher::with_content(const Hash128& before, std::uint64_t position,
                                   std::uint64_t digest) const {
  const std::array<u64, 5> words{before.lo, before.hi, position, digest, 0xc0};
  return sip(words);
}

Hash128 PrefixHasher::next(const Hash128& before, std::span<const std::int32_t> tokens) const {
  const u64* key = nh_key_.data();
  u128 first = u128{before.lo + key[0]} * (before.hi + key[1]);
  u128 second = u128{before.lo + key[2]} * (before.hi + key[3]);
  key += 2;
  const std::int32_t* at = tokens.data();
  std::size_t left = tokens.size();
  for (; left >= 4; left -= 4, at += 4, key += 2) {
    const u64 a = load64(at);
    const u64 b = load64(at + 2);
    first += u128{a + key[0]} * (b + key[1]);
    second += u128{a + key[2]} * (b + key[3]);
  }
  if (left > 0) {
    std::array<std::int32_t, 4> rest{};
    std::memcpy(rest.data(), at, left * sizeof(std::int32_t));
    const u64 a = load64(rest.data());
    const u64 b = load64(rest.data() + 2);
    first += u128{a + key[0]} * (b + key[1]);
    second += u128{a + key[2]} * (b + key[3]);
  }
  Sip sip(key_);
  sip.absorb(static_cast<u64>(first));
  sip.absorb(static_cast<u64>(first >> 64));
  sip.absorb(static_cast<u64>(second));
  sip.absorb(static_cast<u64>(second >> 64));
  return sip.finish(tokens.size());
}

}  // namespace quickturn::control
