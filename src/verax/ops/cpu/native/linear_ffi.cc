// The FFI handlers of kernels/linear.cc: check shapes, pack x.
#include <algorithm>
#include <vector>

#include "export.h"
#include "kernels/linear.h"
#include "levels.h"
#include "linear_run.h"
#include "scratch.h"
#include "shapes.h"
#include "xla/ffi/api/ffi.h"

namespace verax {
namespace {

namespace ffi = ::xla::ffi;

// Products of the same x with several weights, which differ in N alone, and in their kind of blocks.
void run(ffi::ThreadPool& pool, std::vector<LinearTask>& tasks) {
  const LinearTask& first = tasks.front();
  if (first.M == 0) return;
  const SharedScratch packed(std::max<int64_t>(64, linear_packed_bytes(first.M, first.K)));
  for (LinearTask& task : tasks) task.packed = packed.data();
  const auto pack = VERAX_KERNEL(linear_pack);
  const int64_t grain = pieces_of(rows_of_piece(std::max<int64_t>(1, first.K)), LINEAR_STEP) * LINEAR_STEP;
  parallel_for(pool, first.M, grain, [&](int64_t begin, int64_t end) { pack(first, begin, end); });
  run_linear(pool, tasks);
}

// A task with what concerns x and y; N from y, whose rows of padding are zeros already.
ffi::ErrorOr<LinearTask> begin_task(const ffi::Buffer<ffi::F32>& x, const UsedRows& used, ffi::RemainingRets results,
                                    size_t index) {
  auto result = results.get<ffi::Buffer<ffi::F32>>(index);
  if (!result) return ffi::Unexpected(result.error());
  const auto in = x.dimensions(), out = (*result)->dimensions();
  if (in.size() != 2 || out.size() != 2 || out[0] != in[0]) {
    return ffi::Unexpected(ffi::Error::InvalidArgument("linear: expected x [M, K] and y [M, N]"));
  }
  LinearTask task{};
  task.M = used_rows(used, in[0]), task.N = out[1], task.K = in[1];
  task.x = x.typed_data(), task.y = (*result)->typed_data();
  clear_padding(**result, used);
  return task;
}

ffi::Error linear(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, UsedRows used, ffi::RemainingArgs weights,
                  ffi::RemainingRets results) {
  std::vector<LinearTask> tasks;
  for (size_t i = 0; i < weights.size(); ++i) {
    const auto weight = weights.get<ffi::AnyBuffer>(i);
    auto task = begin_task(x, used, results, i);
    if (!weight || !task) return weight ? task.error() : weight.error();
    if (!is_shape(weight->dimensions(), {task->N, task->K})) {
      return ffi::Error::InvalidArgument("linear: expected a weight [N, K] for each y [M, N]");
    }
    task->weights = weight->untyped_data();
    switch (weight->element_type()) {
      case ffi::F32: task->kind = Weights::f32; break;
      case ffi::BF16: task->kind = Weights::bf16; break;
      default: return ffi::Error::InvalidArgument("linear: expected weights of float32 or bfloat16");
    }
    if (i > 0 && task->kind != tasks[0].kind) return ffi::Error::InvalidArgument("linear: weights of two dtypes");
    tasks.push_back(*task);
  }
  if (tasks.empty() || results.size() != tasks.size()) {
    return ffi::Error::InvalidArgument("linear: expected as many results as weights, one or more");
  }
  run(pool, tasks);
  return ffi::Error::Success();
}

// `weights`: of each its values, its scales, and its zero points, which are empty but for int4.
ffi::Error linear_quantized(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, UsedRows used, ffi::RemainingArgs weights,
                            ffi::RemainingRets results, int64_t group) {
  std::vector<LinearTask> tasks;
  for (size_t i = 0; i < weights.size() / 3; ++i) {
    const auto values = weights.get<ffi::AnyBuffer>(3 * i), scales = weights.get<ffi::AnyBuffer>(3 * i + 1);
    const auto zeros = weights.get<ffi::Buffer<ffi::S8>>(3 * i + 2);
    auto found = begin_task(x, used, results, i);
    if (!values || !scales) return values ? scales.error() : values.error();
    if (!zeros) return zeros.error();
    if (!found) return found.error();
    LinearTask& task = *found;
    task.group = group;
    task.weights = values->untyped_data();
    task.scales = scales->untyped_data(), task.half_scales = scales->element_type() == ffi::F16;
    if (!task.half_scales && scales->element_type() != ffi::F32) {
      return ffi::Error::InvalidArgument("linear_quantized: expected scales of float16 or float32");
    }
    const bool grouped = group == 32 || group == 64 || group == 128;
    if (grouped ? task.K % group != 0 : group != 0) {
      return ffi::Error::InvalidArgument("linear_quantized: expected a scale for each 32, 64, 128 or all inputs");
    }
    const int64_t groups = grouped ? task.K / group : 1, blocks = (task.N + 15) / 16;
    const auto shape = values->dimensions(), by = scales->dimensions();
    bool fits = false;
    if (values->element_type() == ffi::S8 || values->element_type() == ffi::F8E4M3FN) {
      task.kind = values->element_type() == ffi::S8 ? Weights::int8 : Weights::float8;
      fits = is_shape(shape, {task.N, task.K}) && is_shape(by, {task.N, groups}) && zeros->element_count() == 0;
    } else if (values->element_type() == ffi::U16) {
      task.kind = Weights::int4;
      fits = grouped && is_shape(shape, {blocks, task.K / 8, 32}) && is_shape(by, {blocks, groups, 16});
      fits = fits && (zeros->element_count() == 0 || is_shape(zeros->dimensions(), {blocks, groups, 16}));
      task.zeros = zeros->element_count() ? zeros->typed_data() : nullptr;
    }
    if (!fits) return ffi::Error::InvalidArgument("linear_quantized: values, scales or zero points do not fit x and y");
    if (i > 0 && task.kind != tasks[0].kind) {
      return ffi::Error::InvalidArgument("linear_quantized: weights of two kinds");
    }
    tasks.push_back(task);
  }
  if (tasks.empty() || results.size() != tasks.size() || weights.size() != 3 * tasks.size()) {
    return ffi::Error::InvalidArgument("linear_quantized: expected values, scales, zero points for each result");
  }
  run(pool, tasks);
  return ffi::Error::Success();
}

// `kinds`: BlockKind of each weight.
ffi::Error linear_blocks(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, UsedRows used, ffi::RemainingArgs weights,
                         ffi::RemainingRets results, ffi::Span<const int64_t> kinds) {
  std::vector<LinearTask> tasks;
  if (weights.size() == 0 || results.size() != weights.size() || kinds.size() != weights.size()) {
    return ffi::Error::InvalidArgument("linear_blocks: expected a kind and a result for each weight, one or more");
  }
  for (size_t i = 0; i < weights.size(); ++i) {
    const auto words = weights.get<ffi::Buffer<ffi::U32>>(i);
    auto task = begin_task(x, used, results, i);
    if (!words || !task) return words ? task.error() : words.error();
    task->kind = Weights::blocks, task->block = static_cast<BlockKind>(kinds[i]);
    task->weights = words->untyped_data();
    const BlockShape shape = block_shape(task->block);
    if (shape.unit == 0) return ffi::Error::InvalidArgument("linear_blocks: unknown kind");
    const int64_t units = (task->K + shape.unit - 1) / shape.unit;
    if (!is_shape(words->dimensions(), {(task->N + 15) / 16, units, shape.words, 16})) {
      return ffi::Error::InvalidArgument("linear_blocks: the words do not fit x and y");
    }
    tasks.push_back(*task);
  }
  run(pool, tasks);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace verax

VERAX_HANDLER(verax_linear, verax::linear,
              xla::ffi::Ffi::Bind()
                  .Ctx<xla::ffi::ThreadPool>()
                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                  .Arg<verax::UsedRows>()
                  .RemainingArgs()
                  .RemainingRets());

VERAX_HANDLER(verax_linear_quantized, verax::linear_quantized,
              xla::ffi::Ffi::Bind()
                  .Ctx<xla::ffi::ThreadPool>()
                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                  .Arg<verax::UsedRows>()
                  .RemainingArgs()
                  .RemainingRets()
                  .Attr<int64_t>("group"));

VERAX_HANDLER(verax_linear_blocks, verax::linear_blocks,
              xla::ffi::Ffi::Bind()
                  .Ctx<xla::ffi::ThreadPool>()
                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                  .Arg<verax::UsedRows>()
                  .RemainingArgs()
                  .RemainingRets()
                  .Attr<xla::ffi::Span<const int64_t>>("kinds"));
