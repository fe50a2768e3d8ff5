// How prefill attention through tiles lays out a unit: lane groups of its queries, and parts, runs of its
// keys, where there are fewer units than threads could take.
#pragma once

#include <immintrin.h>

#include <cstdlib>

#include "attention_units.h"

namespace qt::QT_ISA {

inline constexpr long kTokens = 64;         // query tokens of a unit: up to 4 lane groups a head
inline constexpr long kKeys = 128;          // keys a softmax step
inline constexpr long kLeastPartSteps = 2;  // softmax steps of a part
inline constexpr long kTasksPerThread = 4;  // so many keep threads busy to the end

// A lane group's softmax so far, and its sums [dim][16] of values.
struct Softmax {
  __m512 maximum, total;
  float* sums;
};

// One head's 16 consecutive tokens of a unit.
struct LaneGroup {
  long head, first;
};

static inline long lane_groups_of(const Unit& unit) { return unit.heads * ((unit.count + 15) / 16); }

static inline LaneGroup lane_group(const Unit& unit, long index) {
  const long a_head = (unit.count + 15) / 16;
  return {unit.first_head + index / a_head, index % a_head * 16};
}

static inline __m512 positions_of(const Unit& unit, const LaneGroup& lanes) {
  return _mm512_add_ps((__m512)lane_numbers(),
                       _mm512_set1_ps(static_cast<float>(unit.position + lanes.first)));
}

// Softmaxes of a unit's lane groups for one of its parts, in memory.
class Partial {
 public:
  static long floats(long lane_groups, long dim) { return lane_groups * (dim + 2) * 16; }
  Partial(float* memory, long dim) : memory_(memory), dim_(dim) {}

  Softmax load(long group) const {
    float* at = memory_ + group * (dim_ + 2) * 16;
    return {_mm512_load_ps(at), _mm512_load_ps(at + 16), at + 32};
  }
  void store(long group, const Softmax& softmax) const {
    float* at = memory_ + group * (dim_ + 2) * 16;
    _mm512_store_ps(at, softmax.maximum);
    _mm512_store_ps(at + 16, softmax.total);
  }

 private:
  float* memory_;
  long dim_;
};

// Softmax steps of the row that has the most.
static inline long most_steps(const AttentionArgs& a) {
  long keys = 0;
  for (long row = 0; row < a.rows; ++row) keys = a.context_lens[row] > keys ? a.context_lens[row] : keys;
  if (a.window > 0 && keys > a.window + kTokens) keys = a.window + kTokens;
  return keys / kKeys;
}

// What threads share of units that are cut: sums for each part, and how many parts are done.
struct Shared {
  float* sums;
  long* done;

  Shared(long units, long parts, long floats)
      : sums(static_cast<float*>(std::aligned_alloc(64, rounded(units * parts * floats * 4)))),
        done(static_cast<long*>(std::calloc(static_cast<size_t>(units + 1), sizeof(long)))) {}
  ~Shared() {
    std::free(sums);
    std::free(done);
  }
  Shared(const Shared&) = delete;
  Shared& operator=(const Shared&) = delete;

  // Whether this was the last part of the unit: then all are there to be read.
  bool last(long unit, long parts) const {
    return __atomic_add_fetch(done + unit, 1, __ATOMIC_ACQ_REL) == parts;
  }

 private:
  static size_t rounded(long bytes) { return static_cast<size_t>((bytes + 127) / 64 * 64); }
};

// How many parts each of `units` units is cut into, `steps` softmax steps at most long.
static inline long parts_for(long units, long steps) {
  const long threads = max_threads(), most = steps / kLeastPartSteps;
  if (threads == 1 || units >= kTasksPerThread * threads || most < 2) return 1;
  long parts = (kTasksPerThread * threads + units - 1) / units;
  while (units * parts % threads != 0) ++parts;
  return parts < most ? parts : most;
}

}  // namespace qt::QT_ISA
