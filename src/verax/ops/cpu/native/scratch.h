// Memory to work in.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

namespace verax {

// Memory on a cache line's boundary.
class AlignedBytes {
 public:
  explicit AlignedBytes(int64_t size) : size_(size), data_(::operator new(size, std::align_val_t{64})) {}
  ~AlignedBytes() { ::operator delete(data_, std::align_val_t{64}); }
  AlignedBytes(const AlignedBytes&) = delete;
  AlignedBytes& operator=(const AlignedBytes&) = delete;
  int64_t size() const { return size_; }
  void* data() const { return data_; }

 private:
  int64_t size_;
  void* data_;
};

// Memory of the calling thread, kept between calls: new memory would have to be mapped by the system each time. Each USE
// has its own.
template <int USE = 0>
inline void* thread_scratch(int64_t size) {
  thread_local std::unique_ptr<AlignedBytes> scratch;
  if (!scratch || scratch->size() < size) scratch = std::make_unique<AlignedBytes>(size);
  return scratch->data();
}

// Memory that one call's threads share. The largest of it is kept between calls, for the same reason.
class SharedScratch {
 public:
  explicit SharedScratch(int64_t size) {
    {
      const std::lock_guard<std::mutex> lock(mutex());
      memory_ = std::move(kept());
    }
    if (!memory_ || memory_->size() < size) memory_ = std::make_unique<AlignedBytes>(size);
  }
  ~SharedScratch() {
    const std::lock_guard<std::mutex> lock(mutex());
    if (!kept() || kept()->size() < memory_->size()) kept() = std::move(memory_);
  }
  SharedScratch(const SharedScratch&) = delete;
  SharedScratch& operator=(const SharedScratch&) = delete;
  void* data() const { return memory_->data(); }

 private:
  static std::mutex& mutex() {
    static std::mutex only;
    return only;
  }
  static std::unique_ptr<AlignedBytes>& kept() {
    static std::unique_ptr<AlignedBytes> largest;
    return largest;
  }
  std::unique_ptr<AlignedBytes> memory_;
};

}  // namespace verax
