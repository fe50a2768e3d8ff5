// What the host passes to the walk over the chunks of prompts (gated_delta_prefill.cu).
#pragma once

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

}  // namespace quickturn
