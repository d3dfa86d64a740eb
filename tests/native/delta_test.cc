// The delta rule's kernel without JAX, for the sanitisers: every level, odd shapes, states in place, buffers that end
// where the data ends.
#include <algorithm>

#include "check.h"
#include "kernels/delta.h"
#include "levels.h"
#include "scratch.h"

using verax::DeltaItem;
using verax::DeltaTask;

namespace {

struct Case {
  int64_t T, H, HV, K, V;
  bool bf16, by_channel, erase_before_decay, own_erase, normalize;
};

// Arrays of one sequence, as the kernel reads them and as the numbers that it sees.
struct Arrays {
  std::vector<float> read, erase, write, v, beta, g, state;
  std::vector<uint16_t> bits[4];

  explicit Arrays(const Case& c)
      : read(check::normal(c.T * c.H * c.K, 1)),
        erase(check::normal(c.T * c.H * c.K, 2)),
        write(check::normal(c.T * c.H * c.K, 3)),
        v(check::normal(c.T * c.HV * c.V, 4)),
        beta(check::normal(c.T * c.HV, 5)),
        g(check::normal(c.T * c.HV * (c.by_channel ? c.K : 1), 6)),
        state(check::normal(c.HV * c.K * c.V, 7)) {
    const float unit = 1 / std::sqrt(static_cast<float>(c.K));
    for (float& x : erase) x *= unit;
    for (float& x : write) x *= unit;
    for (float& x : beta) x = 1 / (1 + std::exp(-x));
    for (float& x : g) x = -std::fabs(x) * (x > 1 ? 50.0f : 0.3f);  // one of six forgets nearly everything
    if (!c.own_erase) erase = write;
    std::vector<float>* rounded[] = {&read, &erase, &write, &v};
    for (int i = 0; i < 4 && c.bf16; ++i) {
      for (float& x : *rounded[i]) {
        bits[i].push_back(check::to_bf16(x));
        x = check::from_bf16(bits[i].back());
      }
      bits[i].shrink_to_fit();
    }
  }
  const void* data(int i) const {
    if (!bits[i].empty()) return bits[i].data();
    return (i == 0 ? read : i == 1 ? erase : i == 2 ? write : v).data();
  }
};

struct Result {
  std::vector<float> out, state, kept;
};

constexpr int64_t KEEP = 32;

// In items of `heads` heads and `columns` columns; the last states take the place of the first, or go elsewhere.
Result run(const Case& c, const Arrays& x, int64_t heads, int64_t columns, bool in_place) {
  Result result;
  result.out.assign(c.T * c.HV * c.V, NAN);
  const int64_t size = c.HV * c.K * c.V;
  result.state = in_place ? x.state : std::vector<float>(size, NAN);
  result.kept.assign((c.T + KEEP - 1) / KEEP * size, NAN);
  const void* write = x.data(2);
  const DeltaTask task{c.H,           c.HV,           c.K,         c.V,   x.data(0), c.own_erase ? x.data(1) : write,
                       write,         x.data(3),      c.bf16,      x.beta.data(),    x.g.data(),
                       c.by_channel,  c.erase_before_decay,        c.normalize,      0.5f,
                       KEEP,          result.out.data()};
  for (int64_t head = 0; head < c.HV; head += heads) {
    for (int64_t begin = 0; begin < c.V; begin += columns) {
      DeltaItem item{};
      item.tokens = c.T;
      item.first_head = head;
      item.heads = std::min(heads, c.HV - head);
      item.begin = begin;
      item.end = std::min(c.V, begin + columns);
      item.initial = in_place ? result.state.data() : x.state.data();
      item.last = result.state.data();
      item.kept = result.kept.data();
      item.kept_stride = size;
      const verax::AlignedBytes scratch(verax::delta_scratch_bytes(c.K, item.end - begin, item.heads));
      VERAX_KERNEL(delta)(task, item, scratch.data());
    }
  }
  return result;
}

std::vector<double> key(const std::vector<float>& from, const Case& c, int64_t token, int64_t head) {
  const float* row = from.data() + (token * c.H + head / (c.HV / c.H)) * c.K;
  std::vector<double> key(row, row + c.K);
  double squares = 1e-6;
  for (double x : key) squares += x * x;
  for (double& x : key) x /= c.normalize ? std::sqrt(squares) : 1;
  return key;
}

void compare(const char* level, const char* what, const Case& c, int64_t at, double expected, double got) {
  check::near(got, expected, 2e-5 * (1 + std::fabs(expected)),
              "%s T %d K %d V %d bf16 %d by channel %d before %d: %s[%d]", level, int(c.T), int(c.K), int(c.V),
              int(c.bf16), int(c.by_channel), int(c.erase_before_decay), what, int(at));
}

void check_case(const char* level, const Case& c) {
  const Arrays x(c);
  const Result whole = run(c, x, c.HV, std::max<int64_t>(1, c.V), true);
  const int64_t head_size = c.K * c.V;
  for (int64_t h = 0; h < c.HV; ++h) {
    std::vector<double> state(x.state.begin() + h * head_size, x.state.begin() + (h + 1) * head_size), found(c.V);
    const auto look = [&](const std::vector<double>& key) {
      std::fill(found.begin(), found.end(), 0.0);
      for (int64_t i = 0; i < head_size; ++i) found[i % c.V] += key[i / c.V] * state[i];
    };
    for (int64_t t = 0; t < c.T; ++t) {
      for (int64_t i = 0; i < head_size && t % KEEP == 0; ++i) {
        compare(level, "kept", c, i, state[i], whole.kept[(t / KEEP * c.HV + h) * head_size + i]);
      }
      const std::vector<double> erase = key(x.erase, c, t, h), write = key(x.write, c, t, h);
      if (c.erase_before_decay) look(erase);
      for (int64_t i = 0; i < head_size; ++i) {
        state[i] *= std::exp(double{x.g[c.by_channel ? (t * c.HV + h) * c.K + i / c.V : t * c.HV + h]});
      }
      if (!c.erase_before_decay) look(erase);
      for (int64_t i = 0; i < head_size; ++i) {
        state[i] += write[i / c.V] * x.beta[t * c.HV + h] * (x.v[(t * c.HV + h) * c.V + i % c.V] - found[i % c.V]);
      }
      look(key(x.read, c, t, h));
      for (int64_t i = 0; i < c.V; ++i) {
        const int64_t at = (t * c.HV + h) * c.V + i;
        compare(level, "out", c, at, 0.5 * found[i], whole.out[at]);
      }
    }
    for (int64_t i = 0; i < head_size; ++i) {
      compare(level, "state", c, i, state[i], whole.state[h * head_size + i]);
    }
  }
  const Result parts = run(c, x, 1, 32, false);
  check::that(check::same(whole.out, parts.out) && check::same(whole.state, parts.state) &&
                  check::same(whole.kept, parts.kept),
              "%s T %d K %d V %d: other items give another result", level, int(c.T), int(c.K), int(c.V));
}

}  // namespace

int main() {
  return check::main_of("delta", [](const char* level) {
    for (const bool by_channel : {false, true}) {
      for (const bool before : {false, true}) {
        for (const int64_t T : {0, 1, 3, 5, 16, 37, 65}) {
          check_case(level, {T, 1, 2, 20, 36, false, by_channel, before, before, false});
        }
        check_case(level, {33, 2, 4, 7, 3, true, by_channel, before, false, true});
        check_case(level, {4, 1, 3, 33, 65, true, by_channel, before, true, true});
        check_case(level, {18, 1, 1, 128, 100, false, by_channel, before, true, true});
      }
    }
  });
}
