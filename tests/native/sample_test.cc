// The sampler and the norm without JAX, for the sanitisers: every level, sizes that end anywhere.
#include <algorithm>
#include <memory>
#include <new>

#include "check.h"
#include "kernels/rms_norm.h"
#include "kernels/sample.h"
#include "levels.h"

namespace {

struct Aligned {
  void operator()(void* p) const { ::operator delete(p, std::align_val_t{64}); }
};

int32_t draw(const std::vector<float>& logits, float temperature, int32_t top_k, float top_p, float min_p, float u) {
  const int64_t V = static_cast<int64_t>(logits.size());
  const std::unique_ptr<void, Aligned> buffer(
      ::operator new(verax::sample_buffer_size(V) * sizeof(float), std::align_val_t{64}));
  int32_t token = -1;
  const verax::SampleTask task{V, logits.data(), &temperature, &top_p, &min_p, &u, &top_k, &token};
  VERAX_KERNEL(sample_row)(task, 0, static_cast<float*>(buffer.get()));
  return token;
}

void check_sample(const char* level) {
  for (const int64_t V : {1, 2, 15, 16, 17, 511, 512, 513, 3000}) {
    std::vector<float> logits = check::normal(V, static_cast<unsigned>(V));
    const auto best = static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
    check::that(draw(logits, 0, 0, 1, 0, 0.5f) == best, "%s V %d: greedy", level, int(V));
    check::that(draw(logits, 1, 1, 1, 0, 0.9f) == best, "%s V %d: top-k 1", level, int(V));
    check::that(draw(logits, 1, 0, 1e-6f, 0, 0.9f) == best, "%s V %d: a small top-p", level, int(V));
    check::that(draw(logits, 1, 0, 1, 1, 0.9f) == best, "%s V %d: min-p 1", level, int(V));
    for (const float u : {0.0f, 0.3f, 0.9999999f}) {
      double total = 0, sum = 0;
      for (const float x : logits) total += std::exp(double(x) / 0.7);
      const int32_t token = draw(logits, 0.7f, 0, 1, 0, u);
      check::that(token >= 0 && token < V, "%s V %d: token %d", level, int(V), int(token));
      for (int32_t i = 0; i < token; ++i) sum += std::exp(double(logits[i]) / 0.7);
      const double own = std::exp(double(logits[token]) / 0.7);
      check::that(sum <= (u + 1e-5) * total && sum + own >= (u - 1e-5) * total, "%s V %d u %g: token %d", level, int(V),
                  double(u), int(token));
    }
    logits[V / 2] = NAN;
    check::that(draw(logits, 1, 0, 1, 0, 0.5f) == V / 2, "%s V %d: a NaN's place", level, int(V));
  }
}

void check_norm(const char* level) {
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
          check::that(std::fabs(y[m * D + d] - exact) <= 1e-5 * std::fabs(exact) + 1e-6, "%s norm D %d: %g, expected %g",
                      level, int(D), double(y[m * D + d]), exact);
        }
      }
    }
  }
}

}  // namespace

int main() {
  check::each_level([](const char* level) {
    check_sample(level);
    check_norm(level);
    std::printf("%s: checked\n", level);
  });
  std::printf("sample: %d failures\n", check::failures);
  return check::failures != 0;
}
