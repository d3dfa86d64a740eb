// What the native tests share: numbers, a thread pool, all levels in turn, and a count of what failed.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <new>
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

// Runs `body` at every level; the exit status of a program.
template <typename Body>
int main_of(const char* name, Body body) {
  each_level([&](const char* level) {
    body(level);
    std::printf("%s: checked\n", level);
  });
  std::printf("%s: %d failures\n", name, failures);
  return failures != 0;
}

// True if two arrays have the same bits.
template <typename Value>
bool same(const std::vector<Value>& a, const std::vector<Value>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(Value)) == 0);
}

// Checks that |got - expected| <= allowed at `at` of what the format and its values name.
template <typename... Values>
void near(double got, double expected, double allowed, const char* format, Values... values) {
  if (std::fabs(got - expected) <= allowed) return;
  that(false, format, values...);
  if (failures <= 10) std::printf("  %g, expected %g\n", got, expected);
}

struct Freed {
  void operator()(void* p) const { ::operator delete(p, std::align_val_t{64}); }
};
inline std::unique_ptr<void, Freed> aligned(int64_t bytes) {
  return std::unique_ptr<void, Freed>(::operator new(bytes, std::align_val_t{64}));
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
