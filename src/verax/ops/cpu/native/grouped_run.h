// y[r] = x[r / (R / M)] . W[groups[r]]^T: rows sorted by group, then one product for each group that has any. Matrices
// of other groups are not read.
//
// for each group that has rows: copy its rows of x one below the other       (few rows: pack them too)
// for each group that has rows: its rows of y = its rows of x . W[group]^T   (one round of work for all of them)
// for each row of y: copy it to its place
//
// A row of y does not depend on the rows next to it: kernels/linear_steps.h, kernels/gemm.cc.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "gemm_run.h"
#include "linear_run.h"
#include "scratch.h"

namespace verax {

struct GroupedTask {
  int64_t R, M, G, N, K;  // rows of y, rows of x (a divisor of R), groups
  const void* x;          // float32; rounded already where a product of many rows takes bfloat16
  const int32_t* groups;  // [R]; y is zeros where it is not one of 0..G-1
  Weights kind;
  const void *weights, *scales;  // of each group as LinearTask has them, one after the other
  bool half_scales;
  int64_t group_size;  // inputs that share a scale
  float* y;
};

// Rows of y by group: the rows of `group` are order[begin], ..., order[begin + count - 1].
struct RowsOfGroup {
  int64_t group, begin, count;
};

struct SortedRows {
  std::vector<int64_t> order;
  std::vector<RowsOfGroup> groups;  // those with rows

  // Fills rows of no group with zeros.
  explicit SortedRows(const GroupedTask& t) : order(t.R) {
    std::vector<int64_t> ends(t.G, 0);
    const auto known = [&](int64_t r) { return t.groups[r] >= 0 && t.groups[r] < t.G; };
    for (int64_t r = 0; r < t.R; ++r) {
      if (known(r)) {
        ++ends[t.groups[r]];
      } else {
        std::fill_n(t.y + r * t.N, t.N, 0.0f);
      }
    }
    int64_t begin = 0;
    for (int64_t g = 0; g < t.G; ++g) {
      const int64_t count = ends[g];
      if (count) groups.push_back({g, begin, count});
      ends[g] = begin;
      begin += count;
    }
    for (int64_t r = 0; r < t.R; ++r) {
      if (known(r)) order[ends[t.groups[r]]++] = r;
    }
  }
};

// `body(i, group)` for each group with rows, on several threads if `bytes` are copied in all.
template <typename Pool, typename Body>
void for_each_group(Pool& pool, const SortedRows& rows, int64_t bytes, const Body& body) {
  const auto count = static_cast<int64_t>(rows.groups.size());
  parallel_for(pool, count, grain_of(count, bytes), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) body(i, rows.groups[i]);
  });
}

// A group's rows of x, one below the other.
inline void gather_rows(const GroupedTask& t, const SortedRows& rows, const RowsOfGroup& of, int64_t cell, char* to) {
  const int64_t size = t.K * cell, repeat = t.R / t.M;
  for (int64_t m = 0; m < of.count; ++m) {
    std::memcpy(to + m * size, static_cast<const char*>(t.x) + rows.order[of.begin + m] / repeat * size, size);
  }
}

// Rows of y to their places, of groups with `least` rows or more.
template <typename Pool>
void scatter_rows(Pool& pool, const GroupedTask& t, const SortedRows& rows, const float* ys, int64_t least) {
  for_each_group(pool, rows, t.R * t.N * 4, [&](int64_t, const RowsOfGroup& of) {
    for (int64_t i = of.begin; of.count >= least && i < of.begin + of.count; ++i) {
      std::memcpy(t.y + rows.order[i] * t.N, ys + i * t.N, t.N * sizeof(float));
    }
  });
}

// For few rows of each group. The few rows of a token are not copied: its groups have one row each.
template <typename Pool>
void run_grouped(Pool& pool, const GroupedTask& t) {
  const SortedRows rows(t);
  if (rows.groups.empty()) return;
  LinearTask whole{};  // what all groups share
  whole.N = t.N, whole.K = t.K, whole.kind = t.kind, whole.half_scales = t.half_scales, whole.group = t.group_size;
  const int64_t stored_rows = t.kind == Weights::int4 ? (t.N + 15) / 16 * 16 : t.N;
  const int64_t matrix = stored_rows * linear_row_bytes(whole);
  const int64_t scales = stored_rows * (t.group_size ? t.K / t.group_size : 1) * (t.half_scales ? 2 : 4);

  std::vector<int64_t> packed{0};  // bytes, where each group's packed x begins
  bool copied = false;
  for (const RowsOfGroup& of : rows.groups) {
    packed.push_back(packed.back() + (linear_packed_bytes(of.count, t.K) + 63) / 64 * 64);
    copied |= of.count > 1;
  }
  const SharedScratch scratch(packed.back() + (copied ? t.R * (t.K + t.N) * 4 : 0) + 64);
  auto* bytes = static_cast<char*>(scratch.data());
  auto* xs = reinterpret_cast<float*>(bytes + packed.back());
  float* ys = xs + t.R * t.K;

  std::vector<LinearTask> tasks(rows.groups.size(), whole);
  const auto pack = VERAX_KERNEL(linear_pack);
  for_each_group(pool, rows, t.R * t.K * 4, [&](int64_t i, const RowsOfGroup& of) {
    LinearTask& task = tasks[i];
    task.M = of.count;
    task.weights = static_cast<const char*>(t.weights) + of.group * matrix;
    if (t.scales) task.scales = static_cast<const char*>(t.scales) + of.group * scales;
    task.packed = bytes + packed[i];
    const int64_t first = rows.order[of.begin];
    if (of.count == 1) {
      task.x = static_cast<const float*>(t.x) + first / (t.R / t.M) * t.K, task.y = t.y + first * t.N;
    } else {
      float* copy = xs + of.begin * t.K;
      gather_rows(t, rows, of, sizeof(float), reinterpret_cast<char*>(copy));
      task.x = copy, task.y = ys + of.begin * t.N;
    }
    pack(task, 0, task.M);
  });
  run_linear(pool, tasks);
  if (copied) scatter_rows(pool, t, rows, ys, 2);
}

// For many rows, of f32 and bf16: K is a multiple of GEMM_DEPTH_STEP, N of GEMM_COLUMN_STEP.
template <typename Pool>
void run_grouped_gemm(Pool& pool, const GroupedTask& t) {
  const SortedRows rows(t);
  if (rows.groups.empty()) return;
  const int64_t cell = t.kind == Weights::f32 ? 4 : 2;
  const int64_t inputs = (t.R * t.K * cell + 63) / 64 * 64;
  const SharedScratch scratch(inputs + t.R * t.N * 4);
  auto* xs = static_cast<char*>(scratch.data());
  auto* ys = reinterpret_cast<float*>(xs + inputs);

  std::vector<GemmTask> tasks(rows.groups.size());
  for_each_group(pool, rows, inputs, [&](int64_t i, const RowsOfGroup& of) {
    GemmTask& task = tasks[i];
    task.kind = t.kind, task.M = of.count, task.N = t.N, task.K = t.K;
    task.weight = static_cast<const char*>(t.weights) + of.group * t.N * t.K * cell;
    task.x = xs + of.begin * t.K * cell, task.y = ys + of.begin * t.N;
    gather_rows(t, rows, of, cell, xs + of.begin * t.K * cell);
  });
  run_gemms(pool, tasks);
  scatter_rows(pool, t, rows, ys, 1);
}

}  // namespace verax
