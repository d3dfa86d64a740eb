// Divides a convolution into blocks and shares them over the threads.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/conv.h"
#include "levels.h"
#include "parallel.h"
#include "scratch.h"

namespace verax {

class ConvRun {
 public:
  explicit ConvRun(const ConvTask& task) : task_(task) {}

  template <typename Pool>
  void run(Pool& pool) {
    const ConvTask& t = task_;
    if (t.B * t.T_out * t.H_out * t.W_out * t.O == 0) return;
    const SharedScratch packed(conv_packed_bytes(t));
    task_.packed = static_cast<float*>(packed.data());
    const auto pack = VERAX_KERNEL(conv_pack);
    parallel_for(pool, conv_groups(t), 1, [&](int64_t begin, int64_t end) { pack(t, begin, end); });
    divide(pool.num_threads());
    const auto convolve = VERAX_KERNEL(conv_block);
    const int64_t scratch = conv_scratch_bytes(t, height_, width_);
    parallel_for(pool, t.B * t.T_out * rows_ * columns_ * parts_, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) convolve(t, block(i), thread_scratch(scratch));
    });
  }

 private:
  // What a block reads should stay in the second cache level, together with the weights of a few output channels.
  static constexpr int64_t PATCH_FLOATS = 160 * 1024, PATCH_FLOATS_OF_TILES = 512 * 1024;
  // Pixels: enough that the weights, which each block reads once, do not come from memory too often; and their shape
  // is to have few neighbours, which are copied more than once.
  static constexpr int64_t PIXELS = 256, WIDTH = 32;
  static constexpr int64_t PIECES = 4;  // for each thread, at least

  void divide(int64_t threads) {
    const ConvTask& t = task_;
    const int64_t most = conv_has_tiles(t) ? PATCH_FLOATS_OF_TILES : PATCH_FLOATS;
    const auto fits = [&] { return conv_patch_floats(t, height_, width_) <= most; };
    width_ = std::min(t.W_out, WIDTH);
    height_ = std::min(t.H_out, std::max<int64_t>(1, PIXELS / width_));
    while (height_ > 1 && !fits()) height_ = (height_ + 1) / 2;
    while (width_ > 8 && !fits()) width_ = (width_ + 1) / 2;
    rows_ = pieces_of(t.H_out, height_);
    columns_ = pieces_of(t.W_out, width_);
    // Blocks of equal size, and if they are few, each once for several parts of the output channels.
    height_ = pieces_of(t.H_out, rows_);
    width_ = pieces_of(t.W_out, columns_);
    rows_ = pieces_of(t.H_out, height_);
    columns_ = pieces_of(t.W_out, width_);
    parts_ = std::min(conv_groups(t), pieces_of(PIECES * threads, t.B * t.T_out * rows_ * columns_));
  }

  ConvBlock block(int64_t i) const {
    const ConvTask& t = task_;
    ConvBlock block{};
    const int64_t part = i % parts_, groups = conv_groups(t);
    i /= parts_;
    block.group = groups * part / parts_;
    block.groups = groups * (part + 1) / parts_ - block.group;
    block.w = i % columns_ * width_;
    block.width = std::min(width_, t.W_out - block.w);
    i /= columns_;
    block.h = i % rows_ * height_;
    block.height = std::min(height_, t.H_out - block.h);
    i /= rows_;
    block.t = i % t.T_out;
    block.b = i / t.T_out;
    return block;
  }

  ConvTask task_;
  int64_t height_ = 1, width_ = 1, rows_ = 1, columns_ = 1, parts_ = 1;
};

}  // namespace verax
