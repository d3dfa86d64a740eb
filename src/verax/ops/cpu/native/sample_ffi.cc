// The FFI handler of kernels/sample.cc: a thread a row.
#include "export.h"
#include "kernels/sample.h"
#include "levels.h"
#include "parallel.h"
#include "scratch.h"
#include "xla/ffi/api/ffi.h"

namespace verax {
namespace {

namespace ffi = ::xla::ffi;

ffi::Error sample(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> logits, ffi::Buffer<ffi::F32> temperature,
                  ffi::Buffer<ffi::S32> top_k, ffi::Buffer<ffi::F32> top_p, ffi::Buffer<ffi::F32> min_p,
                  ffi::Buffer<ffi::F32> u, ffi::ResultBuffer<ffi::S32> tokens) {
  const auto shape = logits.dimensions();
  const size_t rows = shape.size() == 2 ? shape[0] : 0;
  if (shape.size() != 2 || shape[1] == 0 || temperature.element_count() != rows || top_k.element_count() != rows ||
      top_p.element_count() != rows || min_p.element_count() != rows || u.element_count() != rows ||
      tokens->element_count() != rows) {
    return ffi::Error::InvalidArgument("sample: expected logits [B, V] and B of each parameter");
  }
  const SampleTask task{shape[1],          logits.typed_data(), temperature.typed_data(), top_p.typed_data(),
                        min_p.typed_data(), u.typed_data(),      top_k.typed_data(),       tokens->typed_data()};
  const auto draw = VERAX_KERNEL(sample_row);
  parallel_for(pool, shape[0], 1, [&](int64_t begin, int64_t end) {
    const int64_t bytes = sample_buffer_size(task.V) * static_cast<int64_t>(sizeof(float));
    auto* buffer = static_cast<float*>(thread_scratch(bytes));
    for (int64_t row = begin; row < end; ++row) draw(task, row, buffer);
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace verax

VERAX_HANDLER(verax_sample, verax::sample,
              xla::ffi::Ffi::Bind()
                  .Ctx<xla::ffi::ThreadPool>()
                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                  .Ret<xla::ffi::Buffer<xla::ffi::S32>>());
