// Products in tiles by AMX: 16 rows of W, of 64 bytes each, times as many columns of x, added to 16 x 16 sums.
//
// An instruction takes its first operand by rows: W, as it is stored. Its second operand has the 4 bytes below each other
// that the first has side by side: x, packed before.
#pragma once

#include "../levels.h"

#if defined(VERAX_TILES)

#include <immintrin.h>

#include <cstdint>

// Operations on tiles, by their intrinsics' names: VERAX_TILE(zero)(0) is _tile_zero(0), or its emulation.
#if defined(VERAX_EMULATE_AMX)
#include "emulated_amx.h"
#define VERAX_TILE(operation) ::verax::emulated_##operation
#else
#define VERAX_TILE(operation) _tile_##operation
#endif

namespace verax {
namespace VERAX_LEVEL {
namespace {

// Rows of a tile, and their bytes: 32 bfloat16 or 16 float32.
constexpr int SIDE = 16, ROW_BYTES = 64, TILE_BYTES = SIDE * ROW_BYTES;

// Bytes that are asked for ahead in each row of W.
constexpr int64_t AHEAD = 256;

struct alignas(64) TileShapes {
  uint8_t palette, start_row, unused[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};

// Constants: GCC's `_tile_loadconfig` reads eight bytes as far as the compiler knows, which drops stores to the others.
constexpr TileShapes FULL = {1,
                             0,
                             {},
                             {ROW_BYTES, ROW_BYTES, ROW_BYTES, ROW_BYTES, ROW_BYTES, ROW_BYTES, ROW_BYTES, ROW_BYTES},
                             {SIDE, SIDE, SIDE, SIDE, SIDE, SIDE, SIDE, SIDE}};

// The shapes of a thread's tiles, for as long as this lives.
class Tiles {
 public:
  explicit Tiles(const TileShapes& shapes = FULL) { VERAX_TILE(loadconfig)(&shapes); }
  ~Tiles() { VERAX_TILE(release)(); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

// A strip of W: of each 16 rows a tile, and the distances of its rows and of the next 64 bytes.
struct Strip {
  const char* first;
  int64_t second, row, step;
  bool streamed;  // comes from memory
};

// The compiler takes the numbers of tiles as words only.
#define VERAX_TILE_DOT(y, w, x)  \
  do {                           \
    if constexpr (INTEGERS) {    \
      VERAX_TILE(dpbssd)(y, w, x);     \
    } else {                     \
      VERAX_TILE(dpbf16ps)(y, w, x);   \
    }                            \
  } while (0)

// W: as many tiles of 16 rows; X: as many of 16 rows of x. Tile 2 w + m has the sums, 4 and 5 the rows of W, 6 and 7 of x.
// Values are bfloat16, or 8-bit integers.
template <bool INTEGERS, int W, int X>
inline void add_tiles(const Strip& strip, const char* x, int64_t next_x, int64_t steps) {
  const char* w = strip.first;
  for (int64_t i = 0; i < steps; ++i, w += strip.step, x += TILE_BYTES) {
    if (strip.streamed) {
      for (int64_t r = 0; r < SIDE; ++r) {
        _mm_prefetch(w + r * strip.row + AHEAD, _MM_HINT_T0);
        if constexpr (W == 2) _mm_prefetch(w + strip.second + r * strip.row + AHEAD, _MM_HINT_T0);
      }
    }
    VERAX_TILE(loadd)(6, x, 64);
    VERAX_TILE(loadd)(4, w, strip.row);
    VERAX_TILE_DOT(0, 4, 6);
    if constexpr (X == 2) {
      VERAX_TILE(loadd)(7, x + next_x, 64);
      VERAX_TILE_DOT(1, 4, 7);
    }
    if constexpr (W == 2) {
      VERAX_TILE(loadd)(5, w + strip.second, strip.row);
      VERAX_TILE_DOT(2, 5, 6);
      if constexpr (X == 2) VERAX_TILE_DOT(3, 5, 7);
    }
  }
}

// Sums of W x X tiles begin at zero, or where `sums` has left them.
template <int W, int X>
inline void begin_tiles(const char* sums, bool first) {
  if (first) {
    VERAX_TILE(zero)(0);
    if constexpr (X == 2) VERAX_TILE(zero)(1);
    if constexpr (W == 2) VERAX_TILE(zero)(2);
    if constexpr (W == 2 && X == 2) VERAX_TILE(zero)(3);
  } else {
    VERAX_TILE(loadd)(0, sums, 64);
    if constexpr (X == 2) VERAX_TILE(loadd)(1, sums + TILE_BYTES, 64);
    if constexpr (W == 2) VERAX_TILE(loadd)(2, sums + 2 * TILE_BYTES, 64);
    if constexpr (W == 2 && X == 2) VERAX_TILE(loadd)(3, sums + 3 * TILE_BYTES, 64);
  }
}

template <int W, int X>
inline void end_tiles(char* sums) {
  VERAX_TILE(stored)(0, sums, 64);
  if constexpr (X == 2) VERAX_TILE(stored)(1, sums + TILE_BYTES, 64);
  if constexpr (W == 2) VERAX_TILE(stored)(2, sums + 2 * TILE_BYTES, 64);
  if constexpr (W == 2 && X == 2) VERAX_TILE(stored)(3, sums + 3 * TILE_BYTES, 64);
}

}  // namespace
}  // namespace VERAX_LEVEL
}  // namespace verax

#endif
