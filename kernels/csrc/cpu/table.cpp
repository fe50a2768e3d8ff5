// The function table of one instruction-set level.

#include "kernels.h"

namespace qt::QT_ISA {

#define QT_TEXT(name) #name
#define QT_NAME(name) QT_TEXT(name)

void rms_norm(const NormArgs& a);
void silu_and_mul(const SiluArgs& a);
void rotary_cache_write(const RotaryArgs& a);
void attention_decode(const AttentionArgs& a);
void attention_prefill(const AttentionArgs& a);
void gather_rows(const GatherArgs& a);
void stream_linear(const StreamLinearArgs& a);
void argmax(const ArgmaxArgs& a);
void draw(const DrawArgs& a);

extern const Kernels table;
const Kernels table = {QT_NAME(QT_ISA),  rms_norm,
                       silu_and_mul,     rotary_cache_write,
                       attention_decode, attention_prefill,
                       gather_rows,      stream_linear,
                       argmax,           draw};

}  // namespace qt::QT_ISA
