// What the host passes to the causal convolution (causal_conv.cu).
#pragma once

namespace quickturn {

// Pointers to device memory; pitches in elements. Everything but the indexes is bfloat16.
struct CausalConvArguments {
  const void* x;       // [tokens, channels]
  const void* weight;  // [channels, 4]
  const void* bias;    // [channels] or null
  void* states;        // [blocks, channels, 3]
  const void* state_in;
  const void* state_out;
  const void* state_zero;
  const void* query_start;  // [rows + 1]
  const void* kept_start;   // [rows + 1] or null: no states kept on the way
  const void* kept_tokens;
  const void* kept_rows;
  void* out;  // [tokens, channels]
  long long x_pitch, block_pitch;
  int tokens, rows, channels;
};

}  // namespace quickturn
