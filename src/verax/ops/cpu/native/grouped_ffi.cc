// The FFI handlers of grouped_run.h: products of rows with the matrices of their groups.

#include "export.h"
#include "grouped_run.h"
#include "shapes.h"
#include "xla/ffi/api/ffi.h"

namespace verax {
namespace {

namespace ffi = ::xla::ffi;

using Rows = ffi::AnyBuffer;
using Groups = ffi::Buffer<ffi::S32>;

// A task with all but its weights, of which there are G.
ffi::ErrorOr<GroupedTask> begin_task(const Rows& x, const Groups& groups, int64_t G, ffi::Buffer<ffi::F32>& y) {
  const auto in = x.dimensions(), out = y.dimensions();
  GroupedTask task{};
  task.R = static_cast<int64_t>(groups.element_count()), task.G = G;
  if (in.size() != 2 || out.size() != 2 || out[0] != task.R || (task.R && (in[0] == 0 || task.R % in[0] != 0))) {
    return ffi::Unexpected(
        ffi::Error::InvalidArgument("grouped_linear: expected x [M, K], groups [R] with R a multiple of M, y [R, N]"));
  }
  task.M = in[0], task.N = out[1], task.K = in[1];
  task.x = x.untyped_data(), task.groups = groups.typed_data(), task.y = y.typed_data();
  return task;
}

// `many`: rows of each group, so that their product is bound by arithmetic. x is then rounded to the dtype of W.
ffi::Error grouped(ffi::ThreadPool pool, Rows x, Groups groups, ffi::AnyBuffer weights, ffi::ResultBuffer<ffi::F32> y,
                   bool many) {
  const auto shape = weights.dimensions();
  auto task = begin_task(x, groups, shape.size() ? shape[0] : 0, *y);
  if (!task) return task.error();
  if (!is_shape(shape, {task->G, task->N, task->K})) {
    return ffi::Error::InvalidArgument("grouped_linear: expected weights [G, N, K]");
  }
  switch (weights.element_type()) {
    case ffi::F32: task->kind = Weights::f32; break;
    case ffi::BF16: task->kind = Weights::bf16; break;
    default: return ffi::Error::InvalidArgument("grouped_linear: expected weights of float32 or bfloat16");
  }
  if (x.element_type() != (many ? weights.element_type() : ffi::F32)) {
    return ffi::Error::InvalidArgument("grouped_linear: expected x of float32, or of the weights' dtype if there are many");
  }
  if (many && (task->K % GEMM_DEPTH_STEP || task->N % GEMM_COLUMN_STEP)) {
    return ffi::Error::InvalidArgument("grouped_linear: expected K divisible by 32 and N by 16");
  }
  task->weights = weights.untyped_data();
  if (task->R == 0 || task->N == 0) return ffi::Error::Success();
  many ? run_grouped_gemm(pool, *task) : run_grouped(pool, *task);
  return ffi::Error::Success();
}

ffi::Error grouped_quantized(ffi::ThreadPool pool, Rows x, Groups groups, ffi::AnyBuffer values, ffi::AnyBuffer scales,
                             ffi::ResultBuffer<ffi::F32> y, int64_t group_size) {
  const auto shape = values.dimensions(), by = scales.dimensions();
  auto task = begin_task(x, groups, shape.size() ? shape[0] : 0, *y);
  if (!task) return task.error();
  const bool by_group = group_size == 32 || group_size == 64 || group_size == 128;
  if (by_group ? task->K % group_size != 0 : group_size != 0) {
    return ffi::Error::InvalidArgument("grouped_linear: expected a scale for each 32, 64, 128 or all inputs");
  }
  const int64_t each = by_group ? task->K / group_size : 1, blocks = (task->N + 15) / 16;
  bool fits = x.element_type() == ffi::F32;
  fits &= scales.element_type() == ffi::F16 || scales.element_type() == ffi::F32;
  if (values.element_type() == ffi::S8 || values.element_type() == ffi::F8E4M3FN) {
    task->kind = values.element_type() == ffi::S8 ? Weights::int8 : Weights::float8;
    fits &= is_shape(shape, {task->G, task->N, task->K}) && is_shape(by, {task->G, task->N, each});
  } else {
    task->kind = Weights::int4;
    fits &= values.element_type() == ffi::U16 && by_group && is_shape(shape, {task->G, blocks, task->K / 8, 32}) &&
            is_shape(by, {task->G, blocks, each, 16});
  }
  if (!fits) return ffi::Error::InvalidArgument("grouped_linear: the values or scales do not fit x and y");
  task->weights = values.untyped_data(), task->scales = scales.untyped_data();
  task->half_scales = scales.element_type() == ffi::F16, task->group_size = group_size;
  if (task->R && task->N) run_grouped(pool, *task);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace verax

VERAX_HANDLER(verax_grouped_linear, verax::grouped,
              xla::ffi::Ffi::Bind()
                  .Ctx<xla::ffi::ThreadPool>()
                  .Arg<xla::ffi::AnyBuffer>()
                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                  .Arg<xla::ffi::AnyBuffer>()
                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                  .Attr<bool>("many"));

VERAX_HANDLER(verax_grouped_linear_quantized, verax::grouped_quantized,
              xla::ffi::Ffi::Bind()
                  .Ctx<xla::ffi::ThreadPool>()
                  .Arg<xla::ffi::AnyBuffer>()
                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                  .Arg<xla::ffi::AnyBuffer>()
                  .Arg<xla::ffi::AnyBuffer>()
                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                  .Attr<int64_t>("group_size"));
