// The FFI handlers of kernels/hierarchical.cc and kernels/hierarchical_walk.cc: chunks shared over the threads.
#include <utility>
#include <vector>

#include "export.h"
#include "kernels/hierarchical.h"
#include "pages.h"
#include "parallel.h"
#include "scratch.h"
#include "shapes.h"
#include "staged.h"
#include "xla/ffi/api/ffi.h"

namespace verax {
namespace {

namespace ffi = ::xla::ffi;
using Floats = ffi::Buffer<ffi::F32>;
using FloatsOut = ffi::ResultBuffer<ffi::F32>;

// What threads leave for each other stays in the third cache level: 8 MiB of it.
constexpr int64_t CACHED_FLOATS = 1 << 21;

// Inputs of both rules; the gates of the fast and of the slow state.
struct Inputs {
  Floats q, k, v, beta, fast, slow;
};

// The error says what does not fit.
ffi::Error fill_task(HierarchicalTask& t, const Inputs& x, int64_t chunk, FloatsOut out) {
  const auto keys = x.q.dimensions(), values = x.v.dimensions();
  if (keys.size() != 4 || values.size() != 4) {
    return ffi::Error::InvalidArgument("hierarchical: expected q [B, T, H, K] and v [B, T, H, V]");
  }
  t.B = keys[0], t.T = keys[1], t.H = keys[2], t.K = keys[3], t.V = values[3], t.C = chunk;
  if (chunk < 1 || t.T % chunk) {
    return ffi::Error::InvalidArgument("hierarchical: expected a chunk that divides T");
  }
  for (const auto& shape : {x.beta.dimensions(), x.fast.dimensions(), x.slow.dimensions()}) {
    if (!is_shape(shape, {t.B, t.T, t.H})) return ffi::Error::InvalidArgument("hierarchical: expected [B, T, H]");
  }
  if (!is_shape(x.k.dimensions(), {t.B, t.T, t.H, t.K}) || !is_shape(values, {t.B, t.T, t.H, t.V}) ||
      !is_shape(out->dimensions(), {t.B, t.T, t.H, t.V})) {
    return ffi::Error::InvalidArgument("hierarchical: shapes do not fit each other");
  }
  t.q = x.q.typed_data(), t.k = x.k.typed_data(), t.v = x.v.typed_data(), t.beta = x.beta.typed_data();
  t.gates[0] = x.fast.typed_data(), t.gates[1] = x.slow.typed_data(), t.out = out->typed_data();
  ask_for_large_pages(t.out, out->size_bytes());
  return ffi::Error::Success();
}

ffi::Error hierarchical_local(ffi::ThreadPool pool, Floats q, Floats k, Floats v, Floats beta, Floats fast, Floats slow,
                              int64_t chunk, FloatsOut out) {
  HierarchicalTask task{};
  if (auto error = fill_task(task, {q, k, v, beta, fast, slow}, chunk, out); error.failure()) return error;
  const int64_t heads = task.B * task.H, scratch = hierarchical_scratch_bytes(task);
  const auto run = VERAX_KERNEL(hierarchical_local);
  parallel_for(pool, task.T / chunk * heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) run(task, i % heads, i / heads, thread_scratch(scratch));
  });
  return ffi::Error::Success();
}

ffi::Error hierarchical(ffi::ThreadPool pool, Floats q, Floats k, Floats v, Floats beta, Floats fast, Floats slow,
                        Floats fast_decay, Floats slow_decay, Floats bilinear, Floats temperature, Floats w1, Floats b1,
                        Floats w2, Floats b2, Floats token_w1, Floats token_b1, Floats token_w2, Floats token_b2,
                        int64_t chunk, FloatsOut out, FloatsOut fast_state, FloatsOut slow_state) {
  HierarchicalTask t{};
  if (auto error = fill_task(t, {q, k, v, beta, fast, slow}, chunk, out); error.failure()) return error;
  t.hidden = b1.element_count(), t.token_hidden = token_b1.element_count();
  for (const auto& shape : {fast_state->dimensions(), slow_state->dimensions()}) {
    if (!is_shape(shape, {t.B, t.H, t.K, t.V})) {
      return ffi::Error::InvalidArgument("hierarchical: expected states [B, H, K, V]");
    }
  }
  if (!is_shape(fast_decay.dimensions(), {t.B, t.T, t.H}) || !is_shape(slow_decay.dimensions(), {t.B, t.T, t.H}) ||
      !is_shape(bilinear.dimensions(), {t.H, t.K, t.V}) || !is_shape(temperature.dimensions(), {t.H}) ||
      !is_shape(w1.dimensions(), {t.hidden, t.K + t.V + 1}) || !is_shape(w2.dimensions(), {1, t.hidden}) ||
      !is_shape(token_w1.dimensions(), {t.token_hidden, t.K + t.V}) ||
      !is_shape(token_w2.dimensions(), {1, t.token_hidden}) || !is_shape(b2.dimensions(), {1}) ||
      !is_shape(token_b2.dimensions(), {1})) {
    return ffi::Error::InvalidArgument("hierarchical: decays or weights of the flux do not fit q and v");
  }
  t.decays[0] = fast_decay.typed_data(), t.decays[1] = slow_decay.typed_data();
  t.bilinear = bilinear.typed_data(), t.temperature = temperature.typed_data();
  t.w1 = w1.typed_data(), t.b1 = b1.typed_data(), t.w2 = w2.typed_data(), t.b2 = b2.typed_data();
  t.states[0] = fast_state->typed_data(), t.states[1] = slow_state->typed_data();
  std::vector<float> flux(hierarchical_flux_floats(t));
  hierarchical_pack_flux(t, token_w1.typed_data(), token_b1.typed_data(), token_w2.typed_data(), token_b2.typed_data(),
                         flux.data());
  t.token_flux = flux.data();
  t.ahead = hierarchical_ahead(t, CACHED_FLOATS);
  const SharedScratch shared(4 * hierarchical_shared_floats(t));
  t.shared = static_cast<float*>(shared.data());

  const int64_t chunks = t.T / t.C, scratch = hierarchical_scratch_bytes(t);
  const auto within = VERAX_KERNEL(hierarchical_within);
  const auto walk = VERAX_KERNEL(hierarchical_walk);
  pipelined_scan(
      pool, chunks, t.B * t.H, t.ahead,
      [&](int64_t head, int64_t chunk) { within(t, head, chunk, thread_scratch(scratch)); },
      [&](int64_t head, int64_t chunk) { walk(t, head, chunk, thread_scratch(scratch)); });
  return ffi::Error::Success();
}

// A binding that takes `count` more arrays, at least one: a binding cannot be copied.
template <int count, class Binding>
auto arrays(Binding binding) {
  if constexpr (count == 1) {
    return std::move(binding).template Arg<Floats>();
  } else {
    return arrays<count - 1>(std::move(binding).template Arg<Floats>());
  }
}

}  // namespace
}  // namespace verax

VERAX_HANDLER(verax_hierarchical_local, verax::hierarchical_local,
              verax::arrays<6>(xla::ffi::Ffi::Bind().Ctx<xla::ffi::ThreadPool>())
                  .Attr<int64_t>("chunk")
                  .Ret<verax::Floats>());

VERAX_HANDLER(verax_hierarchical, verax::hierarchical,
              verax::arrays<18>(xla::ffi::Ffi::Bind().Ctx<xla::ffi::ThreadPool>())
                  .Attr<int64_t>("chunk")
                  .Ret<verax::Floats>()
                  .Ret<verax::Floats>()
                  .Ret<verax::Floats>());
