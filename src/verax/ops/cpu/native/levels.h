// Instruction-set levels. Every file in kernels/ is compiled once for each level of the machine's architecture, inside
// the level's own namespace; which of them runs is decided at run time.
//
// The build defines VERAX_HAS_<level> for each level that it compiles, and VERAX_LEVEL in the kernels' own units.
// Best first, which is the order of preference, wherever levels are listed.
#pragma once

#ifdef VERAX_HAS_avx512_bf16
#define VERAX_IF_avx512_bf16(...) __VA_ARGS__
#else
#define VERAX_IF_avx512_bf16(...)
#endif
#ifdef VERAX_HAS_avx512
#define VERAX_IF_avx512(...) __VA_ARGS__
#else
#define VERAX_IF_avx512(...)
#endif
#ifdef VERAX_HAS_avx2
#define VERAX_IF_avx2(...) __VA_ARGS__
#else
#define VERAX_IF_avx2(...)
#endif
#ifdef VERAX_HAS_neon
#define VERAX_IF_neon(...) __VA_ARGS__
#else
#define VERAX_IF_neon(...)
#endif

// Declares `void name(parameters)` in each level's namespace: `VERAX_DECLARE_KERNEL(linear, const LinearTask&)`.
#define VERAX_DECLARE_KERNEL(name, ...)                              \
  VERAX_IF_avx512_bf16(namespace avx512_bf16 { void name(__VA_ARGS__); }) \
  VERAX_IF_avx512(namespace avx512 { void name(__VA_ARGS__); })      \
  VERAX_IF_avx2(namespace avx2 { void name(__VA_ARGS__); })          \
  VERAX_IF_neon(namespace neon { void name(__VA_ARGS__); })          \
  namespace portable { void name(__VA_ARGS__); }

// The function of that name at the level in force.
#define VERAX_KERNEL(name)                                                                          \
  (VERAX_IF_avx512_bf16(::verax::level() == ::verax::Level::avx512_bf16 ? ::verax::avx512_bf16::name :) \
   VERAX_IF_avx512(::verax::level() == ::verax::Level::avx512 ? ::verax::avx512::name :)           \
   VERAX_IF_avx2(::verax::level() == ::verax::Level::avx2 ? ::verax::avx2::name :)                 \
   VERAX_IF_neon(::verax::level() == ::verax::Level::neon ? ::verax::neon::name :)                 \
   ::verax::portable::name)

namespace verax {

enum class Level { avx512_bf16, avx512, avx2, neon, portable };

// The level in force: the best that this machine runs, unless `verax_set_level` chose another.
Level level();

}  // namespace verax
