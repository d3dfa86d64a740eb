// Adjustments of a row's scores before the draw, and the draw's random number. Not vectorised: few tokens are touched.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <limits>

#include "kernels/sample.h"
#include "parallel.h"
#include "sample_fields.h"  // SampleFloat, SampleInt: written by build.py from sampling_fields.py
#include "scratch.h"

namespace verax {

struct SampleTask {
  int64_t B, V, S, L;  // rows, vocabulary, slots, tokens of a slot
  const float* logits;                // [B, V]
  const int32_t* tokens;              // [S, L]
  const int32_t *slots, *lengths;     // of each row
  const float* floats;                // [S, NUM_SAMPLE_FLOATS]
  const int32_t* ints;                // [S, NUM_SAMPLE_INTS]
  int64_t num_bias, num_banned, num_words;
  const int32_t* bias_ids;            // [S, num_bias]; ids outside the vocabulary are ignored
  const float* bias_values;
  const int32_t* banned;              // [S, num_banned], likewise
  const int32_t* mask;                // [B, num_words], bit j of word i for token 32 i + j; no words: everything
  int32_t* chosen;                    // of each row
};

// Threefry-2x32 with 20 rounds (Salmon et al., 2011, doi:10.1145/2063384.2063405), as in JAX.
inline std::array<uint32_t, 2> threefry(std::array<uint32_t, 2> key, std::array<uint32_t, 2> x) {
  constexpr int rotations[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
  const uint32_t keys[3] = {key[0], key[1], key[0] ^ key[1] ^ 0x1BD11BDA};
  x[0] += keys[0];
  x[1] += keys[1];
  for (uint32_t round = 0; round < 5; ++round) {
    for (const int rotation : rotations[round % 2]) {
      x[0] += x[1];
      x[1] = (x[1] << rotation | x[1] >> (32 - rotation)) ^ x[0];
    }
    x[0] += keys[(round + 1) % 3];
    x[1] += keys[(round + 2) % 3] + round + 1;
  }
  return x;
}

// ops.sampling.uniform: `jax.random.uniform` of the key that `position` is folded into.
inline float uniform(uint32_t seed_high, uint32_t seed_low, uint32_t position) {
  const std::array<uint32_t, 2> bits = threefry(threefry({seed_high, seed_low}, {0, position}), {0, 0});
  const uint32_t one_to_two = (bits[0] ^ bits[1]) >> 9 | 0x3F800000;
  float value;
  std::memcpy(&value, &one_to_two, sizeof value);
  return value - 1;
}

// A row of `SampleTask` before the draw.
class RowOfSlot {
 public:
  RowOfSlot(const SampleTask& task, int64_t row)
      : t_(task),
        slot_(std::clamp<int64_t>(task.slots[row], 0, task.S - 1)),
        length_(std::clamp<int64_t>(task.lengths[row], 0, task.L)),
        logits_(task.logits + row * task.V),
        floats_(task.floats + slot_ * NUM_SAMPLE_FLOATS),
        ints_(task.ints + slot_ * NUM_SAMPLE_INTS),
        words_(task.num_words == 0 ? nullptr : task.mask + row * task.num_words) {}

  // The row that `sample_row` draws from. `adjusted` holds V floats, `counts` V integers.
  SampleRow prepare(int32_t position, float* adjusted, int32_t* counts) const {
    const bool penalized = floats_[PRESENCE_PENALTY] != 0 || floats_[FREQUENCY_PENALTY] != 0 || floats_[REPETITION_PENALTY] != 1;
    const bool early = position < ints_[MIN_LENGTH];
    const float* logits = logits_;
    if (penalized || ints_[NUM_BIAS] > 0 || early || words_ != nullptr) {
      logits = std::copy_n(logits_, t_.V, adjusted) - t_.V;
      if (penalized) penalize(adjusted, counts);
      if (ints_[NUM_BIAS] > 0) add_bias(adjusted);
      if (early) hold_back(adjusted, reinterpret_cast<float*>(counts));
      if (words_ != nullptr) forbid(adjusted);
    }
    return {t_.V,          logits, floats_[TEMPERATURE], floats_[TOP_P], floats_[MIN_P],
            uniform(ints_[SEED_HIGH], ints_[SEED_LOW], position), ints_[TOP_K]};
  }

 private:
  bool known(int32_t token) const { return token >= 0 && token < t_.V; }
  bool allowed(int64_t token) const { return token / 32 < t_.num_words && (words_[token / 32] >> (token % 32) & 1) != 0; }

  void penalize(float* logits, int32_t* counts) const {
    constexpr int32_t unseen = -1;
    const int32_t* tokens = t_.tokens + slot_ * t_.L;
    std::fill_n(counts, t_.V, unseen);
    for (int64_t i = 0; i < length_; ++i) {
      if (!known(tokens[i])) continue;
      int32_t& count = counts[tokens[i]];
      count = std::max(count, 0) + (i >= ints_[NUM_PROMPT] ? 1 : 0);
    }
    for (int64_t i = 0; i < length_; ++i) {
      if (!known(tokens[i]) || counts[tokens[i]] == unseen) continue;
      float& logit = logits[tokens[i]];
      int32_t& count = counts[tokens[i]];
      logit = logit > 0 ? logit / floats_[REPETITION_PENALTY] : logit * floats_[REPETITION_PENALTY];
      logit -= floats_[FREQUENCY_PENALTY] * static_cast<float>(count);
      if (count > 0) logit -= floats_[PRESENCE_PENALTY];
      count = unseen;  // once for each token, however often it occurs
    }
  }

  void add_bias(float* logits) const {
    for (int64_t i = slot_ * t_.num_bias; i < (slot_ + 1) * t_.num_bias; ++i) {
      if (known(t_.bias_ids[i])) logits[t_.bias_ids[i]] += t_.bias_values[i];
    }
  }

  void hold_back(float* logits, float* before) const {
    if (words_ != nullptr) std::copy_n(logits, t_.V, before);
    for (int64_t i = slot_ * t_.num_banned; i < (slot_ + 1) * t_.num_banned; ++i) {
      if (known(t_.banned[i])) logits[t_.banned[i]] = -std::numeric_limits<float>::infinity();
    }
    if (words_ == nullptr) return;
    for (int64_t i = 0; i < t_.V; ++i) {
      if (allowed(i) && logits[i] > -std::numeric_limits<float>::infinity()) return;
    }
    // The grammar allows nothing but the end: the least number of tokens gives way.
    std::copy_n(before, t_.V, logits);
  }

  void forbid(float* logits) const {
    for (int64_t i = 0; i < t_.V; ++i) {
      if (!allowed(i)) logits[i] = -std::numeric_limits<float>::infinity();
    }
  }

  const SampleTask& t_;
  const int64_t slot_, length_;
  const float* logits_;
  const float* floats_;
  const int32_t *ints_, *words_;
};

// Draws a token of each row, a thread a row.
template <typename Pool>
void run_sample(Pool& pool, const SampleTask& task) {
  const auto draw = VERAX_KERNEL(sample_row);
  parallel_for(pool, task.B, grain_of(task.B, task.B * task.V * 4), [&](int64_t begin, int64_t end) {
    // The counts of tokens are done with when the buffer is needed for the draw.
    const int64_t buffer = sample_buffer_size(task.V);
    auto* scratch = static_cast<float*>(thread_scratch((buffer + task.V) * static_cast<int64_t>(sizeof(float))));
    for (int64_t row = begin; row < end; ++row) {
      auto* counts = reinterpret_cast<int32_t*>(scratch);
      draw(RowOfSlot(task, row).prepare(task.lengths[row], scratch + buffer, counts), scratch, task.chosen + row);
    }
  });
}

}  // namespace verax
