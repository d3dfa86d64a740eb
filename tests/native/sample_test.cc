// The sampler without JAX, for the sanitisers: every level, sizes that end anywhere.
#include <algorithm>

#include "check.h"
#include "kernels/sample.h"
#include "levels.h"
#include "sample_run.h"

namespace {

int32_t draw(const std::vector<float>& logits, float temperature, int32_t top_k, float top_p, float min_p, float u) {
  const int64_t V = static_cast<int64_t>(logits.size());
  const auto buffer = check::aligned(verax::sample_buffer_size(V) * sizeof(float));
  int32_t token = -1;
  const verax::SampleRow row{V, logits.data(), temperature, top_p, min_p, u, top_k};
  VERAX_KERNEL(sample_row)(row, static_cast<float*>(buffer.get()), &token);
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

// Rows of two slots, with every adjustment, and ids that no vocabulary has.
void check_run(const char* level) {
  for (const int64_t V : {3, 33, 1000}) {
    const int64_t B = 5, S = 2, L = 9, words = (V + 31) / 32;
    const std::vector<float> logits = check::normal(B * V, 7);
    std::vector<int32_t> tokens(S * L), slots{0, 1, 1, 0, 1}, lengths{4, 9, 0, 8, 3}, chosen(B, -1);
    for (int64_t i = 0; i < S * L; ++i) tokens[i] = i % 4 == 3 ? INT32_MAX : static_cast<int32_t>(i % V);
    const std::vector<float> floats{0.8f, 0.9f, 0.01f, 0.5f, 0.2f, 1.3f, 0, 1, 0, 0, 0, 1};
    const std::vector<int32_t> ints{5, 2, 1, 2, 6, 2, 0, 0, 3, 4, 100, 0};
    const std::vector<int32_t> bias_ids{0, INT32_MAX, INT32_MAX, INT32_MAX}, banned{1, INT32_MAX, 1, -1};
    const std::vector<float> bias_values{2, 3, 0, 0};
    std::vector<int32_t> mask(B * words, -1);
    mask[words] = 2;  // all that row 1 may say is held back
    for (const int64_t num_words : {int64_t{0}, words}) {
      check::Pool pool(2);
      verax::run_sample(pool, {B, V, S, L, logits.data(), tokens.data(), slots.data(), lengths.data(), floats.data(),
                               ints.data(), 2, 2, num_words, bias_ids.data(), bias_values.data(), banned.data(),
                               mask.data(), chosen.data()});
      for (int64_t row = 0; row < B; ++row) {
        check::that(chosen[row] >= 0 && chosen[row] < V, "%s V %d row %d: %d", level, int(V), int(row), chosen[row]);
      }
      check::that(chosen[2] != 1 && chosen[4] != 1, "%s V %d: a token that is held back", level, int(V));
      if (num_words > 0) check::that(V == 3 ? chosen[1] == 1 : chosen[1] >= 32, "%s V %d: a grammar", level, int(V));
    }
  }
  // The vectors of Random123 for 20 rounds.
  const auto zeros = verax::threefry({0, 0}, {0, 0});
  const auto pi = verax::threefry({0x13198a2e, 0x03707344}, {0x243f6a88, 0x85a308d3});
  check::that(zeros[0] == 0x6b200159 && zeros[1] == 0x99ba4efe, "threefry of zeros");
  check::that(pi[0] == 0xc4923a9c && pi[1] == 0x483df7a0, "threefry of pi");
}

void check_logprobs(const char* level) {
  for (const int64_t V : {1, 2, 63, 64, 65, 500}) {
    const std::vector<float> logits = check::normal(V, static_cast<unsigned>(V));
    const int64_t n = std::min<int64_t>(V, 20);
    std::vector<float> values(n + 1, NAN);
    std::vector<int32_t> ids(n + 1, -1);
    int32_t rank = -1;
    VERAX_KERNEL(logprobs_row)({V, logits.data(), 0, n}, values.data(), ids.data(), &rank);
    double total = 0;
    int32_t better = 0;
    for (const float x : logits) total += std::exp(double(x)), better += x > logits[0];
    check::that(rank == 1 + better && ids[0] == 0, "%s V %d: rank %d", level, int(V), rank);
    for (int64_t i = 0; i <= n; ++i) {
      check::that(std::fabs(values[i] - (logits[ids[i]] - std::log(total))) < 1e-5, "%s V %d: value", level, int(V));
      check::that(i < 2 || values[i] <= values[i - 1], "%s V %d: order", level, int(V));
    }
  }
}

}  // namespace

int main() {
  return check::main_of("sample", [](const char* level) {
    check_sample(level);
    check_run(level);
    check_logprobs(level);
  });
}
