// The FFI handlers of kernels/rms_norm.cc.
#include <algorithm>

#include "export.h"
#include "kernels/rms_norm.h"
#include "levels.h"
#include "parallel.h"
#include "shapes.h"
#include "xla/ffi/api/ffi.h"

namespace verax {
namespace {

namespace ffi = ::xla::ffi;

ffi::Error rms_norm(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer weight, ffi::Result<ffi::AnyBuffer> y,
                    float eps, bool silu) {
  const auto shape = x.dimensions();
  const int64_t size = static_cast<int64_t>(x.element_count()), D = shape.size() ? shape[shape.size() - 1] : 0;
  if (shape.size() == 0 || static_cast<int64_t>(weight.element_count()) != D || y->element_count() != x.element_count() ||
      !is_float(x) || !is_float(weight) || !is_float(*y)) {
    return ffi::Error::InvalidArgument("rms_norm: expected x and y [..., D] and a weight [D] of float32 or bfloat16");
  }
  if (size == 0) return ffi::Error::Success();
  const RmsNormTask task{D,
                         x.untyped_data(),
                         x.element_type() == ffi::BF16,
                         weight.untyped_data(),
                         weight.element_type() == ffi::BF16,
                         eps,
                         silu,
                         y->untyped_data(),
                         y->element_type() == ffi::BF16};
  const auto normalize = VERAX_KERNEL(rms_norm);
  parallel_for(pool, size / D, rows_of_piece(D), [&](int64_t begin, int64_t end) { normalize(task, begin, end); });
  return ffi::Error::Success();
}

// Queries and keys, each [tokens, heads, H], in one round of work.
ffi::Error norm_rotary(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> q, ffi::Buffer<ffi::F32> k, ffi::AnyBuffer q_weight,
                       ffi::AnyBuffer k_weight, ffi::Buffer<ffi::F32> cos, ffi::Buffer<ffi::F32> sin,
                       ffi::ResultBuffer<ffi::F32> q_out, ffi::ResultBuffer<ffi::F32> k_out, float eps) {
  const auto in = q.dimensions(), keys = k.dimensions(), table = cos.dimensions();
  const auto is_weight = [&](const ffi::AnyBuffer& w) {
    return in.size() == 3 && is_float(w) && static_cast<int64_t>(w.element_count()) == in[2];
  };
  if (in.size() != 3 || keys.size() != 3 || table.size() != 2 || keys[0] != in[0] || keys[2] != in[2] ||
      table[0] != in[0] || 2 * table[1] > in[2] || sin.element_count() != cos.element_count() ||
      !is_weight(q_weight) || !is_weight(k_weight) || q_out->element_count() != q.element_count() ||
      k_out->element_count() != k.element_count()) {
    return ffi::Error::InvalidArgument(
        "norm_rotary: expected q [T, N, H], k [T, K, H], weights [H], and cos and sin [T, h] with 2 h up to H");
  }
  const auto task_of = [&](const ffi::Buffer<ffi::F32>& x, const ffi::AnyBuffer& weight, int64_t heads, float* y) {
    const RmsNormTask norm{in[2], x.untyped_data(), false, weight.untyped_data(), weight.element_type() == ffi::BF16,
                           eps, false, y, false};
    return NormRotaryTask{norm, heads, table[1], cos.typed_data(), sin.typed_data()};
  };
  const NormRotaryTask queries = task_of(q, q_weight, in[1], q_out->typed_data());
  const NormRotaryTask of_keys = task_of(k, k_weight, keys[1], k_out->typed_data());
  const int64_t first = in[0] * in[1], all = first + in[0] * keys[1];
  if (all == 0 || in[2] == 0) return ffi::Error::Success();
  const auto rotate = VERAX_KERNEL(norm_rotary);
  parallel_for(pool, all, rows_of_piece(in[2]), [&](int64_t begin, int64_t end) {
    if (begin < first) rotate(queries, begin, std::min(end, first));
    if (end > first) rotate(of_keys, std::max(begin, first) - first, end - first);
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace verax

VERAX_HANDLER(verax_rms_norm, verax::rms_norm,
              xla::ffi::Ffi::Bind()
                  .Ctx<xla::ffi::ThreadPool>()
                  .Arg<xla::ffi::AnyBuffer>()
                  .Arg<xla::ffi::AnyBuffer>()
                  .Ret<xla::ffi::AnyBuffer>()
                  .Attr<float>("eps")
                  .Attr<bool>("silu"));

VERAX_HANDLER(verax_norm_rotary, verax::norm_rotary,
              xla::ffi::Ffi::Bind()
                  .Ctx<xla::ffi::ThreadPool>()
                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                  .Arg<xla::ffi::AnyBuffer>()
                  .Arg<xla::ffi::AnyBuffer>()
                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                  .Attr<float>("eps"));
