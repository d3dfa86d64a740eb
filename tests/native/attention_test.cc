// The attention and cache kernels without JAX, for the sanitisers: every level, odd shapes, buffers that end where the
// data ends.
#include <algorithm>

#include "attention_run.h"
#include "check.h"
#include "kernels/write_pages.h"

using verax::AttentionTask;
using verax::AttentionTile;

namespace {

using verax::Keys;

// Random numbers as stored, in a buffer without a byte to spare, and what they stand for. int8: a scale for
// each `H` of them.
struct Numbers {
  Keys kind;
  std::vector<float> exact, scales;
  std::vector<uint16_t> bits;
  std::vector<int8_t> integers;

  Numbers(int64_t size, Keys kind, unsigned seed, int64_t H = 1) : kind(kind), exact(check::normal(size, seed)) {
    if (kind == Keys::bf16) {
      for (float& x : exact) {
        bits.push_back(check::to_bf16(x));
        x = check::from_bf16(bits.back());
      }
    } else if (kind == Keys::int8) {
      for (int64_t i = 0; i < size; ++i) {
        if (i % H == 0) scales.push_back(0.01f + 0.001f * (i / H % 7));
        const float integer = std::fmin(127, std::fmax(-127, std::rint(exact[i] / scales.back())));
        integers.push_back(static_cast<int8_t>(integer));
        exact[i] = integer * scales.back();
      }
    }
    bits.shrink_to_fit();
    scales.shrink_to_fit();
    integers.shrink_to_fit();
  }
  const void* data() const {
    if (kind == Keys::bf16) return bits.data();
    return kind == Keys::int8 ? static_cast<const void*>(integers.data()) : exact.data();
  }
};

// Sequences that lie in pages, in reverse order. Queries are the last `queries` of `length` tokens.
struct Sequence {
  int64_t length, queries;
};

struct Case {
  int64_t N, K, H, p;
  bool q_bf16;
  Keys keys;
  bool causal;
  std::vector<Sequence> sequences;
  int64_t window = 0;
  float soft_cap = 0;
  std::vector<float> sinks = {};

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
  const AttentionTask task{c.N,       c.K,      c.H,     q.data(),        c.q_bf16,        k.data(),
                           v.data(),  c.keys,   k.scales.data(),  v.scales.data(), c.pages(), c.p,
                           c.K * c.p * c.H,     c.p * c.H,        c.H,             c.causal,
                           c.window,  1 / std::sqrt(static_cast<float>(c.H)),  c.soft_cap,      out.data(),
                           c.sinks.empty() ? nullptr : c.sinks.data()};
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
  const Numbers q(c.queries() * c.N * c.H, c.q_bf16 ? Keys::bf16 : Keys::f32, 1);
  const Numbers k(cached, c.keys, 2, c.H), v(cached, c.keys, 3, c.H);
  const std::vector<float> out = run(c, q, k, v, 1);
  const double tolerance = c.keys == Keys::f32 ? 1e-5 : 3e-2;
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
        for (int64_t key = c.window ? std::max<int64_t>(0, visible - c.window) : 0; key < visible; ++key) {
          const int64_t at = (((last_page - key / c.p) * c.K + n / (c.N / c.K)) * c.p + key % c.p) * c.H;
          double score = 0;
          for (int64_t h = 0; h < c.H; ++h) score += double{query[h]} * k.exact[at + h];
          score /= std::sqrt(double(c.H));
          if (c.soft_cap != 0) score = c.soft_cap * std::tanh(score / c.soft_cap);
          const double weight = std::exp(score);
          total += weight;
          for (int64_t h = 0; h < c.H; ++h) exact[h] += weight * v.exact[at + h];
        }
        if (total > 0 && !c.sinks.empty()) total += std::exp(double{c.sinks[n]});
        for (int64_t h = 0; h < c.H; ++h) {
          const double expected = total > 0 ? exact[h] / total : 0, got = out[(row * c.N + n) * c.H + h];
          check::near(got, expected, tolerance, "%s N %d K %d H %d p %d keys %d: out[%d, %d, %d]", level, int(c.N),
                      int(c.K), int(c.H), int(c.p), int(c.keys), int(row), int(n), int(h));
        }
      }
    }
  }
  check::that(check::same(out, run(c, q, k, v, 3)), "%s N %d H %d: three threads give another result than one", level,
              int(c.N), int(c.H));
}

void check_write_pages(const char* level, Keys keys) {
  constexpr int64_t T = 5, K = 3, H = 20, P = 4, p = 8;
  const std::vector<float> x = check::normal(T * K * H, 4);
  const int32_t pages[T] = {0, 3, P, -1, 2}, offsets[T] = {7, 0, 0, 0, p};
  std::vector<float> wide(keys == Keys::f32 ? P * K * p * H : 0, 0.0f), scales(keys == Keys::int8 ? P * K * p : 0, 0.0f);
  std::vector<uint16_t> narrow(keys == Keys::bf16 ? P * K * p * H : 0, 0);
  std::vector<int8_t> integers(keys == Keys::int8 ? P * K * p * H : 0, 0);
  void* cache = keys == Keys::f32 ? static_cast<void*>(wide.data())
              : keys == Keys::bf16 ? static_cast<void*>(narrow.data()) : integers.data();
  const verax::WritePagesTask task{T, K, H, P, p, x.data(), pages, offsets, cache, keys, scales.data()};
  VERAX_KERNEL(write_pages)(task, 0, 2);
  VERAX_KERNEL(write_pages)(task, 2, 3);
  for (int64_t i = 0; i < P * K * p * H; ++i) {
    float expected = 0, largest = 0;
    for (int64_t t = 0; t < 2; ++t) {  // the other three have no place
      const int64_t offset = i / H % p, head = i / H / p % K, page = i / H / p / K;
      if (page != pages[t] || offset != offsets[t]) continue;
      const float* row = &x[(t * K + head) * H];
      expected = row[i % H];
      for (int64_t h = 0; h < H; ++h) largest = std::fmax(largest, std::fabs(row[h]));
    }
    float got, allowed = 0;
    if (keys == Keys::f32) {
      got = wide[i];
    } else if (keys == Keys::bf16) {
      got = check::from_bf16(narrow[i]);
      expected = check::from_bf16(check::to_bf16(expected));
    } else {
      got = integers[i] * scales[i / H];
      allowed = 0.5001f / 127 * largest;
    }
    check::that(std::fabs(got - expected) <= allowed, "%s: write_pages at %d", level, int(i));
  }
}

}  // namespace

int main() {
  const std::vector<Sequence> ragged = {{1, 1}, {0, 1}, {37, 37}, {16, 1}, {130, 70}, {0, 0}, {600, 1}, {530, 3}};
  return check::main_of("attention", [&](const char* level) {
    for (const Keys keys : {Keys::f32, Keys::bf16, Keys::int8}) {
      const bool bf16 = keys == Keys::bf16;
      check_case(level, {2, 1, 16, 16, !bf16, keys, true, ragged});
      check_case(level, {5, 1, 20, 7, bf16, keys, true, ragged});
      check_case(level, {3, 3, 33, 1, false, keys, true, ragged});
      check_case(level, {8, 1, 80, 64, true, keys, true, {{65, 65}, {64, 2}}});
      check_case(level, {6, 2, 128, 16, true, keys, true, {{200, 1}, {64, 1}, {63, 1}, {1, 1}}});
      check_case(level, {2, 2, 128, 1000, bf16, keys, false, {{700, 7}, {3, 9}}});
      check_case(level, {1, 1, 256, 16, false, keys, false, {{33, 200}}});
      for (const int64_t window : {1, 37, 64, 512, 520}) {
        check_case(level, {4, 1, 20, 16, bf16, keys, true, ragged, window});
        check_case(level, {2, 2, 64, 7, false, keys, true, {{1500, 1}, {1200, 300}}, window, 2.5f});
        check_case(level, {4, 2, 20, 7, bf16, keys, true, {{1500, 1}, {600, 3}}, window, 0, {-3, 0, 2, 9}});
      }
      check_write_pages(level, keys);
    }
  });
}
