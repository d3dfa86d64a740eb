// Which levels this machine runs, and which one is in force; the part of the C interface that Python calls directly.
#include "levels.h"

#include <atomic>
#include <cstring>

#include "export.h"

namespace verax {
namespace {

struct Choice {
  Level level;
  const char* name;
  bool runs_here;
};

// `__builtin_cpu_supports` also asks whether the operating system saves the registers.
const Choice* choices(int* count) {
  static const Choice table[] = {
      VERAX_IF_avx512_bf16({Level::avx512_bf16, "avx512_bf16",
                            __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni") &&
                                __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                                __builtin_cpu_supports("avx512dq")}, )
      VERAX_IF_avx512({Level::avx512, "avx512",
                       __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                           __builtin_cpu_supports("avx512dq")}, )
      VERAX_IF_avx2({Level::avx2, "avx2", __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")}, )
      VERAX_IF_neon({Level::neon, "neon", true}, )
      {Level::portable, "portable", true},
  };
  *count = sizeof(table) / sizeof(table[0]);
  return table;
}

const Choice* best() {
  int count;
  const Choice* choice = choices(&count);
  while (!choice->runs_here) ++choice;
  return choice;
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
