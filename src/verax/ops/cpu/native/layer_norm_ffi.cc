// The FFI handler of kernels/layer_norm.cc.
#include "export.h"
#include "kernels/layer_norm.h"
#include "levels.h"
#include "parallel.h"
#include "shapes.h"
#include "xla/ffi/api/ffi.h"

namespace verax {
namespace {

namespace ffi = ::xla::ffi;

ffi::Error layer_norm(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> residual,
                      ffi::AnyBuffer weight, ffi::AnyBuffer bias, ffi::ResultBuffer<ffi::F32> y, float eps) {
  const auto shape = x.dimensions();
  const auto size = static_cast<int64_t>(x.element_count()), added = static_cast<int64_t>(residual.element_count());
  const int64_t D = shape.size() ? shape[shape.size() - 1] : 0;
  const bool bf16 = weight.element_type() == ffi::BF16;
  if (shape.size() == 0 || static_cast<int64_t>(y->element_count()) != size || (added && added != size)) {
    return ffi::Error::InvalidArgument("layer_norm: expected x and y [..., D], and a residual like x or none");
  }
  if (static_cast<int64_t>(weight.element_count()) != D || static_cast<int64_t>(bias.element_count()) != D ||
      bias.element_type() != weight.element_type() || !is_float(weight)) {
    return ffi::Error::InvalidArgument("layer_norm: expected a weight and a bias [D], both float32 or both bfloat16");
  }
  if (size == 0) return ffi::Error::Success();
  const LayerNormTask task{D, x.typed_data(), added ? residual.typed_data() : nullptr, weight.untyped_data(),
                           bias.untyped_data(), bf16, eps, y->typed_data()};
  const auto normalize = VERAX_KERNEL(layer_norm);
  parallel_for(pool, size / D, rows_of_piece(D), [&](int64_t begin, int64_t end) { normalize(task, begin, end); });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace verax

VERAX_HANDLER(verax_layer_norm, verax::layer_norm,
              xla::ffi::Ffi::Bind()
                  .Ctx<xla::ffi::ThreadPool>()
                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                  .Arg<xla::ffi::AnyBuffer>()
                  .Arg<xla::ffi::AnyBuffer>()
                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                  .Attr<float>("eps"));
