// The FFI handlers of kernels/gemm.cc.
#include "export.h"
#include "gemm_run.h"
#include "shapes.h"
#include "xla/ffi/api/ffi.h"

namespace verax {
namespace {

namespace ffi = ::xla::ffi;

ffi::Error gemm(ffi::ThreadPool pool, ffi::AnyBuffer x, UsedRows used, ffi::AnyBuffer weight,
                ffi::Buffer<ffi::F32> scales, ffi::Buffer<ffi::F32> bias, ffi::ResultBuffer<ffi::F32> y, int64_t kind) {
  const auto in = x.dimensions(), shape = weight.dimensions(), out = y->dimensions();
  if (in.size() != 2 || out.size() != 2 || out[0] != in[0]) {
    return ffi::Error::InvalidArgument("gemm: expected x [M, K] and y [M, N]");
  }
  GemmTask task{};
  task.M = used_rows(used, in[0]), task.N = out[1], task.K = in[1];
  task.block = static_cast<BlockKind>(kind);
  const BlockShape blocks = block_shape(task.block);
  const bool fits = weight.element_type() != ffi::U32
                        ? shape.size() == 2 && shape[0] == task.N && shape[1] == task.K
                        : blocks.unit && shape.size() == 4 && shape[0] == task.N / 16 &&
                              shape[1] == (task.K + blocks.unit - 1) / blocks.unit && shape[2] == blocks.words &&
                              shape[3] == 16;
  if (!fits) return ffi::Error::InvalidArgument("gemm: expected a weight [N, K], or its blocks");
  switch (weight.element_type()) {
    case ffi::F32: task.kind = Weights::f32; break;
    case ffi::BF16: task.kind = Weights::bf16; break;
    case ffi::S8: task.kind = Weights::int8; break;
    case ffi::U32: task.kind = Weights::blocks; break;
    default: return ffi::Error::InvalidArgument("gemm: expected a weight of float32, bfloat16, int8 or blocks");
  }
  const bool floats = task.kind == Weights::f32 || (task.kind == Weights::blocks && !gemm_rounds_blocks());
  if (x.element_type() != (floats ? ffi::F32 : ffi::BF16)) {
    return ffi::Error::InvalidArgument(floats ? "gemm: expected x in float32" : "gemm: expected x in bfloat16");
  }
  const auto num_scales = static_cast<int64_t>(scales.element_count());
  const auto num_biases = static_cast<int64_t>(bias.element_count());
  if (task.K % GEMM_DEPTH_STEP != 0 || task.N % GEMM_COLUMN_STEP != 0 || (num_biases && num_biases != task.N) ||
      num_scales != (task.kind == Weights::int8 ? task.N : 0)) {
    return ffi::Error::InvalidArgument(
        "gemm: expected K divisible by 32, N by 16, N scales of integers, and a bias of N or none");
  }
  task.x = x.untyped_data();
  task.weight = weight.untyped_data();
  task.scales = num_scales ? scales.typed_data() : nullptr;
  task.bias = num_biases ? bias.typed_data() : nullptr;
  task.y = y->typed_data();
  run_gemm(pool, task);
  clear_padding(*y, used);
  return ffi::Error::Success();
}

// Both operands in 8-bit integers: rows of x become them here.
ffi::Error gemm_int8(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, UsedRows used, ffi::Buffer<ffi::S8> weight,
                     ffi::Buffer<ffi::F32> scales, ffi::Buffer<ffi::F32> bias, ffi::ResultBuffer<ffi::F32> y) {
  const auto in = x.dimensions(), shape = weight.dimensions(), out = y->dimensions();
  if (in.size() != 2 || shape.size() != 2 || out.size() != 2 || out[0] != in[0] || shape[0] != out[1] ||
      shape[1] != in[1]) {
    return ffi::Error::InvalidArgument("gemm_int8: expected x [M, K], a weight [N, K] and y [M, N]");
  }
  GemmTask task{};
  task.kind = Weights::int8_pairs;
  task.M = used_rows(used, in[0]), task.N = out[1], task.K = in[1];
  const auto num_scales = static_cast<int64_t>(scales.element_count());
  const auto num_biases = static_cast<int64_t>(bias.element_count());
  if (task.K % GEMM_DEPTH_STEP != 0 || task.K > GEMM_INTEGER_DEPTH || task.N % GEMM_COLUMN_STEP != 0 ||
      num_scales != task.N || (num_biases && num_biases != task.N)) {
    return ffi::Error::InvalidArgument(
        "gemm_int8: expected K divisible by 32 up to 131072, N by 16, N scales, and a bias of N or none");
  }
  task.x = x.typed_data();
  task.weight = weight.typed_data();
  task.scales = scales.typed_data();
  task.bias = num_biases ? bias.typed_data() : nullptr;
  task.y = y->typed_data();
  run_rounded_gemm(pool, task);
  clear_padding(*y, used);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace verax

VERAX_HANDLER(verax_gemm, verax::gemm,
              xla::ffi::Ffi::Bind()
                  .Ctx<xla::ffi::ThreadPool>()
                  .Arg<xla::ffi::AnyBuffer>()
                  .Arg<verax::UsedRows>()
                  .Arg<xla::ffi::AnyBuffer>()
                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                  .Attr<int64_t>("block_kind"));

VERAX_HANDLER(verax_gemm_int8, verax::gemm_int8,
              xla::ffi::Ffi::Bind()
                  .Ctx<xla::ffi::ThreadPool>()
                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                  .Arg<verax::UsedRows>()
                  .Arg<xla::ffi::Buffer<xla::ffi::S8>>()
                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>());
