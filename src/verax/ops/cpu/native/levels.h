// Instruction-set levels. Every file in kernels/ is compiled once for each level of the machine's architecture, inside
// the level's own namespace; which of them runs is decided at run time.
//
// This is the one list of levels, best first, which is the order of preference. build.py reads it too. It defines
// VERAX_HAS_<level> as 1 for each level that it compiles and as 0 for the others; VERAX_LEVEL in the kernels' units.
#pragma once

#define VERAX_CPU __builtin_cpu_supports  // the operating system saves the registers, too
#define VERAX_ARM ::verax::arm_has  // by the names of the architecture, without FEAT_
#define VERAX_AVX512 VERAX_CPU("avx512bw") && VERAX_CPU("avx512vl") && VERAX_CPU("avx512dq")

// The level amx has the processor's tiles or, for tests on other machines, emulated ones: VERAX_EMULATE_AMX, which
// build.py defines in its units and in levels.cc. VERAX_TILES is defined in its units.
#if defined(VERAX_EMULATE_AMX)
#define VERAX_AMX true
#else
#define VERAX_AMX ::verax::amx_permitted()
#endif
#if (defined(__AMX_BF16__) || defined(VERAX_EMULATE_AMX)) && !defined(VERAX_PORTABLE)
#define VERAX_TILES
#endif

// ROW(level, architecture, compiler flags, test of the processor, capabilities, ...), where `...` is the caller's.
//
// Capabilities: bf16_dot multiplies bfloat16, with sums of 32 bits; bf16_tiles multiplies 16 x 32 by 32 x 16 bfloat16 at
// once, or twice as many 8-bit integers; byte_dot multiplies integers of 8 bits, with sums of 32 bits; half_dot multiplies
// pairs of 16 bits, and adds in 32; fma multiplies and adds vectors of float32. The portable level is compiled with -O2,
// which takes half the time of -O3 for code that runs as fast, and without contraction: on ARM a product that is added to a
// constant, to be rounded to a whole number, would not be rounded first.
// clang-format off
#define VERAX_LEVELS(ROW, ...)                                                                              \
  ROW(amx, x86_64,                                                                                          \
      "-mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512vl -mavx512dq -mprefer-vector-width=512 "           \
      "-mavx512vnni -mavx512bf16 -mamx-tile -mamx-bf16 -mamx-int8",                                         \
      VERAX_AVX512 && VERAX_CPU("avx512vnni") && VERAX_CPU("avx512bf16") && VERAX_AMX,                      \
      "bf16_dot bf16_tiles byte_dot fma half_dot", __VA_ARGS__)                                             \
  ROW(avx512_bf16, x86_64,                                                                                  \
      "-mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512vl -mavx512dq -mprefer-vector-width=512 "           \
      "-mavx512vnni -mavx512bf16",                                                                          \
      VERAX_AVX512 && VERAX_CPU("avx512vnni") && VERAX_CPU("avx512bf16"), "bf16_dot byte_dot fma half_dot", \
      __VA_ARGS__)                                                                                          \
  ROW(avx512_vnni, x86_64,                                                                                  \
      "-mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512vl -mavx512dq -mprefer-vector-width=512 "           \
      "-mavx512vnni",                                                                                       \
      VERAX_AVX512 && VERAX_CPU("avx512vnni"), "byte_dot fma half_dot", __VA_ARGS__)                        \
  ROW(avx512, x86_64,                                                                                       \
      "-mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512vl -mavx512dq -mprefer-vector-width=512",           \
      VERAX_AVX512, "fma half_dot", __VA_ARGS__)                                                            \
  ROW(avx_vnni, x86_64, "-mavx2 -mfma -mf16c -mavxvnni",                                                    \
      VERAX_CPU("avx2") && VERAX_CPU("fma") && VERAX_CPU("avxvnni"), "byte_dot fma half_dot", __VA_ARGS__)  \
  ROW(avx2, x86_64, "-mavx2 -mfma -mf16c", VERAX_CPU("avx2") && VERAX_CPU("fma"), "fma half_dot",           \
      __VA_ARGS__)                                                                                          \
  ROW(neon_bf16, aarch64, "-march=armv8.2-a+dotprod+i8mm+bf16",                                             \
      VERAX_ARM("DotProd") && VERAX_ARM("I8MM") && VERAX_ARM("BF16"), "bf16_dot byte_dot fma", __VA_ARGS__) \
  ROW(neon_dot, aarch64, "-march=armv8.2-a+dotprod", VERAX_ARM("DotProd"), "byte_dot fma", __VA_ARGS__)     \
  ROW(neon, aarch64, "-march=armv8-a", true, "fma", __VA_ARGS__)                                            \
  ROW(portable, any, "-DVERAX_PORTABLE -O2 -ffp-contract=off", true, "", __VA_ARGS__)
// clang-format on

// `VERAX_WHEN(level)(text)`: the text if the level is compiled.
#define VERAX_WHEN(L) VERAX_PASTE(VERAX_WHEN_, VERAX_HAS_##L)
#define VERAX_WHEN_0(...)
#define VERAX_WHEN_1(...) __VA_ARGS__
#define VERAX_PASTE(a, b) VERAX_PASTE_TOKENS(a, b)
#define VERAX_PASTE_TOKENS(a, b) a##b

// Declares `void name(parameters)` in each level's namespace: `VERAX_DECLARE_KERNEL(linear, const LinearTask&)`.
#define VERAX_DECLARE_KERNEL(name, ...) VERAX_LEVELS(VERAX_DECLARE_AT, name, (__VA_ARGS__))
#define VERAX_DECLARE_AT(L, architecture, flags, runs_here, capabilities, name, parameters) \
  VERAX_WHEN(L)(namespace L { void name parameters; })

// The function of that name at the level in force, which is one of those that are compiled.
#define VERAX_KERNEL(name) (VERAX_LEVELS(VERAX_KERNEL_AT, name) nullptr)
#define VERAX_KERNEL_AT(L, architecture, flags, runs_here, capabilities, name) \
  VERAX_WHEN(L)(::verax::level() == ::verax::Level::L ? ::verax::L::name :)

#define VERAX_LEVEL_NAME(L, ...) L,

namespace verax {

// True if the processor has AMX, and the system lets this process use it: Linux does on request.
bool amx_permitted();
// True if the processor is an ARM one with FEAT_`feature`.
bool arm_has(const char* feature);

enum class Level { VERAX_LEVELS(VERAX_LEVEL_NAME, ) };

// The level in force: the best that this machine runs, unless `verax_set_level` chose another.
Level level();

}  // namespace verax
