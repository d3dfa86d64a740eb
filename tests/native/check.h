// What the native tests share: numbers, a thread pool, all levels in turn, and a count of what failed.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <random>
#include <thread>
#include <vector>

extern "C" const char* verax_level_name(int i);
extern "C" int verax_set_level(const char* name);
extern "C" int verax_level_has(const char* capability);

namespace check {

inline int failures = 0;

template <typename... Values>
inline void that(bool holds, const char* format, Values... values) {
  if (holds) return;
  if (++failures <= 10) {
    std::printf(format, values...);
    std::printf("\n");
  }
}

// Runs tasks on threads of its own, as late as it likes; `join` waits for them.
class Pool {
 public:
  explicit Pool(int threads) : size_(threads) {}
  ~Pool() { join(); }
  int64_t num_threads() const { return size_; }
  void Schedule(std::function<void()> task) { threads_.emplace_back(std::move(task)); }
  void join() {
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
  }

 private:
  int size_;
  std::vector<std::thread> threads_;
};

template <typename Body>
void each_level(Body body) {
  for (int i = 0; const char* name = verax_level_name(i); ++i) {
    verax_set_level(name);
    body(name);
  }
}

// On the heap and not a byte longer than asked: the address sanitiser then sees every read past the end.
inline std::vector<float> normal(int64_t size, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> distribution;
  std::vector<float> values(size);
  for (float& value : values) value = distribution(generator);
  values.shrink_to_fit();
  return values;
}

inline uint16_t to_bf16(float x) {  // to nearest even; no NaN here
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
inline float from_bf16(uint16_t x) {
  const uint32_t bits = uint32_t{x} << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

}  // namespace check
