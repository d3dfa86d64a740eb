// Checks of an FFI handler's arguments.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <initializer_list>

#include "xla/ffi/api/ffi.h"

namespace verax {

inline bool is_shape(::xla::ffi::Span<const int64_t> shape, std::initializer_list<int64_t> expected) {
  return std::equal(shape.begin(), shape.end(), expected.begin(), expected.end());
}

inline bool is_float(const ::xla::ffi::AnyBuffer& x) {
  return x.element_type() == ::xla::ffi::F32 || x.element_type() == ::xla::ffi::BF16;
}

// Number of rows that are not padding, which may be given: [1], or [0] where all `rows` count.
using UsedRows = ::xla::ffi::Buffer<::xla::ffi::S32>;

inline int64_t used_rows(const UsedRows& used, int64_t rows) {
  return used.element_count() ? std::clamp<int64_t>(used.typed_data()[0], 0, rows) : rows;
}

// Zeros in the rows of padding of a result [M, N].
template <typename Buffer>
void clear_padding(Buffer& result, const UsedRows& used) {
  const auto shape = result.dimensions();
  if (result.size_bytes() == 0) return;
  const int64_t row = static_cast<int64_t>(result.size_bytes()) / shape[0], count = used_rows(used, shape[0]);
  std::memset(static_cast<char*>(result.untyped_data()) + count * row, 0, (shape[0] - count) * row);
}

}  // namespace verax
