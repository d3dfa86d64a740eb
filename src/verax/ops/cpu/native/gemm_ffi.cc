// The FFI handler of kernels/gemm.cc.
#include "export.h"
#include "gemm_run.h"
#include "xla/ffi/api/ffi.h"

namespace verax {
namespace {

namespace ffi = ::xla::ffi;

ffi::Error gemm(ffi::ThreadPool pool, ffi::Buffer<ffi::BF16> x, ffi::Buffer<ffi::BF16> weight,
                ffi::Buffer<ffi::F32> bias, ffi::ResultBuffer<ffi::F32> y) {
  const auto in = x.dimensions(), shape = weight.dimensions(), out = y->dimensions();
  if (in.size() != 2 || shape.size() != 2 || out.size() != 2 || in[1] != shape[1] || out[0] != in[0] ||
      out[1] != shape[0]) {
    return ffi::Error::InvalidArgument("gemm: expected x [M, K], weight [N, K] and y [M, N]");
  }
  GemmTask task{};
  task.M = in[0], task.N = shape[0], task.K = in[1];
  const auto bias_count = static_cast<int64_t>(bias.element_count());
  if (task.K % GEMM_DEPTH_STEP != 0 || task.N % GEMM_COLUMN_STEP != 0 || (bias_count && bias_count != task.N)) {
    return ffi::Error::InvalidArgument("gemm: expected K divisible by 32, N by 16, and a bias of N or none");
  }
  task.x = reinterpret_cast<const uint16_t*>(x.typed_data());
  task.weight = reinterpret_cast<const uint16_t*>(weight.typed_data());
  task.bias = bias_count ? bias.typed_data() : nullptr;
  task.y = y->typed_data();
  run_gemm(pool, task);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace verax

VERAX_HANDLER(verax_gemm, verax::gemm,
              xla::ffi::Ffi::Bind()
                  .Ctx<xla::ffi::ThreadPool>()
                  .Arg<xla::ffi::Buffer<xla::ffi::BF16>>()
                  .Arg<xla::ffi::Buffer<xla::ffi::BF16>>()
                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>());
