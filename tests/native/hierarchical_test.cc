// LAM's kernels without JAX, for the sanitisers: every level, odd shapes, buffers that end where the data ends.
#include "check.h"
#include "kernels/hierarchical.h"
#include "parallel.h"
#include "scratch.h"

namespace {

struct Case {
  int64_t B, T, H, K, V, C, hidden;
  bool local;
};

// Outputs of a chunk's kernel, then of the reading from random states; the local rule's outputs alone.
std::vector<float> run(const Case& c) {
  const int64_t tokens = c.B * c.T * c.H, chunks = tokens / c.C;
  const auto q = check::normal(tokens * c.K, 1), k = check::normal(tokens * c.K, 2);
  const auto v = check::normal(tokens * c.V, 3), beta = check::normal(tokens, 4);
  const auto fast = check::normal(tokens, 5), slow = check::normal(tokens, 6);
  const auto w1 = check::normal(c.hidden * (c.K + c.V), 7), b1 = check::normal(c.hidden, 8);
  const auto w2 = check::normal(c.hidden, 9), b2 = check::normal(1, 10);
  const auto found = check::normal(chunks * 2 * c.K * c.V, 11);
  std::vector<float> out(tokens * c.V, NAN), inner(c.local ? 0 : tokens * (c.V + c.K), NAN);
  std::vector<float> shares(c.local ? 0 : tokens * 2, NAN), sums(c.local ? 0 : chunks * (c.K + c.V), NAN);
  std::vector<float> product(c.local ? 0 : chunks * c.K * (c.V + c.K), NAN);
  verax::HierarchicalTask t{};
  t.T = c.T, t.H = c.H, t.K = c.K, t.V = c.V, t.C = c.C, t.hidden = c.hidden;
  t.q = q.data(), t.k = k.data(), t.v = v.data(), t.beta = beta.data(), t.fast = fast.data(), t.slow = slow.data();
  t.w1 = w1.data(), t.b1 = b1.data(), t.w2 = w2.data(), t.b2 = b2.data();
  t.local = c.local, t.out = out.data(), t.inner = inner.data(), t.shares = shares.data();
  t.product = product.data(), t.sums = sums.data();
  const int64_t scratch =
      verax::hierarchical_scratch_bytes(c.K, c.V) + verax::hierarchical_flux_bytes(c.K, c.V, c.hidden);
  const verax::AlignedBytes memory(scratch);
  for (int64_t i = 0; i < chunks; ++i) VERAX_KERNEL(hierarchical_chunk)(t, i, memory.data());
  if (c.local) return out;
  const verax::HierarchicalRead r{c.T, c.H, c.K, c.V, c.C, inner.data(), shares.data(), found.data(), out.data()};
  for (int64_t i = 0; i < chunks; ++i) VERAX_KERNEL(hierarchical_read)(r, i, memory.data());
  for (const auto* part : {&product, &sums}) out.insert(out.end(), part->begin(), part->end());
  return out;
}

}  // namespace

int main() {
  const Case cases[] = {{1, 1, 1, 1, 1, 1, 1, false},      {2, 65, 3, 20, 36, 65, 10, false},
                        {1, 192, 2, 32, 32, 96, 16, false}, {1, 130, 1, 33, 5, 130, 17, true},
                        {2, 64, 1, 32, 32, 32, 16, true}};
  for (const Case& c : cases) {
    std::vector<float> first;
    check::each_level([&](const char* level) {
      const std::vector<float> out = run(c);
      if (first.empty()) first = out;
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
