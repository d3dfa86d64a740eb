// for each block of tokens of the chunk:
//   k, q = unit keys and queries;  kb, right = beta k, beta [v | k]
//   new = k - lower(kb, k) k                   (lower(x, y) = tril(x y^T, -1) over all tokens of the chunk so far)
//   [U | W] = right - lower(kb, new) right     (T = I - lower(kb, new): see ops/hierarchical/_factored.py)
//   inner = (lower(q, k) with its diagonal) [U | W]
//   phi = the perceptron of (kb, beta v);  shares = gates * (0.5 + 0.3 phi, 0.5 - 0.3 phi)
// With the states, hierarchical_read: out = shares[0] (P U + Y R_fast) + shares[1] (P U + Y R_slow), Y = q - P W.
//
// Each of the three products keeps the sum of y^T z over the blocks before; only the block itself is multiplied out.
#include "hierarchical.h"

#include <cmath>

#include "cells.h"

namespace verax {
namespace VERAX_LEVEL {
namespace {

constexpr int64_t BLOCK = HIERARCHICAL_BLOCK;
constexpr float ONES[ROWS] = {1, 1, 1, 1, 1, 1};
constexpr float LOG2_E = 1.44269504088896340736f;
constexpr float LOCAL_FAST = 0.1f, LOCAL_SLOW = 0.9f;  // LOCAL_SHARES of ops/hierarchical/_published.py

// to[0..padded) = from[0..size) * factor, zeros after.
void scaled(float* to, const float* from, int64_t size, int64_t padded, float factor) {
  for (int64_t i = 0; i < size; ++i) to[i] = from[i] * factor;
  for (int64_t i = size; i < padded; ++i) to[i] = 0;
}

// Divided by its length, or by 1e-12 where that is more; `to` has zeros to `padded`.
void normalized(float* to, const float* from, int64_t size, int64_t padded) {
  scaled(to, from, size, padded, 1);
  F32 squares = zero();
  for (int64_t i = 0; i < padded; i += F32::lanes) squares = fma(load(to + i), load(to + i), squares);
  const float length = std::sqrt(sum(squares));
  const F32 factor = broadcast(1 / (length > 1e-12f ? length : 1e-12f));
  for (int64_t i = 0; i < padded; i += F32::lanes) store(to + i, mul(load(to + i), factor));
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
  const int64_t vectors = width / F32::lanes;
  for (int64_t r = 0; r < rows; r += ROWS) {
    const int64_t count = rows - r < ROWS ? rows - r : ROWS;
    const int64_t seen = r + count - 1 + diagonal, score_vectors = (seen + F32::lanes - 1) / F32::lanes;
    const Matrix from{x.row(r), x.stride}, to{out.row(r), out.stride};
    product<F32Cells>(count, from, y_columns, depth, scores, score_vectors, nullptr);
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t j = r + i + diagonal; j < score_vectors * F32::lanes; ++j) scores.row(i)[j] = 0;
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

// The perceptron of the token flux, packed once a chunk: weights by input, zeros where sizes are padded.
struct Flux {
  int64_t inputs, width;
  Matrix w1, hidden;
  float *b1, *w2;
  float b2;

  Flux(const HierarchicalTask& t, int64_t K, int64_t V, Carver& carver)
      : inputs(V + K), width(hierarchical_padded(t.hidden)) {
    w1 = {carver.take(inputs * width), width};
    hidden = {carver.take(BLOCK * width), width};
    b1 = carver.take(width);
    w2 = carver.take(width);
    b2 = t.b2[0];
    std::memset(w1.at, 0, inputs * width * sizeof(float));
    for (int64_t j = 0; j < t.hidden; ++j) {
      const float* row = t.w1 + j * (t.K + t.V);  // of the key, then of the value; ours are the other way round
      for (int64_t d = 0; d < t.K; ++d) w1.row(V + d)[j] = row[d];
      for (int64_t d = 0; d < t.V; ++d) w1.row(d)[j] = row[t.K + d];
    }
    scaled(b1, t.b1, t.hidden, width, 1);
    scaled(w2, t.w2, t.hidden, width, 1);
  }

  // phi of each row of `x`.
  void run(Matrix x, int64_t rows, float* phi) {
    for (int64_t r = 0; r < rows; r += ROWS) {
      const int64_t count = rows - r < ROWS ? rows - r : ROWS;
      product<F32Cells>(count, {x.row(r), x.stride}, w1, inputs, {hidden.row(r), width}, width / F32::lanes, nullptr);
    }
    for (int64_t r = 0; r < rows; ++r) {
      float* h = hidden.row(r);
      for (int64_t j = 0; j < width; ++j) h[j] += b1[j];
      phi[r] = b2;
      for (int64_t j = 0; j < width; j += F32::lanes) {
        float power[F32::lanes];
        store(power, exponential(load(h + j)));
        for (int l = 0; l < F32::lanes; ++l) power[l] = h[j + l] / (1 + power[l]);  // silu
        phi[r] += sum(mul(load(power), load(w2 + j)));
      }
    }
    for (int64_t r = 0; r < rows; r += F32::lanes) {  // `phi` has room for whole registers
      float power[F32::lanes];
      store(power, exponential(load(phi + r)));
      for (int l = 0; l < F32::lanes; ++l) {
        const float sigmoid = 1 / (1 + power[l]);
        phi[r + l] = sigmoid < 0.01f ? 0.01f : sigmoid > 0.99f ? 0.99f : sigmoid;
      }
    }
  }

  // e^-x, finite.
  static F32 exponential(F32 x) {
    const F32 y = max(mul(x, broadcast(LOG2_E)), broadcast(-126));
    return exp2(sub(zero(), y));
  }
};

}  // namespace

void hierarchical_chunk(const HierarchicalTask& t, int64_t chunk, void* scratch) {
  const int64_t n = t.T / t.C, h = chunk % t.H, i = chunk / t.H % n, b = chunk / t.H / n;
  const int64_t K = hierarchical_padded(t.K), V = hierarchical_padded(t.V);
  const int64_t both = V + (t.local ? V : K);
  Carver carver{static_cast<float*>(scratch)};
  const Matrix q{carver.take(BLOCK * K), K}, k{carver.take(BLOCK * K), K}, kb{carver.take(BLOCK * K), K};
  const Matrix fresh{carver.take(BLOCK * K), K}, columns{carver.take(K * BLOCK), BLOCK};
  const Matrix right{carver.take(BLOCK * both), both}, values{carver.take(BLOCK * both), both};
  const Matrix out{carver.take(BLOCK * both), both}, scores{carver.take(ROWS * BLOCK), BLOCK};
  const Matrix keys_before{carver.take(K * K), K}, right_before{carver.take(K * both), both};
  const Matrix values_before{carver.take(K * both), both};
  float* phi = carver.take(BLOCK);
  float* sums = t.local ? nullptr : t.sums + chunk * (t.K + t.V);
  for (int64_t d = 0; sums && d < t.K + t.V; ++d) sums[d] = 0;

  const int64_t first_token = (b * t.T + i * t.C) * t.H + h;
  Flux flux(t, K, V, carver);
  for (int64_t begin = 0; begin < t.C; begin += BLOCK) {
    const int64_t rows = t.C - begin < BLOCK ? t.C - begin : BLOCK;
    const bool first = begin == 0, last = begin + rows == t.C;
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t token = first_token + (begin + r) * t.H;
      const float beta = t.beta[token];
      normalized(q.row(r), t.q + token * t.K, t.K, K);
      normalized(k.row(r), t.k + token * t.K, t.K, K);
      scaled(kb.row(r), k.row(r), K, K, beta);
      scaled(right.row(r), t.v + token * t.V, t.V, V, beta);
      if (!t.local) scaled(right.row(r) + V, kb.row(r), K, K, 1);
    }
    const int64_t right_width = t.local ? V : both;

    transposed(columns, k, rows, K);
    lower(kb, columns, k, keys_before, first, last, rows, K, K, false, scores, fresh);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t d = 0; d < K; ++d) fresh.row(r)[d] = k.row(r)[d] - fresh.row(r)[d];
    }

    // U goes to the second half if the rule is local, whose first half are the values themselves.
    const Matrix u{values.at + (t.local ? V : 0), both};
    transposed(columns, fresh, rows, K);
    lower(kb, columns, right, right_before, first, last, rows, K, right_width, false, scores, u);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t d = 0; d < right_width; ++d) u.row(r)[d] = right.row(r)[d] - u.row(r)[d];
      if (t.local) scaled(values.row(r), right.row(r), V, V, 1);
    }

    transposed(columns, k, rows, K);
    lower(q, columns, values, values_before, first, last && t.local, rows, K, both, true, scores, out);
    if (t.local) {
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t token = first_token + (begin + r) * t.H;
        const float fast = LOCAL_FAST * t.fast[token], slow = LOCAL_SLOW * t.slow[token], *from = out.row(r);
        for (int64_t d = 0; d < t.V; ++d) t.out[token * t.V + d] = fast * from[d] + slow * from[V + d];
      }
      continue;
    }
    flux.run(right, rows, phi);
    float* inner = t.inner + (chunk * t.C + begin) * (t.V + t.K);
    float* shares = t.shares + (chunk * t.C + begin) * 2;
    for (int64_t r = 0; r < rows; ++r, inner += t.V + t.K, shares += 2) {
      const int64_t token = first_token + (begin + r) * t.H;
      const float* from = out.row(r);
      for (int64_t d = 0; d < t.V; ++d) inner[d] = from[d];
      for (int64_t d = 0; d < t.K; ++d) inner[t.V + d] = q.row(r)[d] - from[V + d];
      for (int64_t d = 0; d < t.K; ++d) sums[d] += k.row(r)[d];
      for (int64_t d = 0; d < t.V; ++d) sums[t.K + d] += values.row(r)[d];
      shares[0] = (0.5f + 0.3f * phi[r]) * t.fast[token];
      shares[1] = (0.5f - 0.3f * phi[r]) * t.slow[token];
    }
  }
  if (t.local) return;
  float* product = t.product + chunk * t.K * (t.V + t.K);
  for (int64_t d = 0; d < t.K; ++d, product += t.V + t.K) {
    scaled(product, values_before.row(d), t.V, t.V, 1);
    scaled(product + t.V, values_before.row(d) + V, t.K, t.K, 1);
  }
}

void hierarchical_read(const HierarchicalRead& t, int64_t chunk, void* scratch) {
  const int64_t n = t.T / t.C, h = chunk % t.H, i = chunk / t.H % n, b = chunk / t.H / n;
  const int64_t V = hierarchical_padded(t.V), stride = t.V + t.K, first_token = (b * t.T + i * t.C) * t.H + h;
  Carver carver{static_cast<float*>(scratch)};
  const Matrix states{carver.take(t.K * 2 * V), 2 * V}, read{carver.take(ROWS * 2 * V), 2 * V};
  for (int64_t d = 0; d < t.K; ++d) {
    for (int64_t x = 0; x < 2; ++x) {
      scaled(states.row(d) + x * V, t.found + ((chunk * 2 + x) * t.K + d) * t.V, t.V, V, 1);
    }
  }
  float* inner = const_cast<float*>(t.inner) + chunk * t.C * stride;  // products only read their operands
  const float* shares = t.shares + chunk * t.C * 2;
  for (int64_t begin = 0; begin < t.C; begin += ROWS) {
    const int64_t rows = t.C - begin < ROWS ? t.C - begin : ROWS;
    product<F32Cells>(rows, {inner + begin * stride + t.V, stride}, states, t.K, read, 2 * V / F32::lanes, nullptr);
    for (int64_t r = 0; r < rows; ++r) {
      const float *within = inner + (begin + r) * stride, *from = read.row(r);
      const float fast = shares[(begin + r) * 2], slow = shares[(begin + r) * 2 + 1];
      float* to = t.out + (first_token + (begin + r) * t.H) * t.V;
      for (int64_t d = 0; d < t.V; ++d) to[d] = fast * (within[d] + from[d]) + slow * (within[d] + from[V + d]);
    }
  }
}

}  // namespace VERAX_LEVEL
}  // namespace verax
