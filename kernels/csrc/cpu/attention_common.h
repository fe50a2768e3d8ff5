// What decode and prefill attention share: cache addresses, visible ranges, and the scores' transformation.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace qt::QT_ISA {

// Scores are kept in base 2 (exp(x) = exp2(x * log2 e)), so that a softmax term costs one multiplication
// less.
inline constexpr float kLog2e = 1.44269504F;
inline constexpr float kFarBelow = -1e30F;  // stands for -inf where a difference of two must not be NaN

struct KeyRun {
  const int32_t* blocks;  // the row's block table
  long head;
};

template <class T>
static inline const T* key_at(const PagedCache& c, const KeyRun& run, long position) {
  const long block = run.blocks[position / c.block_tokens];
  return static_cast<const T*>(c.k) + block * c.k_block_stride +
         (position % c.block_tokens) * c.k_token_stride + run.head * c.head_dim;
}

template <class T>
static inline const T* value_at(const PagedCache& c, const KeyRun& run, long position) {
  const long block = run.blocks[position / c.block_tokens];
  return static_cast<const T*>(c.v) + block * c.v_block_stride +
         (position % c.block_tokens) * c.v_token_stride + run.head * c.head_dim;
}

// First key that a query at `position` sees.
static inline long first_key(const AttentionArgs& a, long position) {
  return a.window > 0 && position >= a.window ? position - a.window + 1 : 0;
}

// Raw dot products to base-2 scores.
struct ScoreScale {
  float factor;   // scale * log2 e, or scale alone before a soft cap
  float softcap;  // 0: none
};

static inline ScoreScale score_scale(const AttentionArgs& a) {
  return a.softcap > 0 ? ScoreScale{a.scale / a.softcap, a.softcap * kLog2e}
                       : ScoreScale{a.scale * kLog2e, 0};
}

static inline vf scaled(vf dot, ScoreScale s) {
  return s.softcap > 0 ? tanh(dot * s.factor) * s.softcap : dot * s.factor;
}

}  // namespace qt::QT_ISA
