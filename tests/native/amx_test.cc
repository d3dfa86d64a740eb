// The emulation of AMX's tiles against the processor's, bit for bit. Without AMX there is nothing to compare with.
#include "kernels/emulated_amx.h"

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>

#include "check.h"
#include "levels.h"

#if defined(__linux__) && defined(__x86_64__) && (!defined(__GNUC__) || defined(__clang__) || __GNUC__ >= 11)
#include <immintrin.h>

namespace {

struct alignas(64) Shapes {
  uint8_t palette, start_row, unused[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};

// Sums in tile 0, operands in tiles 1 and 2.
struct alignas(64) Operands {
  uint8_t sums[1024], a[1024], b[1024];
};

enum class Dot { bf16, ss, su };
constexpr Dot DOTS[] = {Dot::bf16, Dot::ss, Dot::su};

__attribute__((target("amx-tile,amx-bf16,amx-int8"))) void on_processor(const Shapes& shapes, Dot dot, const Operands& in,
                                                                        uint8_t* out) {
  _tile_loadconfig(&shapes);
  _tile_loadd(0, in.sums, 64);
  _tile_loadd(1, in.a, 64);
  _tile_loadd(2, in.b, 64);
  switch (dot) {
    case Dot::bf16: _tile_dpbf16ps(0, 1, 2); break;
    case Dot::ss: _tile_dpbssd(0, 1, 2); break;
    case Dot::su: _tile_dpbsud(0, 1, 2); break;
  }
  _tile_stored(0, out, 64);
  _tile_zero(0);
  _tile_stored(0, out + 1024, 64);
  _tile_release();
}

void emulated(const Shapes& shapes, Dot dot, const Operands& in, uint8_t* out) {
  verax::emulated_loadconfig(&shapes);
  verax::emulated_loadd(0, in.sums, 64);
  verax::emulated_loadd(1, in.a, 64);
  verax::emulated_loadd(2, in.b, 64);
  switch (dot) {
    case Dot::bf16: verax::emulated_dpbf16ps(0, 1, 2); break;
    case Dot::ss: verax::emulated_dpbssd(0, 1, 2); break;
    case Dot::su: verax::emulated_dpbsud(0, 1, 2); break;
  }
  verax::emulated_stored(0, out, 64);
  verax::emulated_zero(0);
  verax::emulated_stored(0, out + 1024, 64);
  verax::emulated_release();
}

// Kinds of float values: of one size; of all sizes, so that products underflow and overflow; and any bits at all.
enum class Values { normal, wide, any };

template <typename Generator>
float value_of(Values values, Generator& generator) {
  std::normal_distribution<float> normal;
  if (values == Values::normal) return normal(generator);
  if (values == Values::wide) return std::ldexp(normal(generator), static_cast<int>(generator() % 90) - 110);
  const auto bits = static_cast<uint32_t>(generator());
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

void fill(Operands& operands, Dot dot, Values values, unsigned seed) {
  std::mt19937 generator(seed);
  auto* bytes = reinterpret_cast<uint8_t*>(&operands);
  for (size_t i = 0; i < sizeof(Operands); ++i) bytes[i] = static_cast<uint8_t>(generator());
  if (dot != Dot::bf16) return;
  for (int i = 0; i < 256; ++i) {
    const float sum = value_of(values, generator);
    std::memcpy(operands.sums + 4 * i, &sum, 4);
  }
  for (int i = 0; i < 1024; ++i) {
    const float value = value_of(values, generator);
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    const auto half = static_cast<uint16_t>(bits >> 16);
    std::memcpy((i < 512 ? operands.a : operands.b) + 2 * (i % 512), &half, 2);
  }
}

bool same(const uint8_t* a, const uint8_t* b, Dot dot) {
  if (std::memcmp(a, b, 4) == 0) return true;
  float x, y;
  std::memcpy(&x, a, 4), std::memcpy(&y, b, 4);
  return dot == Dot::bf16 && std::isnan(x) && std::isnan(y);
}

// M x N sums of K words of 4 bytes.
void compare(Dot dot, Values values, int M, int N, int K, unsigned seed) {
  Shapes shapes{};
  shapes.palette = 1;
  shapes.rows[0] = shapes.rows[1] = static_cast<uint8_t>(M), shapes.rows[2] = static_cast<uint8_t>(K);
  shapes.row_bytes[0] = shapes.row_bytes[2] = static_cast<uint16_t>(4 * N);
  shapes.row_bytes[1] = static_cast<uint16_t>(4 * K);
  Operands operands;
  fill(operands, dot, values, seed);
  uint8_t wanted[2048], got[2048];  // what is not stored stays
  std::memset(wanted, 7, sizeof(wanted)), std::memset(got, 7, sizeof(got));
  on_processor(shapes, dot, operands, wanted);
  emulated(shapes, dot, operands, got);
  for (int i = 0; i < 2048; i += 4) {
    uint32_t bits[2];
    std::memcpy(bits, got + i, 4), std::memcpy(bits + 1, wanted + i, 4);
    check::that(same(got + i, wanted + i, dot), "dot %d, values %d, %dx%dx%d, seed %u, byte %d: %08x, not %08x",
                static_cast<int>(dot), static_cast<int>(values), M, N, K, seed, i, bits[0], bits[1]);
  }
}

}  // namespace

int main() {
  if (!verax::amx_permitted()) {
    std::printf("amx: not here, nothing to compare the emulation with\n");
    return 0;
  }
  unsigned seed = 0;
  for (Dot dot : DOTS) {
    for (Values values : {Values::normal, Values::wide, Values::any}) {
      for (int i = 0; i < 100; ++i) compare(dot, values, 16, 16, 16, ++seed);
      for (int size : {1, 3, 7}) compare(dot, values, size, 16 - size, 2 * size, ++seed);
    }
  }
  std::printf("amx: %s\n", check::failures ? "FAILED" : "ok");
  return check::failures != 0;
}

#else
int main() {
  std::printf("amx: not here, nothing to compare the emulation with\n");
  return 0;
}
#endif
