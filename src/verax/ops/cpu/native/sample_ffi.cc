// The FFI handlers of sample_run.h and of the log-probabilities in kernels/sample.cc.
#include <algorithm>

#include "export.h"
#include "sample_run.h"
#include "xla/ffi/api/ffi.h"

namespace verax {
namespace {

namespace ffi = ::xla::ffi;

ffi::Error sample(ffi::ThreadPool pool, ffi::BufferR2<ffi::F32> logits, ffi::BufferR2<ffi::S32> tokens,
                  ffi::BufferR1<ffi::S32> slots, ffi::BufferR1<ffi::S32> lengths, ffi::BufferR2<ffi::F32> floats,
                  ffi::BufferR2<ffi::S32> ints, ffi::BufferR2<ffi::S32> bias_ids, ffi::BufferR2<ffi::F32> bias_values,
                  ffi::BufferR2<ffi::S32> banned, ffi::BufferR2<ffi::S32> mask,
                  ffi::ResultBufferR1<ffi::S32> chosen) {
  const int64_t B = logits.dimensions()[0], V = logits.dimensions()[1];
  const int64_t S = tokens.dimensions()[0];
  const auto is = [](const auto& x, int64_t rows, int64_t columns) {
    return x.dimensions()[0] == rows && x.dimensions()[1] == columns;
  };
  const int64_t num_bias = bias_ids.dimensions()[1], num_words = mask.dimensions()[1];
  if (V == 0 || S == 0 || slots.dimensions()[0] != B || lengths.dimensions()[0] != B || chosen->dimensions()[0] != B ||
      !is(floats, S, NUM_SAMPLE_FLOATS) || !is(ints, S, NUM_SAMPLE_INTS) || !is(bias_ids, S, num_bias) ||
      !is(bias_values, S, num_bias) || banned.dimensions()[0] != S || !is(mask, B, num_words) ||
      (num_words > 0 && num_words * 32 < V)) {
    return ffi::Error::InvalidArgument("sample: expected logits [B, V], tokens [S, L], parameters of S slots, B rows");
  }
  run_sample(pool, SampleTask{B, V, S, tokens.dimensions()[1], logits.typed_data(), tokens.typed_data(),
                              slots.typed_data(), lengths.typed_data(), floats.typed_data(), ints.typed_data(),
                              num_bias, banned.dimensions()[1], num_words, bias_ids.typed_data(),
                              bias_values.typed_data(), banned.typed_data(), mask.typed_data(), chosen->typed_data()});
  return ffi::Error::Success();
}

ffi::Error token_logprobs(ffi::ThreadPool pool, ffi::BufferR2<ffi::F32> logits, ffi::BufferR1<ffi::S32> chosen,
                          ffi::BufferR1<ffi::PRED> wanted, ffi::ResultBufferR2<ffi::F32> values,
                          ffi::ResultBufferR2<ffi::S32> ids, ffi::ResultBufferR1<ffi::S32> ranks) {
  const int64_t B = logits.dimensions()[0], V = logits.dimensions()[1], n = values->dimensions()[1];
  if (V == 0 || n == 0 || n - 1 > V || chosen.dimensions()[0] != B || wanted.dimensions()[0] != B ||
      values->dimensions()[0] != B || ids->dimensions()[0] != B || ids->dimensions()[1] != n ||
      ranks->dimensions()[0] != B) {
    return ffi::Error::InvalidArgument("token_logprobs: expected logits [B, V], B tokens and at most V of the best");
  }
  const auto score = VERAX_KERNEL(logprobs_row);
  parallel_for(pool, B, grain_of(B, B * V * 4), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      float* to_values = values->typed_data() + row * n;
      int32_t* to_ids = ids->typed_data() + row * n;
      if (!wanted.typed_data()[row]) {
        std::fill_n(to_values, n, 0.0f);
        std::fill_n(to_ids, n, 0);
        ranks->typed_data()[row] = 0;
        continue;
      }
      const int32_t token = std::clamp<int32_t>(chosen.typed_data()[row], 0, static_cast<int32_t>(V - 1));
      score({V, logits.typed_data() + row * V, token, n - 1}, to_values, to_ids, ranks->typed_data() + row);
    }
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace verax

VERAX_HANDLER(verax_sample, verax::sample,
              xla::ffi::Ffi::Bind()
                  .Ctx<xla::ffi::ThreadPool>()
                  .Arg<xla::ffi::BufferR2<xla::ffi::F32>>()
                  .Arg<xla::ffi::BufferR2<xla::ffi::S32>>()
                  .Arg<xla::ffi::BufferR1<xla::ffi::S32>>()
                  .Arg<xla::ffi::BufferR1<xla::ffi::S32>>()
                  .Arg<xla::ffi::BufferR2<xla::ffi::F32>>()
                  .Arg<xla::ffi::BufferR2<xla::ffi::S32>>()
                  .Arg<xla::ffi::BufferR2<xla::ffi::S32>>()
                  .Arg<xla::ffi::BufferR2<xla::ffi::F32>>()
                  .Arg<xla::ffi::BufferR2<xla::ffi::S32>>()
                  .Arg<xla::ffi::BufferR2<xla::ffi::S32>>()
                  .Ret<xla::ffi::BufferR1<xla::ffi::S32>>());

VERAX_HANDLER(verax_token_logprobs, verax::token_logprobs,
              xla::ffi::Ffi::Bind()
                  .Ctx<xla::ffi::ThreadPool>()
                  .Arg<xla::ffi::BufferR2<xla::ffi::F32>>()
                  .Arg<xla::ffi::BufferR1<xla::ffi::S32>>()
                  .Arg<xla::ffi::BufferR1<xla::ffi::PRED>>()
                  .Ret<xla::ffi::BufferR2<xla::ffi::F32>>()
                  .Ret<xla::ffi::BufferR2<xla::ffi::S32>>()
                  .Ret<xla::ffi::BufferR1<xla::ffi::S32>>());
