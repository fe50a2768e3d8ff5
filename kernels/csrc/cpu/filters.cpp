// Which logits the filters keep. Compiled for any processor: selection and sorting of few gain nothing from
// wide vectors.

#include <algorithm>
#include <cmath>
#include <functional>
#include <iterator>
#include <limits>
#include <vector>

#include "kernels.h"

namespace qt {

float least_kept(const float* logits, long size, float peak, float temperature, int k, float p, float m) {
  float least = -std::numeric_limits<float>::infinity();
  std::vector<float> pool;
  if (k > 0 && k < size) {
    pool.assign(logits, logits + size);
    std::nth_element(pool.begin(), pool.begin() + (k - 1), pool.end(), std::greater<>());
    least = pool[static_cast<size_t>(k - 1)];
  }
  if (p < 1.0F) {
    pool.clear();
    std::copy_if(logits, logits + size, std::back_inserter(pool),
                 [least](float x) { return x >= least && std::isfinite(x); });
    const auto weight = [peak, temperature](float x) {
      return std::exp((static_cast<double>(x) - peak) / temperature);
    };
    double whole = 0.0;
    for (const float x : pool) whole += weight(x);
    // What weighs less than this weighs less than 1 - p in all: the cut lies above. Half, for rounding.
    const double share = 0.5 * (1.0 - p) * whole / static_cast<double>(pool.size());
    const double bound = peak + temperature * std::log(share);
    pool.erase(std::remove_if(pool.begin(), pool.end(), [bound](float x) { return x < bound; }), pool.end());
    std::sort(pool.begin(), pool.end(), std::greater<>());
    double sum = 0.0;
    for (const float x : pool) {
      sum += weight(x);
      if (sum < p * whole) continue;
      least = x;
      break;
    }
  }
  if (m > 0.0F) least = std::max(least, peak + temperature * std::log(m));
  return least;
}

}  // namespace qt
