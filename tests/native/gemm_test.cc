// The matmul of many rows without JAX, for the sanitisers: every level, buffers that end where the data ends.
#include "gemm_run.h"

#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

#include "check.h"
#include "panels_run.h"

namespace {

using verax::Weights;

// How an operand is kept, and what its values then are.
struct Operand {
  std::vector<float> values;
  std::vector<uint16_t> halves;
  std::vector<int8_t> bytes;
  const void* data = nullptr;

  Operand(Weights kind, int64_t count, int seed) : values(check::normal(count, seed)) {
    for (float& value : values) {
      if (kind == Weights::bf16) {
        halves.push_back(check::to_bf16(value));
        value = check::from_bf16(halves.back());
      } else if (kind == Weights::int8) {
        bytes.push_back(static_cast<int8_t>(std::lround(std::fmax(-127, std::fmin(127, 50 * value)))));
        value = bytes.back();
      }
    }
    values.shrink_to_fit(), halves.shrink_to_fit(), bytes.shrink_to_fit();
    data = kind == Weights::f32    ? static_cast<const void*>(values.data())
           : kind == Weights::bf16 ? static_cast<const void*>(halves.data())
                                   : static_cast<const void*>(bytes.data());
  }
};

void product(const char* level, Weights kind, int64_t M, int64_t K, int64_t N, bool biased) {
  const Operand x(kind == Weights::f32 ? kind : Weights::bf16, M * K, 1), weight(kind, N * K, 2);
  const auto bias = check::normal(N, 3);
  auto scales = check::normal(N, 4);
  for (float& scale : scales) scale *= 0.02f;
  const bool scaled = kind == Weights::int8;
  std::vector<float> y(M * N, NAN);
  verax::GemmTask task{};
  task.kind = kind, task.M = M, task.N = N, task.K = K;
  task.x = x.data, task.weight = weight.data, task.y = y.data();
  task.scales = scaled ? scales.data() : nullptr, task.bias = biased ? bias.data() : nullptr;
  check::Pool pool(3);
  verax::run_gemm(pool, task);
  pool.join();
  for (int64_t m = 0; m < M; ++m) {
    for (int64_t n = 0; n < N; ++n) {
      double sum = 0;
      for (int64_t k = 0; k < K; ++k) sum += static_cast<double>(x.values[m * K + k]) * weight.values[n * K + k];
      sum = sum * (scaled ? scales[n] : 1) + (biased ? bias[n] : 0);
      check::that(std::abs(y[m * N + n] - sum) <= 3e-6 * static_cast<double>(K) + 1e-5 * std::abs(sum),
                  "%s %ldx%ldx%ld at %ld, %ld: %g, not %g", level, static_cast<long>(M), static_cast<long>(K),
                  static_cast<long>(N), static_cast<long>(m), static_cast<long>(n), y[m * N + n], sum);
    }
  }
}

// Both operands in 8-bit integers: every row of x has another size, and one is not finite.
void integers(const char* level, int64_t M, int64_t K, int64_t N) {
  auto x = check::normal(M * K, 1);
  for (int64_t m = 0; m < M; ++m) {
    for (int64_t k = 0; k < K; ++k) x[m * K + k] *= static_cast<float>(m % 5);
  }
  if (M > 1) x[K] = INFINITY;
  const Operand weight(Weights::int8, N * K, 2);
  const auto bias = check::normal(N, 3), scales = check::normal(N, 4);
  std::vector<float> y(M * N, -1);
  verax::GemmTask task{};
  task.kind = Weights::int8_pairs, task.M = M, task.N = N, task.K = K;
  task.x = x.data(), task.weight = weight.data, task.y = y.data();
  task.scales = scales.data(), task.bias = bias.data();
  check::Pool pool(3);
  verax::run_rounded_gemm(pool, task);
  pool.join();
  for (int64_t m = 0; m < M; ++m) {
    float largest = 0;
    for (int64_t k = 0; k < K; ++k) largest = std::fmax(largest, std::abs(x[m * K + k]));
    const float scale = largest / 127, factor = scale > 1e-37f ? 1 / scale : 0;
    for (int64_t n = 0; n < N; ++n) {
      double sum = 0;
      for (int64_t k = 0; k < K; ++k) sum += std::nearbyintf(x[m * K + k] * factor) * weight.values[n * K + k];
      sum = sum * scale * scales[n] + bias[n];
      const float got = y[m * N + n];
      check::that(m == 1 ? std::isnan(got) : std::abs(got - sum) <= 1e-6 * (1 + std::abs(sum)),
                  "%s integers %ldx%ldx%ld at %ld, %ld: %g, not %g", level, static_cast<long>(M), static_cast<long>(K),
                  static_cast<long>(N), static_cast<long>(m), static_cast<long>(n), got, sum);
    }
  }
}

// Panels [N / 48 rounded up, K / values, 48, values] of a weight, whose elements are `bytes` wide.
std::vector<char> panels_of(const void* weight, int64_t N, int64_t K, int64_t values, int64_t bytes) {
  const int64_t strip = verax::GEMM_STRIP;
  std::vector<char> to((N + strip - 1) / strip * strip * K * bytes);
  for (int64_t n = 0; n < N; ++n) {
    for (int64_t k = 0; k < K; ++k) {
      const int64_t at = ((n / strip * (K / values) + k / values) * strip + n % strip) * values + k % values;
      std::memcpy(&to[at * bytes], static_cast<const char*>(weight) + (n * K + k) * bytes, bytes);
    }
  }
  return to;
}

// A weight in panels, with scales if it is of integers, and a bias.
struct Panels {
  Panels(Weights kind, int64_t N, int64_t K, unsigned seed)
      : weight(kind == Weights::int8_pairs ? Weights::int8 : kind, N * K, seed),
        bias(check::normal(N, seed + 1)),
        scales(check::normal(N, seed + 2)) {
    const bool integers = kind == Weights::int8 || kind == Weights::int8_pairs;
    packed = panels_of(weight.data, N, K, verax::gemm_cell_values(kind), integers ? 1 : kind == Weights::f32 ? 4 : 2);
    if (kind == Weights::int8_pairs) {
      for (char& byte : packed) byte = static_cast<char>(byte + 128);
    }
    task.kind = kind, task.N = N, task.K = K;
    task.weight = packed.data(), task.bias = bias.data();
    if (integers) task.scales = scales.data();
  }
  Panels(const Panels&) = delete;
  Operand weight;
  std::vector<float> bias, scales;
  std::vector<char> packed;
  verax::GemmTask task{};
};

// x rounded to integers, a scale for each piece, by 8-bit integers.
void wide_product(const Panels& weight, int64_t M, int64_t K, const std::vector<float>& x, std::vector<float>& y) {
  constexpr int64_t values = 2 * verax::gemm_piece(verax::Weights::int8);
  const int64_t N = weight.task.N;
  for (int64_t m = 0; m < M; ++m) {
    for (int64_t n = 0; n < N; ++n) {
      double total = 0;
      for (int64_t begin = 0; begin < K; begin += values) {
        const int64_t end = std::min(K, begin + values);
        float largest = 0;
        double sum = 0;
        for (int64_t k = begin; k < end; ++k) largest = std::fmax(largest, std::abs(x[m * K + k]));
        const float scale = largest / verax::GEMM_LARGEST, factor = 1 / scale;
        for (int64_t k = begin; k < end; ++k) {
          sum += std::nearbyintf(x[m * K + k] * factor) * weight.weight.values[n * K + k];
        }
        total += sum * scale;
      }
      y[m * N + n] = static_cast<float>(total * weight.scales[n] + weight.bias[n]);
    }
  }
}

// The same numbers as without panels, to the last bit where both round x alike.
void panels(const char* level, Weights kind, int64_t M, int64_t K, int64_t N) {
  if (!verax::gemm_has_panels(kind)) return;
  const Panels weight(kind, N, K, 2);
  const auto x = check::normal(M * K, 1);
  std::vector<uint16_t> rounded;
  for (float value : x) rounded.push_back(check::to_bf16(value));
  std::vector<float> expected(M * N, NAN), y(M * N, NAN);
  verax::GemmTask task = weight.task;
  task.M = M, task.y = expected.data(), task.weight = weight.weight.data;
  task.x = kind == Weights::bf16 ? static_cast<const void*>(rounded.data()) : x.data();
  check::Pool pool(3);
  if (kind == Weights::int8) {
    wide_product(weight, M, K, x, expected);
  } else if (kind == Weights::int8_pairs) {
    verax::run_rounded_gemm(pool, task);
  } else {
    verax::run_gemm(pool, task);
  }
  task.x = x.data(), task.weight = weight.packed.data(), task.y = y.data();
  verax::run_panels(pool, {task});
  std::vector<uint16_t> halves(M * N);
  task.y = nullptr, task.rounded = halves.data();
  verax::run_panels(pool, {task});
  pool.join();
  const bool same = kind != Weights::int8 && !verax::gemm_has_tiles(task);  // tiles add in another order
  for (int64_t i = 0; i < M * N; ++i) {
    check::that(std::abs(y[i] - expected[i]) <= (same ? 0 : 1e-4 * (1 + std::abs(expected[i]))), "%s panels %ldx%ldx%ld at %ld: %g, not %g", level,
                static_cast<long>(M), static_cast<long>(K), static_cast<long>(N), static_cast<long>(i), y[i],
                expected[i]);
    check::that(halves[i] == check::to_bf16(y[i]), "%s panels %ldx%ldx%ld at %ld: %g is not rounded", level,
                static_cast<long>(M), static_cast<long>(K), static_cast<long>(N), static_cast<long>(i), y[i]);
  }
}

// The same numbers as of the two products, to the last bit.
void mlp(const char* level, Weights kind, int64_t M, int64_t K, int64_t H, int64_t N, int threads = 3) {
  if (!verax::gemm_has_panels(kind)) return;
  const Panels first(kind, H, K, 2), second(kind, N, H, 5);
  const auto x = check::normal(M * K, 1);
  std::vector<float> hidden(M * H, NAN), expected(M * N, NAN), y(M * N, NAN);
  verax::GemmTask up = first.task, down = second.task;
  up.M = down.M = M, up.activation = M % 2 ? verax::Activation::gelu : verax::Activation::gelu_tanh;
  up.x = x.data(), up.y = hidden.data();
  down.x = hidden.data(), down.y = expected.data();
  check::Pool pool(threads);
  verax::run_panels(pool, {up});
  verax::run_panels(pool, {down});
  down.y = y.data();
  verax::run_mlp(pool, up, down);
  pool.join();
  for (int64_t i = 0; i < M * N; ++i) {
    check::that(y[i] == expected[i], "%s mlp %ldx%ldx%ldx%ld at %ld: %g, not %g", level, static_cast<long>(M),
                static_cast<long>(K), static_cast<long>(H), static_cast<long>(N), static_cast<long>(i), y[i], expected[i]);
  }
}

// The product of up, multiplied by the SiLU of gate's.
void swiglu(const char* level, Weights kind, int64_t M, int64_t K, int64_t N) {
  if (!verax::gemm_has_panels(kind)) return;
  const Panels first(kind, N, K, 2), second(kind, N, K, 5);
  const auto x = check::normal(M * K, 1);
  std::vector<float> gated(M * N, NAN), y(M * N, NAN), got(M * N, NAN);
  verax::GemmTask gate = first.task, up = second.task;
  gate.M = up.M = M;
  gate.x = up.x = x.data();
  gate.y = gated.data(), up.y = y.data();
  check::Pool pool(3);
  verax::run_panels(pool, {gate});
  verax::run_panels(pool, {up});
  up.y = got.data(), up.gate = &gate;
  verax::run_panels(pool, {up});
  pool.join();
  for (int64_t i = 0; i < M * N; ++i) {
    const double expected = gated[i] / (1 + std::exp(-static_cast<double>(gated[i]))) * y[i];
    check::that(std::abs(got[i] - expected) <= 1e-6 * (1 + std::abs(expected)), "%s swiglu %ldx%ldx%ld at %ld: %g, not %g",
                level, static_cast<long>(M), static_cast<long>(K), static_cast<long>(N), static_cast<long>(i), got[i],
                expected);
  }
}

}  // namespace

int main() {
  check::each_level([](const char* level) {
    for (const Weights kind : {Weights::f32, Weights::bf16, Weights::int8}) {
      for (const bool biased : {false, true}) {
        product(level, kind, 1, 32, 16, biased);
        product(level, kind, 13, 416, 80, biased);
        product(level, kind, 200, 64, 400, biased);
        product(level, kind, 40, 1056, 48, biased);
        product(level, kind, 70, 1056, 48, biased);
      }
    }
    for (const Weights kind : {Weights::f32, Weights::bf16, Weights::int8, Weights::int8_pairs}) {
      panels(level, kind, 1, 32, 16);
      panels(level, kind, 13, 416, 80);
      panels(level, kind, 1600, 64, 48);
      panels(level, kind, 40, 1600, 96);
      mlp(level, kind, 0, 32, 96, 16);
      mlp(level, kind, 5, 64, 96, 48);
      mlp(level, kind, 150, 416, 3200, 80);
      mlp(level, kind, 150, 416, 3200, 80, 1);
      mlp(level, kind, 700, 32, 96, 16);
      swiglu(level, kind, 0, 32, 48);
      swiglu(level, kind, 5, 1056, 80);
      swiglu(level, kind, 700, 64, 400);
    }
    integers(level, 1, 32, 16);
    integers(level, 13, 416, 80);
    integers(level, 200, 64, 400);
    integers(level, 40, 1056, 48);
    std::printf("%s: checked\n", level);
  });
  std::printf("gemm: %d failures\n", check::failures);
  return check::failures != 0;
}
