// The Python module: thin, no decisions.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>

#include "quickturn/control/scheduler.hpp"
#include "quickturn/control/states.hpp"
#include "views.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace quickturn::control;
using namespace quickturn::control::bindings;

namespace {

using Tokens = nb::ndarray<const std::int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

std::span<const std::int32_t> span_of(const Tokens& tokens) { return {tokens.data(), tokens.size()}; }

GroupKind kind_of(const std::string& name) {
  for (const GroupKind kind : {GroupKind::full, GroupKind::window, GroupKind::state}) {
    if (name == name_of(kind)) return kind;
  }
  throw std::invalid_argument("kind must be full, window or state, got " + name);
}

// A request with its prompt: the array is kept by reference and read by `add`.
struct PyRequest {
  RequestSpec spec;
  Tokens tokens;
};

struct PyResult {
  StepId step;
  Tokens tokens;
  std::optional<Tokens> counts;
  double elapsed_us;
};

struct PyEvents {
  std::vector<std::uint8_t> kinds, tiers, groups;
  std::vector<std::uint64_t> hashes, parents;
  std::vector<std::int32_t> depths;

  explicit PyEvents(const std::vector<KvEvent>& events) {
    for (const auto& event : events) {
      kinds.push_back(static_cast<std::uint8_t>(event.kind));
      tiers.push_back(event.tier);
      groups.push_back(event.group);
      hashes.insert(hashes.end(), {event.hash.lo, event.hash.hi});
      parents.insert(parents.end(), {event.parent.lo, event.parent.hi});
      depths.push_back(static_cast<std::int32_t>(event.depth));
    }
  }
};

nb::object pairs(const std::vector<std::uint64_t>& words, nb::handle owner) {
  return nb::cast(
      nb::ndarray<nb::numpy, const std::uint64_t, nb::ndim<2>>(words.data(), {words.size() / 2, 2}, owner));
}

void bind_config(nb::module_& m) {
  nb::class_<GroupConfig>(m, "GroupConfig")
      .def(
          "__init__",
          [](GroupConfig* self, const std::string& kind, std::int32_t blocks_per_slab, std::int32_t window,
             std::string name) {
            new (self) GroupConfig{kind_of(kind), blocks_per_slab, window, std::move(name)};
          },
          "kind"_a, "blocks_per_slab"_a, nb::kw_only(), "window"_a = 0, "name"_a = "")
      .def_prop_ro("kind", [](const GroupConfig& self) { return std::string(name_of(self.kind)); })
      .def_ro("blocks_per_slab", &GroupConfig::blocks_per_slab)
      .def_ro("window", &GroupConfig::window)
      .def_ro("name", &GroupConfig::name);
  nb::class_<TierConfig>(m, "TierConfig")
      .def(
          "__init__",
          [](TierConfig* self, std::string name, std::vector<std::int32_t> blocks) {
            new (self) TierConfig{std::move(name), std::move(blocks)};
          },
          "name"_a, "blocks"_a)
      .def_ro("name", &TierConfig::name)
      .def_ro("blocks", &TierConfig::blocks);
  const Policy defaults;
  nb::class_<Policy>(m, "Policy")
      .def(
          "__init__",
          [](Policy* self, double min_tps_per_user, double max_gap_factor, double max_ttft, double max_pause,
             std::int32_t pause_every, double fairness, double share_wait, std::int32_t checkpoint_stride,
             std::int32_t checkpoint_tail, double eviction_hold, double max_hold, double max_hold_share,
             double demote_below, std::int32_t max_demotes_per_step) {
            new (self) Policy{
                min_tps_per_user, max_gap_factor, max_ttft,          max_pause,           pause_every,
                fairness,         share_wait,     checkpoint_stride, checkpoint_tail,     eviction_hold,
                max_hold,         max_hold_share, demote_below,      max_demotes_per_step};
          },
          nb::kw_only(), "min_tps_per_user"_a = defaults.min_tps_per_user,
          "max_gap_factor"_a = defaults.max_gap_factor, "max_ttft"_a = defaults.max_ttft,
          "max_pause"_a = defaults.max_pause, "pause_every"_a = defaults.pause_every,
          "fairness"_a = defaults.fairness, "share_wait"_a = defaults.share_wait,
          "checkpoint_stride"_a = defaults.checkpoint_stride, "checkpoint_tail"_a = defaults.checkpoint_tail,
          "eviction_hold"_a = defaults.eviction_hold, "max_hold"_a = defaults.max_hold,
          "max_hold_share"_a = defaults.max_hold_share, "demote_below"_a = defaults.demote_below,
          "max_demotes_per_step"_a = defaults.max_demotes_per_step)
      .def_rw("min_tps_per_user", &Policy::min_tps_per_user)
      .def_rw("max_gap_factor", &Policy::max_gap_factor)
      .def_rw("max_ttft", &Policy::max_ttft)
      .def_rw("max_pause", &Policy::max_pause)
      .def_rw("pause_every", &Policy::pause_every)
      .def_rw("fairness", &Policy::fairness)
      .def_rw("share_wait", &Policy::share_wait)
      .def_rw("checkpoint_stride", &Policy::checkpoint_stride)
      .def_rw("checkpoint_tail", &Policy::checkpoint_tail)
      .def_rw("eviction_hold", &Policy::eviction_hold)
      .def_rw("max_hold", &Policy::max_hold)
      .def_rw("max_hold_share", &Policy::max_hold_share)
      .def_rw("demote_below", &Policy::demote_below)
      .def_rw("max_demotes_per_step", &Policy::max_demotes_per_step);
  nb::class_<SchedulerConfig>(m, "SchedulerConfig")
      .def(
          "__init__",
          [](SchedulerConfig* self, std::vector<GroupConfig> groups, std::int32_t num_slabs,
             std::int32_t block_tokens, std::int32_t max_requests, std::int32_t max_step_tokens,
             std::int32_t max_context, bool prefix_cache, std::int32_t draft_tokens,
             std::int32_t pipeline_depth, std::vector<TierConfig> tiers,
             const std::vector<std::pair<std::int32_t, std::int32_t>>& recorded, const Policy& policy,
             const nb::bytes& hash_key, std::string model_salt, bool kv_events) {
            SchedulerConfig config{std::move(groups),
                                   num_slabs,
                                   block_tokens,
                                   max_requests,
                                   max_step_tokens,
                                   max_context,
                                   prefix_cache,
                                   draft_tokens,
                                   pipeline_depth,
                                   std::move(tiers),
                                   {},
                                   policy,
                                   {},
                                   std::move(model_salt),
                                   kv_events};
            for (const auto& [rows, tokens] : recorded) config.recorded.push_back({rows, tokens});
            if (hash_key.size() != config.hash_key.size()) {
              throw std::invalid_argument("hash_key must have 16 bytes, got " +
                                          std::to_string(hash_key.size()));
            }
            std::memcpy(config.hash_key.data(), hash_key.c_str(), config.hash_key.size());
            validate(config);
            new (self) SchedulerConfig(std::move(config));
          },
          nb::kw_only(), "groups"_a, "num_slabs"_a, "block_tokens"_a = 64, "max_requests"_a = 256,
          "max_step_tokens"_a = 2048, "max_context"_a = 1 << 30, "prefix_cache"_a = true,
          "draft_tokens"_a = 0, "pipeline_depth"_a = 2, "tiers"_a = std::vector<TierConfig>{},
          "recorded"_a = std::vector<std::pair<std::int32_t, std::int32_t>>{}, "policy"_a = defaults,
          "hash_key"_a = nb::bytes("\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0", 16), "model_salt"_a = "",
          "kv_events"_a = false);
}

void bind_requests(nb::module_& m) {
  nb::class_<PyRequest>(m, "Request")
      .def(
          "__init__",
          [](PyRequest* self, RequestId id, Tokens tokens, std::int32_t max_tokens, std::int32_t min_tokens,
             std::vector<std::int32_t> stop_token_ids, double arrival, std::int32_t priority,
             std::string session, std::optional<double> deadline, std::string cache_salt, std::string adapter,
             std::vector<std::pair<std::int64_t, std::uint64_t>> content,
             std::vector<std::int64_t> boundaries, double retention, bool fresh) {
            RequestSpec spec;
            spec.id = id;
            spec.max_tokens = max_tokens;
            spec.min_tokens = min_tokens;
            spec.stop_token_ids = std::move(stop_token_ids);
            spec.arrival = arrival;
            spec.priority = priority;
            spec.session = std::move(session);
            spec.deadline = deadline.value_or(kNever);
            spec.cache_salt = std::move(cache_salt);
            spec.adapter = std::move(adapter);
            spec.content = std::move(content);
            spec.boundaries = std::move(boundaries);
            spec.retention = retention;
            spec.fresh = fresh;
            new (self) PyRequest{std::move(spec), std::move(tokens)};
          },
          "id"_a, "tokens"_a.noconvert(), nb::kw_only(), "max_tokens"_a = 16, "min_tokens"_a = 0,
          "stop_token_ids"_a = std::vector<std::int32_t>{}, "arrival"_a = 0.0, "priority"_a = 0,
          "session"_a = "", "deadline"_a = nb::none(), "cache_salt"_a = "", "adapter"_a = "",
          "content"_a = std::vector<std::pair<std::int64_t, std::uint64_t>>{},
          "boundaries"_a = std::vector<std::int64_t>{}, "retention"_a = 0.0, "fresh"_a = false)
      .def_prop_ro("id", [](const PyRequest& self) { return self.spec.id; });
  nb::class_<PyResult>(m, "StepResult")
      .def(
          "__init__",
          [](PyResult* self, StepId step, Tokens tokens, std::optional<Tokens> counts, double elapsed_us) {
            new (self) PyResult{step, std::move(tokens), std::move(counts), elapsed_us};
          },
          "step"_a, "tokens"_a.noconvert(), "counts"_a.noconvert() = nb::none(), "elapsed_us"_a = 0.0);
  nb::class_<Applied>(m, "Applied")
      .def_prop_ro("ids",
                   [](nb::handle self) { return view(nb::cast<const Applied&>(self).ended.ids, self); })
      .def_prop_ro("slots",
                   [](nb::handle self) { return view(nb::cast<const Applied&>(self).ended.slots, self); })
      .def_prop_ro("reasons",
                   [](nb::handle self) { return view(nb::cast<const Applied&>(self).ended.reasons, self); })
      .def_prop_ro("accepted",
                   [](nb::handle self) { return view(nb::cast<const Applied&>(self).accepted, self); });
  nb::class_<PyEvents>(m, "KvEvents")
      .def_prop_ro("kinds", [](nb::handle self) { return view(nb::cast<const PyEvents&>(self).kinds, self); })
      .def_prop_ro("tiers", [](nb::handle self) { return view(nb::cast<const PyEvents&>(self).tiers, self); })
      .def_prop_ro("groups",
                   [](nb::handle self) { return view(nb::cast<const PyEvents&>(self).groups, self); })
      .def_prop_ro("hashes",
                   [](nb::handle self) { return pairs(nb::cast<const PyEvents&>(self).hashes, self); })
      .def_prop_ro("parents",
                   [](nb::handle self) { return pairs(nb::cast<const PyEvents&>(self).parents, self); })
      .def_prop_ro("depths",
                   [](nb::handle self) { return view(nb::cast<const PyEvents&>(self).depths, self); });
}

void bind_scheduler(nb::module_& m) {
  nb::class_<Scheduler>(m, "Scheduler")
      .def(nb::init<SchedulerConfig>(), "config"_a)
      .def(
          "add",
          [](Scheduler& self, const PyRequest& request) {
            RequestSpec spec = request.spec;
            spec.tokens = span_of(request.tokens);
            nb::gil_scoped_release release;
            self.add(spec);
          },
          "request"_a)
      .def("cancel", &Scheduler::cancel, "id"_a)
      .def("finish", &Scheduler::finish, "id"_a)
      .def("fail", &Scheduler::fail, "id"_a)
      .def("hold", &Scheduler::hold, "session"_a, "seconds"_a)
      .def(
          "plan",
          [](Scheduler& self, double now) -> std::optional<PlanHandle> {
            auto plan = self.plan(now);
            if (plan == nullptr) return std::nullopt;
            return PlanHandle{std::move(plan)};
          },
          "now"_a)
      .def(
          "apply",
          [](Scheduler& self, const PyResult& result) {
            const auto counts = result.counts ? span_of(*result.counts) : std::span<const std::int32_t>{};
            return self.apply(result.step, span_of(result.tokens), counts, result.elapsed_us);
          },
          "result"_a)
      .def("timed", &Scheduler::timed, "step"_a, "elapsed_us"_a)
      .def(
          "transfers_done",
          [](Scheduler& self,
             const nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>& ids) {
            self.transfers_done({ids.data(), ids.size()});
          },
          "ids"_a.noconvert())
      .def(
          "transfers_done",
          [](Scheduler& self, const std::vector<TransferId>& ids) { self.transfers_done(ids); }, "ids"_a)
      .def(
          "match",
          [](const Scheduler& self, const Tokens& tokens, const std::string& cache_salt,
             const std::string& adapter) {
            const auto span = span_of(tokens);
            nb::gil_scoped_release release;
            return self.match(span, adapter, cache_salt);
          },
          "tokens"_a.noconvert(), nb::kw_only(), "cache_salt"_a = "", "adapter"_a = "")
      .def(
          "prefix_hashes",
          [](const Scheduler& self, const Tokens& tokens, const std::string& cache_salt,
             const std::string& adapter) {
            const auto hashes = self.prefix_hashes(span_of(tokens), adapter, cache_salt);
            auto* words = new std::vector<std::uint64_t>;
            for (const Hash128& hash : hashes) words->insert(words->end(), {hash.lo, hash.hi});
            nb::capsule owner(words,
                              [](void* p) noexcept { delete static_cast<std::vector<std::uint64_t>*>(p); });
            return pairs(*words, owner);
          },
          "tokens"_a.noconvert(), nb::kw_only(), "cache_salt"_a = "", "adapter"_a = "")
      .def("has_unfinished", &Scheduler::has_unfinished)
      .def("stats",
           [](const Scheduler& self) {
             nb::dict stats;
             for (const auto& [name, value] : self.stats()) stats[name.c_str()] = value;
             return stats;
           })
      .def("take_events", [](Scheduler& self) { return PyEvents(self.take_events()); })
      .def("reset_prefix_cache", &Scheduler::reset_prefix_cache)
      .def("check", [](const Scheduler& self) {
        try {
          self.check();
        } catch (const std::logic_error& broken) {
          throw std::runtime_error(broken.what());
        }
      });
}

}  // namespace

NB_MODULE(_control, m) {
  nb::set_leak_warnings(false);  // what test frameworks keep alive at exit is no leak of ours
  m.doc() = "Quickturn's control plane, the compiled part.";
  bind_config(m);
  bind_requests(m);
  bind_plan(m);
  bind_scheduler(m);
  m.def("transitions", [] {
    std::vector<std::tuple<std::string, std::string, std::string>> rows;
    for (const auto& row : transition_table()) rows.emplace_back(row.from, row.event, row.to);
    return rows;
  });
  m.def("build_info", [] {
#if defined(__SANITIZE_ADDRESS__)
    const char* sanitizers = "address,undefined";
#else
        const char* sanitizers = "";
#endif
    return std::map<std::string, std::string>{
        {"compiler", __VERSION__}, {"build_type", QUICKTURN_BUILD_TYPE}, {"sanitizers", sanitizers}};
  });
}
