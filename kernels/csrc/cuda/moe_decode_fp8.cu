// Few tokens and experts of e4m3 with block factors: see moe_decode.cuh.
#include "moe_decode.cuh"

extern "C" int quickturn_moe_fp8_stages(int tokens, int top) {
  return quickturn::moe_stages<true>(tokens, top);
}

extern "C" int quickturn_moe_fp8_few_tokens(const quickturn::MoeArguments* arguments, int blocks, int early,
                                            void* stream) {
  return quickturn::launch_moe<true>(*arguments, blocks, early, stream);
}
