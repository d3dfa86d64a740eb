// The FFI handlers of kernels/attention.cc: over dense arrays, and over the pages of a cache.
#include <numeric>

#include "attention_run.h"
#include "export.h"
#include "shapes.h"
#include "xla/ffi/api/ffi.h"

namespace verax {
namespace {

namespace ffi = ::xla::ffi;

bool same(ffi::Span<const int64_t> a, ffi::Span<const int64_t> b) {
  return a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin());
}

// Arguments of all handlers: scale, window and cap of the scores, and the heads' sinks, empty for none.
struct Scores {
  int64_t window;
  float scale, soft_cap;
  ffi::Buffer<ffi::F32> sinks;
};

// True for a sink of each query head, or for none.
bool fits(const ffi::Buffer<ffi::F32>& sinks, int64_t heads) {
  return sinks.element_count() == 0 || static_cast<int64_t>(sinks.element_count()) == heads;
}

// The fields that both handlers set alike; keys of [.., K, ..] heads are not yet said where.
AttentionTask task_of(const ffi::AnyBuffer& q, const ffi::AnyBuffer& k, const ffi::AnyBuffer& v, int64_t K,
                      Scores scores, ffi::ResultBuffer<ffi::F32>& out) {
  const auto shape = q.dimensions();
  AttentionTask task{};
  task.N = shape[shape.size() - 2];
  task.K = K;
  task.H = shape[shape.size() - 1];
  task.q = q.untyped_data();
  task.q_bf16 = q.element_type() == ffi::BF16;
  task.k = k.untyped_data();
  task.v = v.untyped_data();
  task.keys = k.element_type() == ffi::F32 ? Keys::f32 : k.element_type() == ffi::BF16 ? Keys::bf16 : Keys::int8;
  task.window = std::max<int64_t>(0, scores.window);
  task.scale = scores.scale;
  task.soft_cap = scores.soft_cap;
  task.sinks = scores.sinks.element_count() ? scores.sinks.typed_data() : nullptr;
  task.out = out->typed_data();
  return task;
}

ffi::Error attention(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                     ffi::Buffer<ffi::S32> segments, ffi::Buffer<ffi::F32> sinks, bool causal, int64_t window,
                     float scale, float soft_cap, ffi::ResultBuffer<ffi::F32> out) {
  const auto queries = q.dimensions(), keys = k.dimensions();
  if (queries.size() != 4 || keys.size() != 4 || !same(keys, v.dimensions()) || !same(queries, out->dimensions()) ||
      keys[0] != queries[0] || keys[3] != queries[3] || (keys[2] ? queries[2] % keys[2] : queries[2])) {
    return ffi::Error::InvalidArgument("attention: expected q [B, T, N, H], k and v [B, S, K, H] with K dividing N");
  }
  if (!is_float(q) || !is_float(k) || k.element_type() != v.element_type()) {
    return ffi::Error::InvalidArgument("attention: expected float32 or bfloat16, k and v of the same");
  }
  const int64_t B = queries[0], T = queries[1], S = keys[1], K = keys[2], H = keys[3];
  const bool segmented = segments.element_count() > 0;
  if (segmented && (T != S || static_cast<int64_t>(segments.element_count()) != B * T)) {
    return ffi::Error::InvalidArgument("attention: expected segments [B, T], and as many keys as queries");
  }
  if (!fits(sinks, queries[2])) return ffi::Error::InvalidArgument("attention: expected sinks [N]");
  if (window && !causal) return ffi::Error::InvalidArgument("attention: expected no window unless causal");
  if (out->element_count() == 0) return ffi::Error::Success();
  AttentionTask task = task_of(q, k, v, K, {window, scale, soft_cap, sinks}, out);
  task.causal = causal;
  task.num_pages = B;
  task.page_size = std::max<int64_t>(1, S);
  task.page_stride = S * K * H;
  task.head_stride = H;
  task.token_stride = K * H;
  std::vector<int32_t> pages(B);
  std::iota(pages.begin(), pages.end(), 0);
  AttentionRun run(task);
  for (int64_t b = 0; b < B; ++b) {
    AttentionTile sequence{};
    sequence.first_query = b * T;
    sequence.num_queries = T;
    sequence.visible = causal ? S - T + 1 : S;
    sequence.pages = &pages[b];
    if (segmented) sequence.query_segments = sequence.key_segments = segments.typed_data() + b * T;
    run.add(sequence);
  }
  run.run(pool);
  return ffi::Error::Success();
}

// `k_scales` and `v_scales` are null, or of int8 pages.
ffi::Error attend_pages(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                        const float* k_scales, const float* v_scales, ffi::Buffer<ffi::S32> page_table,
                        ffi::Buffer<ffi::S32> kv_lengths, ffi::Buffer<ffi::S32> query_starts, Scores scores,
                        ffi::ResultBuffer<ffi::F32> out) {
  const auto queries = q.dimensions(), cache = k.dimensions(), table = page_table.dimensions();
  if (queries.size() != 3 || cache.size() != 4 || !same(cache, v.dimensions()) || !same(queries, out->dimensions()) ||
      cache[3] != queries[2] || (cache[1] ? queries[1] % cache[1] : queries[1])) {
    return ffi::Error::InvalidArgument(
        "paged attention: expected q [T, N, H] and pages [P, K, p, H] with K dividing N");
  }
  if (!is_float(q) || k.element_type() != v.element_type() || (k_scales ? k.element_type() != ffi::S8 : !is_float(k))) {
    return ffi::Error::InvalidArgument(
        "paged attention: expected float32 or bfloat16, or int8 pages with scales, both caches of the same");
  }
  if (table.size() != 2 || static_cast<int64_t>(kv_lengths.element_count()) != table[0] ||
      static_cast<int64_t>(query_starts.element_count()) != table[0] + 1) {
    return ffi::Error::InvalidArgument(
        "paged attention: expected a page table [B, W], B lengths and B + 1 query starts");
  }
  if (!fits(scores.sinks, queries[1])) return ffi::Error::InvalidArgument("paged attention: expected sinks [N]");
  if (out->element_count() == 0) return ffi::Error::Success();
  const int64_t T = queries[0], B = table[0], W = table[1];
  AttentionTask task = task_of(q, k, v, cache[1], scores, out);
  task.k_scales = k_scales;
  task.v_scales = v_scales;
  task.causal = true;
  task.num_pages = cache[0];
  task.page_size = cache[2];
  task.token_stride = task.H;
  task.head_stride = task.page_size * task.H;
  task.page_stride = task.K * task.head_stride;
  const int32_t *lengths = kv_lengths.typed_data(), *starts = query_starts.typed_data();
  const int64_t longest = task.num_pages ? W * task.page_size : 0;
  AttentionRun run(task);
  int64_t done = 0;  // queries that have an owner; the others are padding and come out zero
  for (int64_t b = 0; b < B; ++b) {
    const int64_t first = std::clamp<int64_t>(starts[b], done, T), end = std::clamp<int64_t>(starts[b + 1], first, T);
    std::fill(task.out + done * task.N * task.H, task.out + first * task.N * task.H, 0.0f);
    done = end;
    AttentionTile sequence{};
    sequence.first_query = first;
    sequence.num_queries = end - first;
    sequence.visible = std::min<int64_t>(lengths[b], longest) - (end - first) + 1;
    sequence.pages = page_table.typed_data() + b * W;
    run.add(sequence);
  }
  std::fill(task.out + done * task.N * task.H, task.out + T * task.N * task.H, 0.0f);
  run.run(pool);
  return ffi::Error::Success();
}

ffi::Error paged_attention(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                           ffi::Buffer<ffi::S32> page_table, ffi::Buffer<ffi::S32> kv_lengths,
                           ffi::Buffer<ffi::S32> query_starts, ffi::Buffer<ffi::F32> sinks, int64_t window,
                           float scale, float soft_cap, ffi::ResultBuffer<ffi::F32> out) {
  return attend_pages(pool, q, k, v, nullptr, nullptr, page_table, kv_lengths, query_starts,
                      {window, scale, soft_cap, sinks}, out);
}

ffi::Error paged_attention_quantized(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k,
                                     ffi::Buffer<ffi::F32> k_scales, ffi::AnyBuffer v, ffi::Buffer<ffi::F32> v_scales,
                                     ffi::Buffer<ffi::S32> page_table, ffi::Buffer<ffi::S32> kv_lengths,
                                     ffi::Buffer<ffi::S32> query_starts, ffi::Buffer<ffi::F32> sinks, int64_t window,
                                     float scale, float soft_cap, ffi::ResultBuffer<ffi::F32> out) {
  const auto cache = k.dimensions(), scales = k_scales.dimensions();
  if (cache.size() != 4 || !same(scales, cache.first(3)) || !same(scales, v_scales.dimensions())) {
    return ffi::Error::InvalidArgument("paged attention: expected scales [P, K, p] of pages [P, K, p, H]");
  }
  return attend_pages(pool, q, k, v, k_scales.typed_data(), v_scales.typed_data(), page_table, kv_lengths, query_starts,
                      {window, scale, soft_cap, sinks}, out);
}

}  // namespace
}  // namespace verax

VERAX_HANDLER(verax_attention, verax::attention,
              xla::ffi::Ffi::Bind()
                  .Ctx<xla::ffi::ThreadPool>()
                  .Arg<xla::ffi::AnyBuffer>()
                  .Arg<xla::ffi::AnyBuffer>()
                  .Arg<xla::ffi::AnyBuffer>()
                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                  .Attr<bool>("causal")
                  .Attr<int64_t>("window")
                  .Attr<float>("scale")
                  .Attr<float>("soft_cap")
                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>());

VERAX_HANDLER(verax_paged_attention, verax::paged_attention,
              xla::ffi::Ffi::Bind()
                  .Ctx<xla::ffi::ThreadPool>()
                  .Arg<xla::ffi::AnyBuffer>()
                  .Arg<xla::ffi::AnyBuffer>()
                  .Arg<xla::ffi::AnyBuffer>()
                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                  .Attr<int64_t>("window")
                  .Attr<float>("scale")
                  .Attr<float>("soft_cap")
                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>());

VERAX_HANDLER(verax_paged_attention_quantized, verax::paged_attention_quantized,
              xla::ffi::Ffi::Bind()
                  .Ctx<xla::ffi::ThreadPool>()
                  .Arg<xla::ffi::AnyBuffer>()
                  .Arg<xla::ffi::AnyBuffer>()
                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                  .Arg<xla::ffi::AnyBuffer>()
                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                  .Attr<int64_t>("window")
                  .Attr<float>("scale")
                  .Attr<float>("soft_cap")
                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>());
