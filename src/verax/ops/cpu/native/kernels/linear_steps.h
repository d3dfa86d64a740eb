// The order in which a product's tiles are done, for all kinds of weights:
//
// for each segment of 1,024 inputs:               (x's segment stays in the first cache level)
//   for n in steps of C units of W:               (they stream from memory, once)
//     for m in steps of R rows of x:
//       Tile::run<R, C>: y[m..m+R, n..n+C] += x[m..m+R, segment] . W[n..n+C, segment]
//
// A Tile says what a unit of W is (rows that lie side by side) and where it lies, how far to look ahead, and how many
// R and C its sums fit into the registers with. A row of y must not depend on R and C, so that it is the same to the
// last bit whatever other rows are computed beside it.
#pragma once

#include "linear.h"

namespace verax {
namespace VERAX_LEVEL {
namespace {

constexpr int64_t SEGMENT = 1024;

// Inputs [begin, end), and where W is read soon: a tile asks for what lies there as it goes.
struct Segment {
  int64_t begin, end;
  const void* next;
};

// The rest of the rows, below R of them, then fewer. Tiles that do not fit into the registers are not compiled: C is
// chosen for the rows that there are.
template <class Tile, int R, int C>
void rest_of_rows(const LinearTask& t, int64_t m, int64_t n, const Segment& segment) {
  if constexpr (R > 0) {
    if (t.M - m != R) return rest_of_rows<Tile, R - 1, C>(t, m, n, segment);
    if constexpr (C <= Tile::columns(R)) Tile::template run<R, C>(t, m, n, segment);
  }
}

template <class Tile, int C>
void all_rows(const LinearTask& t, int64_t n, const Segment& segment) {
  constexpr int R = Tile::ROWS;
  int64_t m = 0;
  if constexpr (C <= Tile::columns(R)) {
    for (; m + R <= t.M; m += R) Tile::template run<R, C>(t, m, n, segment);
  }
  rest_of_rows<Tile, R - 1, C>(t, m, n, segment);
}

template <class Tile, int C>
void in_steps(const LinearTask& t, int64_t begin, int64_t end) {
  int64_t from = 0, to = 0;
  do {
    to = t.K - from < SEGMENT ? t.K : from + SEGMENT;
    const auto next = [&](int64_t n) {
      // Some units on, or the first ones of the next segment; at the very end, what is at hand.
      const int64_t then = n + Tile::ahead(C), turn = begin + then + C - end;
      if (then + C <= end) return Tile::at(t, then, from);
      return to < t.K && turn + C <= end ? Tile::at(t, turn, to) : Tile::at(t, n, from);
    };
    int64_t n = begin;
    for (; n + C <= end; n += C) all_rows<Tile, C>(t, n, {from, to, next(n)});
    for (; n < end; ++n) all_rows<Tile, 1>(t, n, {from, to, Tile::at(t, n, from)});
    from = to;
  } while (to < t.K);
}

// Units [begin, end) of W.
template <class Tile>
void linear_units(const LinearTask& t, int64_t begin, int64_t end) {
  switch (Tile::columns(t.M < Tile::ROWS ? static_cast<int>(t.M) : Tile::ROWS)) {
    case 1: return in_steps<Tile, 1>(t, begin, end);
    case 2: return in_steps<Tile, 2>(t, begin, end);
    case 4: return in_steps<Tile, 4>(t, begin, end);
  }
}

}  // namespace
}  // namespace VERAX_LEVEL
}  // namespace verax
