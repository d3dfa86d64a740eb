// The FFI handler of kernels/gemm_panels.cc.
#include <vector>

#include "export.h"
#include "panels_run.h"
#include "xla/ffi/api/ffi.h"

namespace verax {
namespace {

namespace ffi = ::xla::ffi;

// `weights`: of each its panels, its scales (none but for integers) and its bias (or none).
ffi::Error gemm_panels(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::RemainingArgs weights,
                       ffi::RemainingRets results, bool gelu) {
  const auto in = x.dimensions();
  if (in.size() != 2 || results.size() == 0 || weights.size() != 3 * results.size()) {
    return ffi::Error::InvalidArgument("gemm_panels: expected x [M, K], and panels, scales and a bias for each result");
  }
  std::vector<GemmTask> tasks;
  for (size_t i = 0; i < results.size(); ++i) {
    const auto panels = weights.get<ffi::AnyBuffer>(3 * i);
    const auto scales = weights.get<ffi::Buffer<ffi::F32>>(3 * i + 1), bias = weights.get<ffi::Buffer<ffi::F32>>(3 * i + 2);
    auto result = results.get<ffi::Buffer<ffi::F32>>(i);
    if (!panels) return panels.error();
    if (!scales || !bias) return scales ? bias.error() : scales.error();
    if (!result) return result.error();
    GemmTask task{};
    switch (panels->element_type()) {
      case ffi::F32: task.kind = Weights::f32; break;
      case ffi::BF16: task.kind = Weights::bf16; break;
      case ffi::U8: task.kind = Weights::int8_pairs; break;
      default: return ffi::Error::InvalidArgument("gemm_panels: expected panels of float32, bfloat16 or uint8");
    }
    if (!gemm_has_panels(task.kind)) {
      return ffi::Error::InvalidArgument(
          "gemm_panels: the weight was packed for a level with AVX512-BF16 and VNNI (verax.ops.cpu.library.level)");
    }
    const auto out = (*result)->dimensions(), shape = panels->dimensions();
    const int64_t values = gemm_cell_values(task.kind);
    task.M = in[0], task.K = in[1], task.N = out.size() == 2 ? out[1] : 0;
    const bool fits = out.size() == 2 && out[0] == in[0] && shape.size() == 4 && shape[0] == (task.N + GEMM_STRIP - 1) / GEMM_STRIP &&
                      shape[1] * values == task.K && shape[2] == GEMM_STRIP && shape[3] == values;
    if (!fits || task.K % GEMM_DEPTH_STEP || task.N % GEMM_COLUMN_STEP ||
        (task.kind == Weights::int8_pairs && task.K > GEMM_INTEGER_DEPTH)) {
      return ffi::Error::InvalidArgument("gemm_panels: panels [N/48, K/values, 48, values] do not fit x and y [M, N]");
    }
    const auto num_scales = static_cast<int64_t>(scales->element_count());
    const auto num_biases = static_cast<int64_t>(bias->element_count());
    if (num_scales != (task.kind == Weights::int8_pairs ? task.N : 0) || (num_biases && num_biases != task.N)) {
      return ffi::Error::InvalidArgument("gemm_panels: expected N scales of integers, and a bias of N or none");
    }
    if (i > 0 && task.kind != tasks[0].kind) return ffi::Error::InvalidArgument("gemm_panels: weights of two dtypes");
    task.x = x.typed_data();
    task.weight = panels->untyped_data();
    task.scales = num_scales ? scales->typed_data() : nullptr;
    task.bias = num_biases ? bias->typed_data() : nullptr;
    task.y = (*result)->typed_data();
    task.gelu = gelu;
    tasks.push_back(task);
  }
  run_panels(pool, tasks);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace verax

VERAX_HANDLER(verax_gemm_panels, verax::gemm_panels,
              xla::ffi::Ffi::Bind()
                  .Ctx<xla::ffi::ThreadPool>()
                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                  .RemainingArgs()
                  .RemainingRets()
                  .Attr<bool>("gelu"));
