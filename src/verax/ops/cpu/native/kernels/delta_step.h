// The delta rule token by token, where tokens are few: the state is read once and written once, in place perhaps.
#pragma once

#include "delta_rows.h"

namespace verax {
namespace VERAX_LEVEL {
namespace {

// One token's keys: as they read the old state, as they write, and what becomes of the state.
struct Step {
  const float *erase, *read, *write, *decay;  // [K]
  float beta, scale;
  float overlap;                              // read . write
};

// for each row k of the state:  found += erase_k S_k;  seen += read_k S_k
// z = beta (v - found);  out = scale (seen + overlap z)
// for each row k:  S_k = decay_k S_k + write_k z
template <int N, class Element>
inline void step_columns(const Step& s, int64_t K, const float* from, float* to, int64_t stride, const Element* v,
                         float* out) {
  F32 found[N], seen[N];
  VERAX_UNROLL
  for (int c = 0; c < N; ++c) found[c] = seen[c] = zero();
  for (int64_t k = 0; k < K; ++k) {
    const F32 erase = broadcast(s.erase[k]), read = broadcast(s.read[k]);
    VERAX_UNROLL
    for (int c = 0; c < N; ++c) {
      const F32 held = load(from + k * stride + c * L);
      found[c] = fma(erase, held, found[c]);
      seen[c] = fma(read, held, seen[c]);
    }
  }
  VERAX_UNROLL
  for (int c = 0; c < N; ++c) {
    found[c] = mul(broadcast(s.beta), sub(load(v + c * L), found[c]));
    store(out + c * L, mul(broadcast(s.scale), fma(broadcast(s.overlap), found[c], seen[c])));
  }
  for (int64_t k = 0; k < K; ++k) {
    const F32 decay = broadcast(s.decay[k]), write = broadcast(s.write[k]);
    VERAX_UNROLL
    for (int c = 0; c < N; ++c) {
      // The next head's state follows this one.
      prefetch(from + (K + k) * stride + c * L);
      store(to + k * stride + c * L, fma(write, found[c], mul(decay, load(from + k * stride + c * L))));
    }
  }
}

// Columns that fill no register.
template <class Element>
void step_rest(const Step& s, int64_t K, const float* from, float* to, int64_t stride, const Element* v, float* out,
               int64_t count) {
  for (int64_t c = 0; c < count; ++c) {
    float found = 0, seen = 0;
    for (int64_t k = 0; k < K; ++k) {
      found += s.erase[k] * from[k * stride + c];
      seen += s.read[k] * from[k * stride + c];
    }
    float value;
    if constexpr (sizeof(Element) == sizeof(float)) {
      value = v[c];
    } else {
      value = widen(v[c]);
    }
    const float z = s.beta * (value - found);
    out[c] = s.scale * (seen + s.overlap * z);
    for (int64_t k = 0; k < K; ++k) to[k * stride + c] = s.decay[k] * from[k * stride + c] + s.write[k] * z;
  }
}

template <class Element>
void walk_tokens(const DeltaTask& t, const DeltaItem& item, int64_t head, void* memory) {
  const int64_t columns = item.end - item.begin, place = head * t.K * t.V + item.begin;
  Arena arena{static_cast<float*>(memory)};
  const int64_t width = padded_size(t.K);
  float *erase = arena.take(width), *read = arena.take(width), *write = arena.take(width);
  float* decay = arena.take(width);
  const Rows<Element> rows(t, item, head);
  const float* from = item.initial + place;
  float* to = item.last + place;
  if (item.kept && item.tokens) copy_state(item.kept + place, t.V, from, t.V, t.K, columns);
  if (!item.tokens) copy_state(to, t.V, from, t.V, t.K, columns);
  for (int64_t token = 0; token < item.tokens; ++token, from = to) {
    copy_key(erase, rows.erase + rows.key(token), t.K, t.normalize);
    copy_key(read, rows.read + rows.key(token), t.K, t.normalize);
    copy_key(write, rows.write + rows.key(token), t.K, t.normalize);
    rows.decay(decay, token);
    F32 overlap = zero();
    for (int64_t k = 0; k < t.K; k += CHUNK) overlap = dot(overlap, load_chunk(read + k), load_chunk(write + k));
    if (!t.erase_before_decay) scale_by(erase, decay, t.K);
    scale_by(read, decay, t.K);
    const Step step{erase, read, write, decay, t.beta[rows.gate(token)], t.scale, sum(overlap)};
    const Element* v = rows.v + rows.value(token);
    float* out = rows.out(token);
    constexpr int WIDE = 2 * COLUMNS;
    int64_t c = 0;
    for (; c + WIDE * L <= columns; c += WIDE * L) {
      step_columns<WIDE>(step, t.K, from + c, to + c, t.V, v + c, out + c);
    }
    for (; c + L <= columns; c += L) step_columns<1>(step, t.K, from + c, to + c, t.V, v + c, out + c);
    step_rest(step, t.K, from + c, to + c, t.V, v + c, out + c, columns - c);
  }
}

}  // namespace
}  // namespace VERAX_LEVEL
}  // namespace verax
