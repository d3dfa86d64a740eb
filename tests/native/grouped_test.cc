// Products by group without JAX, for the sanitisers: every level, groups without rows, with one, with all of them.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "check.h"
#include "grouped_run.h"
#include "levels.h"

using verax::GroupedTask;
using verax::Weights;

namespace {

// Random weights [G, N, K] of one kind, as bytes, and one scale for each row or group of inputs. int8 and int4 take any
// bytes; scales are powers of two.
struct Stack {
  GroupedTask task{};
  std::vector<uint8_t> bytes;
  std::vector<float> scales;

  Stack(Weights kind, int64_t G, int64_t N, int64_t K, int64_t group_size) {
    verax::LinearTask row{};
    row.kind = kind, row.K = K;
    const int64_t rows = G * (kind == Weights::int4 ? (N + 15) / 16 * 16 : N);
    const std::vector<float> values = check::normal(rows * K, 1);
    bytes.resize(rows * linear_row_bytes(row));
    if (kind == Weights::f32) {
      std::memcpy(bytes.data(), values.data(), bytes.size());
    } else if (kind == Weights::bf16) {
      for (int64_t i = 0; i < rows * K; ++i) {
        const uint16_t rounded = check::to_bf16(values[i]);
        std::memcpy(&bytes[2 * i], &rounded, 2);
      }
    } else {
      for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(i * 37 % 255);
      scales.resize(rows * (group_size ? K / group_size : 1));
      for (size_t i = 0; i < scales.size(); ++i) scales[i] = std::ldexp(1.0f, static_cast<int>(i % 5) - 8);
    }
    task.G = G, task.N = N, task.K = K, task.kind = kind, task.group_size = group_size;
    task.weights = bytes.data(), task.scales = scales.empty() ? nullptr : scales.data();
  }

  std::vector<float> run(const std::vector<float>& x, int64_t M, const std::vector<int32_t>& groups, int threads,
                         bool many) {
    std::vector<float> y(groups.size() * task.N, NAN);
    std::vector<uint16_t> rounded;
    task.R = static_cast<int64_t>(groups.size()), task.M = M;
    task.x = x.data(), task.groups = groups.data(), task.y = y.data();
    check::Pool pool(threads);
    if (many && task.kind == Weights::bf16) {
      for (const float value : x) rounded.push_back(check::to_bf16(value));
      rounded.shrink_to_fit();
      task.x = rounded.data();
    }
    many ? run_grouped_gemm(pool, task) : run_grouped(pool, task);
    return y;
  }
};

void check_stack(const char* level, Stack stack, bool many = false) {
  const int64_t G = stack.task.G, N = stack.task.N, K = stack.task.K;
  for (const int64_t M : {1, 3, 40}) {
    for (const int64_t repeat : {1, 4}) {
      const std::vector<float> x = check::normal(M * K, 2);
      for (const int kind : {0, 1, 2, 3}) {
        std::vector<int32_t> groups(M * repeat);
        for (size_t r = 0; r < groups.size(); ++r) {  // spread, all in one, some empty, some of no group
          const int64_t spread = static_cast<int64_t>(r * 7 + r / 3) % G;
          groups[r] = static_cast<int32_t>(kind == 0 ? spread : kind == 1 ? G - 1 : kind == 2 ? spread / 2 * 2 % G : static_cast<int64_t>(r) % (G + 2) - 1);
        }
        const std::vector<float> y = stack.run(x, M, groups, 1, many);
        check::that(check::same(y, stack.run(x, M, groups, 3, many)), "%s: three threads give another result than one",
                    level);
        // Each row by itself.
        for (size_t r = 0; r < groups.size(); ++r) {
          const auto from = x.begin() + static_cast<int64_t>(r) / repeat * K;
          const std::vector<float> alone = stack.run({from, from + K}, 1, {groups[r]}, 0, many);
          check::that(std::memcmp(alone.data(), &y[r * N], N * 4) == 0, "%s: row %d depends on other rows",
                      level, int(r));
          const bool none = groups[r] < 0 || groups[r] >= G;
          check::that(none == std::all_of(alone.begin(), alone.end(), [](float v) { return v == 0; }),
                      "%s: row %d of group %d is %s", level, int(r), int(groups[r]), none ? "not zeros" : "zeros");
        }
      }
    }
  }
}

}  // namespace

int main() {
  Stack none(Weights::f32, 3, 8, 8, 0);
  check::that(none.run({}, 1, {}, 1, false).empty(), "no rows");
  return check::main_of("grouped", [](const char* level) {
    for (const int64_t N : {1, 21, 64}) {
      check_stack(level, Stack(Weights::f32, 5, N, 33, 0));
      check_stack(level, Stack(Weights::bf16, 5, N, 100, 0));
      check_stack(level, Stack(Weights::f32, 5, 16 * N, 32, 0), true);
      check_stack(level, Stack(Weights::bf16, 5, 16 * N, 64, 0), true);
      check_stack(level, Stack(Weights::int8, 5, N, 64, 0));
      check_stack(level, Stack(Weights::int8, 5, N, 64, 32));
      check_stack(level, Stack(Weights::int4, 5, N, 128, 32));
    }
  });
}
