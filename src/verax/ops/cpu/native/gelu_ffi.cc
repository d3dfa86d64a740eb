// The FFI handler of kernels/gelu.cc.
#include "export.h"
#include "kernels/gelu.h"
#include "levels.h"
#include "parallel.h"
#include "xla/ffi/api/ffi.h"

namespace verax {
namespace {

namespace ffi = ::xla::ffi;

ffi::Error gelu(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::ResultBuffer<ffi::F32> y) {
  if (x.element_count() != y->element_count()) return ffi::Error::InvalidArgument("gelu: expected y like x");
  const GeluTask task{x.typed_data(), y->typed_data()};
  const auto apply = VERAX_KERNEL(gelu);
  parallel_for(pool, static_cast<int64_t>(x.element_count()), ELEMENTS_OF_PIECE,
               [&](int64_t begin, int64_t end) { apply(task, begin, end); });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace verax

VERAX_HANDLER(verax_gelu, verax::gelu,
              xla::ffi::Ffi::Bind()
                  .Ctx<xla::ffi::ThreadPool>()
                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>());
