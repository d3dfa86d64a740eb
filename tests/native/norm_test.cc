// The norms and GELU without JAX, for the sanitisers: every level, sizes that end anywhere.
#include "check.h"
#include "kernels/gelu.h"
#include "kernels/layer_norm.h"
#include "kernels/rms_norm.h"
#include "levels.h"

namespace {

std::vector<uint16_t> rounded(const std::vector<float>& values) {
  std::vector<uint16_t> result;
  for (const float value : values) result.push_back(check::to_bf16(value));
  return result;
}

void check_rms_norm(const char* level) {
  for (const int64_t D : {1, 15, 16, 64, 65, 257}) {
    const std::vector<float> x = check::normal(3 * D, 1), weight = check::normal(D, 2);
    const std::vector<uint16_t> x_rounded = rounded(x), weight_rounded = rounded(weight);
    for (int form = 0; form < 16; ++form) {
      const bool x_bf16 = form & 1, weight_bf16 = form & 2, silu = form & 4, y_bf16 = form & 8;
      std::vector<float> y(3 * D, NAN);
      std::vector<uint16_t> y_rounded(3 * D);
      const auto pointer = [](bool bf16, auto& shorts, auto& floats) -> decltype((void*)nullptr) {
        return bf16 ? (void*)shorts.data() : (void*)floats.data();
      };
      VERAX_KERNEL(rms_norm)({D, pointer(x_bf16, x_rounded, x), x_bf16, pointer(weight_bf16, weight_rounded, weight),
                              weight_bf16, 1e-6f, silu, pointer(y_bf16, y_rounded, y), y_bf16}, 0, 3);
      for (int64_t m = 0; m < 3; ++m) {
        const auto value = [&](int64_t d) -> double { return x_bf16 ? check::from_bf16(x_rounded[m * D + d]) : x[m * D + d]; };
        double squares = 0;
        for (int64_t d = 0; d < D; ++d) squares += value(d) * value(d);
        for (int64_t d = 0; d < D; ++d) {
          double exact = value(d) / std::sqrt(squares / D + 1e-6) * (weight_bf16 ? check::from_bf16(weight_rounded[d]) : weight[d]);
          if (silu) exact /= 1 + std::exp(-exact);
          const float result = y_bf16 ? check::from_bf16(y_rounded[m * D + d]) : y[m * D + d];
          check::near(result, exact, (y_bf16 ? 0x1p-8 : 1e-5) * std::fabs(exact) + 1e-6, "%s norm D %d form %d", level, int(D), form);
        }
      }
    }
  }
}

void check_norm_rotary(const char* level) {
  constexpr int64_t tokens = 3, heads = 2;
  for (const int64_t D : {2, 30, 64, 129}) {
    for (const int64_t h : {D / 2, D / 3}) {
      const std::vector<float> x = check::normal(tokens * heads * D, 1), weight = check::normal(D, 2);
      const std::vector<float> cos = check::normal(tokens * h, 3), sin = check::normal(tokens * h, 4);
      std::vector<float> plain(x.size(), NAN), y(x.size(), NAN);
      verax::RmsNormTask norm{D, x.data(), false, weight.data(), false, 1e-6f, false, plain.data(), false};
      VERAX_KERNEL(rms_norm)(norm, 0, tokens * heads);
      norm.y = y.data();
      VERAX_KERNEL(norm_rotary)({norm, heads, h, cos.data(), sin.data()}, 0, tokens * heads);
      for (int64_t m = 0; m < tokens * heads; ++m) {
        const float *from = plain.data() + m * D, *c = cos.data() + m / heads * h, *s = sin.data() + m / heads * h;
        for (int64_t d = 0; d < D; ++d) {
          double exact = from[d];
          if (d < h) exact = double(from[d]) * c[d] - double(from[d + h]) * s[d];
          if (h <= d && d < 2 * h) exact = double(from[d]) * c[d - h] + double(from[d - h]) * s[d - h];
          check::near(y[m * D + d], exact, 1e-5 * std::fabs(exact) + 1e-5, "%s rotary D %d h %d", level, int(D), int(h));
        }
      }
    }
  }
}

void check_layer_norm(const char* level) {
  for (const int64_t D : {1, 15, 16, 64, 65, 257}) {
    const std::vector<float> x = check::normal(3 * D, 1), residual = check::normal(3 * D, 3);
    const std::vector<float> weight = check::normal(D, 2), bias = check::normal(D, 4);
    for (const bool added : {false, true}) {
      std::vector<float> y(3 * D, NAN);
      const verax::LayerNormTask task{D,     x.data(), added ? residual.data() : nullptr, weight.data(), bias.data(),
                                      false, 1e-6f,    y.data()};
      VERAX_KERNEL(layer_norm)(task, 0, 3);
      for (int64_t m = 0; m < 3; ++m) {
        const auto value = [&](int64_t d) { return double(x[m * D + d]) + (added ? residual[m * D + d] : 0); };
        double mean = 0, squares = 0;
        for (int64_t d = 0; d < D; ++d) mean += value(d) / D;
        for (int64_t d = 0; d < D; ++d) squares += (value(d) - mean) * (value(d) - mean);
        for (int64_t d = 0; d < D; ++d) {
          const double exact = (value(d) - mean) / std::sqrt(squares / D + 1e-6) * weight[d] + bias[d];
          check::near(y[m * D + d], exact, 1e-5 * std::fabs(exact) + 1e-5, "%s layer norm D %d", level, int(D));
        }
      }
    }
  }
}

void check_gelu(const char* level) {
  for (const int64_t size : {1, 15, 16, 17, 100}) {
    std::vector<float> x = check::normal(size, 5), y(size, NAN);
    for (float& value : x) value *= 3;
    VERAX_KERNEL(gelu)({x.data(), y.data()}, 0, size);
    for (int64_t i = 0; i < size; ++i) {
      const double exact = x[i] / 2 * std::erfc(-x[i] / std::sqrt(2.0));
      check::near(y[i], exact, 5e-7, "%s gelu of %g", level, double(x[i]));
    }
  }
}

}  // namespace

int main() {
  return check::main_of("norm", [](const char* level) {
    check_rms_norm(level);
    check_norm_rotary(level);
    check_layer_norm(level);
    check_gelu(level);
  });
}
