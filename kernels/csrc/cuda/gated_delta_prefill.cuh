// What the two kernels of a gated delta net's prompts share: gated_delta_prepare.cu makes of each chunk what
// doesn't depend on the state, gated_delta_prefill.cu walks over the chunks.
#pragma once
#include <cstdint>

namespace quickturn {

// Pointers to device memory; pitches in elements. Activations are bfloat16, heads 128 wide.
struct GatedDeltaScanArguments {
  const void* q;        // [tokens, key_heads, 128], a token's heads contiguous
  const void* k;        // the same
  const void* v;        // [tokens, heads, 128]
  const void* solved;   // [slots, heads, 64, 64]: (I + L)^-1 beta
  const void* scores;   // [slots, heads, 64, 64]
  const void* factors;  // [slots, heads, 5, 64] float32
  void* states;         // [blocks, heads, 128, 128]
  const void* state_in;
  const void* state_out;
  const void* state_zero;
  const void* query_start;   // [rows + 1]
  const void* context_lens;  // [rows] or null
  const void* kept_start;    // [rows + 1] or null: no states kept on the way
  const void* kept_tokens;
  const void* kept_rows;
  void* out;  // [tokens, heads, 128]
  long long q_pitch, k_pitch, v_pitch, state_block_pitch;
  int tokens, rows, key_heads, heads, slots;
  int half_states;  // bfloat16
};

// The same for the preparation; a, b, a_log, dt_bias and what is written.
struct GatedDeltaPrepareArguments {
  const void* q;
  const void* k;
  const void* a;  // [tokens, heads]
  const void* b;
  const void* a_log;    // [heads] float32
  const void* dt_bias;  // [heads] float32
  const void* query_start;
  const void* context_lens;
  void* solved;
  void* scores;
  void* factors;
  long long q_pitch, k_pitch, a_pitch, b_pitch;
  float scale;
  int tokens, rows, key_heads, heads, slots;
};

constexpr int kDim = 128;    // of keys and of values
constexpr int kChunk = 64;   // tokens
constexpr int kSpare = 2;    // slots of a row beyond length / kChunk: its first and last chunk may be partial
constexpr int kFactors = 5;  // log decay; of k before the solution and in the update; of q; norm of k
constexpr uint32_t kTile = kChunk * 128;  // bytes of 64 tokens' 64 columns, or of a triangle

// A row's tokens and the grid of its chunks. Row r's slots begin at query_start[r] / kChunk + kSpare r.
struct Walk {
  int start, end, skipped, chunks;
  long long slot;

  __device__ Walk(const void* query_start, const void* context_lens, int row) {
    const int* starts = static_cast<const int*>(query_start);
    start = starts[row], end = starts[row + 1];
    skipped = 0;
    if (context_lens != nullptr)
      skipped = (static_cast<const int*>(context_lens)[row] - (end - start)) % kChunk;
    chunks = end == start ? 0 : (end - start + skipped + kChunk - 1) / kChunk;
    slot = start / kChunk + kSpare * row;
  }
  __device__ int first(int chunk) const { return max(start, start + chunk * kChunk - skipped); }
  __device__ int last(int chunk) const { return min(end, start + (chunk + 1) * kChunk - skipped); }
};

}  // namespace quickturn
