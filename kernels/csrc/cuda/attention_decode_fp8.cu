// Paged decode attention over caches in e4m3.
#include "attention_decode_kernel.cuh"

namespace quickturn {

cudaError_t decode_fp8(const DecodeArguments& args, int half, int head_dim, long long cache_blocks,
                       int blocks, int early, cudaStream_t stream) {
  const auto launch =
      half ? decode_attention::launch_any<Fp8Cache, Half> : decode_attention::launch_any<Fp8Cache, Bfloat>;
  return launch(args, head_dim, cache_blocks, blocks, early, stream);
}

}  // namespace quickturn
