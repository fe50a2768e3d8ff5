// Few tokens and experts of bfloat16: see moe_decode.cuh.
#include "moe_decode.cuh"

extern "C" int quickturn_moe_stages(int tokens, int top) { return quickturn::moe_stages<false>(tokens, top); }

extern "C" int quickturn_moe_few_tokens(const quickturn::MoeArguments* arguments, int blocks, int early,
                                        void* stream) {
  return quickturn::launch_moe<false>(*arguments, blocks, early, stream);
}
