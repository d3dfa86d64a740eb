// Large pages for results that a kernel writes for the first time.
#pragma once

#include <cstdint>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace verax {

constexpr int64_t LARGE_PAGE = 1 << 21;  // bytes, on x86-64 and most of ARM's Linux

// Asks for large pages where `size` bytes lie. XLA's results are new memory in every call, which the system hands out
// page by page as it is written to: in small ones that takes as long as many a kernel. Only a hint, and none of them if
// no whole large page fits.
inline void ask_for_large_pages(void* data, int64_t size) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + LARGE_PAGE - 1) & -static_cast<uintptr_t>(LARGE_PAGE);
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + size) & -static_cast<uintptr_t>(LARGE_PAGE);
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  static_cast<void>(data), static_cast<void>(size);
#endif
}

}  // namespace verax
