// The FFI handlers of kernels/linear.cc: check shapes, pack x, share the rows of W over the threads.
#include <algorithm>
#include <initializer_list>

#include "export.h"
#include "kernels/linear.h"
#include "levels.h"
#include "parallel.h"
#include "scratch.h"
#include "xla/ffi/api/ffi.h"

namespace verax {
namespace {

namespace ffi = ::xla::ffi;

// Bytes of weight that a thread takes at a time: some ten microseconds of memory traffic.
constexpr int64_t PIECE = 256 * 1024;

void run(ffi::ThreadPool& pool, LinearTask task) {
  if (task.M == 0 || task.N == 0) return;
  const AlignedBytes packed(std::max<int64_t>(64, linear_packed_bytes(task.M, task.K)));
  task.packed = packed.data();
  VERAX_KERNEL(linear_pack)(task);
  const auto columns = VERAX_KERNEL(linear_columns);
  const int64_t rows = std::min(PIECE / std::max<int64_t>(1, linear_row_bytes(task)), task.N / 8);
  const int64_t grain = std::max(LINEAR_STEP, rows / LINEAR_STEP * LINEAR_STEP);
  parallel_for(pool, task.N, grain, [&](int64_t begin, int64_t end) { columns(task, begin, end); });
}

ffi::Error linear(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::AnyBuffer weight,
                  ffi::ResultBuffer<ffi::F32> y) {
  const auto in = x.dimensions(), shape = weight.dimensions(), out = y->dimensions();
  if (in.size() != 2 || shape.size() != 2 || out.size() != 2 || in[1] != shape[1] || out[0] != in[0] ||
      out[1] != shape[0]) {
    return ffi::Error::InvalidArgument("linear: expected x [M, K], weight [N, K] and y [M, N]");
  }
  LinearTask task{};
  task.M = in[0], task.N = shape[0], task.K = in[1];
  task.x = x.typed_data(), task.weights = weight.untyped_data(), task.y = y->typed_data();
  switch (weight.element_type()) {
    case ffi::F32: task.kind = Weights::f32; break;
    case ffi::BF16: task.kind = Weights::bf16; break;
    default: return ffi::Error::InvalidArgument("linear: expected a weight of float32 or bfloat16");
  }
  run(pool, task);
  return ffi::Error::Success();
}

ffi::Error linear_quantized(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::AnyBuffer values,
                            ffi::AnyBuffer scales, ffi::ResultBuffer<ffi::F32> y, int64_t group) {
  const auto in = x.dimensions(), shape = values.dimensions(), by = scales.dimensions(), out = y->dimensions();
  if (in.size() != 2 || out.size() != 2 || out[0] != in[0]) {
    return ffi::Error::InvalidArgument("linear_quantized: expected x [M, K] and y [M, N]");
  }
  LinearTask task{};
  task.M = in[0], task.N = out[1], task.K = in[1], task.group = group;
  task.x = x.typed_data(), task.weights = values.untyped_data(), task.y = y->typed_data();
  task.scales = scales.untyped_data(), task.half_scales = scales.element_type() == ffi::F16;
  if (!task.half_scales && scales.element_type() != ffi::F32) {
    return ffi::Error::InvalidArgument("linear_quantized: expected scales of float16 or float32");
  }
  const bool grouped = group == 32 || group == 64 || group == 128;
  if (grouped ? task.K % group != 0 : group != 0) {
    return ffi::Error::InvalidArgument("linear_quantized: expected a scale for each 32, 64, 128 or all inputs");
  }
  const int64_t groups = grouped ? task.K / group : 1, blocks = (task.N + 15) / 16;
  const auto is = [](const auto& dimensions, std::initializer_list<int64_t> expected) {
    return std::equal(dimensions.begin(), dimensions.end(), expected.begin(), expected.end());
  };
  bool fits = false;
  if (values.element_type() == ffi::S8) {
    task.kind = Weights::int8;
    fits = is(shape, {task.N, task.K}) && is(by, {task.N, groups});
  } else if (values.element_type() == ffi::U16) {
    task.kind = Weights::int4;
    fits = grouped && is(shape, {blocks, task.K / 8, 32}) && is(by, {blocks, groups, 16});
  }
  if (!fits) return ffi::Error::InvalidArgument("linear_quantized: the values or scales do not fit x and y");
  run(pool, task);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace verax

VERAX_HANDLER(verax_linear, verax::linear,
              xla::ffi::Ffi::Bind()
                  .Ctx<xla::ffi::ThreadPool>()
                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                  .Arg<xla::ffi::AnyBuffer>()
                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>());

VERAX_HANDLER(verax_linear_quantized, verax::linear_quantized,
              xla::ffi::Ffi::Bind()
                  .Ctx<xla::ffi::ThreadPool>()
                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                  .Arg<xla::ffi::AnyBuffer>()
                  .Arg<xla::ffi::AnyBuffer>()
                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                  .Attr<int64_t>("group"));
