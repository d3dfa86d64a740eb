// y[M, N] = x[M, K] . W[N, K]^T for few rows M, bound by the speed at which W comes from memory.
#pragma once

#include <cstdint>

#include "../levels.h"

namespace verax {

// Kinds of W's rows. The last three are multiplied by scales: one for a whole row, or one for each group of
// `group` inputs. x is taken as float32 against f32, rounded to bfloat16 against bf16 and float8. Against the others it
// becomes integers: of 16 bits with a scale for each 1,024 inputs against int8, and for each 32 inputs against blocks; of 8
// bits against int4, with a scale for each group.
//   float8  [N, K] bytes of type E4M3, none of which is NaN
//   int8    [N, K] signed bytes
//   int4    [N/16 rounded up, K/8, 16, 2] words: bits 4j to 4j + 3 of word (n, b, c, h) hold row 16 n + c, input
//           8 b + 2 j + h, plus 8; their scales are [N/16 rounded up, K / group, 16], and so are their zero points
//   blocks  of GGUF files, in words that hold their scales too: blocks.h
//   int8_pairs  int8 with an x of signed bytes: gemm.h
enum class Weights { f32, bf16, float8, int8, int4, blocks, int8_pairs };

// Formats of blocks, by ggml's numbers of them.
enum class BlockKind {
  q4_0 = 2, q4_1 = 3, q5_0 = 6, q5_1 = 7, q8_0 = 8, q4_k = 12, q5_k = 13, q6_k = 14, iq4_nl = 20
};

// Inputs of a unit of words, and the words of a unit.
struct BlockShape {
  int64_t unit, words;
};
// All zeros for numbers that are not a kind's.
static inline BlockShape block_shape(BlockKind kind) {
  switch (kind) {
    case BlockKind::q4_0: case BlockKind::iq4_nl: return {64, 9};
    case BlockKind::q4_1: return {64, 10};
    case BlockKind::q5_0: return {64, 11};
    case BlockKind::q5_1: return {64, 12};
    case BlockKind::q8_0: return {64, 17};
    case BlockKind::q4_k: return {256, 37};
    case BlockKind::q5_k: return {256, 45};
    case BlockKind::q6_k: return {256, 53};
  }
  return {0, 0};
}

struct LinearTask {
  int64_t M, N, K;
  const float* x;
  Weights kind;
  const void* weights;
  const void* scales;  // [N, 1] or [N, K / group] but for int4, null for floats
  bool half_scales;    // float16, else float32
  int64_t group;       // inputs that share a scale: 32, 64, 128, or 0 for all of them
  void* packed;        // x as the level's chunks: linear_packed_bytes(M, K), aligned to a cache line
  float* y;
  BlockKind block;      // of blocks
  const int8_t* zeros;  // of int4: integers that stand for 0, -8..7, one for each scale; null if all are 0
};

// static: an inline function that two levels share would be one symbol, at either's instruction set.
static inline int64_t linear_row_bytes(const LinearTask& t) {
  switch (t.kind) {
    case Weights::f32: return t.K * 4;
    case Weights::bf16: return t.K * 2;
    case Weights::float8: return t.K;
    case Weights::int8: case Weights::int8_pairs: return t.K;
    case Weights::int4: return t.K / 2;
    case Weights::blocks: {
      const BlockShape shape = block_shape(t.block);
      return (t.K + shape.unit - 1) / shape.unit * shape.words * 4;
    }
  }
  return 0;
}

// The packed x of int4 and of blocks: for each chunk of 32 inputs (the last filled up with zeros) every row's, one below the other. So a tile
// reads on from one place, and rows of 4,096 inputs do not all begin in the same set of the first cache level.
static inline int64_t linear_packed_at(const LinearTask& t, int64_t m, int64_t k) { return (k / 32 * t.M + m) * 32; }

// Enough at every level: float32 where there is no bfloat16 dot product, followed by the sums of groups, or
// integers followed by their scales. Two chunks make up a unit of blocks.
static inline int64_t linear_packed_bytes(int64_t M, int64_t K) { return M * ((K + 63) / 64 * 2) * (32 + 1) * 4; }

// The kernels take as many rows of W at a time, and int4 and blocks are laid out in as many: pieces of work are
// multiples of it.
constexpr int64_t LINEAR_STEP = 16;

// Fill `packed` from rows [begin, end) of x. `begin` is a multiple of LINEAR_STEP.
VERAX_DECLARE_KERNEL(linear_pack, const LinearTask& task, int64_t begin, int64_t end)
// `linear_pack` for an int4 weight and for blocks, which it calls.
VERAX_DECLARE_KERNEL(linear_int4_pack, const LinearTask& task, int64_t begin, int64_t end)
VERAX_DECLARE_KERNEL(linear_blocks_pack, const LinearTask& task, int64_t begin, int64_t end)
// Columns [begin, end) of y, which are rows of W, for all rows of x. `begin` is a multiple of LINEAR_STEP.
VERAX_DECLARE_KERNEL(linear_columns, const LinearTask& task, int64_t begin, int64_t end)
// `linear_columns` for an int4 weight and for blocks, which it calls.
VERAX_DECLARE_KERNEL(linear_int4_columns, const LinearTask& task, int64_t begin, int64_t end)
VERAX_DECLARE_KERNEL(linear_blocks_columns, const LinearTask& task, int64_t begin, int64_t end)

}  // namespace verax
