// AMX's tiles in portable C++, for tests of the level amx on machines without it: the operations of tiles.h.
//
// The semantics follow the Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, bit for bit
// (tests/native/amx_test.cc compares them with the processor's, where it has AMX), with two omissions: an invalid
// configuration is not refused, and the payload of a NaN may differ.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace verax {
namespace {  // each unit has its own, compiled with its own flags

constexpr int EMULATED_ROWS = 16, EMULATED_ROW_BYTES = 64;

struct EmulatedTile {
  int rows = 0, row_bytes = 0;
  alignas(64) uint8_t data[EMULATED_ROWS][EMULATED_ROW_BYTES] = {};

  template <typename T>
  T get(int row, int i) const {
    T value;
    std::memcpy(&value, data[row] + i * sizeof(T), sizeof(T));
    return value;
  }
  template <typename T>
  void set(int row, int i, T value) {
    std::memcpy(data[row] + i * sizeof(T), &value, sizeof(T));
  }
};

inline EmulatedTile* emulated_tiles() {
  thread_local EmulatedTile tiles[8];
  return tiles;
}

// `shapes`: 64 bytes. Byte 0 is the palette; words from byte 16 on are bytes of a row, bytes from 48 on numbers of rows.
inline void emulated_loadconfig(const void* shapes) {
  const auto* bytes = static_cast<const uint8_t*>(shapes);
  for (int i = 0; i < 8; ++i) {
    EmulatedTile& tile = emulated_tiles()[i] = {};
    tile.rows = bytes[48 + i];
    tile.row_bytes = bytes[16 + 2 * i] | bytes[17 + 2 * i] << 8;
  }
}

inline void emulated_release() {
  for (int i = 0; i < 8; ++i) emulated_tiles()[i] = {};
}

inline void emulated_zero(int tile) { std::memset(emulated_tiles()[tile].data, 0, sizeof(EmulatedTile::data)); }

inline void emulated_loadd(int tile, const void* base, int64_t stride) {
  EmulatedTile& to = emulated_tiles()[tile];
  emulated_zero(tile);
  for (int r = 0; r < to.rows; ++r) std::memcpy(to.data[r], static_cast<const char*>(base) + r * stride, to.row_bytes);
}

inline void emulated_stored(int tile, void* base, int64_t stride) {
  const EmulatedTile& from = emulated_tiles()[tile];
  for (int r = 0; r < from.rows; ++r) std::memcpy(static_cast<char*>(base) + r * stride, from.data[r], from.row_bytes);
}

// y[m, n] += sum over k and i of a[m, 4 k + i] * b[k, 4 n + i], modulo 2^32. Bytes of `a` are int8_t, bytes of `b` are B.
template <typename B>
void emulated_dot_bytes(int y, int a, int b) {
  EmulatedTile *tiles = emulated_tiles(), &to = tiles[y];
  for (int m = 0; m < to.rows; ++m) {
    for (int n = 0; n < to.row_bytes / 4; ++n) {
      auto total = to.get<uint32_t>(m, n);
      for (int k = 0; k < tiles[a].row_bytes / 4; ++k) {
        for (int i = 0; i < 4; ++i) {
          const int product = tiles[a].get<int8_t>(m, 4 * k + i) * tiles[b].get<B>(k, 4 * n + i);
          total += static_cast<uint32_t>(product);
        }
      }
      to.set(m, n, total);
    }
  }
}
inline void emulated_dpbssd(int y, int a, int b) { emulated_dot_bytes<int8_t>(y, a, b); }
inline void emulated_dpbsud(int y, int a, int b) { emulated_dot_bytes<uint8_t>(y, a, b); }

// Denormals are zeros, of operands and of results.
inline float emulated_flush(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x; }

inline float emulated_bf16(const EmulatedTile& tile, int row, int i) {
  const uint32_t bits = uint32_t{tile.get<uint16_t>(row, i)} << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return emulated_flush(value);
}

// y[m, n] += (sum over k of a[m, 2 k] b[k, 2 n]) + (sum over k of a[m, 2 k + 1] b[k, 2 n + 1]): each of the two sums begins
// at zero and takes its products in the order of k, fused; every result is rounded to nearest even.
inline void emulated_dpbf16ps(int y, int a, int b) {
  EmulatedTile *tiles = emulated_tiles(), &to = tiles[y];
  for (int m = 0; m < to.rows; ++m) {
    for (int n = 0; n < to.row_bytes / 4; ++n) {
      float sums[2] = {};
      for (int k = 0; k < tiles[a].row_bytes / 4; ++k) {
        for (int i = 0; i < 2; ++i) {
          const float x = emulated_bf16(tiles[a], m, 2 * k + i), w = emulated_bf16(tiles[b], k, 2 * n + i);
          sums[i] = emulated_flush(std::fma(x, w, sums[i]));
        }
      }
      const float total = emulated_flush(sums[0] + sums[1]);
      to.set(m, n, emulated_flush(emulated_flush(to.get<float>(m, n)) + total));
    }
  }
}

}  // namespace
}  // namespace verax
