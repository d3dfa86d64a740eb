// The products of weights in block formats without JAX, for the sanitisers: every level, odd shapes, buffers that end
// where the data ends.
#include <algorithm>
#include <cmath>

#include "check.h"
#include "gemm_run.h"
#include "kernels/linear.h"
#include "levels.h"
#include "parallel.h"

using verax::BlockKind;

namespace {

// A format, as ops/block_quantized.py describes it.
struct Form {
  BlockKind kind;
  const char* name;
  int bits, offset, group;
  bool minimums, super_blocks;
};
const Form FORMS[] = {
    {BlockKind::q4_0, "Q4_0", 4, 8, 32, false, false},  {BlockKind::q4_1, "Q4_1", 4, 0, 32, true, false},
    {BlockKind::q5_0, "Q5_0", 5, 16, 32, false, false}, {BlockKind::q5_1, "Q5_1", 5, 0, 32, true, false},
    {BlockKind::q8_0, "Q8_0", 8, 128, 32, false, false}, {BlockKind::q4_k, "Q4_K", 4, 0, 32, true, true},
    {BlockKind::q5_k, "Q5_K", 5, 0, 32, true, true},    {BlockKind::q6_k, "Q6_K", 6, 32, 16, false, true},
    {BlockKind::iq4_nl, "IQ4_NL", 4, 0, 32, false, false}};
const int VALUES[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

// Random words, and what they stand for.
struct Case {
  const Form& form;
  int64_t N, K, unit, units, row;  // a row's words of a unit
  std::vector<uint32_t> words;
  std::vector<double> exact;  // [N, K]

  uint32_t& word(int64_t n, int64_t u, int64_t w) { return words[((n / 16 * units + u) * row + w) * 16 + n % 16]; }
  int byte(int64_t n, int64_t u, int64_t first, int64_t i) { return word(n, u, first + i / 4) >> i % 4 * 8 & 255; }

  Case(const Form& form, int64_t N, int64_t K) : form(form), N(N), K(K), exact(N * K) {
    const verax::BlockShape shape = verax::block_shape(form.kind);
    unit = shape.unit, row = shape.words, units = (K + unit - 1) / unit;
    words.resize((N + 15) / 16 * units * row * 16);
    std::mt19937 generator(1);
    for (uint32_t& each : words) each = static_cast<uint32_t>(generator());
    const int64_t codes = unit * (form.bits == 8 ? 8 : 4) / 32;
    const int64_t further = form.bits == 8 ? 0 : unit / 32 * (form.bits - 4);
    const int64_t scales = codes + further, count = form.super_blocks ? unit / form.group / 4 : 1;
    const int64_t minimums = scales + count, factors = scales + count * (1 + form.minimums);
    // float16 numbers are powers of two, which are easily written.
    const auto power = [](int64_t i) { return static_cast<int>(i % 5) - 3; };
    for (int64_t n = 0; n < (N + 15) / 16 * 16; ++n) {
      for (int64_t u = 0; u < units; ++u) {
        const auto halves = [&](int64_t seed) {
          return static_cast<uint32_t>((power(seed) + 15) << 10 | (power(seed + 1) + 15) << 26);
        };
        if (form.super_blocks) {
          word(n, u, factors) = halves(n + u);
        } else {
          word(n, u, scales) = halves(n + u);
          if (form.minimums) word(n, u, minimums) = halves(n + u + 2);
        }
      }
    }
    for (int64_t n = 0; n < N; ++n) {
      for (int64_t k = 0; k < K; ++k) {
        const int64_t u = k / unit, i = k % unit, g = i / form.group;
        int code;
        if (form.bits == 8) {
          code = byte(n, u, 0, i);
        } else {
          code = byte(n, u, i / 8, i % 4) >> (i % 8 / 4 * 4) & 15;
          const int high = form.bits - 4, word_inputs = high ? 32 / high : 1;
          if (high) {
            const int64_t within = i % word_inputs;
            const int bits = byte(n, u, codes + i / word_inputs, within % 4) >> within / 4 * high;
            code |= (bits & ((1 << high) - 1)) << 4;
          }
        }
        if (form.kind == BlockKind::iq4_nl) code = VALUES[code];
        double scale, minimum = 0;
        if (form.super_blocks) {
          const int stored = byte(n, u, scales, g);
          scale = std::ldexp(form.minimums ? stored : static_cast<int8_t>(stored), power(n + u));
          if (form.minimums) minimum = -std::ldexp(byte(n, u, minimums, g), power(n + u + 1));
        } else {
          scale = std::ldexp(1.0, power(n + u + g));
          if (form.minimums) minimum = std::ldexp(1.0, power(n + u + 2 + g));
        }
        exact[n * K + k] = scale * (code - form.offset) + minimum;
      }
    }
  }

  std::vector<float> few(const std::vector<float>& x, int64_t M, int threads) const {
    std::vector<float> y(M * N, NAN);
    const auto packed = check::aligned(verax::linear_packed_bytes(M, K) + 1);
    verax::LinearTask task{};
    task.M = M, task.N = N, task.K = K, task.x = x.data(), task.y = y.data(), task.packed = packed.get();
    task.kind = verax::Weights::blocks, task.block = form.kind, task.weights = words.data();
    VERAX_KERNEL(linear_pack)(task, 0, M);
    check::Pool pool(threads);
    const auto columns = VERAX_KERNEL(linear_columns);
    verax::parallel_for(pool, N, verax::LINEAR_STEP, [&](int64_t begin, int64_t end) { columns(task, begin, end); });
    return y;
  }

  // N is a multiple of 16, K of 32.
  std::vector<float> many(const std::vector<float>& x, int64_t M) const {
    std::vector<float> y(M * N, NAN);
    std::vector<uint16_t> rounded(x.size());
    std::transform(x.begin(), x.end(), rounded.begin(), check::to_bf16);
    const void* inputs = verax::gemm_rounds_blocks() ? static_cast<const void*>(rounded.data()) : x.data();
    verax::GemmTask task{};
    task.M = M, task.N = N, task.K = K, task.x = inputs, task.weight = words.data(), task.y = y.data();
    task.kind = verax::Weights::blocks, task.block = form.kind;
    check::Pool pool(3);
    verax::run_gemm(pool, task);
    pool.join();
    return y;
  }
};

// x as integers of 16 bits with a scale for each 32.
std::vector<double> taken(const std::vector<float>& x) {
  std::vector<double> inputs(x.size());
  for (size_t k = 0; k < x.size(); k += 32) {
    float peak = 0;
    for (size_t i = k; i < k + 32; ++i) peak = std::max(peak, std::fabs(x[i]));
    const float scale = peak / 32639, factor = 1 / scale;
    for (size_t i = k; i < k + 32; ++i) inputs[i] = double{scale} * std::nearbyint(x[i] * factor);
  }
  return inputs;
}

void compare(const char* level, const Case& c, int64_t M, const char* which, const std::vector<double>& inputs,
             const std::vector<float>& y, double tolerance) {
  for (int64_t m = 0; m < M; ++m) {
    for (int64_t n = 0; n < c.N; ++n) {
      double exact = 0, size = 0;
      for (int64_t k = 0; k < c.K; ++k) {
        const double term = c.exact[n * c.K + k] * inputs[m * c.K + k];
        exact += term, size += std::fabs(term);
      }
      check::near(y[m * c.N + n], exact, tolerance * size + 1e-6, "%s %s %s M %d N %d K %d: y[%d, %d]", level,
                  c.form.name, which, int(M), int(c.N), int(c.K), int(m), int(n));
    }
  }
}

void check_case(const char* level, const Case& c) {
  for (const int64_t M : {0, 1, 2, 3, 5, 8, 9, 17}) {
    std::vector<float> x = check::normal(M * c.K, 2);
    for (size_t i = 0; i < x.size(); i += 37) x[i] *= 1000;  // outliers among 32
    const std::vector<float> y = c.few(x, M, 1);
    compare(level, c, M, "few rows", taken(x), y, 1e-5);
    check::that(check::same(y, c.few(x, M, 3)), "%s %s M %d: three threads give another result than one", level,
                c.form.name, int(M));
    if (c.N % 16 || c.K % 32) continue;
    std::vector<double> inputs(x.begin(), x.end());
    const verax::Level here = verax::level();
    if (verax::gemm_rounds_blocks()) {
      const auto rounded = [](float value) { return check::from_bf16(check::to_bf16(value)); };
      std::transform(x.begin(), x.end(), inputs.begin(), rounded);
    } else if (here != verax::Level::portable && here != verax::Level::neon && here != verax::Level::neon_dot) {
      inputs = taken(x);
    }
    compare(level, c, M, "many rows", inputs, c.many(x, M), verax::gemm_rounds_blocks() ? 4e-3 : 1e-5);
  }
}

}  // namespace

int main() {
  return check::main_of("linear_blocks", [](const char* level) {
    for (const Form& form : FORMS) {
      const std::vector<int64_t> lengths = form.super_blocks ? std::vector<int64_t>{256, 768} : std::vector<int64_t>{32, 64, 416};
      for (const int64_t N : {1, 16, 37, 64}) {
        for (const int64_t K : lengths) check_case(level, Case(form, N, K));
      }
      check_case(level, Case(form, 37, form.super_blocks ? 2304 : 2208));  // several segments
    }
  });
}
