// y[M, N] = x[M, K] . W[N, K]^T + bias for many rows M, bound by arithmetic.
#pragma once

#include <cstdint>

#include "../levels.h"
#include "linear.h"

namespace verax {

// W is float32, bfloat16, of 8-bit integers with a scale for each row, or of blocks, whose weights are rounded to
// bfloat16 where the processor multiplies these. x is float32 beside float32, and bfloat16 beside the others. Products are added in float32. K is a multiple of GEMM_DEPTH_STEP, N of GEMM_COLUMN_STEP.
struct GemmTask {
  Weights kind;
  int64_t M, N, K;
  const void *x, *weight;
  const float* scales;  // null, or [N]
  const float* bias;    // null, or [N]
  BlockKind block;      // of blocks
  float* y;
};

// Rows [m, m + rows) and columns [n, n + columns) of y.
struct GemmBlock {
  int64_t m, rows, n, columns;
};

constexpr int64_t GEMM_DEPTH_STEP = 32, GEMM_COLUMN_STEP = 16;

// Cells of K that are multiplied at a time: so many of 48 columns fill three quarters of a 48 KB cache.
constexpr int64_t GEMM_DEPTH = 192;

// Most columns of W that are packed beside each other.
constexpr int64_t GEMM_STRIP = 48;

// Of the memory that a block works in: cells of x and of a strip of W, each 4 bytes. Enough at every level.
inline int64_t gemm_scratch_bytes(int64_t rows) { return 4 * (GEMM_DEPTH * (rows + GEMM_STRIP) + 16); }

VERAX_DECLARE_KERNEL(gemm_block, const GemmTask& task, const GemmBlock& block, void* scratch)

}  // namespace verax
