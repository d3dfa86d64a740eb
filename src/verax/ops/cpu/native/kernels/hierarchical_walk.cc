// S_x = keep_x S_x;  R_x = S_x / |S_x|           (x: fast, slow; the two lie next to each other)
// for each token of the chunk:
//   out = shares[0] (P U + Y R_fast) + shares[1] (P U + Y R_slow)             with Y = q - P W
// S_x = S_x + k^T U - k^T W R_x
// S_fast, S_slow = S_fast + c psi S_slow, S_slow + c (1 - psi) S_fast;  S_x = S_x / |S_x|
//                                                with c = 0.05 + 0.1 times the mean of psi over all heads
#include "hierarchical.h"

#include "rows.h"

namespace verax {
namespace VERAX_LEVEL {
namespace {

constexpr int L = F32::lanes;

// 1 / (|x| + 1e-8), from the squares of x.
float over_norm(F32 squares) { return 1 / (__builtin_sqrtf(sum(squares)) + 1e-8f); }

// R, and S scaled.
void normalize(const HierarchicalTask& t, const float* keep, int64_t V, Matrix states, Matrix found) {
  for (int x = 0; x < 2; ++x) {
    F32 squares = zero();
    for (int64_t d = 0; d < t.K; ++d) {
      float* state = states.row(d) + x * V;
      for (int64_t c = 0; c < V; c += L) {
        const F32 kept = mul(load(state + c), broadcast(keep[x]));
        store(state + c, kept);
        squares = fma(kept, kept, squares);
      }
    }
    const F32 factor = broadcast(over_norm(squares));
    for (int64_t d = 0; d < t.K; ++d) {
      for (int64_t c = x * V; c < (x + 1) * V; c += L) store(found.row(d) + c, mul(load(states.row(d) + c), factor));
    }
  }
}

void mix(const HierarchicalTask& t, float psi, float coupling, int64_t V, Matrix states) {
  const F32 to_fast = broadcast(coupling * psi), to_slow = broadcast(coupling * (1 - psi));
  F32 squares[2] = {zero(), zero()};
  for (int64_t d = 0; d < t.K; ++d) {
    for (int64_t c = 0; c < V; c += L) {
      float* at[2] = {states.row(d) + c, states.row(d) + V + c};
      const F32 fast = load(at[0]), slow = load(at[1]);
      const F32 mixed[2] = {fma(to_fast, slow, fast), fma(to_slow, fast, slow)};
      for (int x = 0; x < 2; ++x) {
        store(at[x], mixed[x]);
        squares[x] = fma(mixed[x], mixed[x], squares[x]);
      }
    }
  }
  for (int x = 0; x < 2; ++x) {
    const F32 factor = broadcast(over_norm(squares[x]));
    for (int64_t d = 0; d < t.K; ++d) {
      for (int64_t c = x * V; c < (x + 1) * V; c += L) store(states.row(d) + c, mul(load(states.row(d) + c), factor));
    }
  }
}

}  // namespace

void hierarchical_walk(const HierarchicalTask& t, int64_t head, int64_t chunk, void* scratch) {
  const int64_t K = hierarchical_padded(t.K), V = hierarchical_padded(t.V), heads = t.B * t.H;
  const HierarchicalShared shared(t);
  const HierarchicalSlot slot = shared.of(t, head, chunk);
  const int64_t both = shared.both;
  Arena arena{static_cast<float*>(scratch)};
  const Matrix found{arena.take(K * 2 * V), 2 * V}, read{arena.take(ROWS * 2 * V), 2 * V};
  const Matrix states{shared.states(t, head), 2 * V};
  if (chunk == 0) fill(states.at, 0, K * 2 * V);
  normalize(t, slot.keep, V, states, found);

  const int64_t first_token = (head / t.H * t.T + chunk * t.C) * t.H + head % t.H;
  for (int64_t begin = 0; begin < t.C; begin += ROWS) {
    const int64_t rows = t.C - begin < ROWS ? t.C - begin : ROWS;
    product<F32Cells>(rows, {slot.inner + begin * both + V, both}, found, t.K, read, 2 * V / L, nullptr);
    for (int64_t r = 0; r < rows; ++r) {
      const float *within = slot.inner + (begin + r) * both, *from = read.row(r);
      const float* shares = slot.shares + 2 * (begin + r);
      float* to = t.out + (first_token + (begin + r) * t.H) * t.V;
      for (int64_t c = 0; c < t.V; c += L) {
        const F32 fast = add(load(within + c), load(from + c)), slow = add(load(within + c), load(from + V + c));
        store_some(to + c, fma(broadcast(shares[0]), fast, mul(broadcast(shares[1]), slow)), t.V - c);
      }
    }
  }

  for (int64_t d = 0; d < t.K; d += ROWS) {
    const int64_t rows = t.K - d < ROWS ? t.K - d : ROWS;
    product<F32Cells>(rows, {slot.product + d * both + V, both}, found, t.K, read, 2 * V / L, nullptr);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < 2 * V; c += L) {
        float* state = states.row(d + r) + c;
        const F32 written = sub(load(slot.product + (d + r) * both + c % V), load(read.row(r) + c));
        store(state, add(load(state), written));
      }
    }
  }
  const float* psi = shared.psi(t, chunk);
  float mean = 0;
  for (int64_t i = 0; i < heads; ++i) mean += psi[i];
  mix(t, psi[head], 0.05f + 0.1f * mean / static_cast<float>(heads), V, states);
  if ((chunk + 1) * t.C < t.T) return;
  for (int x = 0; x < 2; ++x) {
    for (int64_t d = 0; d < t.K; ++d) {
      std::memcpy(t.states[x] + (head * t.K + d) * t.V, states.row(d) + x * V, t.V * sizeof(float));
    }
  }
}

}  // namespace VERAX_LEVEL
}  // namespace verax
