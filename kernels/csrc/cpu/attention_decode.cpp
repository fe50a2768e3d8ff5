// Decode attention: one query token a row against its paged keys and values, flash style, split over threads.
//
// The work is every (row, kv head, chunk of keys), laid end to end and cut into one equal piece a thread. A
// unit (row, kv head, up to 16 of its query heads) that lies in one piece is finished there; one that is cut
// leaves partial softmax states that are merged after the join. This balances any batch, a single row
// included.

#include "attention_state.h"
#include "parallel.h"

namespace qt::QT_ISA {
namespace {

constexpr int kMaxThreads = 64;  // bounds the stack that the cut states take: 33 KiB a thread

struct Unit {
  long row, kv_head, first_head, group;
};

// How the heads are cut into units: `splits` a kv head.
struct Shape {
  long group, splits, per_row;
  explicit Shape(const AttentionArgs& a)
      : group(a.q_heads / a.cache.kv_heads),
        splits((group + kMaxGroup - 1) / kMaxGroup),
        per_row(a.cache.kv_heads * splits) {}
  Unit unit(long index) const {
    const long in_row = index % per_row, kv_head = in_row / splits, first = in_row % splits * kMaxGroup;
    return {index / per_row, kv_head, kv_head * group + first,
            group - first < kMaxGroup ? group - first : kMaxGroup};
  }
};

// One chunk into the state.
template <class T, class Query>
void attend(const AttentionArgs& a, const Query& query, const Chunk<T>& chunk, const Chunk<T>& next,
            State& s) {
  const long dim = a.cache.head_dim;
  const ScoreScale scale = score_scale(a);
  alignas(64) float scores[kMaxGroup * kChunk + kLanes];
  query.scores(a.cache, chunk, next, scores);
  for (long g = 0; g < s.group; ++g) {
    const float factor = softmax_terms(scores + g * kChunk, chunk.count, scale, s.maximum[g], s.total[g]);
    if (factor == 1.0F) continue;
    for (long d = 0; d < dim; ++d) s.sums[g * dim + d] *= factor;
  }
  weigh_values<T>(chunk, next, scores, s, dim);
}

struct Keys {
  long begin, chunks, end;
};

Keys visible_keys(const AttentionArgs& a, long row) {
  const long end = a.context_lens[row];
  const long begin = end > 0 ? first_key(a, end - 1) : 0;
  return {begin, (end - begin + kChunk - 1) / kChunk, end};
}

// A chunk with what it belongs to.
template <class T>
struct Step {
  Chunk<T> chunk;
  Unit unit;
  long index;               // of the unit
  bool first, last, whole;  // the unit's first or last chunk; the unit is not cut by the thread's piece
};

// A walk over the chunks [begin, end) of the whole, unit by unit.
class Walk {
 public:
  Walk(const AttentionArgs& a, const Shape& shape, Range mine)
      : a_(a), shape_(shape), left_(mine.end - mine.begin) {
    long skip = mine.begin;
    while (left_ > 0) {
      keys_ = visible_keys(a_, row_);
      const long chunks = keys_.chunks * shape_.per_row;
      if (skip < chunks) break;
      skip -= chunks;
      ++row_;
    }
    if (left_ == 0) return;
    in_row_ = skip / keys_.chunks;
    chunk_ = skip % keys_.chunks;
  }

  // The next step; its count is 0 when there is none.
  template <class T>
  void take(Step<T>& step) {
    step.chunk.count = 0;
    if (left_ == 0) return;
    step.index = row_ * shape_.per_row + in_row_;
    step.unit = shape_.unit(step.index);
    step.first = chunk_ == 0;
    step.last = chunk_ + 1 == keys_.chunks;
    step.whole = step.first && keys_.chunks <= left_;
    const KeyRun run{a_.block_tables + row_ * a_.block_table_stride, step.unit.kv_head};
    const long begin = keys_.begin + chunk_ * kChunk, rest = keys_.end - begin;
    step.chunk.find(a_.cache, run, begin, rest < kChunk ? rest : kChunk);
    --left_;
    if (++chunk_ < keys_.chunks) return;
    chunk_ = 0;
    if (++in_row_ < shape_.per_row) return;
    in_row_ = 0;
    do {
      ++row_;
      if (left_ > 0) keys_ = visible_keys(a_, row_);
    } while (left_ > 0 && keys_.chunks == 0);
  }

 private:
  const AttentionArgs& a_;
  const Shape& shape_;
  Keys keys_{};
  long left_, row_ = 0, in_row_ = 0, chunk_ = 0;
};

// One thread's piece. A unit that lies in it is finished; one cut by the piece's beginning is left in
// cuts[0], one cut by its end alone in cuts[1].
template <class T, class Query>
void run_piece(const AttentionArgs& a, const Shape& shape, Range mine, State* cuts) {
  const long dim = a.cache.head_dim;
  State local;
  State* state = nullptr;
  Query query(dim);
  Step<T> steps[2];
  Walk walk(a, shape, mine);
  walk.take(steps[0]);
  for (int at = 0; steps[at].chunk.count > 0; at ^= 1) {
    const Step<T>& step = steps[at];
    walk.take(steps[at ^ 1]);
    const Unit& unit = step.unit;
    if (state == nullptr) {
      state = step.whole ? &local : &cuts[step.first ? 1 : 0];
      reset(*state, step.index, unit.group, dim);
      query.take(static_cast<const T*>(a.q) + unit.row * a.q_stride + unit.first_head * dim, unit.group);
    }
    attend<T>(a, query, step.chunk, steps[at ^ 1].chunk, *state);
    if (!step.last) continue;
    if (state == &local) finish<T>(a, unit.row, unit.first_head, local);
    state = nullptr;
  }
}

template <class T>
void finish_unit(const AttentionArgs& a, const Shape& shape, const State& state) {
  const Unit unit = shape.unit(state.unit);
  finish<T>(a, unit.row, unit.first_head, state);
}

// Every thread's cut states in order are neighbours of the same unit: merge runs of them.
template <class T>
void merge_cuts(const AttentionArgs& a, const Shape& shape, State* cuts, int count) {
  State* open = nullptr;
  for (int i = 0; i < count; ++i) {
    if (cuts[i].unit < 0) continue;
    if (open != nullptr && open->unit == cuts[i].unit) {
      merge(*open, cuts[i], a.cache.head_dim);
      continue;
    }
    if (open != nullptr) finish_unit<T>(a, shape, *open);
    open = &cuts[i];
  }
  if (open != nullptr) finish_unit<T>(a, shape, *open);
}

template <class T, class Query>
void decode_typed(const AttentionArgs& a) {
  const Shape shape(a);
  long chunks = 0, keys = 0;
  const long row_out = a.q_heads * a.cache.head_dim;
  for (long row = 0; row < a.rows; ++row) {
    const Keys visible = visible_keys(a, row);
    chunks += visible.chunks * shape.per_row;
    keys += visible.end - visible.begin;
    if (visible.chunks == 0) {
      __builtin_memset(static_cast<T*>(a.out) + row * row_out, 0, static_cast<size_t>(row_out) * sizeof(T));
    }
  }
  int threads = threads_for(keys * 2 * a.cache.kv_heads * a.cache.head_dim * static_cast<long>(sizeof(T)));
  threads = threads < kMaxThreads ? threads : kMaxThreads;
  State* states =
      static_cast<State*>(__builtin_alloca_with_align(static_cast<size_t>(2 * threads) * sizeof(State), 512));
  for (int i = 0; i < 2 * threads; ++i) states[i].unit = -1;
  parallel(threads, [&](int thread, int count) {
    run_piece<T, Query>(a, shape, share(chunks, thread, count), states + 2 * thread);
  });
  merge_cuts<T>(a, shape, states, 2 * threads);
}

}  // namespace

void attention_decode(const AttentionArgs& a) {
  if (a.dtype == DType::kFloat32) {
    decode_typed<float, PlainQuery<float>>(a);
    return;
  }
#if defined(__AMX_TILE__)
  if (TileQuery::fits(a.cache)) {
    decode_typed<bf16, TileQuery>(a);
    return;
  }
#endif
  decode_typed<bf16, PlainQuery<bf16>>(a);
}

}  // namespace qt::QT_ISA
