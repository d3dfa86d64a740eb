// Checks of an FFI handler's arguments.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>

#include "xla/ffi/api/ffi.h"

namespace verax {

inline bool is_shape(::xla::ffi::Span<const int64_t> shape, std::initializer_list<int64_t> expected) {
  return std::equal(shape.begin(), shape.end(), expected.begin(), expected.end());
}

inline bool is_float(const ::xla::ffi::AnyBuffer& x) {
  return x.element_type() == ::xla::ffi::F32 || x.element_type() == ::xla::ffi::BF16;
}

}  // namespace verax
