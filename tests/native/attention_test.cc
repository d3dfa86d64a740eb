// The attention and cache kernels without JAX, for the sanitisers: every level, odd shapes, buffers that end where the
// data ends.
#include <algorithm>

#include "attention_run.h"
#include "check.h"
#include "kernels/write_pages.h"

using verax::AttentionTask;
using verax::AttentionTile;

namespace {

// Random numbers as float32 or bfloat16, in a buffer without a byte to spare.
struct Numbers {
  bool rounded;
  std::vector<float> exact;
  std::vector<uint16_t> bits;

  Numbers(int64_t size, bool rounded, unsigned seed) : rounded(rounded), exact(check::normal(size, seed)) {
    if (!rounded) return;
    for (float& x : exact) {
      bits.push_back(check::to_bf16(x));
      x = check::from_bf16(bits.back());
    }
    bits.shrink_to_fit();
  }
  const void* data() const { return rounded ? static_cast<const void*>(bits.data()) : exact.data(); }
};

// Sequences that lie in pages, in reverse order. Queries are the last `queries` of `length` tokens.
struct Sequence {
  int64_t length, queries;
};

struct Case {
  int64_t N, K, H, p;
  bool q_bf16, keys_bf16, causal;
  std::vector<Sequence> sequences;

  int64_t pages() const {
    int64_t count = 0;
    for (const Sequence& s : sequences) count += (s.length + p - 1) / p;
    return count;
  }
  int64_t queries() const {
    int64_t count = 0;
    for (const Sequence& s : sequences) count += s.queries;
    return count;
  }
};

std::vector<float> run(const Case& c, const Numbers& q, const Numbers& k, const Numbers& v, int threads) {
  std::vector<float> out(c.queries() * c.N * c.H, NAN);
  const AttentionTask task{c.N,       c.K,      c.H,           q.data(),  c.q_bf16,
                           k.data(),  v.data(), c.keys_bf16,   c.pages(), c.p,
                           c.K * c.p * c.H,     c.p * c.H,     c.H,       c.causal,
                           1 / std::sqrt(static_cast<float>(c.H)),        out.data()};
  std::vector<std::vector<int32_t>> tables;
  verax::AttentionRun work(task);
  int64_t first = 0, page = c.pages();
  for (const Sequence& s : c.sequences) {
    std::vector<int32_t>& table = tables.emplace_back();
    for (int64_t at = 0; at < s.length; at += c.p) table.push_back(static_cast<int32_t>(--page));
    AttentionTile tile{};
    tile.first_query = first;
    tile.num_queries = s.queries;
    tile.visible = c.causal ? s.length - s.queries + 1 : s.length;
    tile.pages = table.data();
    work.add(tile);
    first += s.queries;
  }
  check::Pool pool(threads);
  work.run(pool);
  return out;
}

void check_case(const char* level, const Case& c) {
  const int64_t cached = c.pages() * c.K * c.p * c.H;
  const Numbers q(c.queries() * c.N * c.H, c.q_bf16, 1), k(cached, c.keys_bf16, 2), v(cached, c.keys_bf16, 3);
  const std::vector<float> out = run(c, q, k, v, 1);
  const double tolerance = c.keys_bf16 ? 3e-2 : 1e-5;
  int64_t row = 0, page_end = c.pages();
  for (const Sequence& s : c.sequences) {
    const int64_t last_page = page_end - 1;
    page_end -= (s.length + c.p - 1) / c.p;
    for (int64_t i = 0; i < s.queries; ++i, ++row) {
      const int64_t visible = c.causal ? s.length - s.queries + 1 + i : s.length;
      for (int64_t n = 0; n < c.N; ++n) {
        const float* query = &q.exact[(row * c.N + n) * c.H];
        std::vector<double> exact(c.H, 0);
        double total = 0;
        for (int64_t key = 0; key < visible; ++key) {
          const int64_t at = (((last_page - key / c.p) * c.K + n / (c.N / c.K)) * c.p + key % c.p) * c.H;
          double score = 0;
          for (int64_t h = 0; h < c.H; ++h) score += double{query[h]} * k.exact[at + h];
          const double weight = std::exp(score / std::sqrt(double(c.H)));
          total += weight;
          for (int64_t h = 0; h < c.H; ++h) exact[h] += weight * v.exact[at + h];
        }
        for (int64_t h = 0; h < c.H; ++h) {
          const double expected = total > 0 ? exact[h] / total : 0, got = out[(row * c.N + n) * c.H + h];
          check::that(std::fabs(got - expected) <= tolerance,
                      "%s N %d K %d H %d p %d bf16 %d: out[%d, %d, %d] = %g, expected %g", level, int(c.N), int(c.K),
                      int(c.H), int(c.p), int(c.keys_bf16), int(row), int(n), int(h), got, expected);
        }
      }
    }
  }
  const std::vector<float> shared = run(c, q, k, v, 3);
  check::that(out.empty() || std::memcmp(out.data(), shared.data(), out.size() * sizeof(float)) == 0,
              "%s N %d H %d: three threads give another result than one", level, int(c.N), int(c.H));
}

void check_write_pages(const char* level, bool bf16) {
  constexpr int64_t T = 5, K = 3, H = 20, P = 4, p = 8;
  const std::vector<float> x = check::normal(T * K * H, 4);
  const int32_t pages[T] = {0, 3, P, -1, 2}, offsets[T] = {7, 0, 0, 0, p};
  std::vector<float> wide(bf16 ? 0 : P * K * p * H, 0.0f);
  std::vector<uint16_t> narrow(bf16 ? P * K * p * H : 0, 0);
  void* cache = bf16 ? static_cast<void*>(narrow.data()) : wide.data();
  const verax::WritePagesTask task{T, K, H, P, p, x.data(), pages, offsets, cache, bf16};
  VERAX_KERNEL(write_pages)(task, 0, 2);
  VERAX_KERNEL(write_pages)(task, 2, 3);
  for (int64_t i = 0; i < P * K * p * H; ++i) {
    float expected = 0;
    for (int64_t t = 0; t < 2; ++t) {  // the other three have no place
      const int64_t offset = i / H % p, head = i / H / p % K, page = i / H / p / K;
      if (page == pages[t] && offset == offsets[t]) expected = x[(t * K + head) * H + i % H];
    }
    const float got = bf16 ? check::from_bf16(narrow[i]) : wide[i];
    check::that(got == (bf16 ? check::from_bf16(check::to_bf16(expected)) : expected), "%s: write_pages at %d", level,
                int(i));
  }
}

}  // namespace

int main() {
  const std::vector<Sequence> ragged = {{1, 1}, {0, 1}, {37, 37}, {16, 1}, {130, 70}, {0, 0}, {600, 1}, {530, 3}};
  check::each_level([&](const char* level) {
    for (const bool bf16 : {false, true}) {
      check_case(level, {2, 1, 16, 16, !bf16, bf16, true, ragged});
      check_case(level, {5, 1, 20, 7, bf16, bf16, true, ragged});
      check_case(level, {3, 3, 33, 1, false, bf16, true, ragged});
      check_case(level, {8, 1, 80, 64, true, bf16, true, {{65, 65}, {64, 2}}});
      check_case(level, {2, 2, 128, 1000, bf16, bf16, false, {{700, 7}, {3, 9}}});
      check_case(level, {1, 1, 256, 16, false, bf16, false, {{33, 200}}});
      check_write_pages(level, bf16);
    }
    std::printf("%s: checked\n", level);
  });
  std::printf("attention: %d failures\n", check::failures);
  return check::failures != 0;
}
