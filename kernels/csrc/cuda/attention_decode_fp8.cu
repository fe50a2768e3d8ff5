// Paged decode attention over caches in e4m3.
#include "attention_decode_kernel.cuh"

// See launch_any.
extern "C" int quickturn_attention_decode_fp8(const quickturn::DecodeArguments* args, int half, int head_dim,
                                              long long cache_blocks, int blocks, int early, void* stream) {
  return quickturn::decode_attention::launch_any<quickturn::Fp8Cache>(args, half, head_dim, cache_blocks,
                                                                      blocks, early, stream);
}
