// Convolutions with kernels of 3 x 3 and no stride in space by minimal filtering: fewer products for the same sums
// (Winograd, 1980; Lavin and Gray, 2016, arXiv:1509.09308).
#pragma once

#include <cstdint>

#include "conv.h"

namespace verax {

// A convolution whose output frames are cut into tiles of size x size pixels, numbered by row. A tile is computed from
// (size + 2)^2 points of its input and of the kernel.
struct WinogradTask : ConvTask {
  int64_t size;            // 2 or 4
  int64_t tiles_h, tiles_w;
  int64_t group, groups;   // of output channels, whose weights `packed` has: floats, [groups, points, KT, C, CONV_GROUP]
};

// Consecutive tiles of consecutive output frames, which share the inputs of most of their frames, for groups of
// channels, counted from task.group.
struct WinogradBlock {
  int64_t b;
  int64_t t, frames;
  int64_t tile, tiles;
  int64_t group, groups;
};

static inline int64_t winograd_points(const WinogradTask& t) { return (t.size + 2) * (t.size + 2); }

// Channels of the input, with zeros after the last: whole vectors at every level.
static inline int64_t winograd_channels(const ConvTask& t) { return (t.C + 15) / 16 * 16; }

static inline int64_t winograd_packed_floats(const WinogradTask& t) {
  return winograd_points(t) * t.KT * winograd_channels(t) * CONV_GROUP;  // of one group
}

// Inputs of one tile at one point: frames by channels.
static inline int64_t winograd_depth(const ConvTask& t, int64_t frames) {
  return conv_reach(frames, t.stride_t, t.KT) * winograd_channels(t);
}

// Floats from one point's inputs to the next, and sums likewise. A cache line more than they are, because powers of two
// would lie in the same lines of a cache.
static inline int64_t winograd_inputs(const ConvTask& t, int64_t tiles, int64_t frames) {
  return tiles * winograd_depth(t, frames) + 16;
}
static inline int64_t winograd_sums(int64_t tiles, int64_t frames) { return tiles * frames * CONV_GROUP + 16; }

// Memory that a block works in, aligned to a cache line.
static inline int64_t winograd_scratch_bytes(const WinogradTask& t, int64_t tiles, int64_t frames) {
  return 4 * winograd_points(t) * (winograd_inputs(t, tiles, frames) + winograd_sums(tiles, frames));
}

// Fill `packed` for frames and channels of the kernel [begin, end), counted as group, frame, channel.
VERAX_DECLARE_KERNEL(winograd_pack, const WinogradTask& task, int64_t begin, int64_t end)
VERAX_DECLARE_KERNEL(winograd_block, const WinogradTask& task, const WinogradBlock& block, void* scratch)

}  // namespace verax
