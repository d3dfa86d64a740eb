// The FFI handlers of kernels/gemm_panels.cc.
#include <vector>

#include "export.h"
#include "panels_run.h"
#include "shapes.h"
#include "xla/ffi/api/ffi.h"

namespace verax {
namespace {

namespace ffi = ::xla::ffi;

using Floats = ffi::Buffer<ffi::F32>;

// A product with the weight whose panels, scales (none but for integers) and bias (or none) are the arguments from `at` on.
// N is given, M, x and y are not set.
ffi::Error read_weight(ffi::RemainingArgs weights, size_t at, int64_t N, GemmTask& task) {
  const auto panels = weights.get<ffi::AnyBuffer>(at);
  const auto scales = weights.get<Floats>(at + 1), bias = weights.get<Floats>(at + 2);
  if (!panels) return panels.error();
  if (!scales || !bias) return scales ? bias.error() : scales.error();
  switch (panels->element_type()) {
    case ffi::F32: task.kind = Weights::f32; break;
    case ffi::BF16: task.kind = Weights::bf16; break;
    case ffi::S8: task.kind = Weights::int8; break;
    case ffi::U8: task.kind = Weights::int8_pairs; break;
    default: return ffi::Error::InvalidArgument("gemm_panels: expected panels of float32, bfloat16, int8 or uint8");
  }
  if (!gemm_has_panels(task.kind)) {
    return ffi::Error::InvalidArgument(
        "gemm_panels: the weight was packed for a level with other instructions (verax.ops.cpu.library.level)");
  }
  const auto shape = panels->dimensions();
  const int64_t values = gemm_cell_values(task.kind);
  const bool fits = shape.size() == 4 && shape[0] == (N + GEMM_STRIP - 1) / GEMM_STRIP && shape[2] == GEMM_STRIP &&
                    shape[3] == values;
  task.N = N, task.K = fits ? shape[1] * values : 0;
  if (!fits || task.K % GEMM_DEPTH_STEP || N % GEMM_COLUMN_STEP ||
      (task.kind == Weights::int8_pairs && task.K > GEMM_INTEGER_DEPTH)) {
    return ffi::Error::InvalidArgument("gemm_panels: expected panels [N/48, K/values, 48, values] of a weight [N, K]");
  }
  const auto num_scales = static_cast<int64_t>(scales->element_count());
  const auto num_biases = static_cast<int64_t>(bias->element_count());
  const bool integers = task.kind == Weights::int8 || task.kind == Weights::int8_pairs;
  if (num_scales != (integers ? N : 0) || (num_biases && num_biases != N)) {
    return ffi::Error::InvalidArgument("gemm_panels: expected N scales of integers, and a bias of N or none");
  }
  task.weight = panels->untyped_data();
  task.scales = num_scales ? scales->typed_data() : nullptr;
  task.bias = num_biases ? bias->typed_data() : nullptr;
  return ffi::Error::Success();
}

// `weights`: of each its panels, its scales and its bias.
ffi::Error gemm_panels(ffi::ThreadPool pool, Floats x, UsedRows used, ffi::RemainingArgs weights,
                       ffi::RemainingRets results) {
  const auto in = x.dimensions();
  if (in.size() != 2 || results.size() == 0 || weights.size() != 3 * results.size()) {
    return ffi::Error::InvalidArgument("gemm_panels: expected x [M, K], and panels, scales and a bias for each result");
  }
  std::vector<GemmTask> tasks;
  for (size_t i = 0; i < results.size(); ++i) {
    auto result = results.get<ffi::AnyBuffer>(i);
    if (!result) return result.error();
    const auto out = (*result)->dimensions();
    GemmTask task{};
    if (const auto error = read_weight(weights, 3 * i, out.size() == 2 ? out[1] : 0, task); error.failure()) return error;
    if (out.size() != 2 || out[0] != in[0] || task.K != in[1]) {
      return ffi::Error::InvalidArgument("gemm_panels: a weight [N, K] does not fit x [M, K] and y [M, N]");
    }
    if (i > 0 && task.kind != tasks[0].kind) return ffi::Error::InvalidArgument("gemm_panels: weights of two dtypes");
    task.M = used_rows(used, in[0]), task.x = x.typed_data();
    clear_padding(**result, used);
    switch ((*result)->element_type()) {
      case ffi::F32: task.y = static_cast<float*>((*result)->untyped_data()); break;
      case ffi::BF16: task.rounded = static_cast<uint16_t*>((*result)->untyped_data()); break;
      default: return ffi::Error::InvalidArgument("gemm_panels: expected results of float32 or bfloat16");
    }
    tasks.push_back(task);
  }
  run_panels(pool, tasks);
  return ffi::Error::Success();
}

// `weights`: panels, scales and bias of up, which has a GELU (`approximate`: by tanh), then of down.
ffi::Error mlp_panels(ffi::ThreadPool pool, Floats x, UsedRows used, ffi::RemainingArgs weights, ffi::Result<Floats> y,
                      bool approximate) {
  const auto in = x.dimensions(), out = y->dimensions();
  if (in.size() != 2 || out.size() != 2 || out[0] != in[0] || weights.size() != 6) {
    return ffi::Error::InvalidArgument("mlp_panels: expected x [M, K], panels, scales and a bias of two weights, and y [M, N]");
  }
  GemmTask up{}, down{};
  if (const auto error = read_weight(weights, 3, out[1], down); error.failure()) return error;
  if (const auto error = read_weight(weights, 0, down.K, up); error.failure()) return error;
  if (up.K != in[1] || up.kind != down.kind) {
    return ffi::Error::InvalidArgument("mlp_panels: weights [H, K] and [N, H] of one dtype do not fit x [M, K] and y [M, N]");
  }
  up.M = down.M = used_rows(used, in[0]);
  up.x = x.typed_data(), up.activation = approximate ? Activation::gelu_tanh : Activation::gelu;
  down.y = y->typed_data();
  run_mlp(pool, up, down);
  clear_padding(*y, used);
  return ffi::Error::Success();
}

// y = SiLU(gate of x) * (up of x). `weights`: panels, scales and bias of gate, then of up.
ffi::Error swiglu_panels(ffi::ThreadPool pool, Floats x, UsedRows used, ffi::RemainingArgs weights, ffi::Result<Floats> y) {
  const auto in = x.dimensions(), out = y->dimensions();
  if (in.size() != 2 || out.size() != 2 || out[0] != in[0] || weights.size() != 6) {
    return ffi::Error::InvalidArgument("swiglu_panels: expected x [M, K], panels, scales and a bias of two weights, and y [M, N]");
  }
  GemmTask gate{}, up{};
  if (const auto error = read_weight(weights, 0, out[1], gate); error.failure()) return error;
  if (const auto error = read_weight(weights, 3, out[1], up); error.failure()) return error;
  if (gate.K != in[1] || up.K != in[1] || gate.kind != up.kind) {
    return ffi::Error::InvalidArgument("swiglu_panels: weights [N, K] of one dtype do not fit x [M, K] and y [M, N]");
  }
  up.M = used_rows(used, in[0]), up.x = x.typed_data(), up.y = y->typed_data(), up.gate = &gate;
  run_panels(pool, {up});
  clear_padding(*y, used);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace verax

VERAX_HANDLER(verax_gemm_panels, verax::gemm_panels,
              xla::ffi::Ffi::Bind()
                  .Ctx<xla::ffi::ThreadPool>()
                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                  .Arg<verax::UsedRows>()
                  .RemainingArgs()
                  .RemainingRets());

VERAX_HANDLER(verax_swiglu_panels, verax::swiglu_panels,
              xla::ffi::Ffi::Bind()
                  .Ctx<xla::ffi::ThreadPool>()
                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                  .Arg<verax::UsedRows>()
                  .RemainingArgs()
                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>());

VERAX_HANDLER(verax_mlp_panels, verax::mlp_panels,
              xla::ffi::Ffi::Bind()
                  .Ctx<xla::ffi::ThreadPool>()
                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                  .Arg<verax::UsedRows>()
                  .RemainingArgs()
                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                  .Attr<bool>("approximate"));
