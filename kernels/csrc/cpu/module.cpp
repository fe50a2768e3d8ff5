// The Python module: pointers and strides in, nothing out. Shapes are checked by the Python side.

#include <nanobind/nanobind.h>

#include "dispatch.h"
#include "parallel.h"
#include "quant_linear.h"
#include "tile_linear.h"

namespace nb = nanobind;

namespace qt {
namespace {

Isa best = Isa::kBase;
const Kernels* active = nullptr;

template <class T = void>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// Long calls let other Python threads run; short ones are over sooner than the lock would change hands.
template <class Call>
void call(long work, const Call& body) {
  constexpr long kLong = 1L << 26;
  if (work < kLong) {
    body();
    return;
  }
  nb::gil_scoped_release unlocked;
  body();
}

void rms_norm(int dtype, uintptr_t x, uintptr_t residual, uintptr_t weight, uintptr_t out, long rows,
              long size, long x_stride, float eps) {
  active->rms_norm({static_cast<DType>(dtype), pointer(x), pointer(residual), pointer(weight), pointer(out),
                    rows, size, x_stride, eps});
}

void silu_and_mul(int dtype, uintptr_t x, uintptr_t out, long rows, long size, long x_stride) {
  active->silu_and_mul({static_cast<DType>(dtype), pointer(x), pointer(out), rows, size, x_stride});
}

PagedCache paged_cache(uintptr_t k, uintptr_t v, long k_block_stride, long v_block_stride,
                       long k_token_stride, long v_token_stride, long block_tokens, long kv_heads,
                       long head_dim) {
  return {pointer(k),     pointer(v),   k_block_stride, v_block_stride, k_token_stride,
          v_token_stride, block_tokens, kv_heads,       head_dim};
}

void rotary_cache_write(int dtype, uintptr_t q, uintptr_t k, uintptr_t v, long q_stride, long k_stride,
                        long v_stride, uintptr_t positions, uintptr_t cos_sin, long rotary_dim,
                        long cos_sin_stride, uintptr_t slots, uintptr_t q_weight, uintptr_t k_weight,
                        float eps, long tokens, long q_heads, const PagedCache& cache) {
  active->rotary_cache_write({static_cast<DType>(dtype), pointer(q), pointer(k), pointer(v), q_stride,
                              k_stride, v_stride, pointer<int64_t>(positions), pointer<float>(cos_sin),
                              rotary_dim, cos_sin_stride, pointer<int64_t>(slots), pointer(q_weight),
                              pointer(k_weight), eps, tokens, q_heads, cache});
}

void attention_decode(int dtype, uintptr_t q, uintptr_t out, long q_stride, long q_heads,
                      const PagedCache& cache, uintptr_t block_tables, long block_table_stride,
                      uintptr_t context_lens, long rows, float scale, float softcap, long window,
                      uintptr_t sinks) {
  active->attention_decode({static_cast<DType>(dtype), pointer(q), pointer(out), q_stride, q_heads, cache,
                            pointer<int32_t>(block_tables), block_table_stride, nullptr,
                            pointer<int32_t>(context_lens), rows, rows, scale, softcap, window,
                            pointer<float>(sinks)});
}

void attention_prefill(int dtype, uintptr_t q, uintptr_t out, long q_stride, long q_heads,
                       const PagedCache& cache, uintptr_t block_tables, long block_table_stride,
                       uintptr_t query_start, uintptr_t context_lens, long rows, float scale, float softcap,
                       long window, uintptr_t sinks, long tokens, long work) {
  call(work, [&] {
    active->attention_prefill({static_cast<DType>(dtype), pointer(q), pointer(out), q_stride, q_heads, cache,
                               pointer<int32_t>(block_tables), block_table_stride,
                               pointer<int32_t>(query_start), pointer<int32_t>(context_lens), rows, tokens,
                               scale, softcap, window, pointer<float>(sinks)});
  });
}

void stream_linear(int dtype, int out_dtype, uintptr_t x, uintptr_t weight, uintptr_t bias, uintptr_t out,
                   long rows, long n, long k, long x_stride, long weight_stride) {
  active->stream_linear({static_cast<DType>(dtype), static_cast<DType>(out_dtype), pointer(x),
                         pointer(weight), pointer(bias), pointer(out), rows, n, k, x_stride, weight_stride});
}

#ifdef QT_HAS_AMX
void tile_linear_bf16(int out_dtype, uintptr_t x, uintptr_t weight, uintptr_t bias, uintptr_t out, long rows,
                      long n, long k, long x_stride) {
  call(rows * n * k / 16, [&] {
    tile_linear({static_cast<DType>(out_dtype), pointer<bf16>(x), pointer(weight), pointer<bf16>(bias),
                 pointer(out), rows, n, k, x_stride});
  });
}

void quant_linear_bf16(int format, int out_dtype, uintptr_t x, uintptr_t weight, uintptr_t bias,
                       uintptr_t out, long rows, long n, long k, long x_stride) {
  call(rows * n * k / 16, [&] {
    quant_linear(static_cast<Quant>(format),
                 {static_cast<DType>(out_dtype), pointer<bf16>(x), pointer(weight), pointer<bf16>(bias),
                  pointer(out), rows, n, k, x_stride});
  });
}

// What a processor with AMX tiles can do beside.
void define_tiles(nb::module_& m) {
  m.def("tile_linear", &tile_linear_bf16);
  m.def("pack_tiles", [](uintptr_t weight, uintptr_t packed, long n, long k, long stride) {
    nb::gil_scoped_release unlocked;
    pack_tiles({pointer<bf16>(weight), pointer<bf16>(packed), n, k, stride});
  });
  m.def(
      "unpack_rows", [](uintptr_t ids, uintptr_t packed, uintptr_t out, long count, long k, long table_rows) {
        unpack_rows({pointer<int64_t>(ids), pointer<bf16>(packed), pointer<bf16>(out), count, k, table_rows});
      });
  m.def("pack_quant",
        [](int format, int dtype, uintptr_t weight, uintptr_t packed, long n, long k, long stride) {
          nb::gil_scoped_release unlocked;
          pack_quant(static_cast<Quant>(format),
                     {static_cast<DType>(dtype), pointer(weight), pointer(packed), n, k, stride});
        });
  m.def("unpack_quant_rows",
        [](int format, uintptr_t ids, uintptr_t packed, uintptr_t out, long count, long k, long table_rows) {
          unpack_quant_rows(static_cast<Quant>(format), pointer<int64_t>(ids), pointer(packed),
                            pointer<bf16>(out), count, k, table_rows);
        });
  m.def("quant_linear", &quant_linear_bf16);
}
#endif

}  // namespace

NB_MODULE(_cpu, m) {
  best = detect_isa();
#ifndef QT_HAS_AMX
  if (best == Isa::kAmx) best = Isa::kAvx512;
#endif
  active = &kernels_of(best);

  nb::class_<PagedCache>(m, "PagedCache")
      .def("__init__",
           [](PagedCache* self, uintptr_t k, uintptr_t v, long k_block_stride, long v_block_stride,
              long k_token_stride, long v_token_stride, long block_tokens, long kv_heads, long head_dim) {
             new (self) PagedCache(paged_cache(k, v, k_block_stride, v_block_stride, k_token_stride,
                                               v_token_stride, block_tokens, kv_heads, head_dim));
           });

  m.def("isa", [] { return active->name; });
  m.def("use_isa", [](const char* name) {
    for (Isa isa : {Isa::kBase, Isa::kAvx2, Isa::kAvx512, Isa::kAmx}) {
      if (isa <= best && nb::str(kernels_of(isa).name).equal(nb::str(name))) {
        active = &kernels_of(isa);
        return true;
      }
    }
    return false;
  });
  m.def("has_tiles", [] {
#ifdef QT_HAS_AMX
    return active == &kernels_of(Isa::kAmx);
#else
    return false;
#endif
  });
  m.def("openmp_runtime", &runtime_path);
  m.def("max_threads", &max_threads);

  m.def("rms_norm", &rms_norm);
  m.def("silu_and_mul", &silu_and_mul);
  m.def("rotary_cache_write", &rotary_cache_write);
  m.def("attention_decode", &attention_decode);
  m.def("attention_prefill", &attention_prefill);
  m.def("stream_linear", &stream_linear);
#ifdef QT_HAS_AMX
  define_tiles(m);
#endif
  m.def("gather_rows", [](uintptr_t ids, uintptr_t table, uintptr_t out, long count, long row_bytes,
                          long table_rows) {
    active->gather_rows({pointer<int64_t>(ids), pointer(table), pointer(out), count, row_bytes, table_rows});
  });
  m.def("argmax", [](int dtype, uintptr_t x, uintptr_t out, long rows, long size, long x_stride) {
    active->argmax({static_cast<DType>(dtype), pointer(x), pointer<int64_t>(out), rows, size, x_stride});
  });
  m.def("draw", [](int dtype, uintptr_t logits, long rows, long size, long stride, uintptr_t temperature,
                   uintptr_t top_k, uintptr_t top_p, uintptr_t min_p, uintptr_t seeds, uintptr_t positions,
                   uintptr_t out) {
    active->draw({static_cast<DType>(dtype), pointer(logits), rows, size, stride, pointer<float>(temperature),
                  pointer<int32_t>(top_k), pointer<float>(top_p), pointer<float>(min_p),
                  pointer<int64_t>(seeds), pointer<int64_t>(positions), pointer<int64_t>(out)});
  });
}

}  // namespace qt
