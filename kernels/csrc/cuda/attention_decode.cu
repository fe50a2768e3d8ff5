// Paged decode attention over caches of the model's own 16-bit type, and the entry for all caches.
#include "attention_decode_kernel.cuh"

namespace quickturn {

// In attention_decode_fp8.cu.
cudaError_t decode_fp8(const DecodeArguments& args, int half, int head_dim, long long cache_blocks,
                       int blocks, int early, cudaStream_t stream);

}  // namespace quickturn

// See DecodeArguments for the arrays; pitches in elements. half: the model's type is float16, else bfloat16;
// fp8: the cache is e4m3. head_dim 64, 128 or 256; group up to 16; rows up to 1,024; block_tokens a power of
// two from 8 (fp8: 16). `early`: start before the kernel ahead has finished, which must have written neither
// lens, tables nor any key but this step's. Returns a cudaError_t.
extern "C" int quickturn_attention_decode(const quickturn::DecodeArguments* args, int half, int fp8,
                                          int head_dim, long long cache_blocks, int blocks, int early,
                                          void* stream) {
  using namespace quickturn;
  constexpr int kMaxRows = 1024;
  if (args->rows < 1 || args->rows > kMaxRows || args->group < 1 || args->group > kQueryRows ||
      args->block_tokens < (fp8 ? 16 : 8) || (args->block_tokens & (args->block_tokens - 1)) || blocks < 1)
    return cudaErrorInvalidValue;
  const auto on = static_cast<cudaStream_t>(stream);
  if (fp8) return decode_fp8(*args, half, head_dim, cache_blocks, blocks, early, on);
  const auto launch =
      half ? decode_attention::launch_any<SameCache, Half> : decode_attention::launch_any<SameCache, Bfloat>;
  return launch(*args, head_dim, cache_blocks, blocks, early, on);
}
