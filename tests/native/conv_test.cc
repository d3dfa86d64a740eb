// The convolution kernels without JAX, for the sanitisers: every level, odd shapes, buffers that end where the data ends.
#include <algorithm>

#include "check.h"
#include "conv_run.h"
#include "conv_winograd_run.h"

using verax::ConvTask;

namespace {

// Random numbers as float32 or bfloat16, in a buffer without a byte to spare.
struct Numbers {
  std::vector<float> exact;
  std::vector<uint16_t> bits;

  Numbers(int64_t size, bool bf16, unsigned seed) : exact(check::normal(size, seed)) {
    if (!bf16) return;
    for (float& x : exact) {
      bits.push_back(check::to_bf16(x));
      x = check::from_bf16(bits.back());
    }
    bits.shrink_to_fit();
  }
  const void* data() const { return bits.empty() ? static_cast<const void*>(exact.data()) : bits.data(); }
};

// Sizes of a task, and what its arrays hold.
ConvTask shape(int64_t B, int64_t T, int64_t H, int64_t W, int64_t C, int64_t O, int64_t KT, int64_t KH, int64_t KW) {
  ConvTask t{};
  t.B = B, t.T = T, t.H = H, t.W = W, t.C = C, t.O = O, t.KT = KT, t.KH = KH, t.KW = KW;
  t.stride_t = t.stride_h = t.stride_w = 1;
  return t;
}

float at(const ConvTask& t, const Numbers& x, const Numbers& before, int64_t b, int64_t frame, int64_t h, int64_t w,
         int64_t c) {
  frame -= t.T_zeros;
  if (frame < 0 || h < 0 || h >= t.H || w < 0 || w >= t.W) return 0;
  const auto offset = [&](int64_t frames, int64_t i) { return (((b * frames + i) * t.H + h) * t.W + w) * t.C + c; };
  return frame < t.T_before ? before.exact[offset(t.T_before, frame)]
                            : x.exact[offset(t.T, frame - t.T_before)];
}

// `size` of the tiles of minimal filtering; 0: the direct kernel.
void check_case(const char* level, ConvTask t, int64_t size, bool x_bf16, bool weight_bf16, bool biased) {
  t.T_out = (t.T_zeros + t.T_before + t.T - t.KT) / t.stride_t + 1;
  t.x_bf16 = x_bf16, t.weight_bf16 = weight_bf16;
  const int64_t taps = t.KT * t.KH * t.KW, count = t.B * t.T_out * t.H_out * t.W_out * t.O;
  const Numbers x(t.B * t.T * t.H * t.W * t.C, x_bf16, 1), before(t.B * t.T_before * t.H * t.W * t.C, x_bf16, 2);
  const Numbers weight(t.O * t.C * taps, weight_bf16, 3);
  const std::vector<float> bias = check::normal(t.O, 4);
  t.x = x.data(), t.before = before.data(), t.weight = weight.data(), t.bias = biased ? bias.data() : nullptr;

  std::vector<float> results[2];
  for (const int threads : {1, 3}) {
    std::vector<float> wide(x_bf16 ? 0 : count, NAN);
    std::vector<uint16_t> narrow(x_bf16 ? count : 0, 0x7fc0);
    t.y = x_bf16 ? static_cast<void*>(narrow.data()) : wide.data();
    {
      check::Pool pool(threads);
      if (size) {
        verax::WinogradRun(t, size).run(pool);
      } else {
        verax::ConvRun(t).run(pool);
      }
    }
    for (const uint16_t bits : narrow) wide.push_back(check::from_bf16(bits));
    results[threads > 1] = wide;
  }
  check::that(std::equal(results[0].begin(), results[0].end(), results[1].begin()),
              "%s C %d O %d: three threads give another result than one", level, int(t.C), int(t.O));

  std::vector<double> exact, magnitudes;
  for (int64_t b = 0; b < t.B; ++b)
    for (int64_t f = 0; f < t.T_out; ++f)
      for (int64_t h = 0; h < t.H_out; ++h)
        for (int64_t w = 0; w < t.W_out; ++w)
          for (int64_t o = 0; o < t.O; ++o) {
            double sum = biased ? bias[o] : 0, magnitude = 1;
            for (int64_t c = 0; c < t.C; ++c)
              for (int64_t tap = 0; tap < taps; ++tap) {
                float value = at(t, x, before, b, f * t.stride_t + tap / (t.KH * t.KW),
                                 h * t.stride_h - t.top + tap / t.KW % t.KH, w * t.stride_w - t.left + tap % t.KW, c);
                if (weight_bf16) value = check::from_bf16(check::to_bf16(value));
                const double product = double{value} * weight.exact[(o * t.C + c) * taps + tap];
                sum += product;
                magnitude += std::fabs(product);
              }
            exact.push_back(sum), magnitudes.push_back(magnitude);
          }
  // A tile's pixels share its error.
  const double largest = exact.empty() ? 0 : *std::max_element(magnitudes.begin(), magnitudes.end());
  for (size_t i = 0; i < exact.size(); ++i) {
    const double tolerance = 1e-6 * (size ? largest : magnitudes[i]) + (x_bf16 ? std::fabs(exact[i]) / 256 : 0);
    check::that(std::fabs(results[0][i] - exact[i]) <= tolerance,
                "%s C %d O %d kernel %d %d %d tiles of %d, bf16 %d %d: y[%d] = %g, expected %g", level, int(t.C),
                int(t.O), int(t.KT), int(t.KH), int(t.KW), int(size), int(x_bf16), int(weight_bf16), int(i),
                results[0][i], exact[i]);
  }
}

}  // namespace

int main() {
  check::each_level([&](const char* level) {
    for (const int kinds : {0, 1, 2, 3}) {
      const auto check = [&](const ConvTask& t, bool biased, int64_t size = 0) {
        check_case(level, t, size, kinds & 1, kinds & 2, biased);
      };
      ConvTask video = shape(2, 2, 5, 9, 3, 50, 3, 3, 3);
      video.T_zeros = 2, video.top = video.left = 1, video.H_out = 5, video.W_out = 9;
      check(video, true);
      video.T_zeros = 0, video.T_before = 3, video.C = 34, video.O = 3;
      check(video, false);
      for (const int size : {2, 4}) {
        ConvTask tiles = shape(2, 6, 7, 9, 19, 50, 3, 3, 3);  // three pairs of frames, and parts of a tile at the edges
        tiles.T_zeros = 2, tiles.top = tiles.left = 1, tiles.H_out = 7, tiles.W_out = 9;
        check(tiles, true, size);
        tiles.T = 5, tiles.T_zeros = 1, tiles.T_before = 3;  // a frame, then three pairs
        check(tiles, false, size);
        tiles.T = 5, tiles.T_zeros = 0, tiles.T_before = 2, tiles.stride_t = 2;
        tiles.top = 3, tiles.left = 0, tiles.H_out = 6, tiles.W_out = 11;  // reaches past the last column
        check(tiles, false, size);
        tiles.T = 4, tiles.T_before = 5, tiles.KT = 4, tiles.stride_t = 1;  // no pairs, blocks of three frames
        check(tiles, false, size);
        ConvTask blocks = shape(1, 1, 10, 34, 80, 20, 2, 3, 3);  // several blocks, and inputs in more than one part
        blocks.top = blocks.left = 1, blocks.H_out = 10, blocks.W_out = 34;
        blocks.T_zeros = 3;  // the first two frames see zeros only
        check(blocks, true, size);
      }
      ConvTask rows = shape(1, 3, 5, 35, 32, 66, 3, 3, 3);  // rows of 16 pixels and parts, zero frames, 16 of 32 channels
      rows.T_zeros = 2, rows.top = rows.left = 1, rows.H_out = 5, rows.W_out = 35;
      check(rows, true);
      ConvTask pieces = shape(1, 1, 3, 9, 352, 33, 2, 2, 3);  // rows of the kernel in pieces of unequal steps
      pieces.T_zeros = 2, pieces.stride_h = pieces.stride_w = 2, pieces.H_out = 2, pieces.W_out = 5;
      check(pieces, false);
      ConvTask channels = shape(2, 1, 2, 3, 64, 20, 1, 1, 1);
      channels.H_out = 2, channels.W_out = 3;
      check(channels, true);
      ConvTask deep = shape(1, 1, 2, 3, 163, 17, 1, 2, 2);
      deep.H_out = 1, deep.W_out = 2;
      check(deep, true);
      ConvTask pixel = shape(1, 1, 1, 1, 1, 1, 1, 1, 1);
      pixel.H_out = pixel.W_out = 1;
      check(pixel, true);
      ConvTask strided = shape(1, 5, 7, 40, 12, 97, 2, 3, 4);
      strided.stride_t = 2, strided.stride_h = 3, strided.stride_w = 2, strided.left = 2;
      strided.H_out = 3, strided.W_out = 21;  // reaches past the last row and column
      check(strided, false);
      ConvTask outside = shape(1, 1, 1, 2, 4, 5, 1, 2, 2);
      outside.top = 6, outside.left = 9, outside.H_out = 9, outside.W_out = 14;
      check(outside, true);
      ConvTask none = shape(0, 2, 3, 3, 4, 4, 1, 3, 3);
      none.H_out = none.W_out = 1;
      check(none, true);
    }
    std::printf("%s: checked\n", level);
  });
  std::printf("conv: %d failures\n", check::failures);
  return check::failures != 0;
}
