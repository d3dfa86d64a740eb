// for each block of tokens of the chunk:
//   k, q = unit keys and queries;  kb, right = beta k, beta [v | k]
//   new = k - lower(kb, k) k                   (lower(x, y) = tril(x y^T, -1) over all tokens of the chunk so far)
//   [U | W] = right - lower(kb, new) right     (T = I - lower(kb, new): see ops/hierarchical/_published.py)
//   inner = (lower(q, k) with its diagonal) [U | W]
//   phi = the perceptron of (kb, beta v);  shares = gates * (0.5 + 0.3 phi, 0.5 - 0.3 phi)
// psi = the perceptron of the means of k, U and k^T bilinear U / temperature
//
// Each of the three products keeps the sum of y^T z over the blocks before; only the block itself is multiplied out.
#include "hierarchical.h"

#include "rows.h"
#include "silu_lanes.h"

namespace verax {
namespace VERAX_LEVEL {
namespace {

constexpr int L = F32::lanes;
constexpr int64_t BLOCK = HIERARCHICAL_BLOCK;
constexpr float ONES[ROWS] = {1, 1, 1, 1, 1, 1};
constexpr float LOCAL_FAST = 0.1f, LOCAL_SLOW = 0.9f;  // LOCAL_SHARES of ops/hierarchical/_published.py
constexpr float FORGET[2] = {0.1f, 0.05f};             // and FORGET

// Divided by its length, or by 1e-12 where that is more; zeros up to a whole chunk of values.
inline void unit_row(float* to, const float* from, int64_t size) {
  const float length = __builtin_sqrtf(dot_rows(from, from, size));
  copy_row(to, from, size, 1 / (length > 1e-12f ? length : 1e-12f));
}

// to = a - to, over `size` floats, whole registers.
inline void subtract_from(const float* a, float* to, int64_t size) {
  for (int64_t i = 0; i < size; i += L) store(to + i, sub(load(a + i), load(to + i)));
}

inline void add_to(float* to, const float* a, int64_t size) {
  for (int64_t i = 0; i < size; i += L) store(to + i, add(load(to + i), load(a + i)));
}

// Columns of `to` become the rows of `from`.
void transposed(Matrix to, Matrix from, int64_t count, int64_t width) {
  const float* rows[BLOCK];
  for (int64_t i = 0; i < BLOCK; ++i) rows[i] = from.row(i);
  pack_columns<F32Cells>(to, rows, rows, count, width);
}

// out[i] = sum over the block's j < i (j <= i with `diagonal`) of (x[i] . y[j]) z[j], and over the tokens before it by
// `before`, the sum of y[j]^T z[j]; to which the block's own are then added.
void lower(Matrix x, Matrix y_columns, Matrix z, Matrix before, bool first, bool last, int64_t rows, int64_t depth,
           int64_t width, bool diagonal, Matrix scores, Matrix out) {
  const int64_t vectors = width / L;
  for (int64_t r = 0; r < rows; r += ROWS) {
    const int64_t count = rows - r < ROWS ? rows - r : ROWS;
    const int64_t seen = r + count - 1 + diagonal, score_vectors = (seen + L - 1) / L;
    const Matrix from{x.row(r), x.stride}, to{out.row(r), out.stride};
    product<F32Cells>(count, from, y_columns, depth, scores, score_vectors, nullptr);
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t j = r + i + diagonal; j < score_vectors * L; ++j) scores.row(i)[j] = 0;
    }
    if (!first) product<F32Cells>(count, from, before, depth, to, vectors, nullptr);
    product<F32Cells>(count, scores, z, seen, to, vectors, first ? nullptr : ONES);
  }
  if (last) return;
  for (int64_t d = 0; d < depth; d += ROWS) {
    const Matrix from{y_columns.row(d), y_columns.stride}, to{before.row(d), before.stride};
    product<F32Cells>(depth - d < ROWS ? depth - d : ROWS, from, z, rows, to, vectors, first ? nullptr : ONES);
  }
}

inline float clipped(float flux) { return flux < 0.01f ? 0.01f : flux > 0.99f ? 0.99f : flux; }

// phi of each row of x, [beta v | beta k]; it is padded to whole registers.
void token_flux(const HierarchicalTask& t, Matrix x, int64_t rows, Matrix hidden, float* phi) {
  const int64_t width = hidden.stride, inputs = x.stride;
  const Matrix w1{const_cast<float*>(t.token_flux), width};  // products only read their operands
  const float *b1 = w1.row(inputs), *w2 = w1.row(inputs + 1), b2 = *w1.row(inputs + 2);
  for (int64_t r = 0; r < rows; r += ROWS) {
    const int64_t count = rows - r < ROWS ? rows - r : ROWS;
    product<F32Cells>(count, {x.row(r), x.stride}, w1, inputs, {hidden.row(r), width}, width / L, nullptr);
  }
  for (int64_t r = 0; r < rows; ++r) {
    F32 all = zero();
    for (int64_t j = 0; j < width; j += L) {
      const F32 h = add(load(hidden.row(r) + j), load(b1 + j));
      all = fma(silu_of(h), load(w2 + j), all);
    }
    phi[r] = b2 + sum(all);
  }
  for (int64_t r = 0; r < rows; r += L) {
    store(phi + r, div(broadcast(1), one_more(load(phi + r))));
    for (int l = 0; l < L; ++l) phi[r + l] = clipped(phi[r + l]);
  }
}

// psi, from sums over the chunk's tokens of k and U, and of their outer products.
float chunk_flux(const HierarchicalTask& t, int64_t h, const float* key, const float* value, Matrix product) {
  const float mean = 1.0f / static_cast<float>(t.C);
  float score = 0;
  for (int64_t d = 0; d < t.K; ++d) score += dot_rows<float>(product.row(d), t.bilinear + (h * t.K + d) * t.V, t.V);
  score *= mean / t.temperature[h];
  float flux = t.b2[0];
  for (int64_t j = 0; j < t.hidden; ++j) {
    const float* row = t.w1 + j * (t.K + t.V + 1);
    const float by_means = mean * (dot_rows(row, key, t.K) + dot_rows(row + t.K, value, t.V));
    const float x = t.b1[j] + by_means + row[t.K + t.V] * score;
    flux += t.w2[j] * x / (1 + __builtin_expf(-x));
  }
  return clipped(1 / (1 + __builtin_expf(-flux)));
}

template <bool local>
void run(const HierarchicalTask& t, int64_t head, int64_t chunk, void* scratch) {
  const int64_t K = hierarchical_padded(t.K), V = hierarchical_padded(t.V), width = local ? V : V + K;
  const int64_t both = V + (local ? V : K);
  Arena arena{static_cast<float*>(scratch)};
  const Matrix q{arena.take(BLOCK * K), K}, k{arena.take(BLOCK * K), K}, kb{arena.take(BLOCK * K), K};
  const Matrix fresh{arena.take(BLOCK * K), K}, columns{arena.take(K * BLOCK), BLOCK};
  const Matrix right{arena.take(BLOCK * width), width}, values{arena.take(BLOCK * both), both};
  const Matrix scores{arena.take(ROWS * BLOCK), BLOCK};
  const Matrix keys_before{arena.take(K * K), K}, right_before{arena.take(K * both), both};
  const int64_t hidden_width = hierarchical_hidden(t.token_hidden);
  const Matrix hidden{arena.take(BLOCK * hidden_width), hidden_width};
  float *phi = arena.take(BLOCK), *key_sum = arena.take(K), *value_sum = arena.take(V);
  HierarchicalSlot slot{};
  if (local) {
    slot.inner = arena.take(BLOCK * both);
    slot.product = arena.take(K * both);
  } else {
    slot = HierarchicalShared(t).of(t, head, chunk);
    fill(key_sum, 0, K);
    fill(value_sum, 0, V);
  }
  float decays[2] = {0, 0};
  const int64_t first_token = (head / t.H * t.T + chunk * t.C) * t.H + head % t.H;
  for (int64_t begin = 0; begin < t.C; begin += BLOCK) {
    const int64_t rows = t.C - begin < BLOCK ? t.C - begin : BLOCK;
    const bool first = begin == 0, last = begin + rows == t.C;
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t token = first_token + (begin + r) * t.H;
      const float beta = t.beta[token];
      unit_row(q.row(r), t.q + token * t.K, t.K);
      unit_row(k.row(r), t.k + token * t.K, t.K);
      copy_row(kb.row(r), k.row(r), K, beta);
      copy_row(right.row(r), t.v + token * t.V, t.V, beta);
      if (!local) copy_row(right.row(r) + V, kb.row(r), K, 1);
    }

    transposed(columns, k, rows, K);
    lower(kb, columns, k, keys_before, first, last, rows, K, K, false, scores, fresh);
    subtract_from(k.at, fresh.at, rows * K);

    // U goes to the second half if the rule is local, whose first half are the values themselves.
    const Matrix u{values.at + (local ? V : 0), both};
    transposed(columns, fresh, rows, K);
    lower(kb, columns, right, right_before, first, last, rows, K, width, false, scores, u);
    for (int64_t r = 0; r < rows; ++r) {
      subtract_from(right.row(r), u.row(r), width);
      if (local) copy_row(values.row(r), right.row(r), V, 1);
    }

    transposed(columns, k, rows, K);
    const Matrix out{slot.inner + (local ? 0 : begin * both), both}, values_before{slot.product, both};
    lower(q, columns, values, values_before, first, last && local, rows, K, both, true, scores, out);
    if (local) {
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t token = first_token + (begin + r) * t.H;
        const F32 fast = broadcast(LOCAL_FAST * t.gates[0][token]), slow = broadcast(LOCAL_SLOW * t.gates[1][token]);
        const float* from = out.row(r);
        for (int64_t d = 0; d < t.V; d += L) {
          store_some(t.out + token * t.V + d, fma(fast, load(from + d), mul(slow, load(from + V + d))), t.V - d);
        }
      }
      continue;
    }
    token_flux(t, right, rows, hidden, phi);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t token = first_token + (begin + r) * t.H;
      subtract_from(q.row(r), out.row(r) + V, K);
      add_to(key_sum, k.row(r), K);
      add_to(value_sum, values.row(r), V);
      slot.shares[2 * (begin + r)] = (0.5f + 0.3f * phi[r]) * t.gates[0][token];
      slot.shares[2 * (begin + r) + 1] = (0.5f - 0.3f * phi[r]) * t.gates[1][token];
      for (int x = 0; x < 2; ++x) decays[x] += t.decays[x][token];
    }
  }
  if (local) return;
  const float psi = chunk_flux(t, head % t.H, key_sum, value_sum, {slot.product, both});
  HierarchicalShared(t).psi(t, chunk)[head] = psi;
  for (int x = 0; x < 2; ++x) slot.keep[x] = decays[x] / static_cast<float>(t.C) * (1 - FORGET[x] * psi);
}

}  // namespace

void hierarchical_local(const HierarchicalTask& task, int64_t head, int64_t chunk, void* scratch) {
  run<true>(task, head, chunk, scratch);
}

void hierarchical_within(const HierarchicalTask& task, int64_t head, int64_t chunk, void* scratch) {
  run<false>(task, head, chunk, scratch);
}

}  // namespace VERAX_LEVEL
}  // namespace verax
