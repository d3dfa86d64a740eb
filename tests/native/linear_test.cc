// The linear kernels without JAX, for the sanitisers: every level, odd shapes, buffers that end where the data ends.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

#include "check.h"
#include "kernels/linear.h"
#include "levels.h"
#include "parallel.h"

using verax::LinearTask;
using verax::Weights;

namespace {

// Random weights of one kind, and what they stand for.
struct Case {
  Weights kind;
  int64_t N, K, group;
  bool half_scales;
  std::vector<uint8_t> bytes, scales;
  std::vector<int8_t> zeros;
  std::vector<double> exact;  // [N, K]

  Case(Weights kind, int64_t N, int64_t K, int64_t group, bool half_scales, bool asymmetric = false)
      : kind(kind), N(N), K(K), group(group), half_scales(half_scales), exact(N * K) {
    LinearTask t{};
    t.kind = kind, t.K = K;
    const int64_t row = linear_row_bytes(t);
    // int4 comes in blocks of 16 rows.
    const int64_t rows = kind == Weights::int4 ? (N + 15) / 16 * 16 : N;
    bytes.assign(rows * row, 0);
    const std::vector<float> values = check::normal(N * K, 1);
    if (kind == Weights::f32) {
      if (N * K) std::memcpy(bytes.data(), values.data(), bytes.size());
      std::copy(values.begin(), values.end(), exact.begin());
      return;
    }
    if (kind == Weights::bf16) {
      for (int64_t i = 0; i < N * K; ++i) {
        const uint16_t rounded = check::to_bf16(values[i]);
        std::memcpy(&bytes[2 * i], &rounded, 2);
        exact[i] = check::from_bf16(rounded);
      }
      return;
    }
    const int64_t groups = group ? K / group : 1;
    scales.resize(rows * groups * (half_scales ? 2 : 4));
    if (asymmetric) zeros.assign(rows * groups, 0);
    for (int64_t n = 0; n < N; ++n) {
      for (int64_t g = 0; g < groups; ++g) {  // powers of two, of which float16 is easily written
        const int exponent = static_cast<int>((n + g) % 5) - 2;
        const float scale = std::ldexp(1.0f, exponent);
        const uint16_t half = static_cast<uint16_t>((exponent + 15) << 10);
        const int64_t at = kind == Weights::int4 ? (n / 16 * groups + g) * 16 + n % 16 : n * groups + g;
        std::memcpy(&scales[at * (half_scales ? 2 : 4)], half_scales ? (const void*)&half : &scale,
                    half_scales ? 2 : 4);
        if (asymmetric) zeros[at] = static_cast<int8_t>((3 * n + 5 * g) % 16 - 8);
      }
      for (int64_t k = 0; k < K; ++k) {
        const double scale = std::ldexp(1.0, static_cast<int>((n + (group ? k / group : 0)) % 5) - 2);
        if (kind == Weights::int8) {
          const int value = std::clamp(static_cast<int>(values[n * K + k] * 50), -127, 127);
          bytes[n * row + k] = static_cast<uint8_t>(value);
          exact[n * K + k] = value * scale;
        } else if (kind == Weights::float8) {
          // Every number but NaN, in turn: a sign, four bits of exponent with an offset of 7, three of fraction.
          const int code = static_cast<int>((n * K + k) * 37 % 127), sign = (n + k) % 2 ? -1 : 1;
          bytes[n * row + k] = static_cast<uint8_t>(sign < 0 ? code | 128 : code);
          const double size = code < 8 ? std::ldexp(code, -9) : std::ldexp(8 + code % 8, code / 8 - 10);
          exact[n * K + k] = sign * size * scale;
        } else {
          const int value = std::clamp(static_cast<int>(std::floor(values[n * K + k] * 4)), -8, 7);
          uint8_t* word = &bytes[n / 16 * 16 * row + k / 8 * 64 + n % 16 * 4 + k % 2 * 2];
          const int shift = static_cast<int>(k % 8 / 2 * 4);
          word[shift / 8] = static_cast<uint8_t>(word[shift / 8] | (value + 8) << shift % 8);
          exact[n * K + k] = (value - (asymmetric ? (3 * n + 5 * (k / group)) % 16 - 8 : 0)) * scale;
        }
      }
    }
  }

  std::vector<float> run(const std::vector<float>& x, int64_t M, int threads) const {
    std::vector<float> y(M * N, NAN);
    const auto packed = check::aligned(verax::linear_packed_bytes(M, K) + 1);
    const LinearTask task{M,     N,   K,     x.data(),     kind, bytes.data(), scales.empty() ? nullptr : scales.data(),
                          half_scales, group, packed.get(), y.data(), {}, zeros.empty() ? nullptr : zeros.data()};
    VERAX_KERNEL(linear_pack)(task, 0, M);
    check::Pool pool(threads);
    const auto columns = VERAX_KERNEL(linear_columns);
    verax::parallel_for(pool, N, verax::LINEAR_STEP, [&](int64_t begin, int64_t end) { columns(task, begin, end); });
    return y;
  }
};

// x as the kernels take it: see Weights in kernels/linear.h.
std::vector<double> taken(const Case& c, const std::vector<float>& x, int64_t M) {
  std::vector<double> inputs(x.begin(), x.end());
  if (c.kind == Weights::f32) return inputs;
  if (c.kind != Weights::int8 && c.kind != Weights::int4) {
    for (double& input : inputs) input = check::from_bf16(check::to_bf16(static_cast<float>(input)));
    return inputs;
  }
  const int64_t together = c.kind == Weights::int4 ? c.group : 1024;
  for (int64_t m = 0; m < M; ++m) {
    for (int64_t k = 0; k < c.K; k += together) {
      const auto begin = inputs.begin() + m * c.K + k, end = begin + std::min(together, c.K - k);
      float peak = 0;
      for (auto i = begin; i != end; ++i) peak = std::max(peak, static_cast<float>(std::fabs(*i)));
      const float scale = peak / (c.kind == Weights::int4 ? 127 : 32639), factor = 1 / scale;
      for (auto i = begin; i != end; ++i) *i = double{scale} * std::nearbyint(static_cast<float>(*i) * factor);
    }
  }
  return inputs;
}

void check_case(const char* level, const Case& c) {
  for (const int64_t M : {0, 1, 2, 3, 5, 8, 17}) {
    const std::vector<float> x = check::normal(M * c.K, 2);
    const std::vector<double> inputs = taken(c, x, M);
    const std::vector<float> y = c.run(x, M, 1);
    for (int64_t m = 0; m < M; ++m) {
      for (int64_t n = 0; n < c.N; ++n) {
        double exact = 0, size = 0;
        for (int64_t k = 0; k < c.K; ++k) {
          const double term = c.exact[n * c.K + k] * inputs[m * c.K + k];
          exact += term, size += std::fabs(term);
        }
        check::near(y[m * c.N + n], exact, 2e-6 * size + 1e-6, "%s kind %d M %d N %d K %d group %d: y[%d, %d]", level,
                    int(c.kind), int(M), int(c.N), int(c.K), int(c.group), int(m), int(n));
      }
    }
    check::that(check::same(y, c.run(x, M, 3)), "%s kind %d M %d: three threads give another result than one", level,
                int(c.kind), int(M));
  }
}

// The largest sums that a segment of 8-bit weights can have, in whole tiles and in others.
void check_largest_sums(const char* level) {
  Case c(Weights::int8, 67, 1024, 0, false);
  std::fill(c.bytes.begin(), c.bytes.end(), uint8_t{128});  // -128
  for (const int64_t M : {1, 5, 8, 19}) {
    const std::vector<float> y = c.run(std::vector<float>(M * c.K, -1.5f), M, 1);
    for (int64_t m = 0; m < M; ++m) {
      for (int64_t n = 0; n < c.N; ++n) {
        const double scale = std::ldexp(1.0, static_cast<int>(n % 5) - 2), exact = 1.5 * 128 * 1024 * scale;
        check::near(y[m * c.N + n], exact, 2e-7 * exact, "%s: largest sums, M %d: y[%d, %d]", level, int(M), int(m), int(n));
      }
    }
  }
}

void check_parallel_for() {
  for (const int64_t total : {0, 1, 7, 64, 1000}) {
    for (const int threads : {0, 1, 2, 5}) {
      check::Pool pool(threads);
      std::vector<std::atomic<int>> times(total);
      verax::parallel_for(pool, total, 3, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) ++times[i];
      });
      for (auto& count : times) check::that(count == 1, "parallel_for: an item was done %d times", int(count));
    }
  }
}

}  // namespace

int main() {
  check_parallel_for();
  return check::main_of("linear", [](const char* level) {
    check_largest_sums(level);
    for (const int64_t N : {1, 3, 7, 64, 129}) {
      for (const int64_t K : {0, 1, 2, 31, 32, 33, 100, 257}) {
        check_case(level, Case(Weights::f32, N, K, 0, false));
        check_case(level, Case(Weights::bf16, N, K, 0, false));
        check_case(level, Case(Weights::int8, N, K, 0, K % 2));
        check_case(level, Case(Weights::float8, N, K, 0, K % 2));
      }
      for (const int64_t group : {32, 64, 128}) {
        for (const int64_t K : {group, 3 * group, 5 * group}) {
          check_case(level, Case(Weights::int8, N, K, group, K % 3));
          check_case(level, Case(Weights::float8, N, K, group, K % 3));
          check_case(level, Case(Weights::int4, N, K, group, K % 3));
          check_case(level, Case(Weights::int4, N, K, group, K % 3, true));
        }
      }
    }
    for (const Weights kind : {Weights::f32, Weights::bf16, Weights::float8, Weights::int8, Weights::int4}) {
      // several segments
      check_case(level, Case(kind, 37, 2208, kind == Weights::int4 ? 32 : 0, true, kind == Weights::int4));
    }
    for (const int64_t N : {48, 37}) check_case(level, Case(Weights::int8, N, 1088, 0, true));  // in tiles, where there are some
  });
}
