// The FFI handlers of kernels/write_pages.cc. A cache is operand and result in one buffer: XLA copies it first if
// somebody else still needs the old one, and not at all if it was donated.
#include <algorithm>

#include "export.h"
#include "kernels/write_pages.h"
#include "levels.h"
#include "parallel.h"
#include "shapes.h"
#include "xla/ffi/api/ffi.h"

namespace verax {
namespace {

namespace ffi = ::xla::ffi;

// Elements that a thread writes at a time: below it, waking another one takes longer.
constexpr int64_t PIECE = 64 * 1024;

using Floats = ffi::Buffer<ffi::F32>;
using Integers = ffi::Buffer<ffi::S32>;

ffi::ErrorOr<WritePagesTask> task_of(const ffi::AnyBuffer& cache, ffi::Result<ffi::AnyBuffer>& out, const Floats& x,
                                     const Integers& pages, const Integers& offsets) {
  const auto shape = cache.dimensions(), in = x.dimensions();
  if (cache.untyped_data() != out->untyped_data()) {
    return ffi::Unexpected(ffi::Error::InvalidArgument("write_pages: expected caches aliased to the results"));
  }
  if (shape.size() != 4 || in.size() != 3 || in[1] != shape[1] || in[2] != shape[3] ||
      static_cast<int64_t>(pages.element_count()) != in[0] || static_cast<int64_t>(offsets.element_count()) != in[0]) {
    return ffi::Unexpected(ffi::Error::InvalidArgument(
        "write_pages: expected a cache [P, K, p, H], x [T, K, H], T pages and offsets"));
  }
  const auto type = cache.element_type();
  const Keys keys = type == ffi::F32 ? Keys::f32 : type == ffi::BF16 ? Keys::bf16 : Keys::int8;
  return WritePagesTask{in[0],           in[1],  in[2], shape[0], shape[2], x.typed_data(), pages.typed_data(),
                        offsets.typed_data(), out->untyped_data(), keys, nullptr};
}

// Keys and values in one round of work: to call twice takes a decode step longer than to write.
void write(ffi::ThreadPool& pool, const WritePagesTask& k, const WritePagesTask& v) {
  const int64_t elements = k.T * std::max(k.H, v.H), grain = std::max<int64_t>(1, PIECE / std::max<int64_t>(1, elements));
  const auto run = VERAX_KERNEL(write_pages);
  parallel_for(pool, k.K + v.K, grain, [&](int64_t begin, int64_t end) {
    if (begin < k.K) run(k, begin, std::min(end, k.K));
    if (end > k.K) run(v, std::max<int64_t>(0, begin - k.K), end - k.K);
  });
}

ffi::Error write_pages(ffi::ThreadPool pool, ffi::AnyBuffer k_cache, ffi::AnyBuffer v_cache, Floats k, Floats v,
                       Integers pages, Integers offsets, ffi::Result<ffi::AnyBuffer> k_out,
                       ffi::Result<ffi::AnyBuffer> v_out) {
  for (const auto& cache : {k_cache, v_cache}) {
    if (!is_float(cache)) {
      return ffi::Error::InvalidArgument("write_pages: expected float32 or bfloat16 caches");
    }
  }
  const auto keys = task_of(k_cache, k_out, k, pages, offsets), values = task_of(v_cache, v_out, v, pages, offsets);
  if (!keys || !values) return keys ? values.error() : keys.error();
  write(pool, *keys, *values);
  return ffi::Error::Success();
}

// Scales of pages [P, K, p, H].
bool fits(const Floats& scales, const ffi::AnyBuffer& cache, ffi::ResultBuffer<ffi::F32>& out) {
  const auto pages = cache.dimensions(), shape = scales.dimensions();
  return cache.element_type() == ffi::S8 && pages.size() == 4 && shape.size() == 3 &&
         std::equal(shape.begin(), shape.end(), pages.begin()) && scales.untyped_data() == out->untyped_data();
}

ffi::Error write_pages_quantized(ffi::ThreadPool pool, ffi::AnyBuffer k_cache, Floats k_scales, ffi::AnyBuffer v_cache,
                                 Floats v_scales, Floats k, Floats v, Integers pages, Integers offsets,
                                 ffi::Result<ffi::AnyBuffer> k_out, ffi::ResultBuffer<ffi::F32> k_scales_out,
                                 ffi::Result<ffi::AnyBuffer> v_out, ffi::ResultBuffer<ffi::F32> v_scales_out) {
  if (!fits(k_scales, k_cache, k_scales_out) || !fits(v_scales, v_cache, v_scales_out)) {
    return ffi::Error::InvalidArgument(
        "write_pages: expected int8 pages [P, K, p, H] and scales [P, K, p], aliased to the results");
  }
  auto keys = task_of(k_cache, k_out, k, pages, offsets), values = task_of(v_cache, v_out, v, pages, offsets);
  if (!keys || !values) return keys ? values.error() : keys.error();
  keys->scales = k_scales_out->typed_data(), values->scales = v_scales_out->typed_data();
  write(pool, *keys, *values);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace verax

VERAX_HANDLER(verax_write_pages, verax::write_pages,
              xla::ffi::Ffi::Bind()
                  .Ctx<xla::ffi::ThreadPool>()
                  .Arg<xla::ffi::AnyBuffer>()
                  .Arg<xla::ffi::AnyBuffer>()
                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                  .Ret<xla::ffi::AnyBuffer>()
                  .Ret<xla::ffi::AnyBuffer>());

VERAX_HANDLER(verax_write_pages_quantized, verax::write_pages_quantized,
              xla::ffi::Ffi::Bind()
                  .Ctx<xla::ffi::ThreadPool>()
                  .Arg<xla::ffi::AnyBuffer>()
                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                  .Arg<xla::ffi::AnyBuffer>()
                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                  .Ret<xla::ffi::AnyBuffer>()
                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                  .Ret<xla::ffi::AnyBuffer>()
                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>());
