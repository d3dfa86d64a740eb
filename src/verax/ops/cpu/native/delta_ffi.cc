// The FFI handler of kernels/delta.cc: sequences and heads shared over the threads, columns too where those are few.
#include <algorithm>
#include <vector>

#include "export.h"
#include "kernels/delta.h"
#include "pages.h"
#include "parallel.h"
#include "scratch.h"
#include "shapes.h"
#include "xla/ffi/api/ffi.h"

namespace verax {
namespace {

namespace ffi = ::xla::ffi;

// Bytes of state that an item may walk with: a part of the second cache level.
constexpr int64_t STATE_BYTES = 1 << 18;

// Items for each thread, if there is enough to divide: one thread may be slower than another.
constexpr int64_t ITEMS_PER_THREAD = 4;

// Columns are divided by multiples of this, and only where heads are few: each item works out the keys' part again.
constexpr int64_t COLUMNS = 32;

// Heads and columns of an item.
struct Division {
  int64_t heads, columns;
};

Division divide(int64_t N, int64_t HV, int64_t K, int64_t V, int64_t threads) {
  const int64_t fit = STATE_BYTES / 4 / std::max<int64_t>(1, delta_state_floats(K, V));
  const int64_t heads = std::clamp<int64_t>(N * HV / (ITEMS_PER_THREAD * threads), 1, std::max<int64_t>(1, fit));
  const int64_t parts = std::clamp<int64_t>((2 * threads + N * HV - 1) / (N * HV), 1, std::max<int64_t>(1, V / COLUMNS));
  return {heads, parts == 1 ? V : ((V + parts - 1) / parts + COLUMNS - 1) / COLUMNS * COLUMNS};
}

// Where the tokens of each sequence begin and end, in the arrays and in the chunks whose states are kept.
struct Sequence {
  int64_t first, tokens, batch, first_chunk;
};

ffi::Error delta(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> initial, ffi::AnyBuffer read, ffi::AnyBuffer erase,
                 ffi::AnyBuffer write, ffi::AnyBuffer v, ffi::Buffer<ffi::F32> beta, ffi::Buffer<ffi::F32> g,
                 ffi::Buffer<ffi::S32> offsets, float scale, bool normalize, bool erase_before_decay,
                 int64_t keep_every, ffi::ResultBuffer<ffi::F32> last, ffi::ResultBuffer<ffi::F32> out,
                 ffi::ResultBuffer<ffi::F32> kept) {
  const auto keys = read.dimensions(), values = v.dimensions(), gates = g.dimensions(), states = initial.dimensions();
  if (keys.size() != 4 || values.size() != 4 || states.size() != 4) {
    return ffi::Error::InvalidArgument("delta: expected keys [B, T, H, K], v [B, T, HV, V], states [N, HV, K, V]");
  }
  const int64_t B = keys[0], T = keys[1], H = keys[2], K = keys[3], HV = values[2], V = values[3], N = states[0];
  const bool packed = offsets.element_count() > 0;
  const bool by_channel = gates.size() == 4;
  if (!is_shape(erase.dimensions(), {B, T, H, K}) || !is_shape(write.dimensions(), {B, T, H, K}) ||
      !is_shape(values, {B, T, HV, V}) || !is_shape(beta.dimensions(), {B, T, HV}) ||
      !(by_channel ? is_shape(gates, {B, T, HV, K}) : is_shape(gates, {B, T, HV})) ||
      !is_shape(states, {N, HV, K, V}) || !is_shape(last->dimensions(), {N, HV, K, V}) ||
      !is_shape(out->dimensions(), {B, T, HV, V}) || (H ? HV % H : HV)) {
    return ffi::Error::InvalidArgument("delta: shapes do not fit each other");
  }
  if (packed ? B != 1 || static_cast<int64_t>(offsets.element_count()) != N + 1 : B != N) {
    return ffi::Error::InvalidArgument("delta: expected a state for each sequence, or offsets [N + 1] in a batch of 1");
  }
  const int64_t chunks = keep_every ? kept->dimensions()[0] : 0;
  if (keep_every < 0 || keep_every % DELTA_CHUNK ||
      (keep_every && !is_shape(kept->dimensions(), {chunks, B, HV, K, V}))) {
    return ffi::Error::InvalidArgument("delta: expected kept states [n, B, HV, K, V], and a multiple of 16 tokens");
  }
  const auto dtype = read.element_type();
  if ((dtype != ffi::F32 && dtype != ffi::BF16) || erase.element_type() != dtype || write.element_type() != dtype ||
      v.element_type() != dtype) {
    return ffi::Error::InvalidArgument("delta: expected keys and values of float32 or of bfloat16");
  }
  const DeltaTask task{H,
                       HV,
                       K,
                       V,
                       read.untyped_data(),
                       erase.untyped_data(),
                       write.untyped_data(),
                       v.untyped_data(),
                       dtype == ffi::BF16,
                       beta.typed_data(),
                       g.typed_data(),
                       by_channel,
                       erase_before_decay,
                       normalize,
                       scale,
                       keep_every,
                       out->typed_data()};

  std::vector<Sequence> sequences;
  int64_t chunk = 0;
  if (packed) {
    int64_t done = 0;  // tokens that have an owner; the others come out zero
    for (int64_t n = 0; n < N; ++n) {
      const int64_t first = std::clamp<int64_t>(offsets.typed_data()[n], done, T);
      const int64_t end = std::clamp<int64_t>(offsets.typed_data()[n + 1], first, T);
      std::fill(task.out + done * HV * V, task.out + first * HV * V, 0.0f);
      sequences.push_back({first, end - first, 0, chunk});
      if (keep_every) chunk += (end - first + keep_every - 1) / keep_every;
      done = end;
    }
    std::fill(task.out + done * HV * V, task.out + T * HV * V, 0.0f);
  } else {
    for (int64_t b = 0; b < B; ++b) sequences.push_back({b * T, T, b, 0});
    if (keep_every) chunk = (T + keep_every - 1) / keep_every;
  }
  const int64_t head_size = K * V, kept_stride = B * HV * head_size;
  if (keep_every) {
    if (chunk > chunks) return ffi::Error::InvalidArgument("delta: more chunks than kept states");
    std::fill(kept->typed_data() + chunk * kept_stride, kept->typed_data() + kept->element_count(), 0.0f);
  }

  if (N * HV == 0 || V == 0) return ffi::Error::Success();
  ask_for_large_pages(task.out, out->size_bytes());
  const Division division = divide(N, HV, K, V, pool.num_threads());
  const int64_t groups = (HV + division.heads - 1) / division.heads;
  const int64_t parts = (V + division.columns - 1) / division.columns;
  const auto walk = VERAX_KERNEL(delta);
  const int64_t scratch = delta_scratch_bytes(K, division.columns, division.heads);
  parallel_for(pool, N * groups * parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t part = i % parts, group = i / parts % groups, n = i / parts / groups;
      const Sequence& sequence = sequences[n];
      DeltaItem item{};
      item.first = sequence.first;
      item.tokens = sequence.tokens;
      item.first_head = group * division.heads;
      item.heads = std::min(HV - item.first_head, division.heads);
      item.begin = part * division.columns;
      item.end = std::min(V, item.begin + division.columns);
      item.initial = initial.typed_data() + n * HV * head_size;
      item.last = last->typed_data() + n * HV * head_size;
      if (keep_every) {
        item.kept = kept->typed_data() + sequence.first_chunk * kept_stride + sequence.batch * HV * head_size;
        item.kept_stride = kept_stride;
      }
      walk(task, item, thread_scratch(scratch));
    }
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace verax

VERAX_HANDLER(verax_delta, verax::delta,
              xla::ffi::Ffi::Bind()
                  .Ctx<xla::ffi::ThreadPool>()
                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                  .Arg<xla::ffi::AnyBuffer>()
                  .Arg<xla::ffi::AnyBuffer>()
                  .Arg<xla::ffi::AnyBuffer>()
                  .Arg<xla::ffi::AnyBuffer>()
                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                  .Attr<float>("scale")
                  .Attr<bool>("normalize")
                  .Attr<bool>("erase_before_decay")
                  .Attr<int64_t>("keep_every")
                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>());
