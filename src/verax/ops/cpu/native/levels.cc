// Which levels this machine runs, and which one is in force; the part of the C interface that Python calls directly.
#include "levels.h"

#include <atomic>
#include <cstring>

#include "export.h"

#if defined(__linux__) && defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__linux__) && defined(__aarch64__)
#include <sys/auxv.h>
#elif defined(__APPLE__) && defined(__aarch64__)
#include <sys/sysctl.h>

#include <string>
#endif

namespace verax {

bool amx_permitted() {
#if defined(__linux__) && defined(__x86_64__)
  constexpr unsigned WANTED = 1u << 22 | 1u << 24 | 1u << 25;  // bfloat16, tiles, 8-bit integers
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & WANTED) != WANTED) return false;
  constexpr long REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
#else
  return false;
#endif
}

bool arm_has([[maybe_unused]] const char* feature) {
#if defined(__linux__) && defined(__aarch64__)
  struct Bit {
    const char* feature;
    unsigned long word;
    int bit;
  };
  // By number: the C library of an older system has no names for all of them.
  constexpr Bit BITS[] = {{"DotProd", AT_HWCAP, 20}, {"I8MM", AT_HWCAP2, 13}, {"BF16", AT_HWCAP2, 14}};
  for (const Bit& each : BITS) {
    if (std::strcmp(each.feature, feature) == 0) return getauxval(each.word) >> each.bit & 1;
  }
  return false;
#elif defined(__APPLE__) && defined(__aarch64__)
  int has = 0;
  std::size_t size = sizeof has;
  const std::string name = std::string("hw.optional.arm.FEAT_") + feature;
  return sysctlbyname(name.c_str(), &has, &size, nullptr, 0) == 0 && has;
#else
  return false;
#endif
}

namespace {

struct Choice {
  Level level;
  const char* name;
  bool runs_here;
  const char* capabilities;  // words
};

#define VERAX_CHOICE(L, architecture, flags, runs_here, capabilities, ...) \
  VERAX_WHEN(L)({Level::L, #L, runs_here, capabilities}, )

const Choice* choices(int* count) {
  static const Choice table[] = {VERAX_LEVELS(VERAX_CHOICE, )};
  *count = sizeof(table) / sizeof(table[0]);
  return table;
}

// Null if this machine runs none: then no level has a name, and nobody calls a kernel.
const Choice* best() {
  int count;
  const Choice* table = choices(&count);
  for (int i = 0; i < count; ++i) {
    if (table[i].runs_here) return table + i;
  }
  return nullptr;
}

std::atomic<const Choice*>& current() {
  static std::atomic<const Choice*> choice{best()};
  return choice;
}

}  // namespace

Level level() { return current().load(std::memory_order_relaxed)->level; }

}  // namespace verax

// The name of the i-th level that this machine runs, best first; null past the last.
VERAX_EXPORT const char* verax_level_name(int i) {
  int count;
  const verax::Choice* choice = verax::choices(&count);
  for (const verax::Choice* end = choice + count; choice != end; ++choice) {
    if (choice->runs_here && i-- == 0) return choice->name;
  }
  return nullptr;
}

// The name of the level in force.
VERAX_EXPORT const char* verax_level() { return verax::current().load()->name; }

// 1 if the level in force has the capability.
VERAX_EXPORT int verax_level_has(const char* capability) {
  const std::size_t length = std::strlen(capability);
  const char* words = verax::current().load()->capabilities;
  while (*words) {
    const std::size_t word = std::strcspn(words, " ");
    if (word == length && std::strncmp(words, capability, length) == 0) return 1;
    words += word;
    words += std::strspn(words, " ");
  }
  return 0;
}

// Put a level in force for the whole process; 0 if this machine cannot run it.
VERAX_EXPORT int verax_set_level(const char* name) {
  int count;
  const verax::Choice* choice = verax::choices(&count);
  for (const verax::Choice* end = choice + count; choice != end; ++choice) {
    if (choice->runs_here && std::strcmp(choice->name, name) == 0) {
      verax::current().store(choice);
      return 1;
    }
  }
  return 0;
}
