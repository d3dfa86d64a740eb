// The FFI handler of kernels/hierarchical.cc: chunks shared over the threads.
#include "export.h"
#include "kernels/hierarchical.h"
#include "parallel.h"
#include "scratch.h"
#include "xla/ffi/api/ffi.h"

namespace verax {
namespace {

namespace ffi = ::xla::ffi;
using Floats = ffi::Buffer<ffi::F32>;
using FloatsOut = ffi::ResultBuffer<ffi::F32>;

bool is_shape(ffi::Span<const int64_t> shape, std::initializer_list<int64_t> expected) {
  return std::equal(shape.begin(), shape.end(), expected.begin(), expected.end());
}

template <typename Body>
void for_each_chunk(ffi::ThreadPool& pool, int64_t chunks, int64_t scratch, const Body& body) {
  parallel_for(pool, chunks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) body(i, thread_scratch(scratch));
  });
}

ffi::Error hierarchical(ffi::ThreadPool pool, Floats q, Floats k, Floats v, Floats beta, Floats fast, Floats slow,
                        Floats w1, Floats b1, Floats w2, Floats b2, int64_t chunk, bool local, FloatsOut out,
                        FloatsOut inner, FloatsOut shares, FloatsOut product, FloatsOut sums) {
  const auto keys = q.dimensions(), values = v.dimensions();
  if (keys.size() != 4 || values.size() != 4) {
    return ffi::Error::InvalidArgument("hierarchical: expected q [B, T, H, K] and v [B, T, H, V]");
  }
  const int64_t B = keys[0], T = keys[1], H = keys[2], K = keys[3], V = values[3];
  const int64_t hidden = b1.element_count();
  if (chunk < 1 || T % chunk) return ffi::Error::InvalidArgument("hierarchical: expected a chunk that divides T");
  const int64_t n = T / chunk;
  const bool results = local ? is_shape(out->dimensions(), {B, T, H, V})
                             : is_shape(inner->dimensions(), {B, n, H, chunk, V + K}) &&
                                   is_shape(shares->dimensions(), {B, n, H, chunk, 2}) &&
                                   is_shape(product->dimensions(), {B, n, H, K, V + K}) &&
                                   is_shape(sums->dimensions(), {B, n, H, K + V});
  if (!results || !is_shape(k.dimensions(), {B, T, H, K}) || !is_shape(values, {B, T, H, V}) ||
      !is_shape(beta.dimensions(), {B, T, H}) || !is_shape(fast.dimensions(), {B, T, H}) ||
      !is_shape(slow.dimensions(), {B, T, H}) || !is_shape(w1.dimensions(), {hidden, K + V}) ||
      !is_shape(w2.dimensions(), {1, hidden}) || !is_shape(b2.dimensions(), {1})) {
    return ffi::Error::InvalidArgument("hierarchical: shapes do not fit each other");
  }
  HierarchicalTask task{};
  task.T = T, task.H = H, task.K = K, task.V = V, task.C = chunk, task.hidden = hidden;
  task.q = q.typed_data(), task.k = k.typed_data(), task.v = v.typed_data(), task.beta = beta.typed_data();
  task.fast = fast.typed_data(), task.slow = slow.typed_data();
  task.w1 = w1.typed_data(), task.b1 = b1.typed_data(), task.w2 = w2.typed_data(), task.b2 = b2.typed_data();
  task.local = local, task.out = out->typed_data(), task.inner = inner->typed_data();
  task.shares = shares->typed_data(), task.product = product->typed_data(), task.sums = sums->typed_data();
  const auto run = VERAX_KERNEL(hierarchical_chunk);
  const int64_t scratch = hierarchical_scratch_bytes(K, V) + hierarchical_flux_bytes(K, V, hidden);
  for_each_chunk(pool, B * n * H, scratch, [&](int64_t i, void* memory) { run(task, i, memory); });
  return ffi::Error::Success();
}

ffi::Error hierarchical_read(ffi::ThreadPool pool, Floats inner, Floats shares, Floats found, FloatsOut out) {
  const auto shape = inner.dimensions(), states = found.dimensions();
  if (shape.size() != 5 || states.size() != 6) {
    return ffi::Error::InvalidArgument("hierarchical_read: expected inner [B, n, H, C, V + K], found [B, n, H, 2, K, V]");
  }
  const int64_t B = shape[0], n = shape[1], H = shape[2], C = shape[3], K = states[4], V = states[5];
  if (shape[4] != V + K || !is_shape(states, {B, n, H, 2, K, V}) || !is_shape(shares.dimensions(), {B, n, H, C, 2}) ||
      !is_shape(out->dimensions(), {B, n * C, H, V})) {
    return ffi::Error::InvalidArgument("hierarchical_read: shapes do not fit each other");
  }
  const HierarchicalRead task{n * C, H, K, V, C, inner.typed_data(), shares.typed_data(), found.typed_data(),
                              out->typed_data()};
  const auto run = VERAX_KERNEL(hierarchical_read);
  const int64_t scratch = hierarchical_scratch_bytes(K, V);
  for_each_chunk(pool, B * n * H, scratch, [&](int64_t i, void* memory) { run(task, i, memory); });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace verax

#define FLOATS xla::ffi::Buffer<xla::ffi::F32>
VERAX_HANDLER(verax_hierarchical, verax::hierarchical,
              xla::ffi::Ffi::Bind()
                  .Ctx<xla::ffi::ThreadPool>()
                  .Arg<FLOATS>()
                  .Arg<FLOATS>()
                  .Arg<FLOATS>()
                  .Arg<FLOATS>()
                  .Arg<FLOATS>()
                  .Arg<FLOATS>()
                  .Arg<FLOATS>()
                  .Arg<FLOATS>()
                  .Arg<FLOATS>()
                  .Arg<FLOATS>()
                  .Attr<int64_t>("chunk")
                  .Attr<bool>("local")
                  .Ret<FLOATS>()
                  .Ret<FLOATS>()
                  .Ret<FLOATS>()
                  .Ret<FLOATS>()
                  .Ret<FLOATS>());

VERAX_HANDLER(verax_hierarchical_read, verax::hierarchical_read,
              xla::ffi::Ffi::Bind()
                  .Ctx<xla::ffi::ThreadPool>()
                  .Arg<FLOATS>()
                  .Arg<FLOATS>()
                  .Arg<FLOATS>()
                  .Ret<FLOATS>());
