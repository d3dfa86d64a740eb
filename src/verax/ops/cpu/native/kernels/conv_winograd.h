// Convolutions with kernels of 3 x 3 and no stride in space by minimal filtering: fewer products for the same sums
// (Winograd, 1980; Lavin and Gray, 2016, arXiv:1509.09308).
#pragma once

#include <cstdint>

#include "conv.h"

namespace verax {

// A convolution whose output frames are cut into tiles of size x size pixels, numbered by row. A tile is computed from
// (size + 2)^2 points of its input and of the kernel.
//
// In time, output frames are computed one by one from the kernel's frames; or two together from four sums of frames,
// where the kernel has three frames and no stride.
struct WinogradTask : ConvTask {
  int64_t size;            // 2 or 4
  bool pairs;              // of output frames
  int64_t tiles_h, tiles_w;
  int64_t group, groups;   // of output channels, whose weights `packed` has: [groups, points, taps, C, CONV_GROUP]
};

// Consecutive tiles of consecutive output frames, which share the inputs of most of their frames, for groups of
// channels, counted from task.group. Of pairs, both frames.
struct WinogradBlock {
  int64_t b;
  int64_t t, frames;
  int64_t tile, tiles;
  int64_t group, groups;
};

// Output frames of a block of pairs, at most.
constexpr int64_t WINOGRAD_PAIRED = 4;

static inline int64_t winograd_points(const WinogradTask& t) { return (t.size + 2) * (t.size + 2); }

// Channels of the input, with zeros after the last: whole vectors at every level.
static inline int64_t winograd_channels(const ConvTask& t) { return (t.C + 15) / 16 * 16; }

// Frames of the kernel, or sums of them.
static inline int64_t winograd_taps(const WinogradTask& t) { return t.pairs ? 4 : t.KT; }

// Weights of one point and output channel: taps by channels.
static inline int64_t winograd_weights(const WinogradTask& t) { return winograd_taps(t) * winograd_channels(t); }

static inline int64_t winograd_packed_floats(const WinogradTask& t) {
  return winograd_points(t) * winograd_weights(t) * CONV_GROUP;  // of one group
}

// Inputs of one tile at one point: frames, or sums of them, by channels.
static inline int64_t winograd_depth(const WinogradTask& t, int64_t frames) {
  return (t.pairs ? 2 * frames : conv_reach(frames, t.stride_t, t.KT)) * winograd_channels(t);
}

// Floats from one point's inputs to the next, and sums likewise. A cache line more than they are, because powers of two
// would lie in the same lines of a cache.
static inline int64_t winograd_inputs(const WinogradTask& t, int64_t tiles, int64_t frames) {
  return tiles * winograd_depth(t, frames) + 16;
}
static inline int64_t winograd_sums(const WinogradTask& t, int64_t tiles, int64_t frames) {
  return tiles * (t.pairs ? 2 * frames : frames) * CONV_GROUP + 16;
}

// Memory that a block works in, aligned to a cache line.
static inline int64_t winograd_scratch_bytes(const WinogradTask& t, int64_t tiles, int64_t frames) {
  return 4 * winograd_points(t) * (winograd_inputs(t, tiles, frames) + winograd_sums(t, tiles, frames));
}

// Fill `packed` for channels of the input [begin, end), counted as group, channel.
VERAX_DECLARE_KERNEL(winograd_pack, const WinogradTask& task, int64_t begin, int64_t end)
VERAX_DECLARE_KERNEL(winograd_block, const WinogradTask& task, const WinogradBlock& block, void* scratch)

}  // namespace verax
