// The FFI handler of kernels/rms_norm.cc.
#include "export.h"
#include "kernels/rms_norm.h"
#include "levels.h"
#include "parallel.h"
#include "xla/ffi/api/ffi.h"

namespace verax {
namespace {

namespace ffi = ::xla::ffi;

ffi::Error rms_norm(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::AnyBuffer weight,
                    ffi::ResultBuffer<ffi::F32> y, float eps) {
  const auto shape = x.dimensions();
  const int64_t size = static_cast<int64_t>(x.element_count()), D = shape.size() ? shape[shape.size() - 1] : 0;
  const bool weight_bf16 = weight.element_type() == ffi::BF16;
  if (shape.size() == 0 || static_cast<int64_t>(weight.element_count()) != D || y->element_count() != x.element_count() ||
      (!weight_bf16 && weight.element_type() != ffi::F32)) {
    return ffi::Error::InvalidArgument("rms_norm: expected x and y [..., D] and a weight [D] of float32 or bfloat16");
  }
  if (size == 0) return ffi::Error::Success();
  const RmsNormTask task{D, x.typed_data(), weight.untyped_data(), weight_bf16, eps, y->typed_data()};
  const auto normalize = VERAX_KERNEL(rms_norm);
  parallel_for(pool, size / D, rows_of_piece(D), [&](int64_t begin, int64_t end) { normalize(task, begin, end); });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace verax

VERAX_HANDLER(verax_rms_norm, verax::rms_norm,
              xla::ffi::Ffi::Bind()
                  .Ctx<xla::ffi::ThreadPool>()
                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                  .Arg<xla::ffi::AnyBuffer>()
                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                  .Attr<float>("eps"));
