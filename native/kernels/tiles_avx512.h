// The operations of tiles_leaf.h in AVX-512, for the dot products of VNNI and for AMX.
#pragma once

#if defined(__GNUC__) && !defined(__clang__)  // GCC 12 warns of its own headers
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>

#include "tiles_leaf.h"

namespace kvproof {
namespace {

template <int SHIFT>
struct Avx512Tiles {
  static constexpr int OFFSET = SHIFT, ROWS = 8;
  static constexpr bool SIX_BITS = true;
  using Table = __m512i;
  static KVPROOF_INLINE Table table(const std::uint8_t* p) { return _mm512_load_si512(p); }
  template <int K, int COPY>
  static KVPROOF_INLINE Bytes look_up(Table t, Bytes index) {
    return Bytes(_mm512_permutexvar_epi8(__m512i(index), t));
  }
  template <int MASK>
  static KVPROOF_INLINE Bytes merge(Bytes a, Bytes b) {  // mask ? a : b
    return Bytes(_mm512_ternarylogic_epi32(_mm512_set1_epi8(MASK), __m512i(a), __m512i(b), 0xca));
  }
  static KVPROOF_INLINE Bytes even_odd(Bytes even, Bytes odd) {  // bytes of each
    return Bytes(_mm512_mask_blend_epi8(0xaaaaaaaaaaaaaaaa, __m512i(even), __m512i(odd)));
  }
  static KVPROOF_INLINE Shorts scaled(Shorts x, Shorts factor) {  // x * factor / 2^15, rounded
    return Shorts(_mm512_mulhrs_epi16(__m512i(x), __m512i(factor)));
  }
  static KVPROOF_INLINE Bytes bytes(Bytes x) { return OFFSET ? x ^ std::uint8_t(OFFSET) : x; }
  static KVPROOF_INLINE Ints dot(Ints sum, Bytes entry, const std::int8_t* a) {
    std::int32_t four;
    std::memcpy(&four, a, 4);
    return Ints(_mm512_dpbusd_epi32(__m512i(sum), __m512i(entry), _mm512_set1_epi32(four)));
  }
  static KVPROOF_INLINE Floats larger(Floats a, Floats b) {
    return Floats(_mm512_max_ps(__m512(a), __m512(b)));
  }
  static KVPROOF_INLINE Floats larger_magnitude(Floats a, Floats b) {
    return Floats(_mm512_range_ps(__m512(a), __m512(b), 0x0b));  // of magnitudes, the larger
  }
  static KVPROOF_INLINE float largest(Floats x) { return _mm512_reduce_max_ps(__m512(x)); }
  static KVPROOF_INLINE float total(Floats x) { return _mm512_reduce_add_ps(__m512(x)); }
  static KVPROOF_INLINE std::int32_t total(Ints x) { return _mm512_reduce_add_epi32(__m512i(x)); }
  static void widen(const std::uint8_t* halves, int n, float* out) {
    for (int i = 0; i < n; i += 16)
      _mm512_storeu_ps(
          out + i,
          _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(halves + 2 * i))));
  }
};

}  // namespace
}  // namespace kvproof
