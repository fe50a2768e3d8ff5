// Paged decode attention over caches of the model's own 16-bit type.
#include "attention_decode_kernel.cuh"

// See launch_any.
extern "C" int quickturn_attention_decode(const quickturn::DecodeArguments* args, int half, int head_dim,
                                          long long cache_blocks, int blocks, int early, void* stream) {
  return quickturn::decode_attention::launch_any<quickturn::SameCache>(args, half, head_dim, cache_blocks,
                                                                       blocks, early, stream);
}
