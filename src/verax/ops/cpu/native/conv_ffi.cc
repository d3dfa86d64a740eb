// The FFI handler of kernels/conv.cc.
#include "conv_run.h"
#include "conv_winograd_run.h"
#include "export.h"
#include "xla/ffi/api/ffi.h"

namespace verax {
namespace {

namespace ffi = ::xla::ffi;

ffi::Error conv(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer cache, ffi::AnyBuffer weight,
                ffi::Buffer<ffi::F32> bias, ffi::Result<ffi::AnyBuffer> y, ffi::Span<const int64_t> stride,
                ffi::Span<const int64_t> before) {
  const auto in = x.dimensions(), earlier = cache.dimensions(), kernel = weight.dimensions(), out = y->dimensions();
  if (in.size() != 5 || earlier.size() != 5 || kernel.size() != 5 || out.size() != 5 || stride.size() != 3 ||
      before.size() != 3) {
    return ffi::Error::InvalidArgument("conv: expected x, cache and y [B, T, H, W, C] and weight [O, C, KT, KH, KW]");
  }
  ConvTask t{};
  t.B = in[0], t.T = in[1], t.H = in[2], t.W = in[3], t.C = in[4];
  t.T_before = earlier[1];
  t.O = kernel[0], t.KT = kernel[2], t.KH = kernel[3], t.KW = kernel[4];
  t.T_out = out[1], t.H_out = out[2], t.W_out = out[3];
  t.stride_t = stride[0], t.stride_h = stride[1], t.stride_w = stride[2];
  t.T_zeros = before[0], t.top = before[1], t.left = before[2];
  const auto bias_count = static_cast<int64_t>(bias.element_count());
  if (earlier[0] != t.B || earlier[2] != t.H || earlier[3] != t.W || earlier[4] != t.C || kernel[1] != t.C ||
      out[0] != t.B || out[4] != t.O || (bias_count != 0 && bias_count != t.O)) {
    return ffi::Error::InvalidArgument("conv: the shapes of cache, weight, bias and y do not fit x");
  }
  if (std::min({t.C, t.KT, t.KH, t.KW, t.stride_t, t.stride_h, t.stride_w}) < 1 ||
      std::min({t.T_zeros, t.top, t.left}) < 0 ||
      (t.T_out > 0 && conv_reach(t.T_out, t.stride_t, t.KT) > t.T_zeros + t.T_before + t.T)) {
    return ffi::Error::InvalidArgument("conv: expected a kernel, strides from 1, and frames that are there");
  }
  t.x_bf16 = x.element_type() == ffi::BF16, t.weight_bf16 = weight.element_type() == ffi::BF16;
  if ((!t.x_bf16 && x.element_type() != ffi::F32) || (!t.weight_bf16 && weight.element_type() != ffi::F32) ||
      cache.element_type() != x.element_type() || y->element_type() != x.element_type()) {
    return ffi::Error::InvalidArgument("conv: expected float32 or bfloat16, x, cache and y of the same");
  }
  t.x = x.untyped_data(), t.before = cache.untyped_data(), t.weight = weight.untyped_data();
  t.bias = bias_count ? bias.typed_data() : nullptr;
  t.y = y->untyped_data();
  if (const int64_t size = WinogradRun::size_for(t)) {
    WinogradRun(t, size).run(pool);
  } else {
    ConvRun(t).run(pool);
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace verax

VERAX_HANDLER(verax_conv, verax::conv,
              xla::ffi::Ffi::Bind()
                  .Ctx<xla::ffi::ThreadPool>()
                  .Arg<xla::ffi::AnyBuffer>()
                  .Arg<xla::ffi::AnyBuffer>()
                  .Arg<xla::ffi::AnyBuffer>()
                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                  .Ret<xla::ffi::AnyBuffer>()
                  .Attr<xla::ffi::Span<const int64_t>>("stride")
                  .Attr<xla::ffi::Span<const int64_t>>("before"));
