// Numpy views of the arrays in plans and results. A view keeps its owner alive; nothing is copied.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <memory>
#include <vector>

#include "quickturn/control/plan.hpp"

namespace quickturn::control::bindings {

namespace nb = nanobind;

// A read-only one-dimensional view of `data`, which `owner` keeps alive.
template <class T>
nb::ndarray<nb::numpy, const T, nb::ndim<1>> view(const std::vector<T>& data, nb::handle owner) {
  return nb::ndarray<nb::numpy, const T, nb::ndim<1>>(data.data(), {data.size()}, owner);
}

// What Python sees of a part of a plan: the plan's buffers, shared, and the part.
template <class Part>
struct PartOf {
  std::shared_ptr<const StepPlan> plan;
  const Part* part;
};

struct PlanHandle {
  std::shared_ptr<const StepPlan> plan;
};

void bind_plan(nb::module_& module);

}  // namespace quickturn::control::bindings
