// The norms and GELU without JAX, for the sanitisers: every level, sizes that end anywhere.
#include "check.h"
#include "kernels/gelu.h"
#include "kernels/layer_norm.h"
#include "kernels/rms_norm.h"
#include "levels.h"

namespace {

void check_rms_norm(const char* level) {
  for (const int64_t D : {1, 15, 16, 64, 65, 257}) {
    const std::vector<float> x = check::normal(3 * D, 1), weight = check::normal(D, 2);
    std::vector<uint16_t> rounded(D);
    for (int64_t d = 0; d < D; ++d) rounded[d] = check::to_bf16(weight[d]);
    for (const bool bf16 : {false, true}) {
      std::vector<float> y(3 * D, NAN);
      const void* w = bf16 ? static_cast<const void*>(rounded.data()) : weight.data();
      const verax::RmsNormTask task{D, x.data(), w, bf16, 1e-6f, y.data()};
      VERAX_KERNEL(rms_norm)(task, 0, 3);
      for (int64_t m = 0; m < 3; ++m) {
        double squares = 0;
        for (int64_t d = 0; d < D; ++d) squares += double(x[m * D + d]) * x[m * D + d];
        for (int64_t d = 0; d < D; ++d) {
          const double exact = x[m * D + d] / std::sqrt(squares / D + 1e-6) *
                               (bf16 ? check::from_bf16(rounded[d]) : weight[d]);
          check::near(y[m * D + d], exact, 1e-5 * std::fabs(exact) + 1e-6, "%s norm D %d", level, int(D));
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
    check_layer_norm(level);
    check_gelu(level);
  });
}
