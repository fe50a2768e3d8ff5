// What an expert makes of a gate and an up value.
#pragma once
#include "hopper.cuh"

namespace quickturn {

constexpr float kOssAlpha = 1.702f, kOssLimit = 7.f;

// silu(gate) * up, or gpt_oss's clamped form; gate, up and silu(gate) are rounded as separate ops would.
__device__ __forceinline__ float activated(float gate, float up, int oss) {
  gate = rounded(gate);
  up = rounded(up);
  if (oss) {
    gate = fminf(gate, kOssLimit);
    up = fminf(fmaxf(up, -kOssLimit), kOssLimit);
    return gate / (1.f + __expf(-kOssAlpha * gate)) * (up + 1.f);
  }
  return rounded(gate / (1.f + __expf(-gate))) * up;
}

}  // namespace quickturn
