// The FFI handler of kernels/write_pages.cc. The cache is operand and result in one buffer: XLA copies it first if
// somebody else still needs the old one, and not at all if it was donated.
#include <algorithm>

#include "export.h"
#include "kernels/write_pages.h"
#include "levels.h"
#include "parallel.h"
#include "xla/ffi/api/ffi.h"

namespace verax {
namespace {

namespace ffi = ::xla::ffi;

// Elements that a thread writes at a time: below it, waking another one takes longer.
constexpr int64_t PIECE = 64 * 1024;

// `scales` are null, or of int8 pages.
ffi::Error write(ffi::ThreadPool& pool, const ffi::AnyBuffer& cache, void* data, float* scales,
                 const ffi::Buffer<ffi::F32>& x, const ffi::Buffer<ffi::S32>& pages,
                 const ffi::Buffer<ffi::S32>& offsets) {
  const auto shape = cache.dimensions(), in = x.dimensions();
  if (shape.size() != 4 || in.size() != 3 || in[1] != shape[1] || in[2] != shape[3] ||
      static_cast<int64_t>(pages.element_count()) != in[0] || static_cast<int64_t>(offsets.element_count()) != in[0]) {
    return ffi::Error::InvalidArgument("write_pages: expected a cache [P, K, p, H], x [T, K, H], T pages and offsets");
  }
  const auto type = cache.element_type();
  const Keys keys = type == ffi::F32 ? Keys::f32 : type == ffi::BF16 ? Keys::bf16 : Keys::int8;
  const WritePagesTask task{in[0],           in[1],  in[2], shape[0], shape[2], x.typed_data(), pages.typed_data(),
                            offsets.typed_data(), data, keys, scales};
  const int64_t grain = std::max<int64_t>(1, PIECE / std::max<int64_t>(1, task.T * task.H));
  const auto run = VERAX_KERNEL(write_pages);
  parallel_for(pool, task.K, grain, [&](int64_t begin, int64_t end) { run(task, begin, end); });
  return ffi::Error::Success();
}

ffi::Error write_pages(ffi::ThreadPool pool, ffi::AnyBuffer cache, ffi::Buffer<ffi::F32> x,
                       ffi::Buffer<ffi::S32> pages, ffi::Buffer<ffi::S32> offsets, ffi::Result<ffi::AnyBuffer> out) {
  const bool is_float = cache.element_type() == ffi::F32 || cache.element_type() == ffi::BF16;
  if (!is_float || cache.untyped_data() != out->untyped_data()) {
    return ffi::Error::InvalidArgument("write_pages: expected a float32 or bfloat16 cache, aliased to the result");
  }
  return write(pool, cache, out->untyped_data(), nullptr, x, pages, offsets);
}

ffi::Error write_pages_quantized(ffi::ThreadPool pool, ffi::AnyBuffer cache, ffi::Buffer<ffi::F32> scales,
                                 ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::S32> pages, ffi::Buffer<ffi::S32> offsets,
                                 ffi::Result<ffi::AnyBuffer> out, ffi::ResultBuffer<ffi::F32> scales_out) {
  if (cache.element_type() != ffi::S8 || cache.untyped_data() != out->untyped_data() ||
      scales.untyped_data() != scales_out->untyped_data()) {
    return ffi::Error::InvalidArgument("write_pages: expected int8 pages and scales, aliased to the results");
  }
  const auto pages_shape = cache.dimensions(), scales_shape = scales.dimensions();
  if (pages_shape.size() != 4 || scales_shape.size() != 3 ||
      !std::equal(scales_shape.begin(), scales_shape.end(), pages_shape.begin())) {
    return ffi::Error::InvalidArgument("write_pages: expected scales [P, K, p] of pages [P, K, p, H]");
  }
  return write(pool, cache, out->untyped_data(), scales_out->typed_data(), x, pages, offsets);
}

}  // namespace
}  // namespace verax

VERAX_HANDLER(verax_write_pages, verax::write_pages,
              xla::ffi::Ffi::Bind()
                  .Ctx<xla::ffi::ThreadPool>()
                  .Arg<xla::ffi::AnyBuffer>()
                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                  .Ret<xla::ffi::AnyBuffer>());

VERAX_HANDLER(verax_write_pages_quantized, verax::write_pages_quantized,
              xla::ffi::Ffi::Bind()
                  .Ctx<xla::ffi::ThreadPool>()
                  .Arg<xla::ffi::AnyBuffer>()
                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                  .Ret<xla::ffi::AnyBuffer>()
                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>());
