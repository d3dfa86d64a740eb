// LAM's kernels without JAX, for the sanitisers: every level, odd shapes, buffers that end where the data ends.
#include <algorithm>

#include "check.h"
#include "kernels/hierarchical.h"
#include "parallel.h"
#include "scratch.h"
#include "staged.h"

namespace {

struct Case {
  int64_t B, T, H, K, V, C, hidden;
  bool local;
};

// Outputs, then both states; the local rule's outputs alone.
std::vector<float> run(const Case& c, int64_t ahead) {
  const int64_t tokens = c.B * c.T * c.H, states = c.B * c.H * c.K * c.V;
  const auto q = check::normal(tokens * c.K, 1), k = check::normal(tokens * c.K, 2);
  const auto v = check::normal(tokens * c.V, 3), beta = check::normal(tokens, 4);
  const auto fast = check::normal(tokens, 5), slow = check::normal(tokens, 6);
  const auto fast_decay = check::normal(tokens, 7), slow_decay = check::normal(tokens, 8);
  const auto w1 = check::normal(c.hidden * (c.K + c.V + 1), 9), b1 = check::normal(c.hidden, 10);
  const auto w2 = check::normal(c.hidden, 11), b2 = check::normal(1, 12);
  const auto token_w1 = check::normal(c.hidden * (c.K + c.V), 13), token_b1 = check::normal(c.hidden, 14);
  const auto token_w2 = check::normal(c.hidden, 15), token_b2 = check::normal(1, 16);
  const auto bilinear = check::normal(c.H * c.K * c.V, 17), temperature = std::vector<float>(c.H, 0.5f);
  std::vector<float> out(tokens * c.V, NAN), last[2];
  verax::HierarchicalTask t{};
  t.B = c.B, t.T = c.T, t.H = c.H, t.K = c.K, t.V = c.V, t.C = c.C;
  t.q = q.data(), t.k = k.data(), t.v = v.data(), t.beta = beta.data(), t.out = out.data();
  t.gates[0] = fast.data(), t.gates[1] = slow.data();
  check::Pool pool(3);
  const int64_t heads = c.B * c.H, chunks = c.T / c.C;
  const auto on = [&](auto kernel) {
    return [&t, kernel](int64_t head, int64_t chunk) {
      const verax::AlignedBytes memory(verax::hierarchical_scratch_bytes(t));
      kernel(t, head, chunk, memory.data());
    };
  };
  if (c.local) {
    const auto local = on(VERAX_KERNEL(hierarchical_local));
    verax::parallel_for(pool, heads * chunks, 1, [&](int64_t i, int64_t) { local(i % heads, i / heads); });
    pool.join();
    return out;
  }
  for (auto& state : last) state.assign(states, NAN);
  t.decays[0] = fast_decay.data(), t.decays[1] = slow_decay.data();
  t.hidden = t.token_hidden = c.hidden;
  t.w1 = w1.data(), t.b1 = b1.data(), t.w2 = w2.data(), t.b2 = b2.data();
  t.bilinear = bilinear.data(), t.temperature = temperature.data();
  t.states[0] = last[0].data(), t.states[1] = last[1].data(), t.ahead = ahead;
  std::vector<float> flux(verax::hierarchical_flux_floats(t), NAN);
  verax::hierarchical_pack_flux(t, token_w1.data(), token_b1.data(), token_w2.data(), token_b2.data(), flux.data());
  t.token_flux = flux.data();
  const int64_t floats = verax::hierarchical_shared_floats(t);
  const verax::AlignedBytes shared(4 * floats);
  t.shared = static_cast<float*>(shared.data());
  std::fill(t.shared, t.shared + floats, NAN);
  verax::pipelined_scan(pool, chunks, heads, ahead, on(VERAX_KERNEL(hierarchical_within)),
                     on(VERAX_KERNEL(hierarchical_walk)));
  pool.join();
  for (const auto& state : last) out.insert(out.end(), state.begin(), state.end());
  return out;
}

}  // namespace

int main() {
  const Case cases[] = {{1, 1, 1, 1, 1, 1, 1, false},      {2, 65, 3, 20, 36, 65, 10, false},
                        {1, 192, 2, 32, 32, 96, 16, false}, {2, 160, 1, 8, 32, 32, 4, false},
                        {1, 130, 1, 33, 5, 130, 17, true},  {2, 64, 1, 32, 32, 32, 16, true}};
  for (const Case& c : cases) {
    std::vector<float> first;
    check::each_level([&](const char* level) {
      const std::vector<float> out = run(c, 2);
      if (first.empty()) first = out;
      check::that(out == run(c, 3), "%s: depends on how far the work is ahead", level);
      for (size_t i = 0; i < out.size(); ++i) {
        const float bound = 1e-3f * (1 + std::abs(first[i]));
        check::that(std::abs(out[i] - first[i]) <= bound, "%s T=%lld at %zu: %g, expected %g", level,
                    static_cast<long long>(c.T), i, out[i], first[i]);
      }
    });
  }
  std::printf("hierarchical: %d failures\n", check::failures);
  return check::failures != 0;
}
