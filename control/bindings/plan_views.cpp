#include "views.hpp"

namespace quickturn::control::bindings {

namespace {

template <class Part>
using Column32 = std::vector<std::int32_t> Part::*;

template <class Part, class T>
void column(nb::class_<PartOf<Part>>& cls, const char* name, std::vector<T> Part::* member) {
  cls.def_prop_ro(name, [member](nb::handle self) {
    return view(nb::cast<const PartOf<Part>&>(self).part->*member, self);
  });
}

template <class T>
void plan_column(nb::class_<PlanHandle>& cls, const char* name, std::vector<T> StepPlan::* member) {
  cls.def_prop_ro(name, [member](nb::handle self) {
    return view((*nb::cast<const PlanHandle&>(self).plan).*member, self);
  });
}

template <class T>
nb::list state_column(nb::handle self, std::vector<T> StateRows::* member) {
  nb::list columns;
  for (const auto& rows : nb::cast<const PlanHandle&>(self).plan->states)
    columns.append(view(rows.*member, self));
  return columns;
}

template <class Part>
auto part(const Part StepPlan::* member) {
  return [member](const PlanHandle& self) { return PartOf<Part>{self.plan, &((*self.plan).*member)}; };
}

}  // namespace

void bind_plan(nb::module_& module) {
  auto updates = nb::class_<PartOf<BlockUpdates>>(module, "BlockUpdates");
  column(updates, "slots", &BlockUpdates::slots);
  column(updates, "indexes", &BlockUpdates::indexes);
  column(updates, "blocks", &BlockUpdates::blocks);

  auto admitted = nb::class_<PartOf<AdmittedRows>>(module, "Admitted");
  column(admitted, "ids", &AdmittedRows::ids);
  column(admitted, "slots", &AdmittedRows::slots);
  column(admitted, "cached_tokens", &AdmittedRows::cached_tokens);
  column(admitted, "known_tokens", &AdmittedRows::known_tokens);

  auto released = nb::class_<PartOf<ReleasedRows>>(module, "Released");
  column(released, "ids", &ReleasedRows::ids);
  column(released, "slots", &ReleasedRows::slots);

  auto ended = nb::class_<PartOf<EndedRows>>(module, "Ended");
  column(ended, "ids", &EndedRows::ids);
  column(ended, "slots", &EndedRows::slots);
  column(ended, "reasons", &EndedRows::reasons);

  auto transfers = nb::class_<PartOf<TransferRows>>(module, "Transfers");
  column(transfers, "ids", &TransferRows::ids);
  column(transfers, "groups", &TransferRows::groups);
  column(transfers, "src_tiers", &TransferRows::src_tiers);
  column(transfers, "src_blocks", &TransferRows::src_blocks);
  column(transfers, "dst_tiers", &TransferRows::dst_tiers);
  column(transfers, "dst_blocks", &TransferRows::dst_blocks);

  auto plan = nb::class_<PlanHandle>(module, "StepPlan");
  plan.def_prop_ro("step", [](const PlanHandle& self) { return self.plan->step; });
  plan.def_prop_ro("num_rows", [](const PlanHandle& self) { return self.plan->num_rows(); });
  plan.def_prop_ro("num_decode_rows", [](const PlanHandle& self) { return self.plan->num_decode_rows; });
  plan.def_prop_ro("num_tokens", [](const PlanHandle& self) { return self.plan->num_tokens; });
  plan.def_prop_ro("num_samples", [](const PlanHandle& self) { return self.plan->num_samples; });
  plan.def_prop_ro("max_context_len", [](const PlanHandle& self) { return self.plan->max_context_len; });
  plan_column(plan, "slots", &StepPlan::slots);
  plan_column(plan, "query_lens", &StepPlan::query_lens);
  plan_column(plan, "context_lens", &StepPlan::context_lens);
  plan_column(plan, "samples", &StepPlan::samples);
  plan.def_prop_ro("block_updates", [](const PlanHandle& self) {
    nb::list groups;
    for (const auto& group : self.plan->block_updates)
      groups.append(nb::cast(PartOf<BlockUpdates>{self.plan, &group}));
    return groups;
  });
  plan.def_prop_ro("state_in", [](nb::handle self) { return state_column(self, &StateRows::in); });
  plan.def_prop_ro("state_out", [](nb::handle self) { return state_column(self, &StateRows::out); });
  plan.def_prop_ro("state_zero", [](nb::handle self) { return state_column(self, &StateRows::zero); });
  plan.def_prop_ro("admitted", part(&StepPlan::admitted));
  plan.def_prop_ro("released", part(&StepPlan::released));
  plan.def_prop_ro("ended", part(&StepPlan::ended));
  plan.def_prop_ro("transfers_before", part(&StepPlan::transfers_before));
  plan.def_prop_ro("transfers_after", part(&StepPlan::transfers_after));
}

}  // namespace quickturn::control::bindings
