// What the host passes to the decode step of a gated delta net (gated_delta_step.cu).
#pragma once

namespace quickturn {

// Pointers to device memory; pitches in elements. Activations, convolution weights and states are bfloat16.
struct GatedDeltaStepArguments {
  const void* qkv;          // [rows, (2 key_heads + heads) 128]
  const void* conv_weight;  // [channels, 4]
  const void* conv_bias;    // [channels] or null
  void* conv_states;        // [blocks, channels, 3]
  const void* a;            // [rows, heads]
  const void* b;
  const void* a_log;    // [heads] float32
  const void* dt_bias;  // [heads] float32
  void* states;         // [blocks, heads, 128, 128]
  const void* state_in;
  const void* state_out;
  const void* state_zero;
  const void* gate;         // [rows, heads, 128] or null: no norm
  const void* norm_weight;  // [128]
  void* out;                // [rows, heads, 128]
  long long qkv_pitch, conv_block_pitch, a_pitch, b_pitch, state_block_pitch, gate_pitch, gate_head_pitch;
  float scale, eps;
  int rows, key_heads, heads;
  int wide_norm_weight;  // float32
  int settled;           // states and indexes may be read before the kernels ahead have finished
};

}  // namespace quickturn
