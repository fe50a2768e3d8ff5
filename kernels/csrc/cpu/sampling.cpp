// Drawing a token: logit / temperature + Gumbel noise, and the largest.
//
// Noise is at most 23, so that a token that far behind the best so far, in units of the temperature, can't
// win: of most rows few blocks of tokens need any noise.

#include "argmax_row.h"
#include "kernels.h"
#include "parallel.h"
#include "simd.h"

namespace qt::QT_ISA {
namespace {

constexpr float kMostNoise = 23.0F;  // -log(2^-33) = 22.9
constexpr float kGreedyBelow = 1e-5F;
constexpr long kBlock = 4 * kLanes;  // a call of philox gives four words

vu high_words(vu a, uint32_t factor) {
#if defined(__AVX512F__)
  const __m512i x = (__m512i)a, m = _mm512_set1_epi32(static_cast<int>(factor));
  const __m512i even = _mm512_mul_epu32(x, m), odd = _mm512_mul_epu32(_mm512_srli_epi64(x, 32), m);
  return (vu)_mm512_mask_mov_epi32(_mm512_srli_epi64(even, 32), 0xaaaa, odd);
#elif defined(__AVX2__)
  const __m256i x = (__m256i)a, m = _mm256_set1_epi32(static_cast<int>(factor));
  const __m256i even = _mm256_mul_epu32(x, m), odd = _mm256_mul_epu32(_mm256_srli_epi64(x, 32), m);
  return (vu)_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
#else
  vu high{};
  for (int i = 0; i < kLanes; ++i) high[i] = static_cast<uint32_t>((uint64_t{a[i]} * factor) >> 32);
  return high;
#endif
}

vf gumbel(vu word) {
  const vf u = min((__builtin_convertvector(word, vf) + 0.5F) * 0x1p-32F, splat(1.0F - 0x1p-24F));
  const vf series = u + u * u * (0.5F + u * (1.0F / 3.0F + u * 0.25F));
  return -log(u < 0x1p-6F ? series : -log(1.0F - u));
}

// Noise of the kBlock tokens from 4 * `group`.
void block_noise(uint64_t seed, uint64_t position, uint32_t group, float* noise) {
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  vu words[4] = {vu{} + static_cast<uint32_t>(position), vu{} + static_cast<uint32_t>(position >> 32),
                 vu{} + group, vu{}};
  for (uint32_t i = 0; i < kLanes; ++i) words[2][i] += i;
  for (int round = 0; round < 10; ++round) {
    const vu high0 = high_words(words[0], 0xd2511f53U), low0 = words[0] * 0xd2511f53U;
    const vu high2 = high_words(words[2], 0xcd9e8d57U), low2 = words[2] * 0xcd9e8d57U;
    words[0] = high2 ^ words[1] ^ key0;
    words[1] = low2;
    words[2] = high0 ^ words[3] ^ key1;
    words[3] = low0;
    key0 += 0x9e3779b9U;
    key1 += 0xbb67ae85U;
  }
  for (int w = 0; w < 4; ++w) {
    const vf one = gumbel(words[w]);
    for (int i = 0; i < kLanes; ++i) noise[4 * i + w] = one[i];
  }
}

struct Draw {
  float temperature, floor;
  uint64_t seed, position;
  float best, least;  // score so far, and the logits that may beat it
  int64_t token;

  void take(float score, int64_t at) {
    best = score;
    token = at;
    const float reach = (best - kMostNoise) * temperature;
    least = reach > floor ? reach : floor;
  }

  template <class T>
  void block(const T* x, long begin) {
    vf logits[4];
    vf top = splat(-__builtin_inff());
    for (int j = 0; j < 4; ++j) {
      logits[j] = load(x + j * kLanes);
      top = max(top, logits[j]);
    }
    if (!any(top >= least)) return;
    float noise[kBlock], scores[kBlock];
    block_noise(seed, position, static_cast<uint32_t>(begin / 4), noise);
    vf most = splat(-__builtin_inff());
    for (int j = 0; j < 4; ++j) {
      const vf score = logits[j] / temperature + load(noise + j * kLanes);
      const vf kept = logits[j] >= floor ? score : splat(-__builtin_inff());
      store(scores + j * kLanes, kept);
      most = max(most, kept);
    }
    if (!any(most > best)) return;
    for (long i = 0; i < kBlock; ++i) {
      if (scores[i] > best) take(scores[i], begin + i);
    }
  }
};

template <class T>
int64_t draw_row(const DrawArgs& a, long row) {
  const T* x = static_cast<const T*>(a.logits) + row * a.stride;
  const int64_t peak = argmax_row(x, a.size);
  const float temperature = a.temperature[row];
  if (peak < 0 || temperature < kGreedyBelow) return peak;
  Draw draw{temperature,
            -__builtin_inff(),
            static_cast<uint64_t>(a.seeds[row]),
            static_cast<uint64_t>(a.positions[row]),
            -__builtin_inff(),
            -__builtin_inff(),
            peak};
  if constexpr (sizeof(T) == sizeof(float)) {
    if (a.top_k != nullptr)
      draw.floor = least_kept(x, a.size, x[peak], temperature, a.top_k[row], a.top_p[row], a.min_p[row]);
  }
  float noise[kBlock];
  block_noise(draw.seed, draw.position, static_cast<uint32_t>(peak / kBlock * kLanes), noise);
  draw.take(to_float(x[peak]) / temperature + noise[peak % kBlock], peak);
  long i = 0;
  for (; i + kBlock <= a.size; i += kBlock) draw.block(x + i, i);
  if (i < a.size) {
    float rest[kBlock];
    for (long j = 0; j < kBlock; ++j) rest[j] = i + j < a.size ? to_float(x[i + j]) : -__builtin_inff();
    draw.block(rest, i);
  }
  return draw.token;
}

}  // namespace

void draw(const DrawArgs& a) {
  const long size = a.dtype == DType::kFloat32 ? 4 : 2;
  parallel(threads_for(a.rows * a.size * size), [&](int thread, int threads) {
    const Range rows = share(a.rows, thread, threads);
    for (long row = rows.begin; row < rows.end; ++row) {
      a.out[row] = a.dtype == DType::kFloat32 ? draw_row<float>(a, row) : draw_row<bf16>(a, row);
    }
  });
}

}  // namespace qt::QT_ISA
