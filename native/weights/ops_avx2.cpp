#if defined(__x86_64__)

#include "weights/transpose_avx2.h"

namespace kvproof::weights {
namespace {

struct Avx2 {
  static constexpr int W = 8, MR = 6, NR = 16;  // 12 sums, 2 weights, 2 for broadcasts
  using Vec = __m256;
  static Vec zero() { return _mm256_setzero_ps(); }
  static Vec load(const float* p) { return _mm256_loadu_ps(p); }
  static Vec broadcast(const float* p) { return _mm256_broadcast_ss(p); }
  static void store(float* p, Vec a) { _mm256_storeu_ps(p, a); }
  static Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
  static Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
  static float sum(Vec a) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
  }
  static void load_bf16_pairs(const uint16_t* p, Vec& even, Vec& odd) {
    const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    even = _mm256_castsi256_ps(_mm256_slli_epi32(v, 16));
    odd = _mm256_castsi256_ps(_mm256_and_si256(v, _mm256_set1_epi32(int(0xffff0000))));
  }
  static void panel(const uint16_t* w, size_t k, size_t cols, size_t depth, float* out) {
    transpose_panel_avx2<NR>(w, k, cols, depth, out);
  }
};

}  // namespace

const Ops ops_avx2 = make_ops<Avx2>("avx2");

}  // namespace kvproof::weights

#endif
