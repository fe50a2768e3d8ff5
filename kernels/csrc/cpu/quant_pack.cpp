// Quantising weights into the layout of quant_linear.h, and reading rows back.

#include <immintrin.h>

#include "parallel.h"
#include "quant_linear.h"
#include "simd.h"

namespace qt {
namespace QT_ISA {
namespace {

uint16_t to_half(float x) { return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }
float from_half(uint16_t x) { return _cvtsh_ss(x); }

long rounded(float x, long low, long high) {
  const long value = static_cast<long>(__builtin_rintf(x));
  return value < low ? low : (value > high ? high : value);
}

// One step of a panel as it is being written or read.
class StepView {
 public:
  StepView(Quant format, uint8_t* bytes) : format_(format), bytes_(bytes) {}

  uint16_t& scale(long column) const { return halves(format_ == Quant::kInt8 ? 1024 : 512)[column]; }
  uint16_t& minimum(long column) const { return halves(512 + 64)[column]; }

  void put(long column, long feature, long q) const {
    if (format_ == Quant::kInt8) {
      bytes_[byte_at(column, feature)] = static_cast<uint8_t>(q);
    } else {
      words()[word_at(column, feature)] |= static_cast<uint32_t>(q) << (feature / 2 % 8 * 4);
    }
  }

  float value(long column, long feature) const {
    if (format_ == Quant::kInt8) {
      return from_half(scale(column)) *
             static_cast<float>(static_cast<int8_t>(bytes_[byte_at(column, feature)]));
    }
    const uint32_t q = (words()[word_at(column, feature)] >> (feature / 2 % 8 * 4)) & 15U;
    return from_half(scale(column)) * static_cast<float>(q) + from_half(minimum(column));
  }

 private:
  uint16_t* halves(long offset) const { return reinterpret_cast<uint16_t*>(bytes_ + offset); }
  uint32_t* words() const { return reinterpret_cast<uint32_t*>(bytes_); }
  static long byte_at(long column, long feature) {
    return column / 16 * 512 + feature / 2 * 32 + column % 16 * 2 + feature % 2;
  }
  static long word_at(long column, long feature) {
    return column / 16 * 64 + column % 16 / 8 * 32 + feature / 16 * 16 + column % 8 * 2 + feature % 2;
  }

  Quant format_;
  uint8_t* bytes_;
};

template <class T>
void quantise_group(const StepView& step, Quant format, long column, const T* weight) {
  float low = to_float(weight[0]), high = low;
  for (long i = 1; i < kStepFeatures; ++i) {
    const float value = to_float(weight[i]);
    low = value < low ? value : low;
    high = value > high ? value : high;
  }
  const bool int8 = format == Quant::kInt8;
  const float largest = high > -low ? high : -low;
  step.scale(column) = to_half(int8 ? largest / 127.0F : (high - low) / 15.0F);
  if (!int8) step.minimum(column) = to_half(low);
  const float scale = from_half(step.scale(column)), offset = int8 ? 0.0F : from_half(step.minimum(column));
  const float inverse = scale > 0 ? 1.0F / scale : 0.0F;
  for (long i = 0; i < kStepFeatures; ++i) {
    step.put(column, i, rounded((to_float(weight[i]) - offset) * inverse, int8 ? -127 : 0, int8 ? 127 : 15));
  }
}

template <class T>
void pack_typed(Quant format, const QuantPackArgs& a) {
  const long panels = (a.n + kPanelColumns - 1) / kPanelColumns, steps = a.k / kStepFeatures;
  const long step_bytes = kStepBytes[static_cast<int>(format)];
  for (long index = 0; index < panels * steps; ++index) {
    uint8_t* bytes = static_cast<uint8_t*>(a.packed) + index * step_bytes;
    __builtin_memset(bytes, 0, static_cast<size_t>(step_bytes));
    const StepView step(format, bytes);
    const long first = index / steps * kPanelColumns;
    for (long column = 0; column < kPanelColumns && first + column < a.n; ++column) {
      const T* row = static_cast<const T*>(a.weight) + (first + column) * a.stride;
      quantise_group(step, format, column, row + index % steps * kStepFeatures);
    }
  }
}

}  // namespace
}  // namespace QT_ISA

void pack_quant(Quant format, const QuantPackArgs& a) {
  if (a.dtype == DType::kFloat32) {
    QT_ISA::pack_typed<float>(format, a);
  } else {
    QT_ISA::pack_typed<bf16>(format, a);
  }
}

void unpack_quant_rows(Quant format, const int64_t* ids, const void* packed, bf16* out, long count, long k,
                       long table_rows) {
  const long steps = k / kStepFeatures, step_bytes = kStepBytes[static_cast<int>(format)];
  parallel(threads_for(count * k * 32), [&](int thread, int threads) {
    const Range mine = share(count, thread, threads);
    for (long i = mine.begin; i < mine.end; ++i) {
      bf16* row = out + i * k;
      if (ids[i] < 0 || ids[i] >= table_rows) {
        __builtin_memset(static_cast<void*>(row), 0, static_cast<size_t>(k) * sizeof(bf16));
        continue;
      }
      const long first = ids[i] / kPanelColumns * steps;
      for (long feature = 0; feature < k; ++feature) {
        auto* bytes =
            static_cast<uint8_t*>(const_cast<void*>(packed)) + (first + feature / kStepFeatures) * step_bytes;
        const QT_ISA::StepView step(format, bytes);
        row[feature] = QT_ISA::to_bf16(step.value(ids[i] % kPanelColumns, feature % kStepFeatures));
      }
    }
  });
}

}  // namespace qt
