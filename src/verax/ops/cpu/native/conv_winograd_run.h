// Divides a convolution by minimal filtering into blocks and shares them over the threads.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/conv_winograd.h"
#include "levels.h"
#include "parallel.h"
#include "scratch.h"

namespace verax {

class WinogradRun {
 public:
  // `size` of the tiles: 4 or 2.
  WinogradRun(const ConvTask& task, int64_t size) : task_{task, size, false, 0, 0, 0, 0} {
    task_.tiles_h = pieces_of(task.H_out, size), task_.tiles_w = pieces_of(task.W_out, size);
  }

  // The tiles' size for a task; 0 if it is better convolved directly, because a frame's tiles are too few for the
  // transform of the weights to pay. The number of frames is not asked, so that chunks of a clip take the same way.
  //
  // float32 takes the smaller tiles. Their error equals the error of direct sums, and the error of larger ones is three times as
  // large, which bfloat16 does not show. Tiles of AMX multiply faster than minimal filtering saves products.
  static int64_t size_for(const ConvTask& t) {
    if (conv_has_tiles(t) || t.KH != 3 || t.KW != 3 || t.stride_h != 1 || t.stride_w != 1 || t.C < 16 || t.O < 32) return 0;
    const int64_t size = t.weight_bf16 ? 4 : 2;
    return pieces_of(t.H_out, size) * pieces_of(t.W_out, size) < LEAST_TILES ? 0 : size;
  }

  // The first of an odd number of frames is computed by itself, the others in pairs. So a clip in chunks has the pairs
  // of the whole, if the chunks after the first have an even number of frames.
  template <typename Pool>
  void run(Pool& pool) {
    const bool has_pairs = task_.KT == 3 && task_.stride_t == 1;
    const int64_t single = has_pairs ? task_.T_out % 2 : task_.T_out;
    task_.pairs = false;
    run(pool, 0, single);
    task_.pairs = true;
    run(pool, single, task_.T_out - single);
  }

 private:
  static constexpr int64_t LEAST_TILES = 16;
  static constexpr int64_t PACKED_FLOATS = 24 * 1024 * 1024;      // of weights: groups of output channels
  static constexpr int64_t INPUT_FLOATS = 2 * 1024 * 1024;        // of a block, which the third cache level keeps
  static constexpr int64_t FRAMES = WINOGRAD_PAIRED, TILES = 64;  // of a block; tiles of all its frames
  static constexpr int64_t PIECES = 2;                            // for each thread, at least

  // Output frames [first, first + frames), all in pairs or none.
  template <typename Pool>
  void run(Pool& pool, int64_t first, int64_t frames) {
    WinogradTask& t = task_;
    const int64_t tiles = t.tiles_h * t.tiles_w, all = conv_groups(t), channels = winograd_channels(t);
    if (t.B * frames * tiles * t.O == 0) return;
    const int64_t at_once = std::clamp<int64_t>(PACKED_FLOATS / winograd_packed_floats(t), 1, all);
    const SharedScratch packed(4 * at_once * winograd_packed_floats(t));
    t.packed = static_cast<float*>(packed.data());
    const auto pack = VERAX_KERNEL(winograd_pack);
    const auto convolve = VERAX_KERNEL(winograd_block);
    const int64_t unit = t.pairs ? 2 : 1, most_frames = std::min(frames, FRAMES);
    const int64_t spans = pieces_of(frames, most_frames);
    const int64_t fits = INPUT_FLOATS / winograd_points(t) / winograd_depth(t, most_frames);
    const int64_t most = std::clamp<int64_t>(fits, 8, TILES / most_frames), threads = pool.num_threads();
    int64_t pieces = pieces_of(tiles, most);
    // As much work for each thread.
    if (t.B * spans * pieces > threads) pieces = std::min(tiles, pieces_of(pieces, threads) * threads);
    for (t.group = 0; t.group < all; t.group += at_once) {
      t.groups = std::min(at_once, all - t.group);
      parallel_for(pool, t.groups * channels, 8, [&](int64_t begin, int64_t end) { pack(t, begin, end); });
      // If blocks are few, each once for several parts of the output channels.
      const int64_t parts = std::min(t.groups, pieces_of(PIECES * threads, t.B * spans * pieces));
      parallel_for(pool, t.B * spans * pieces * parts, 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          const int64_t part = i % parts, piece = i / parts % pieces, span = i / parts / pieces % spans;
          const auto frame = [&](int64_t span) { return first + frames / unit * span / spans * unit; };
          WinogradBlock block{};
          block.b = i / parts / pieces / spans;
          block.t = frame(span), block.frames = frame(span + 1) - block.t;
          block.tile = tiles * piece / pieces, block.tiles = tiles * (piece + 1) / pieces - block.tile;
          block.group = t.groups * part / parts, block.groups = t.groups * (part + 1) / parts - block.group;
          convolve(t, block, thread_scratch(winograd_scratch_bytes(t, most, most_frames)));
        }
      });
    }
  }

  WinogradTask task_;
};

}  // namespace verax
