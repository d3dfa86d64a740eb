// The matmul of many rows without JAX, for the sanitisers: every level, buffers that end where the data ends.
#include "gemm_run.h"

#include <cmath>
#include <cstdio>

#include "check.h"

namespace {

std::vector<uint16_t> rounded(const std::vector<float>& values) {
  std::vector<uint16_t> bits(values.size());
  for (size_t i = 0; i < values.size(); ++i) bits[i] = check::to_bf16(values[i]);
  bits.shrink_to_fit();
  return bits;
}

void product(const char* level, int64_t M, int64_t K, int64_t N, bool biased) {
  const auto x = rounded(check::normal(M * K, 1)), weight = rounded(check::normal(N * K, 2));
  const auto bias = check::normal(N, 3);
  std::vector<float> y(M * N, NAN);
  verax::GemmTask task{};
  task.M = M, task.N = N, task.K = K;
  task.x = x.data(), task.weight = weight.data(), task.bias = biased ? bias.data() : nullptr, task.y = y.data();
  check::Pool pool(3);
  verax::run_gemm(pool, task);
  pool.join();
  for (int64_t m = 0; m < M; ++m) {
    for (int64_t n = 0; n < N; ++n) {
      double sum = biased ? bias[n] : 0;
      for (int64_t k = 0; k < K; ++k) {
        sum += static_cast<double>(check::from_bf16(x[m * K + k])) * check::from_bf16(weight[n * K + k]);
      }
      check::that(std::abs(y[m * N + n] - sum) <= 3e-6 * static_cast<double>(K) + 1e-5 * std::abs(sum),
                  "%s %ldx%ldx%ld at %ld, %ld: %g, not %g", level, static_cast<long>(M), static_cast<long>(K),
                  static_cast<long>(N), static_cast<long>(m), static_cast<long>(n), y[m * N + n], sum);
    }
  }
}

}  // namespace

int main() {
  check::each_level([](const char* level) {
    for (const bool biased : {false, true}) {
      product(level, 1, 32, 16, biased);
      product(level, 13, 416, 80, biased);
      product(level, 200, 64, 400, biased);
    }
    std::printf("%s: checked\n", level);
  });
  std::printf("gemm: %d failures\n", check::failures);
  return check::failures != 0;
}
