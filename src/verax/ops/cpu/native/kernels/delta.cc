// for each chunk of C tokens, for each head:               (for each head and token instead, where tokens are few)
//   E, R, W[C, K] = erase, read, write keys;  D[i, j] = the decay after token j up to token i, by channel perhaps
//   L[i, j] = beta_i E_i . W_j D[i, j]  (j < i);           P[i, j] = R_i . W_j D[i, j]  (j <= i)
//   for each slab of columns:
//     F = [E; R] S                                         (decayed since the chunk began)
//     Z = (I + L)^-1 beta (v - F of E)                     (substitution, a register of columns at a time)
//     out = F of R + P Z
//     S = S decayed + (W decayed until the chunk ends)^T Z
//
// This is the chunked form of verax/ops/delta/_chunk.py (Yang et al., 2024, arXiv:2412.06464) with the state in the
// first cache levels. Decays are products of factors up to 1, never quotients: nothing overflows, nothing cancels.
#include "delta.h"

#include "delta_rows.h"
#include "delta_step.h"

namespace verax {
namespace VERAX_LEVEL {
namespace {

constexpr int C = DELTA_CHUNK;
constexpr int PARTS = C / L;       // registers that hold a number for each token of a chunk
constexpr int64_t SLAB = 64;       // columns of the state worked on at a time: 32 KB of it where K is 128

// Row i: 1 at i, else 0.
struct Identity {
  float at[C][C];
  constexpr Identity() : at() {
    for (int i = 0; i < C; ++i) at[i][i] = 1;
  }
};
constexpr Identity ONE;

// What the keys and gates of a chunk alone determine.
struct Work {
  Matrix keys;      // [2 C, K]: the erase keys of the chunk's tokens, then their read keys; at last with decays
  Matrix write;     // [C, K], perhaps the keys in `keys`
  Matrix late;      // [C, K]: by channel, write keys decayed until the chunk ends
  Matrix gates;     // [C, K]: by channel, each token's decay
  float* keep;      // [K]: decay over the whole chunk
  Matrix columns;   // [K, C]: write keys
  Matrix updates;   // [K, C]: those that the state is updated with
  Matrix meets;     // [2 C, C]: `keys` . `write`, by channel with decays
  float* lower;     // [C, C]: -L
  float* inner;     // [C, C]: P, scaled
  float* beta;      // [C]
  float* found;     // [C]: factor on F of E, -beta with the decay
  float* seen;      // [C]: factor on F of R, the scale with the decay
  float* tail;      // [C]: factor on Z where the state is updated
  Matrix states;    // by head, [K, columns]
  Matrix products;  // [2 C, SLAB]: F
  Matrix values;    // [C, SLAB]: beta v, then Z tail
};

Work allocate(void* memory, int64_t K, int64_t columns) {
  Arena arena{static_cast<float*>(memory)};
  const int64_t width = padded_size(K);
  Work w;
  w.keys = {arena.take(2 * C * width), width};
  w.write = {arena.take(C * width), width};
  w.late = {arena.take(C * width), width};
  w.gates = {arena.take(C * width), width};
  w.keep = arena.take(width);
  w.columns = {arena.take(width * C), C};
  w.updates = {arena.take(width * C), C};
  w.meets = {arena.take(2 * C * C), C};
  w.lower = arena.take(C * C);
  w.inner = arena.take(C * C);
  w.beta = arena.take(C);
  w.found = arena.take(C);
  w.seen = arena.take(C);
  w.tail = arena.take(C);
  w.products = {arena.take(2 * C * SLAB), SLAB};
  w.values = {arena.take(C * SLAB), SLAB};
  w.states = {arena.next, delta_state_floats(K, columns) / (K ? K : 1)};
  return w;
}

// Keys of `n` tokens.
template <class Element>
void load_keys(const Rows<Element>& rows, Work& w, int64_t token, int64_t n) {
  const DeltaTask& t = rows.t;
  for (int64_t i = 0; i < n; ++i) {
    copy_key(w.keys.row(i), rows.erase + rows.key(token + i), t.K, t.normalize);
    copy_key(w.keys.row(n + i), rows.read + rows.key(token + i), t.K, t.normalize);
    if (w.write.at != w.keys.at) copy_key(w.write.row(i), rows.write + rows.key(token + i), t.K, t.normalize);
  }
}

// Rows of `from`, the first n of them, as columns; the others repeat the last and are not read.
void turn(Matrix to, Matrix from, int64_t n, int64_t K) {
  const float* rows[C];
  for (int64_t i = 0; i < C; ++i) rows[i] = from.row(i < n ? i : n - 1);
  pack_columns<F32Cells>(to, rows, rows, C, K);
}

// Decays by head: they stand outside the dot products.
template <class Element>
void decay_by_head(const Rows<Element>& rows, Work& w, int64_t token, int64_t n) {
  const DeltaTask& t = rows.t;
  float decay[C] = {};
  for (int64_t i = 0; i < n; ++i) decay[i] = t.g[rows.gate(token + i)];
  for (int64_t i = 0; i < C; i += L) store(decay + i, exponential(load(decay + i)));
  F32 since[PARTS];  // of token i, by token j
  for (F32& part : since) part = zero();
  float all = 1;     // since the chunk began
  for (int64_t i = 0; i < n; ++i) {
    const float before = all;
    all *= decay[i];
    w.found[i] = -w.beta[i] * (t.erase_before_decay ? before : all);
    w.seen[i] = t.scale * all;
    for (int p = 0; p < PARTS; ++p) {
      const F32 earlier = since[p], now = mul(earlier, broadcast(decay[i]));
      const F32 erased = mul(broadcast(-w.beta[i]), t.erase_before_decay ? earlier : now);
      store(w.lower + i * C + p * L, mul(erased, load(w.meets.row(i) + p * L)));
      since[p] = add(now, load(ONE.at[i] + p * L));
      store(w.inner + i * C + p * L, mul(mul(broadcast(t.scale), since[p]), load(w.meets.row(n + i) + p * L)));
    }
  }
  float tail = 1;
  for (int64_t i = n - 1; i >= 0; --i) {
    w.tail[i] = tail;
    tail *= decay[i];
  }
  fill(w.keep, all, t.K);
}

// Products of tokens `begin` to `begin` + COUNT with earlier ones, where each channel decays by itself. `reached` is
// [K, C]: write keys decayed up to token `begin`, by token; on return, up to the last.
template <int COUNT>
inline void meet_rows(const DeltaTask& t, Work& w, Matrix reached, int64_t begin, int64_t n, int64_t part) {
  F32 lower[COUNT], inner[COUNT];
  VERAX_UNROLL
  for (int i = 0; i < COUNT; ++i) lower[i] = inner[i] = zero();
  for (int64_t k = 0; k < t.K; ++k) {
    F32 decayed = load(reached.row(k) + part * L);
    const F32 written = load(w.columns.row(k) + part * L);
    VERAX_UNROLL
    for (int i = 0; i < COUNT; ++i) {
      const F32 earlier = decayed;
      decayed = mul(decayed, broadcast(w.gates.row(begin + i)[k]));
      const F32 erased = t.erase_before_decay ? earlier : decayed;
      lower[i] = fma(erased, broadcast(w.keys.row(begin + i)[k]), lower[i]);
      decayed = fma(written, load(ONE.at[begin + i] + part * L), decayed);
      inner[i] = fma(decayed, broadcast(w.keys.row(n + begin + i)[k]), inner[i]);
    }
    store(reached.row(k) + part * L, decayed);
  }
  VERAX_UNROLL
  for (int i = 0; i < COUNT; ++i) {
    store(w.lower + (begin + i) * C + part * L, mul(lower[i], broadcast(-w.beta[begin + i])));
    store(w.inner + (begin + i) * C + part * L, mul(inner[i], broadcast(t.scale)));
  }
}

// Decays by channel: they stand inside the dot products.
template <class Element>
void decay_by_channel(const Rows<Element>& rows, Work& w, int64_t token, int64_t n) {
  constexpr int COUNT = 4;
  const DeltaTask& t = rows.t;
  const int64_t width = w.keys.stride;
  for (int64_t i = 0; i < n; ++i) rows.decay(w.gates.row(i), token + i);
  std::memset(w.updates.at, 0, t.K * C * sizeof(float));
  for (int64_t i = 0; i < n;) {
    const auto each_part = [&](auto meet) {
      for (int part = 0; part < PARTS; ++part) meet(part);
    };
    if (n - i >= COUNT) {
      each_part([&](int part) { meet_rows<COUNT>(t, w, w.updates, i, n, part); });
      i += COUNT;
    } else {
      each_part([&](int part) { meet_rows<1>(t, w, w.updates, i, n, part); });
      i += 1;
    }
  }
  // Until the chunk ends, from its last token to its first.
  fill(w.keep, 1, width);
  for (int64_t i = n - 1; i >= 0; --i) {
    std::memcpy(w.late.row(i), w.write.row(i), width * sizeof(float));
    scale_by(w.late.row(i), w.keep, width);
    scale_by(w.keep, w.gates.row(i), width);
  }
  turn(w.updates, w.late, n, t.K);
  // Since the chunk began.
  float* all = w.late.at;
  fill(all, 1, width);
  for (int64_t i = 0; i < n; ++i) {
    if (t.erase_before_decay) scale_by(w.keys.row(i), all, width);
    scale_by(all, w.gates.row(i), width);
    if (!t.erase_before_decay) scale_by(w.keys.row(i), all, width);
    scale_by(w.keys.row(n + i), all, width);
    w.found[i] = -w.beta[i];
    w.seen[i] = t.scale;
    w.tail[i] = 1;
  }
}

// a[rows, depth] . b, or `out` shrunk by row and added to, for any number of rows.
template <class Between>
inline void products(int64_t rows, Matrix a, Matrix b, int64_t depth, Matrix out, int64_t vectors, const float* alpha,
                     const Between& between) {
  for (int64_t r = 0; r < rows; r += ROWS) {
    between(r);
    product<F32Cells>(rows - r < ROWS ? rows - r : ROWS, {a.row(r), a.stride}, b, depth, {out.row(r), out.stride},
                      vectors, alpha ? alpha + r : nullptr);
  }
}

// Everything of a chunk but its values and the state. Heads that share their keys share what has no decay in it.
template <class Element>
void prepare(const Rows<Element>& rows, Work& w, int64_t token, int64_t n, bool same_keys) {
  const DeltaTask& t = rows.t;
  for (int64_t i = 0; i < n; ++i) w.beta[i] = t.beta[rows.gate(token + i)];
  if (!same_keys || t.by_channel) {
    load_keys(rows, w, token, n);
    turn(w.columns, w.write, n, t.K);
    if (!t.by_channel) products(2 * n, w.keys, w.columns, t.K, w.meets, PARTS, nullptr, [](int64_t) {});
  }
  t.by_channel ? decay_by_channel(rows, w, token, n) : decay_by_head(rows, w, token, n);
}

// A register of columns: Z by substitution, then the outputs. Sums of a token take earlier tokens only.
// Not inlined: the factors would be taken out of the loop over columns, 256 of them, and kept on the stack.
__attribute__((noinline)) void solve(const Work& w, int64_t column, int64_t n, float* const* out, int64_t count) {
  F32 z[C];
  VERAX_UNROLL
  for (int i = 0; i < C; ++i) {
    z[i] = i < n ? fma(broadcast(w.found[i]), load(w.products.row(i) + column), load(w.values.row(i) + column)) : zero();
  }
  VERAX_UNROLL
  for (int j = 0; j < C - 1; ++j) {
    VERAX_UNROLL
    for (int i = j + 1; i < C; ++i) z[i] = fma(broadcast(w.lower[i * C + j]), z[j], z[i]);
  }
  VERAX_UNROLL
  for (int i = 0; i < C; ++i) {
    if (i < n) {
      F32 o = mul(broadcast(w.seen[i]), load(w.products.row(n + i) + column));
      VERAX_UNROLL
      for (int j = 0; j <= i; ++j) o = fma(broadcast(w.inner[i * C + j]), z[j], o);
      store_some(out[i] + column, o, count);
      store(w.values.row(i) + column, mul(broadcast(w.tail[i]), z[i]));
    }
  }
}

// The chunk's part of a slab of columns. `ask_for(i)`, i < n, fetches what comes next.
template <class Element, class AskFor>
void advance(const Rows<Element>& rows, const Work& w, Matrix state, int64_t token, int64_t n, int64_t begin,
             int64_t count, const AskFor& ask_for) {
  const int64_t K = rows.t.K, vectors = (count + L - 1) / L;
  float* out[C];
  for (int64_t i = 0; i < n; ++i) {
    copy_row(w.values.row(i), rows.v + rows.value(token + i) + begin, count, w.beta[i]);
    out[i] = rows.out(token + i) + begin;
  }
  state.at += begin;
  products(2 * n, w.keys, state, K, w.products, vectors, nullptr, [&](int64_t r) {
    for (int64_t i = r / 2; i < r / 2 + ROWS / 2 && i < n; ++i) ask_for(i);
  });
  for (int64_t c = 0; c < count; c += L) solve(w, c, n, out, count - c);
  products(K, w.updates, w.values, n, state, vectors, w.keep, [](int64_t) {});
}

template <class Element>
void walk_chunks(const DeltaTask& t, const DeltaItem& item, void* memory) {
  const int64_t columns = item.end - item.begin, size = delta_state_floats(t.K, columns);
  Work w = allocate(memory, t.K, columns);
  if (t.erase == t.write) w.write = w.keys;
  if (!t.by_channel) w.updates = w.columns;
  const auto state_of = [&](int64_t h) { return Matrix{w.states.at + h * size, w.states.stride}; };
  const auto place = [&](int64_t h) { return (item.first_head + h) * t.K * t.V + item.begin; };
  std::memset(w.states.at, 0, item.heads * size * sizeof(float));
  for (int64_t h = 0; h < item.heads; ++h) {
    copy_state(state_of(h).at, w.states.stride, item.initial + place(h), t.V, t.K, columns);
  }
  for (int64_t token = 0; token < item.tokens; token += C) {
    const int64_t n = item.tokens - token < C ? item.tokens - token : C;
    for (int64_t h = 0; h < item.heads; ++h) {
      const Matrix state = state_of(h);
      if (item.kept && token % t.keep_every == 0) {
        float* kept = item.kept + token / t.keep_every * item.kept_stride;
        copy_state(kept + place(h), t.V, state.at, state.stride, t.K, columns);
      }
      const Rows<Element> rows(t, item, item.first_head + h);
      prepare(rows, w, token, n, h > 0 && !rows.first_of_key());
      const bool more = h + 1 < item.heads;
      const Rows<Element> next(t, item, item.first_head + (more ? h + 1 : 0));
      for (int64_t begin = 0; begin < columns; begin += SLAB) {
        advance(rows, w, state, token, n, begin, columns - begin < SLAB ? columns - begin : SLAB, [&](int64_t i) {
          if (begin == 0) next.ask_for(more ? token + i : token + C + i);
        });
      }
    }
  }
  for (int64_t h = 0; h < item.heads; ++h) {
    copy_state(item.last + place(h), t.V, state_of(h).at, w.states.stride, t.K, columns);
  }
}

template <class Element>
void walk(const DeltaTask& t, const DeltaItem& item, void* memory) {
  if (item.tokens > DELTA_STEP) return walk_chunks<Element>(t, item, memory);
  for (int64_t h = 0; h < item.heads; ++h) walk_tokens<Element>(t, item, item.first_head + h, memory);
}

}  // namespace

void delta(const DeltaTask& task, const DeltaItem& item, void* scratch) {
  task.bf16 ? walk<bf16>(task, item, scratch) : walk<float>(task, item, scratch);
}

}  // namespace VERAX_LEVEL
}  // namespace verax
