// What each set of kernels needs that is not here: names of instructions, or "" where it can run.
// The whole file of a set is compiled for all of its instructions, so all must be there.
#pragma once

#include <initializer_list>
#include <string>

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace kvproof {
namespace {

struct Feature {
  const char* name;
  bool here;
};

inline std::string missing(std::initializer_list<Feature> features) {
  std::string names;
  for (const Feature& feature : features)
    if (!feature.here) names += (names.empty() ? "" : ", ") + std::string(feature.name);
  return names;
}

#if defined(__x86_64__)
// __builtin_cpu_supports also asks whether the system saves the registers.
inline std::string missing_for_avx2() {
  __builtin_cpu_init();
  return missing({{"AVX2", __builtin_cpu_supports("avx2") != 0},
                  {"FMA", __builtin_cpu_supports("fma") != 0},
                  {"F16C", __builtin_cpu_supports("f16c") != 0},
                  {"BMI1", __builtin_cpu_supports("bmi") != 0},
                  {"BMI2", __builtin_cpu_supports("bmi2") != 0}});
}

inline std::string missing_for_avx2vnni() {
  if (std::string avx2 = missing_for_avx2(); !avx2.empty()) return avx2;
  // Asked directly: not every compiler knows its name. Its registers are those of AVX2.
  unsigned eax = 0, ebx, ecx, edx;
  const bool leaf = __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx);
  return missing({{"AVX-VNNI", leaf && (eax >> 4 & 1)}});
}

inline std::string missing_for_avx512() {
  if (std::string avx2 = missing_for_avx2(); !avx2.empty()) return avx2;
  return missing({{"AVX512F", __builtin_cpu_supports("avx512f") != 0},
                  {"AVX512BW", __builtin_cpu_supports("avx512bw") != 0},
                  {"AVX512DQ", __builtin_cpu_supports("avx512dq") != 0},
                  {"AVX512VL", __builtin_cpu_supports("avx512vl") != 0},
                  {"AVX512_VNNI", __builtin_cpu_supports("avx512vnni") != 0},
                  {"AVX512_VBMI", __builtin_cpu_supports("avx512vbmi") != 0}});
}

// AMX with int8, and the system's leave to use its registers: Linux gives it to a process that
// asks.
inline std::string missing_for_amx() {
  if (std::string avx512 = missing_for_avx512(); !avx512.empty()) return avx512;
  unsigned eax, ebx, ecx, edx = 0;
  const bool leaf = __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx);
  const bool tile = leaf && (edx >> 24 & 1), int8 = leaf && (edx >> 25 & 1);
  bool leave = false;
#if defined(__linux__)
  constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, TILE_DATA = 18;
  leave = tile && syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) == 0;
#endif
  return missing({{"AMX-TILE", tile}, {"AMX-INT8", int8}, {"the system's leave for AMX", leave}});
}

inline std::string missing_for_neon() { return "AArch64"; }
#else
inline std::string missing_for_avx2() { return "x86-64"; }
inline std::string missing_for_avx2vnni() { return "x86-64"; }
inline std::string missing_for_avx512() { return "x86-64"; }
inline std::string missing_for_amx() { return "x86-64"; }
#if defined(__aarch64__) && defined(__linux__)
// Older processors have NEON without the dot products (Cortex-A72).
inline std::string missing_for_neon() {
  constexpr unsigned long DOT_PRODUCTS = 1 << 20;  // HWCAP_ASIMDDP
  return missing({{"dot products (FEAT_DotProd)", (getauxval(AT_HWCAP) & DOT_PRODUCTS) != 0}});
}
#elif defined(__aarch64__) && defined(__APPLE__)
inline std::string missing_for_neon() { return ""; }  // from the first Apple silicon on
#else
inline std::string missing_for_neon() { return "AArch64 with Linux or macOS"; }
#endif
#endif

}  // namespace
}  // namespace kvproof
