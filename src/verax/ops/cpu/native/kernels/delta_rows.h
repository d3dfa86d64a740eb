// The delta rule's arrays, row by row: keys, values, gates and outputs of one head's tokens, and parts of its state.
#pragma once

#include "delta.h"
#include "rows.h"

namespace verax {
namespace VERAX_LEVEL {
namespace {

constexpr int L = F32::lanes;
constexpr float EPSILON = 1e-6f;  // under the root of a key's squared norm

// A key as float32, of length 1 if asked for.
template <class Element>
inline void copy_key(float* to, const Element* from, int64_t K, bool normalize) {
  float factor = 1;
  copy_row(to, from, K, factor);
  if (!normalize) return;
  F32 squares = zero();
  for (int64_t k = 0; k < K; k += CHUNK) squares = dot(squares, load_chunk(to + k), load_chunk(to + k));
  factor = 1 / __builtin_sqrtf(sum(squares) + EPSILON);
  copy_row(to, to, K, factor);
}

// The tokens of an item and one of its heads, in the arrays.
template <class Element>
struct Rows {
  const DeltaTask& t;
  const int64_t first, head;
  const int64_t columns;
  const Element *read, *erase, *write, *v;
  float* to;

  Rows(const DeltaTask& t, const DeltaItem& item, int64_t head)
      : t(t), first(item.first), head(head), columns(item.end - item.begin) {
    const int64_t at = (first * t.H + head / (t.HV / t.H)) * t.K, values = (first * t.HV + head) * t.V + item.begin;
    read = static_cast<const Element*>(t.read) + at;
    erase = static_cast<const Element*>(t.erase) + at;
    write = static_cast<const Element*>(t.write) + at;
    v = static_cast<const Element*>(t.v) + values;
    to = t.out + values;
  }
  int64_t key(int64_t token) const { return token * t.H * t.K; }
  int64_t value(int64_t token) const { return token * t.HV * t.V; }
  int64_t gate(int64_t token) const { return (first + token) * t.HV + head; }
  float* out(int64_t token) const { return to + value(token); }
  bool first_of_key() const { return head % (t.HV / t.H) == 0; }

  // A token's decay by channel, whatever it is given by.
  void decay(float* to, int64_t token) const {
    if (t.by_channel) {
      copy_row(to, t.g + gate(token) * t.K, t.K, 1);
    } else {
      fill(to, t.g[gate(token)], padded_size(t.K));
    }
    for (int64_t k = 0; k < t.K; k += L) store(to + k, exponential(load(to + k)));
  }

  // What will be needed next is asked for while there is something to do.
  void ask_for(int64_t token) const {
    // GCC takes a function that only prefetches for one without effect, and leaves its calls out.
    __asm__ volatile("");
    constexpr int64_t LINE = 64 / sizeof(Element);
    for (int64_t k = 0; k < t.K; k += LINE) {
      prefetch(read + key(token) + k);
      prefetch(write + key(token) + k);
      if (erase != write) prefetch(erase + key(token) + k);
    }
    for (int64_t c = 0; c < columns; c += LINE) prefetch(v + value(token) + c);
    for (int64_t c = 0; c < columns; c += 64 / sizeof(float)) prefetch(out(token) + c);
  }
};

// Columns of states: `from` or `to` may be the item's part of an array whose rows are V long.
void copy_state(float* to, int64_t to_stride, const float* from, int64_t from_stride, int64_t K, int64_t columns) {
  if (to == from) return;
  for (int64_t k = 0; k < K; ++k) std::memcpy(to + k * to_stride, from + k * from_stride, columns * sizeof(float));
}

}  // namespace
}  // namespace VERAX_LEVEL
}  // namespace verax
