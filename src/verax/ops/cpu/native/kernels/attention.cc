// for each span of ATTENTION_SPAN keys:                    (with its own softmax)
//   for each block of BLOCK keys:                          (packed into the first cache level, zeros past the end)
//     for each group of up to ROWS rows that see any of it:            (if they are few: FEW rows, nothing packed; by
//                                                                       AMX: TILE_ROWS)
//       scores[row, key] = q . k                           (scores are in powers of 2: q carries scale x log2(e))
//       scores = cap tanh(scores / cap), where there is a cap
//       m, l, weights = online softmax of the scores (Milakov and Gimelshein, 2018, arXiv:1805.02867)
//       sums[row, h] = alpha x sums + weights . v, with alpha = 2^(old m - new m)
//   merge the span's (sums, m, l) into the sums of the spans before it
// out = sums / l, with the weight of the head's sink added to l, where heads have sinks
//
// With int8 keys and values, a key's scale multiplies its scores, a value's scale its weights; sums have neither.
//
// With a window, a tile begins at the first key that its first query sees, and no key before it is read: its page may be
// another sequence's.
//
// A row of q is one query with one head. What a row computes depends on its own keys only: a block that it does not see
// is skipped, or adds exactly nothing. This is FlashAttention's algorithm (Dao et al., 2022, arXiv:2205.14135).
#include "attention.h"

#include "direct.h"
#include "tile_product.h"

namespace verax {
namespace VERAX_LEVEL {
namespace {

constexpr int64_t BLOCK = 64;  // keys: packed keys and values of 128 bfloat16 fill two thirds of a 48 KB cache

// Below every score that counts, and finite: the difference of two is 0, not NaN.
constexpr float LOWEST = -1e30f;

// Most rows of a lone query that are not worth packing for.
constexpr int64_t DIRECT_ROWS = 8;

constexpr float LOG2_E = 1.44269504088896340736f;

// Softmax state of some rows, with FlashAttention's letters: `sums / l` is their result so far. l is the sum of the
// weights, which are relative to 2^m for the largest score m.
struct State {
  Matrix sums;
  float *m, *l;
};

State state_at(float* memory, int64_t rows, int64_t H) {
  const int64_t stride = attention_padded(H);
  float* rest = memory + rows * stride;
  return {{memory, stride}, rest, rest + rows};
}

// Where a tile works.
struct Scratch {
  Matrix q, k, v, scores, weights;
  const float* zeros;  // as long as a key
  State span, merged;
};

Scratch allocate(void* memory, int64_t rows, int64_t H, int depth) {
  Arena arena{static_cast<float*>(memory)};
  const int64_t width = attention_padded(H);
  Scratch s;
  s.q = {arena.take(rows * width / depth), width / depth};
  s.k = {arena.take(BLOCK * width / depth), BLOCK};
  s.v = {arena.take(BLOCK * width / depth), width};
  s.scores = {arena.take(ATTENTION_GROUP * BLOCK), BLOCK};
  s.weights = {arena.take(ATTENTION_GROUP * BLOCK / depth), BLOCK / depth};
  float* zeros = arena.take(width);
  std::memset(zeros, 0, width * sizeof(float));
  s.zeros = zeros;
  s.span = state_at(arena.take(attention_partial_floats(rows, H)), rows, H);
  s.merged = state_at(arena.take(attention_partial_floats(rows, H)), rows, H);
  return s;
}

void clear(State& state, int64_t rows) {
  std::memset(state.sums.at, 0, rows * state.sums.stride * sizeof(float));
  for (int64_t r = 0; r < rows; ++r) {
    state.m[r] = LOWEST;
    state.l[r] = 0;
  }
}

float power_of_two(float x) {
  float values[F32::lanes];
  store(values, exp2(broadcast(x)));
  return values[0];
}

// merged += span
void merge(State& merged, const State& span, int64_t rows) {
  for (int64_t r = 0; r < rows; ++r) {
    const float m = merged.m[r] > span.m[r] ? merged.m[r] : span.m[r];
    const float alpha = power_of_two(merged.m[r] - m), weight = power_of_two(span.m[r] - m);
    merged.m[r] = m;
    merged.l[r] = merged.l[r] * alpha + span.l[r] * weight;
    float *to = merged.sums.row(r), *from = span.sums.row(r);
    for (int64_t h = 0; h < merged.sums.stride; h += F32::lanes) {
      store(to + h, fma(load(from + h), broadcast(weight), mul(load(to + h), broadcast(alpha))));
    }
  }
}

// Where row r of a tile lies in q and in the result.
int64_t row_offset(const AttentionTask& t, const AttentionTile& tile, int64_t r) {
  const int64_t G = t.N / t.K;
  return ((tile.first_query + r / G) * t.N + tile.head * G + r % G) * t.H;
}

void finish(const AttentionTask& t, const AttentionTile& tile, const State& state, int64_t rows) {
  for (int64_t r = 0; r < rows; ++r) {
    float* to = t.out + row_offset(t, tile, r);
    const float *from = state.sums.row(r), l = state.l[r];
    float factor = l == 0 ? 0 : 1 / l;  // 0: a row that sees nothing
    if (t.sinks && l != 0) {
      const float sink = t.sinks[tile.head * (t.N / t.K) + r % (t.N / t.K)] * LOG2_E;
      const float m = sink > state.m[r] ? sink : state.m[r], alpha = power_of_two(state.m[r] - m);
      factor = alpha / (l * alpha + power_of_two(sink - m));
    }
    for (int64_t h = 0; h < t.H; ++h) to[h] = from[h] * factor;
  }
}

// The row's elements as cells, times `scale`.
template <class Kind, class Element>
void pack_query(float* to, const Element* from, int64_t H, float scale) {
  for (int64_t h = 0; h < H; h += CHUNK) {
    Element buffer[CHUNK];
    Chunk chunk = load_chunk(padded(from + h, H - h, buffer));
    for (F32& part : chunk.part) part = mul(part, broadcast(scale));
    Kind::of_chunk(to + h / Kind::depth, chunk);
  }
}

// A lone query's keys of a whole block are taken from this number of places in turn, 16 keys apart: where each is a page,
// the processor's own prefetching, which ends where a page of memory ends, follows all of them at once (a third faster,
// measured).
constexpr int64_t STREAMS = 4, EACH = BLOCK / STREAMS;

// Where the keys and values of a block lie, and their scales if they are int8. Outside of the tile: a row of zeros.
template <class Element>
struct Block {
  static constexpr bool scaled = sizeof(Element) == 1;
  const Element *k[BLOCK], *v[BLOCK];
  float k_scales[scaled ? BLOCK : 1], v_scales[scaled ? BLOCK : 1];

  Block(const AttentionTask& t, const AttentionTile& tile, int64_t begin, int64_t count, const Element* zeros) {
    int64_t page = begin / t.page_size, within = begin % t.page_size, at = count ? offset(t, tile, page, within) : 0;
    const int64_t first = tile.begin - begin;  // of a window, if it is in this block
    // It sees the whole block, in which order does not matter to it then.
    const bool in_streams = count == BLOCK && first <= 0 && tile.num_queries == 1 && !tile.query_segments;
    for (int64_t j = 0; j < BLOCK; ++j) {
      const int64_t i = in_streams ? j % EACH * STREAMS + j / EACH : j;
      const bool read = first <= i && i < count;
      k[i] = read ? static_cast<const Element*>(t.k) + at : zeros;
      v[i] = read ? static_cast<const Element*>(t.v) + at : zeros;
      if constexpr (scaled) {
        k_scales[i] = read ? t.k_scales[at / t.H] : 0;
        v_scales[i] = read ? t.v_scales[at / t.H] : 0;
      }
      at += t.token_stride;
      if (++within == t.page_size && j + 1 < count) at = offset(t, tile, ++page, within = 0);
    }
  }

  static int64_t offset(const AttentionTask& t, const AttentionTile& tile, int64_t index, int64_t within) {
    const int64_t listed = tile.pages[index];
    const int64_t page = listed < 0 ? 0 : listed < t.num_pages ? listed : t.num_pages - 1;  // as JAX clamps
    return page * t.page_stride + tile.head * t.head_stride + within * t.token_stride;
  }
};

// Signs for `pick`: BLOCK zeros, then BLOCK times -1. From `steps + BLOCK - n` on, the first n keys are visible.
struct Steps {
  float sign[2 * BLOCK];
  constexpr Steps() : sign() {
    for (int64_t i = BLOCK; i < 2 * BLOCK; ++i) sign[i] = -1;
  }
};
constexpr Steps STEPS;

// Scores, in powers of 2, bent into (-cap log2(e), cap log2(e)): tanh(y) = 1 - 2 / (1 + e^2y).
inline F32 soft_capped(F32 score, float cap) {
  const F32 twice = sub(zero(), max(broadcast(-126), mul(score, broadcast(-2 / cap))));  // exp2 takes less than 127
  const F32 rest = div(broadcast(-2), add(broadcast(1), exp2(twice)));
  return mul(add(broadcast(1), rest), broadcast(cap * LOG2_E));
}

// Scores to weights, for one row over `vectors` registers of keys; `hidden` is null where every key is visible.
// Returns alpha, the factor of the sums before this block.
template <class Kind>
float soften(float soft_cap, float* scores, float* weights, int64_t vectors, const Block<typename Kind::Element>& block,
             const float* hidden, float& m, float& l) {
  constexpr bool scaled = Block<typename Kind::Element>::scaled;
  F32 most = broadcast(m);
  for (int64_t i = 0; i < vectors; ++i) {
    float* at = scores + i * F32::lanes;
    if (scaled) store(at, mul(load(at), load(block.k_scales + i * F32::lanes)));
    if (soft_cap != 0) store(at, soft_capped(load(at), soft_cap));
    if (hidden) store(at, pick(load(hidden + i * F32::lanes), load(at), broadcast(-__builtin_inff())));
    most = max(load(at), most);
  }
  const float new_m = largest_lane(most);
  F32 added = zero();
  for (int64_t i = 0; i < vectors; ++i) {
    float* at = scores + i * F32::lanes;
    const F32 weight = exp2(sub(load(at), broadcast(new_m)));
    added = add(added, weight);
    store(at, scaled ? mul(weight, load(block.v_scales + i * F32::lanes)) : weight);
  }
  for (int64_t i = 0; i < vectors * F32::lanes; i += CHUNK) {
    Kind::of_chunk(weights + i / Kind::depth, load_chunk(scores + i));
  }
  const float alpha = power_of_two(m - new_m);
  m = new_m;
  l = l * alpha + sum(added);
  return alpha;
}

// Row by row, which keys of a block stay hidden: signs for `pick`, or null if none.
struct Visibility {
  const AttentionTask& task;
  const AttentionTile& tile;
  int64_t begin, count, columns;  // of the block
  float buffer[BLOCK];

  int64_t visible(int64_t query) const { return tile.visible + (task.causal ? query : 0) - begin; }
  int64_t first(int64_t query) const { return task.window ? visible(query) - task.window : 0; }
  bool none(int64_t first_query, int64_t last_query) const {
    return visible(last_query) <= 0 || first(first_query) >= count;
  }

  const float* hidden(int64_t query) {
    const int64_t from = first(query);
    int64_t seen = visible(query);
    seen = seen < 0 ? 0 : seen < count ? seen : count;
    if (tile.query_segments || from > 0) {
      const int32_t *segment = tile.query_segments, *segments = tile.key_segments;
      for (int64_t i = 0; i < columns; ++i) {
        const bool sees = from <= i && i < seen && (!segment || segments[begin + i] == segment[query]);
        buffer[i] = sees ? 0 : -1;
      }
      return buffer;
    }
    return seen < columns ? STEPS.sign + BLOCK - seen : nullptr;
  }
};

// Products of a group of rows with a block of packed keys, and with its packed values.
template <class Kind>
struct Products {
  static constexpr int rows = ROWS;
  void scores(int64_t n, Matrix q, Matrix k, int64_t depth, Matrix out, int64_t vectors) {
    product<Kind>(n, q, k, depth, out, vectors, nullptr);
  }
  // sums = alpha x sums + weights . v
  void sums(int64_t n, Matrix weights, Matrix v, int64_t depth, Matrix out, int64_t vectors, const float* alpha) {
    product<Kind>(n, weights, v, depth, out, vectors, alpha);
  }
};

#if defined(VERAX_TILES)
struct TileProducts {
  static constexpr int rows = TILE_ROWS;
  TilesOfRows tiles;
  void scores(int64_t n, Matrix q, Matrix k, int64_t depth, Matrix out, int64_t vectors) {
    tile_product(tiles, n, q, k, depth, out, vectors, false);
  }
  void sums(int64_t n, Matrix weights, Matrix v, int64_t depth, Matrix out, int64_t vectors, const float* alpha) {
    for (int64_t i = 0; i < n; ++i) {
      if (alpha[i] == 1) continue;  // mostly: the largest score is soon found
      float* row = out.row(i);
      for (int64_t h = 0; h < vectors * F32::lanes; h += F32::lanes) store(row + h, mul(load(row + h), broadcast(alpha[i])));
    }
    tile_product(tiles, n, weights, v, depth, out, vectors, true);
  }
};
template <>
struct Products<Pairs> : TileProducts {};
template <>
struct Products<Int8Pairs> : TileProducts {};
#endif
static_assert(Products<Bf16Cells>::rows <= ATTENTION_GROUP && Products<F32Cells>::rows <= ATTENTION_GROUP);

// The block's part of all rows of a tile.
template <class Kind>
void attend_block(const AttentionTask& t, const AttentionTile& tile, int64_t rows, int64_t begin, int64_t count,
                  const Block<typename Kind::Element>& block, const Block<typename Kind::Element>& next,
                  const Scratch& s, State& state) {
  const int64_t G = t.N / t.K, columns = attention_padded(count), vectors = columns / F32::lanes;
  const int64_t key_depth = (t.H + Kind::depth - 1) / Kind::depth, depth = (count + Kind::depth - 1) / Kind::depth;
  pack_columns<Kind>(s.k, block.k, next.k, columns, t.H);
  pack_rows<Kind>(s.v, block.v, next.v, columns, t.H);
  Visibility visibility{t, tile, begin, count, columns, {}};
  Products<Kind> products;
  for (int64_t row = 0; row < rows; row += products.rows) {
    const int64_t n = rows - row < products.rows ? rows - row : products.rows;
    if (visibility.none(row / G, (row + n - 1) / G)) continue;
    products.scores(n, {s.q.row(row), s.q.stride}, s.k, key_depth, s.scores, vectors);
    float alpha[ATTENTION_GROUP];
    for (int64_t i = 0; i < n; ++i) {
      alpha[i] = soften<Kind>(t.soft_cap, s.scores.row(i), s.weights.row(i), vectors, block,
                              visibility.hidden((row + i) / G), state.m[row + i], state.l[row + i]);
    }
    products.sums(n, s.weights, s.v, depth, {state.sums.row(row), state.sums.stride},
                  (t.H + F32::lanes - 1) / F32::lanes, alpha);
  }
}

// Rows of a lone query.
template <class Kind>
void attend_block_directly(const AttentionTask& t, const AttentionTile& tile, int64_t rows, int64_t begin,
                           int64_t count, const Block<typename Kind::Element>& block,
                           const Block<typename Kind::Element>& next, const Scratch& s, State& state) {
  const int64_t columns = attention_padded(count), vectors = columns / F32::lanes;
  const int64_t scored = (count + F32::lanes - 1) / F32::lanes * F32::lanes;  // the others are hidden
  Visibility visibility{t, tile, begin, count, columns, {}};
  const float* hidden = visibility.hidden(0);
  for (int64_t row = 0; row < rows; row += FEW) {
    const auto attend = [&](auto n) {
      constexpr int R = decltype(n)::value;
      direct_scores<Kind, R>({s.q.row(row), s.q.stride}, block.k, next.k, scored, t.H, s.scores);
      float alpha[R];
      for (int i = 0; i < R; ++i) {
        alpha[i] = soften<Kind>(t.soft_cap, s.scores.row(i), s.weights.row(i), vectors, block, hidden,
                                 state.m[row + i], state.l[row + i]);
      }
      direct_sums<Kind, R>(s.weights, block.v, next.v, count, t.H, {state.sums.row(row), state.sums.stride}, alpha);
    };
    with_rows(rows - row < FEW ? rows - row : FEW, attend);
  }
}

// First key of the block that a tile begins with. Where keys are hidden from a query, its blocks are the ones that it has
// with any other queries.
int64_t first_block(const AttentionTask& t, const AttentionTile& tile) {
  return t.window || tile.query_segments ? tile.begin / BLOCK * BLOCK : tile.begin;
}

template <class Kind>
void attend(const AttentionTask& t, const AttentionTile& tile, const AttentionTile* next_tile, void* memory) {
  const int64_t G = t.N / t.K, rows = tile.num_queries * G;
  Scratch s = allocate(memory, rows, t.H, Kind::depth);
  using Element = typename Kind::Element;
  const auto* zeros = reinterpret_cast<const Element*>(s.zeros);
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t at = row_offset(t, tile, r);
    if (t.q_bf16) {
      pack_query<Kind>(s.q.row(r), static_cast<const bf16*>(t.q) + at, t.H, t.scale * LOG2_E);
    } else {
      pack_query<Kind>(s.q.row(r), static_cast<const float*>(t.q) + at, t.H, t.scale * LOG2_E);
    }
  }
  const bool direct = tile.num_queries == 1 && rows <= DIRECT_ROWS;
  const auto attend_keys = direct ? attend_block_directly<Kind> : attend_block<Kind>;
  const auto keys_between = [](int64_t at, int64_t end) { return at > end ? 0 : end - at < BLOCK ? end - at : BLOCK; };
  const auto block_of = [&](const AttentionTile& of, int64_t at, int64_t end) {
    return Block<Element>(t, of, at, keys_between(at, end), zeros);
  };
  const auto attend_span = [&](int64_t begin, int64_t end, State& state) {
    clear(state, rows);
    Block<Element> block = block_of(tile, begin, end);
    for (int64_t at = begin; at < end; at += BLOCK) {
      // The first block of a further span or tile is only asked for.
      const bool leaves = at + BLOCK >= tile.end && next_tile;
      const Block<Element> next = leaves ? block_of(*next_tile, first_block(t, *next_tile), next_tile->end)
                                         : block_of(tile, at + BLOCK, at + BLOCK < end ? end : tile.end);
      attend_keys(t, tile, rows, at, keys_between(at, end), block, next, s, state);
      block = next;
    }
  };
  if (tile.partial) {
    State state = state_at(tile.partial, rows, t.H);
    return attend_span(first_block(t, tile), tile.end, state);
  }
  clear(s.merged, rows);
  for (int64_t begin = first_block(t, tile); begin < tile.end;) {
    const int64_t next = (begin / ATTENTION_SPAN + 1) * ATTENTION_SPAN, end = next < tile.end ? next : tile.end;
    attend_span(begin, end, s.span);
    merge(s.merged, s.span, rows);
    begin = end;
  }
  finish(t, tile, s.merged, rows);
}

}  // namespace

void attention_tile(const AttentionTask& task, const AttentionTile& tile, const AttentionTile* next, void* scratch) {
  switch (task.keys) {
    case Keys::f32: return attend<F32Cells>(task, tile, next, scratch);
    case Keys::bf16: return attend<Bf16Cells>(task, tile, next, scratch);
    case Keys::int8: return attend<Int8Cells>(task, tile, next, scratch);
  }
}

void attention_merge(const AttentionTask& t, const AttentionTile& tile, int64_t spans, float* partials) {
  const int64_t rows = tile.num_queries * (t.N / t.K), size = attention_partial_floats(rows, t.H);
  State merged = state_at(partials, rows, t.H);
  for (int64_t i = 1; i < spans; ++i) merge(merged, state_at(partials + i * size, rows, t.H), rows);
  finish(t, tile, merged, rows);
}

}  // namespace VERAX_LEVEL
}  // namespace verax
