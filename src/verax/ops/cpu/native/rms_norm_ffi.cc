// The FFI handler of kernels/rms_norm.cc.
#include "export.h"
#include "kernels/rms_norm.h"
#include "levels.h"
#include "parallel.h"
#include "xla/ffi/api/ffi.h"

namespace verax {
namespace {

namespace ffi = ::xla::ffi;

bool is_float(ffi::DataType type) { return type == ffi::F32 || type == ffi::BF16; }

ffi::Error rms_norm(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer weight, ffi::Result<ffi::AnyBuffer> y,
                    float eps, bool silu) {
  const auto shape = x.dimensions();
  const int64_t size = static_cast<int64_t>(x.element_count()), D = shape.size() ? shape[shape.size() - 1] : 0;
  if (shape.size() == 0 || static_cast<int64_t>(weight.element_count()) != D || y->element_count() != x.element_count() ||
      !is_float(x.element_type()) || !is_float(weight.element_type()) || !is_float(y->element_type())) {
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
