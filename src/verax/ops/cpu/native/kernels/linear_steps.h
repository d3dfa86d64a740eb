// The order in which a product's tiles are done, for all kinds of weights. Where x does not fit into the first cache
// level, a segment of it does:
//
// for each segment of 1,024 inputs:
//   for each few units of W:                      (they stream from memory, once)
//     for m in steps of R rows of x:              (which stay in the first level as well)
//       for n in steps of C of these units:
//         Tile::run<R, C>: y[m..m+R, n..n+C] += x[m..m+R, segment] . W[n..n+C, segment]
//
// Where x fits, a tile's C units lie apart, so that the memory gives C streams, each from end to end, which it does
// faster (1.1 to 1.2 times for one row of x) than in short runs side by side:
//
// for n in the first of C runs of units of W:
//   for each segment:
//     for m in steps of R rows of x:
//       Tile::run<R, C>: y[m..m+R, n, n+apart, ...] += x[m..m+R, segment] . W[n, n+apart, ..., segment]
//
// A Tile says what a unit of W is (rows that lie side by side) and where it lies, how far to look ahead, and how many
// R and C its sums fit into the registers with. A row of y must not depend on R, C and the order, so that it is the same
// to the last bit whatever other rows are computed with it. `run` is not inlined: each has several callers.
#pragma once

#include "linear.h"

namespace verax {
namespace VERAX_LEVEL {
namespace {

constexpr int64_t SEGMENT = 1024;
constexpr int64_t FITS = 16 * 1024;  // values of x, most of which are packed in two bytes
constexpr int64_t STAYS = 16 * 1024;  // bytes of W that stay next to R rows of x
constexpr int64_t BYTES_AHEAD = 8 * 1024;  // of W, that a tile's streams have asked for together

// Inputs [begin, end), by how many units a tile's lie apart, and where W is read soon: a tile asks for what lies there
// as it goes.
struct Segment {
  int64_t begin, end, apart;
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

// R rows from m on, or the rest.
template <class Tile, int C>
void rows_from(const LinearTask& t, int64_t m, int64_t n, const Segment& segment) {
  constexpr int R = Tile::ROWS;
  if (m + R > t.M) return rest_of_rows<Tile, R - 1, C>(t, m, n, segment);
  if constexpr (C <= Tile::columns(R)) Tile::template run<R, C>(t, m, n, segment);
}

template <class Tile, int C>
void all_rows(const LinearTask& t, int64_t n, const Segment& segment) {
  for (int64_t m = 0; m < t.M; m += Tile::ROWS) rows_from<Tile, C>(t, m, n, segment);
}

// There is one, of no inputs, even where x has none: y becomes zeros.
template <typename Body>
void for_each_segment(const LinearTask& t, const Body& body) {
  int64_t from = 0, to = 0;
  do {
    to = t.K - from < SEGMENT ? t.K : from + SEGMENT;
    body(from, to);
    from = to;
  } while (to < t.K);
}

// Units n, n + apart, and so on. At the end they ask for what lies after W, which does no harm.
template <class Tile, int C>
void all_segments(const LinearTask& t, int64_t n, int64_t apart) {
  for_each_segment(t, [&](int64_t from, int64_t to) {
    const auto* first = static_cast<const char*>(Tile::at(t, n, from));
    all_rows<Tile, C>(t, n, {from, to, apart, first + BYTES_AHEAD / C});
  });
}

template <class Tile, int C>
void in_streams(const LinearTask& t, int64_t begin, int64_t end) {
  const int64_t apart = (end - begin) / C;
  for (int64_t n = begin; n < begin + apart; ++n) all_segments<Tile, C>(t, n, apart);
  for (int64_t n = begin + apart * C; n < end; ++n) all_segments<Tile, 1>(t, n, 1);
}

// Units of W, a multiple of C, of which `inputs` take about STAYS bytes.
template <class Tile, int C>
int64_t units_that_stay(const LinearTask& t, int64_t inputs) {
  const auto* first = static_cast<const char*>(Tile::at(t, 0, 0));
  const int64_t bytes = static_cast<const char*>(Tile::at(t, 1, 0)) - first;  // of a unit, with all its inputs
  const int64_t units = STAYS * t.K / (inputs * bytes + 1) / C * C;
  return units < C ? C : units;
}

template <class Tile, int C>
void in_steps(const LinearTask& t, int64_t begin, int64_t end) {
  if (t.M * t.K <= FITS) return in_streams<Tile, C>(t, begin, end);
  for_each_segment(t, [&](int64_t from, int64_t to) {
    const auto next = [&](int64_t n) {
      // Some units on, or the first ones of the next segment; at the very end, what is at hand.
      const int64_t then = n + Tile::ahead(C), turn = begin + then + C - end;
      if (then + C <= end) return Tile::at(t, then, from);
      return to < t.K && turn + C <= end ? Tile::at(t, turn, to) : Tile::at(t, n, from);
    };
    const int64_t few = units_that_stay<Tile, C>(t, to - from), last = end - (end - begin) % C;
    for (int64_t first = begin; first < last; first += few) {
      const int64_t until = last - first < few ? last : first + few;
      for (int64_t m = 0; m < t.M; m += Tile::ROWS) {
        for (int64_t n = first; n < until; n += C) {
          rows_from<Tile, C>(t, m, n, {from, to, 1, m == 0 ? next(n) : Tile::at(t, n, from)});
        }
      }
    }
    for (int64_t n = last; n < end; ++n) all_rows<Tile, 1>(t, n, {from, to, 1, Tile::at(t, n, from)});
  });
}

// Units [begin, end) of W.
template <class Tile>
void linear_units(const LinearTask& t, int64_t begin, int64_t end) {
  switch (Tile::columns(t.M < Tile::ROWS ? static_cast<int>(t.M) : Tile::ROWS)) {
    case 1: return in_steps<Tile, 1>(t, begin, end);
    case 2: return in_steps<Tile, 2>(t, begin, end);
    case 3: return in_steps<Tile, 3>(t, begin, end);
    case 4: return in_steps<Tile, 4>(t, begin, end);
  }
}

}  // namespace
}  // namespace VERAX_LEVEL
}  // namespace verax
