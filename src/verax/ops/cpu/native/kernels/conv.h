// Convolution of channels-last images over time, height and width, as a matrix product of patches with the weight.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../levels.h"

namespace verax {

// Letters: B batch, T frames, H height, W width, C channels in, O channels out, K the kernel's extent.
struct ConvTask {
  int64_t B, T, H, W, C, O;
  int64_t T_before;               // frames that stand before the frames of x
  int64_t T_zeros, top, left;     // zero frames before all of them, zero rows above and zero columns left of each frame
  int64_t T_out, H_out, W_out;    // where these reach below or right of a frame, it is zero there too
  int64_t KT, KH, KW;
  int64_t stride_t, stride_h, stride_w;
  const void* x;                  // [B, T, H, W, C]
  const void* before;             // [B, T_before, H, W, C], of x's type
  bool x_bf16;                    // else float32
  const void* weight;             // [O, C, KT, KH, KW]
  bool weight_bf16;               // else float32; x is rounded to it
  const float* bias;              // [O], or null
  float* packed;                  // the weight as the level's cells: conv_packed_bytes, aligned to a cache line
  void* y;                        // [B, T_out, H_out, W_out, O], of x's type
};

// Output channels that are computed together. All levels' tiles divide it.
constexpr int64_t CONV_GROUP = 48;

static inline int64_t conv_groups(const ConvTask& t) { return (t.O + CONV_GROUP - 1) / CONV_GROUP; }

// A part of one output frame, and groups of its channels.
struct ConvBlock {
  int64_t b, t;
  int64_t h, height, w, width;
  int64_t group, groups;
};

// Frames of the kernel that read nothing but zero frames, for this output frame.
static inline int64_t conv_zero_frames(const ConvTask& t, int64_t frame) {
  return std::clamp<int64_t>(t.T_zeros - frame * t.stride_t, 0, t.KT);
}

// Frame `at`, counted from the first zero frame; null for a frame of zeros.
template <class Element>
static inline const Element* conv_frame(const ConvTask& t, int64_t b, int64_t at) {
  const int64_t image = t.H * t.W * t.C;
  at -= t.T_zeros;
  if (at < 0) return nullptr;
  return at < t.T_before ? static_cast<const Element*>(t.before) + (b * t.T_before + at) * image
                         : static_cast<const Element*>(t.x) + (b * t.T + at - t.T_before) * image;
}

// Enough at every level, as one channel a cell is.
static inline int64_t conv_packed_bytes(const ConvTask& t) {
  return 4 * conv_groups(t) * CONV_GROUP * t.KT * t.KH * t.KW * t.C;
}

// Pixels of a row of the input that `width` pixels of the output read.
static inline int64_t conv_reach(int64_t width, int64_t stride, int64_t K) { return (width - 1) * stride + K; }

// Floats that a block copies of the input, at most.
static inline int64_t conv_patch_floats(const ConvTask& t, int64_t height, int64_t width) {
  return t.KT * conv_reach(height, t.stride_h, t.KH) * conv_reach(width, t.stride_w, t.KW) * (t.C + t.C % 2);
}

// The level amx multiplies tiles of 16 pixels, where a row of the kernel fills them.
static inline bool conv_has_tiles(const ConvTask& t) {
  return t.weight_bf16 && t.C % 2 == 0 && t.KW * t.C % 32 == 0 && level() == Level::amx;
}
static inline int64_t conv_tiles(int64_t height, int64_t width) { return height * ((width + 15) / 16); }

// Numbers of sums, of 48 channels or in pairs of tiles by pairs; and of the kernel's rows. Both fill cache lines.
static inline int64_t conv_sums_floats(int64_t height, int64_t width) {
  return std::max(height * width * CONV_GROUP, (conv_tiles(height, width) + 1) / 2 * 4 * 256);
}
static inline int64_t conv_kernel_rows(const ConvTask& t) { return (t.KT * t.KH + 7) / 8 * 8; }

// Memory that a block works in, aligned to a cache line: its sums, where each row of the kernel begins, and its input.
static inline int64_t conv_scratch_bytes(const ConvTask& t, int64_t height, int64_t width) {
  const int64_t after = 15 * t.stride_w * t.C + 32;
  return 4 * (conv_sums_floats(height, width) + 2 * conv_kernel_rows(t) + conv_patch_floats(t, height, width) + after);
}

// Fill `packed` for groups [begin, end).
VERAX_DECLARE_KERNEL(conv_pack, const ConvTask& task, int64_t begin, int64_t end)
VERAX_DECLARE_KERNEL(conv_block, const ConvTask& task, const ConvBlock& block, void* scratch)

}  // namespace verax
