// scores = (logits - maximum) / temperature                      (one pass, after those for the maximum and a NaN)
// for min-p, top-k, top-p as asked:
//   31 passes that count, or add up weights, above a threshold   (its bits are found from the top, as in the XLA form)
// weights = exp(scores), summed by chunks; the chunk, then the token, where the sum passes u times the total
//
// log-probabilities: one pass for the maximum, one for the sum of exponentials, the rank and the best tokens
#include "sample.h"

#include <cmath>

#include "vec_math.h"

namespace verax {
namespace VERAX_LEVEL {
namespace {

constexpr int64_t L = F32::lanes;
constexpr float LOG2_E = 1.44269504f;

float infinity() { return __builtin_inff(); }

// Logits from `i` on, minus infinity past the end.
F32 load_padded(const float* logits, int64_t i, int64_t V) {
  if (i + L <= V) return load(logits + i);
  float rest[L];
  for (int64_t j = 0; j < L; ++j) rest[j] = i + j < V ? logits[i + j] : -infinity();
  return load(rest);
}

// Largest of `count` logits, a multiple of the lanes.
float largest_of(const float* logits, int64_t count) {
  F32 maximum = broadcast(-infinity());
  for (int64_t i = 0; i < count; i += L) maximum = max(load(logits + i), maximum);
  return largest_lane(maximum);
}

float largest(const float* logits, int64_t V) {
  int64_t i = V / L * L;
  float value = largest_of(logits, i);
  for (; i < V; ++i) value = logits[i] > value ? logits[i] : value;
  return value;
}

// The first place of a value that the logits have; by chunks, then one by one.
int64_t place_of(float value, const float* logits, int64_t V) {
  int64_t i = 0;
  while (i + SAMPLE_CHUNK < V && largest_of(logits + i, SAMPLE_CHUNK) != value) i += SAMPLE_CHUNK;
  while (i + 1 < V && logits[i] != value) ++i;
  return i;
}

// The first place of a NaN; V if there is none.
int64_t place_of_nan(const float* logits, int64_t V) {
  F32 sums = zero();
  int64_t i = 0;
  for (; i + L <= V; i += L) sums = add(sums, mul(load(logits + i), zero()));  // of infinities, it is NaN too
  float rest = sum(sums);
  for (; i < V; ++i) rest += logits[i] * 0;
  if (rest == 0) return V;
  for (i = 0; i < V && logits[i] == logits[i]; ++i) {
  }
  return i;
}

struct Scores {
  float* at;       // at most 0, minus infinity where cut, padded with it to whole chunks
  float* weights;  // their exponentials
  int64_t size;

  // 1 or the weights where a score is at least `threshold`, summed.
  float above(float threshold, bool weighted) const {
    const F32 least = broadcast(threshold);
    F32 sums[4] = {zero(), zero(), zero(), zero()};
    for (int64_t i = 0; i < size; i += 4 * L) {
      VERAX_UNROLL
      for (int j = 0; j < 4; ++j) {
        // The difference of two equal scores is +0, of minus infinity and anything minus infinity or negative.
        const F32 below = sub(load(at + i + j * L), least);
        sums[j] = add(sums[j], pick(below, weighted ? load(weights + i + j * L) : broadcast(1), zero()));
      }
    }
    return sum(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
  }

  // The largest t with above(t) >= enough; minus infinity where even everything is not.
  float threshold(float enough, bool weighted) const {
    uint32_t bits = 0;  // the largest pattern that is not enough, of minus t; the answer is its successor
    for (int i = 30; i >= 0; --i) {
      const uint32_t trial = bits | uint32_t{1} << i;
      if (trial - 1 > 0x7f800000 || above(negative(trial - 1), weighted) < enough) bits = trial;
    }
    return negative(bits < 0x7f800000 ? bits : 0x7f800000);
  }

  void cut(float threshold) {
    const F32 least = broadcast(threshold), gone = broadcast(-infinity());
    for (int64_t i = 0; i < size; i += L) {
      const F32 score = load(at + i), below = sub(score, least);
      store(at + i, pick(below, score, gone));
      store(weights + i, pick(below, load(weights + i), zero()));
    }
  }

  static float negative(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return -value;
  }
};

// The first of `count` whose cumulative weight exceeds `target`, at most the last above 0. The weight before it is
// subtracted from the target.
int64_t passes(const float* weights, int64_t count, double* target) {
  int64_t last = 0;
  double before = 0, sum = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (weights[i] > 0) last = i, before = sum;
    sum += weights[i];
    if (sum > *target) break;
  }
  *target -= before;
  return last;
}

int32_t draw(Scores& scores, float u) {
  // The sums of chunks are written over the scores, which are not needed any more.
  const int64_t chunks = scores.size / SAMPLE_CHUNK;
  double total = 0;
  for (int64_t c = 0; c < chunks; ++c) {
    F32 sums[4] = {zero(), zero(), zero(), zero()};
    for (int64_t i = 0; i < SAMPLE_CHUNK; i += 4 * L) {
      VERAX_UNROLL
      for (int j = 0; j < 4; ++j) sums[j] = add(sums[j], load(scores.weights + c * SAMPLE_CHUNK + i + j * L));
    }
    scores.at[c] = sum(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
    total += scores.at[c];
  }
  double target = static_cast<double>(u) * total;
  const int64_t chunk = passes(scores.at, chunks, &target);
  return static_cast<int32_t>(chunk * SAMPLE_CHUNK + passes(scores.weights + chunk * SAMPLE_CHUNK, SAMPLE_CHUNK, &target));
}

// Tokens that are looked at together for the best ones.
constexpr int64_t BLOCK = 64;

// Inserts a score into the best `count` of at most `limit`, in falling order, if it belongs there. Returns their number.
int64_t insert(float score, int64_t at, int64_t limit, int64_t count, float* values, int32_t* ids) {
  if (count == limit && !(limit > 0 && score > values[limit - 1])) return count;
  int64_t i = count < limit ? count : limit - 1;
  for (; i > 0 && score > values[i - 1]; --i) {
    values[i] = values[i - 1];
    ids[i] = ids[i - 1];
  }
  values[i] = score;
  ids[i] = static_cast<int32_t>(at);
  return count < limit ? count + 1 : limit;
}

}  // namespace

void sample_row(const SampleRow& row, float* buffer, int32_t* token) {
  const int64_t V = row.V;
  const float* logits = row.logits;
  const int64_t nan = place_of_nan(logits, V);
  const float maximum = largest(logits, V);
  if (nan < V || !(row.temperature > 0) || !(__builtin_fabsf(maximum) < infinity())) {
    *token = static_cast<int32_t>(nan < V ? nan : place_of(maximum, logits, V));
    return;
  }
  Scores scores{buffer, buffer + sample_buffer_size(V) / 2, sample_buffer_size(V) / 2};
  const F32 warmth = broadcast(row.temperature), top = broadcast(maximum);
  const F32 log2_e = broadcast(LOG2_E);
  for (int64_t i = 0; i < scores.size; i += L) {
    const F32 score = div(sub(load_padded(logits, i, V), top), warmth);
    store(scores.at + i, score);
    store(scores.weights + i, exp2(mul(score, log2_e)));
  }
  if (row.min_p > 0) scores.cut(::logf(row.min_p > 1e-37f ? row.min_p : 1e-37f));
  if (row.top_k > 0 && row.top_k < V) scores.cut(scores.threshold(static_cast<float>(row.top_k), false));
  if (row.top_p < 1) scores.cut(scores.threshold(row.top_p * scores.above(-infinity(), true), true));
  *token = draw(scores, row.u);
}

void logprobs_row(const LogprobsRow& row, float* values, int32_t* ids, int32_t* rank) {
  const int64_t V = row.V;
  const float own = row.logits[row.chosen] + 0.0f;  // -0 becomes +0, and no difference of equals is -0
  const float maximum = largest(row.logits, V);
  // Not minus infinity, whose difference to another one is NaN.
  const F32 mine = broadcast(own < -__FLT_MAX__ ? -__FLT_MAX__ : own);
  const F32 top = broadcast(maximum), log2_e = broadcast(LOG2_E);
  double total = 0;
  int64_t better = 0, found = 0;
  for (int64_t block = 0; block < V; block += BLOCK) {
    const int64_t end = block + BLOCK < V ? block + BLOCK : V;
    F32 weights = zero(), larger = zero(), most_here = broadcast(-infinity());
    for (int64_t i = block; i < end; i += L) {
      const F32 score = load_padded(row.logits, i, V);
      weights = add(weights, exp2(mul(sub(score, top), log2_e)));
      larger = add(larger, pick(sub(mine, score), zero(), broadcast(1)));
      most_here = max(score, most_here);
    }
    total += sum(weights);
    better += static_cast<int64_t>(sum(larger));
    if (found == row.num_top && !(largest_lane(most_here) > values[found])) continue;
    for (int64_t i = block; i < end; ++i) found = insert(row.logits[i], i, row.num_top, found, values + 1, ids + 1);
  }
  // The maximum first: next to large scores, a logarithm of the sum would lose its digits.
  const auto normalizer = static_cast<float>(::log(total));
  values[0] = own;
  ids[0] = row.chosen;
  for (int64_t i = 0; i <= row.num_top; ++i) values[i] = (values[i] - maximum) - normalizer;
  *rank = static_cast<int32_t>(1 + better);
}

}  // namespace VERAX_LEVEL
}  // namespace verax
