// Causal convolution of width 4 and SiLU over ragged rows: a thread has eight channels and walks along some
// tokens of one row, the three inputs before in registers. A row's first thread blocks see to its states,
// which no others read or write, so that a state may be replaced where it lies.
#include <cuda_runtime.h>

#include "causal_conv.cuh"
#include "hopper.cuh"

namespace quickturn {
namespace {

constexpr int kTokens = 32;  // of a thread block
constexpr int kThreads = 128;
constexpr int kChannels = 8;  // of a thread
constexpr int kWidth = 4;
constexpr int kTaps = kWidth - 1;
constexpr int kAhead = 8;  // tokens in flight, a multiple of kWidth

__device__ __forceinline__ bf16 element(const uint4& packed, int i) {
  const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
  return static_cast<bf16>(i % 2 ? words[i / 2] >> 16 : words[i / 2] & 0xFFFFu);
}

__device__ __forceinline__ void widen8(const uint4& packed, float (&to)[kChannels]) {
  const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    to[2 * i] = __uint_as_float(words[i] << 16);
    to[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000u);
  }
}

// A state of eight channels, [8, 3], as the three inputs that it holds, and back.
__device__ __forceinline__ void split_state(const uint4 (&state)[kTaps], uint4 (&inputs)[kTaps]) {
#pragma unroll
  for (int tap = 0; tap < kTaps; ++tap) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int one = 2 * i * kTaps + tap, two = (2 * i + 1) * kTaps + tap;
      words[i] = element(state[one / 8], one % 8) | static_cast<uint32_t>(element(state[two / 8], two % 8))
                                                        << 16;
    }
    inputs[tap] = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

__device__ __forceinline__ void join_state(const uint4 (&inputs)[kTaps], uint4 (&state)[kTaps]) {
  uint32_t words[4 * kTaps];
#pragma unroll
  for (int i = 0; i < 4 * kTaps; ++i) {
    const int one = 2 * i, two = 2 * i + 1;
    words[i] = element(inputs[one % kTaps], one / kTaps) |
               static_cast<uint32_t>(element(inputs[two % kTaps], two / kTaps)) << 16;
  }
#pragma unroll
  for (int i = 0; i < kTaps; ++i)
    state[i] = make_uint4(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]);
}

// Grid: (slots of kTokens tokens, parts of the channels). Row r's slots begin at query_start[r] / kTokens +
// r.
__global__ void __launch_bounds__(kThreads, 4) causal_conv(const CausalConvArguments args) {
  const int* starts = static_cast<const int*>(args.query_start);
  const int slot = blockIdx.x;
  int row = 0, above = args.rows;
  while (above - row > 1) {
    const int middle = (row + above) / 2;
    if (starts[middle] / kTokens + middle <= slot)
      row = middle;
    else
      above = middle;
  }
  const int start = starts[row], length = starts[row + 1] - start;
  const int begin = (slot - start / kTokens - row) * kTokens, end = min(length, begin + kTokens);
  const int channel = (blockIdx.y * kThreads + threadIdx.x) * kChannels;
  if (begin >= length || channel >= args.channels) return;

  const uint4* x =
      reinterpret_cast<const uint4*>(static_cast<const bf16*>(args.x) + start * args.x_pitch + channel);
  const long long pitch = args.x_pitch / 8;
  uint4* out = reinterpret_cast<uint4*>(static_cast<bf16*>(args.out) +
                                        static_cast<long long>(start) * args.channels + channel);
  const long long out_pitch = args.channels / 8;
  const long long target = static_cast<const int*>(args.state_out)[row];
  if (target < 0) {
    for (int token = begin; token < end; ++token) out[token * out_pitch] = make_uint4(0, 0, 0, 0);
    return;
  }

  float weight[kWidth][kChannels];
#pragma unroll
  for (int i = 0; i < kChannels / 2; ++i) {
    float two[8];
    widen8(reinterpret_cast<const uint4*>(static_cast<const bf16*>(args.weight) + channel * kWidth)[i], two);
#pragma unroll
    for (int tap = 0; tap < kWidth; ++tap)
      weight[tap][2 * i] = two[tap], weight[tap][2 * i + 1] = two[kWidth + tap];
  }
  float bias[kChannels] = {};
  if (args.bias != nullptr)
    widen8(*reinterpret_cast<const uint4*>(static_cast<const bf16*>(args.bias) + channel), bias);

  bf16* states = static_cast<bf16*>(args.states) + static_cast<long long>(channel) * kTaps;
  uint4 before[kTaps] = {};  // the inputs ahead of `begin`, oldest first
  if (begin == 0) {
    const long long source = static_cast<const int*>(args.state_in)[row];
    if (source >= 0 && static_cast<const unsigned char*>(args.state_zero)[row] == 0) {
      uint4 state[kTaps];
#pragma unroll
      for (int i = 0; i < kTaps; ++i)
        state[i] = reinterpret_cast<const uint4*>(states + source * args.block_pitch)[i];
      split_state(state, before);
    }
    const auto keep = [&](long long block, int after) {
      uint4 inputs[kTaps], state[kTaps];
#pragma unroll
      for (int tap = 0; tap < kTaps; ++tap) {
        const int at = after - kTaps + tap;
        // `before` by constant indexes only.
        const uint4 old = at == -3 ? before[0] : at == -2 ? before[1] : before[2];
        inputs[tap] = at >= 0 ? x[at * pitch] : old;
      }
      join_state(inputs, state);
#pragma unroll
      for (int i = 0; i < kTaps; ++i)
        reinterpret_cast<uint4*>(states + block * args.block_pitch)[i] = state[i];
    };
    if (args.kept_start != nullptr) {
      const int last = static_cast<const int*>(args.kept_start)[row + 1];
      for (int i = static_cast<const int*>(args.kept_start)[row]; i < last; ++i)
        keep(static_cast<const int*>(args.kept_rows)[i], static_cast<const int*>(args.kept_tokens)[i]);
    }
    keep(target, length);
  } else {
#pragma unroll
    for (int tap = 0; tap < kTaps; ++tap) before[tap] = x[(begin - kTaps + tap) * pitch];
  }

  float window[kWidth][kChannels];
#pragma unroll
  for (int tap = 0; tap < kTaps; ++tap) widen8(before[tap], window[tap]);
  for (int base = begin; base < end; base += kAhead) {
    uint4 fresh[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
      if (base + i < end) fresh[i] = x[(base + i) * pitch];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      // The window turns instead of moving: kAhead is a multiple of kWidth, so every index is a constant.
      widen8(fresh[i], window[(i + kTaps) % kWidth]);
      float sum[kChannels];
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
        sum[c] = bias[c];
#pragma unroll
        for (int tap = 0; tap < kWidth; ++tap) sum[c] += weight[tap][c] * window[(i + tap) % kWidth][c];
        sum[c] = __fdividef(sum[c], 1.f + __expf(-sum[c]));
      }
      if (base + i < end)
        out[(base + i) * out_pitch] = make_uint4(narrow2(sum[0], sum[1]), narrow2(sum[2], sum[3]),
                                                 narrow2(sum[4], sum[5]), narrow2(sum[6], sum[7]));
    }
  }
}

}  // namespace
}  // namespace quickturn

// channels, pitches multiples of 8, pointers 16-byte aligned. Returns a cudaError_t.
extern "C" int quickturn_causal_conv(const quickturn::CausalConvArguments* args, void* stream) {
  using namespace quickturn;
  if (args->channels % kChannels || args->x_pitch % 8 || args->block_pitch % 8) return cudaErrorInvalidValue;
  const int parts = (args->channels / kChannels + kThreads - 1) / kThreads;
  causal_conv<<<dim3(args->tokens / kTokens + args->rows, parts), kThreads, 0,
                static_cast<cudaStream_t>(stream)>>>(*args);
  return cudaGetLastError();
}
