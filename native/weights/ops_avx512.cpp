#if defined(__x86_64__)
#if defined(__GNUC__) && !defined(__clang__)
// gcc 12 takes the deliberately undefined operands inside its own intrinsics for mistakes.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include "weights/transpose_avx2.h"

namespace kvproof::weights {
namespace {

struct Avx512 {
  static constexpr int W = 16, MR = 12, NR = 32;  // 24 sums, 2 weights, the rest for broadcasts
  using Vec = __m512;
  static Vec zero() { return _mm512_setzero_ps(); }
  static Vec load(const float* p) { return _mm512_loadu_ps(p); }
  static Vec broadcast(const float* p) { return _mm512_set1_ps(*p); }
  static void store(float* p, Vec a) { _mm512_storeu_ps(p, a); }
  static Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
  static Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
  static float sum(Vec a) { return _mm512_reduce_add_ps(a); }
  static void load_bf16_pairs(const uint16_t* p, Vec& even, Vec& odd) {
    const __m512i v = _mm512_loadu_si512(p);
    even = _mm512_castsi512_ps(_mm512_slli_epi32(v, 16));
    odd = _mm512_castsi512_ps(_mm512_and_si512(v, _mm512_set1_epi32(int(0xffff0000))));
  }
  static void panel(const uint16_t* w, size_t k, size_t cols, size_t depth, float* out) {
    transpose_panel_avx2<NR>(w, k, cols, depth, out);
  }
};

}  // namespace

const Ops ops_avx512 = make_ops<Avx512>("avx512");

}  // namespace kvproof::weights

#endif
