// AVX2 kernels on processors that have the 256-bit dot products of AVX-VNNI and no AVX-512 (Alder
// Lake and its successors, Zen 5c): vpdpwssd takes 16 products and adds them, in place of a
// vpmaddwd and a vpaddd.
#if defined(__x86_64__)
#include "isa_avx2.h"

namespace kvproof {
namespace {

struct Avx2Vnni : Avx2 {
  static constexpr bool FUSED_MADD = true;
  static W madd(W acc, W a, W b) { return _mm256_dpwssd_avx_epi32(acc, a, b); }
};

}  // namespace

constinit const Kernels kernels_avx2vnni = make_kernels<Avx2Vnni>("avx2vnni");

}  // namespace kvproof
#endif
