// How prefill attention is cut into units of work, and how threads take them.
#pragma once

#include <cstdlib>

#include "attention_common.h"
#include "parallel.h"

namespace qt::QT_ISA {

inline constexpr long kMaxUnitHeads = 8;

// Consecutive query tokens of one row, and query heads that share a kv head.
struct Unit {
  const int32_t* blocks;
  long kv_head, first_head, heads;
  long token, count, position;  // first token (in the batch), tokens, and the first one's key position
};

class Units {
 public:
  Units(const AttentionArgs& a, long tokens) : a_(a), tokens_(tokens) {
    group_ = a.q_heads / a.cache.kv_heads;
    splits_ = (group_ + kMaxUnitHeads - 1) / kMaxUnitHeads;
    for (long row = 0; row < a.rows; ++row) count_ += blocks(row) * a.cache.kv_heads * splits_;
  }

  long count() const { return count_; }
  long max_heads() const { return group_ < kMaxUnitHeads ? group_ : kMaxUnitHeads; }

  // Unit `index`; a row's later tokens, which see more keys, come first.
  Unit at(long index) const {
    const long a_block = a_.cache.kv_heads * splits_;
    long row = 0;
    while (index >= blocks(row) * a_block) index -= blocks(row++) * a_block;
    const long first = (blocks(row) - 1 - index / a_block) * tokens_, in_block = index % a_block;
    const long split = in_block % splits_ * kMaxUnitHeads, kv_head = in_block / splits_;
    const long queries = a_.query_start[row + 1] - a_.query_start[row];
    return {a_.block_tables + row * a_.block_table_stride,
            kv_head,
            kv_head * group_ + split,
            group_ - split < kMaxUnitHeads ? group_ - split : kMaxUnitHeads,
            a_.query_start[row] + first,
            queries - first < tokens_ ? queries - first : tokens_,
            a_.context_lens[row] - queries + first};
  }

 private:
  long blocks(long row) const {
    if (a_.context_lens[row] == 0) return 0;
    return (a_.query_start[row + 1] - a_.query_start[row] + tokens_ - 1) / tokens_;
  }

  const AttentionArgs& a_;
  long tokens_, group_ = 0, splits_ = 0, count_ = 0;
};

// Zeros for the tokens that no unit covers: padding rows, and what follows the last row.
template <class T>
static void clear_padding(const AttentionArgs& a) {
  const size_t token_bytes = static_cast<size_t>(a.q_heads * a.cache.head_dim) * sizeof(T);
  char* out = static_cast<char*>(a.out);
  for (long row = 0; row < a.rows; ++row) {
    const size_t first = static_cast<size_t>(a.query_start[row]),
                 end = static_cast<size_t>(a.query_start[row + 1]);
    if (a.context_lens[row] == 0) __builtin_memset(out + first * token_bytes, 0, (end - first) * token_bytes);
  }
  const size_t used = static_cast<size_t>(a.query_start[a.rows]);
  __builtin_memset(out + used * token_bytes, 0, (static_cast<size_t>(a.tokens) - used) * token_bytes);
}

// Runs body(task, scratch) for every task; they are taken one by one, since their cost differs.
template <class Body>
static void for_each_task(long tasks, size_t scratch_bytes, const Body& body) {
  long next = 0;
  const int limit = max_threads();
  parallel(tasks < limit ? static_cast<int>(tasks) : limit, [&](int, int) {
    void* scratch = std::aligned_alloc(64, (scratch_bytes + 63) / 64 * 64);
    for (;;) {
      const long task = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED);
      if (task >= tasks) break;
      body(task, scratch);
    }
    std::free(scratch);
  });
}

}  // namespace qt::QT_ISA
