// The operations of tiles_leaf.h in 256-bit registers. DOT adds products of four bytes to each
// lane: an instruction where the processor has it.
#pragma once

#define KVPROOF_LANES 8
#include <immintrin.h>

#include "tiles_leaf.h"

namespace kvproof {
namespace {

template <class DOT>
struct Avx2Tiles {
  static constexpr int OFFSET = 128, ROWS = 4;  // 16 registers
  static constexpr bool SIX_BITS = false;
  struct Table {  // vpshufb looks at four bits: entries of codes 0-15 and 16-31
    __m256i low, high;
  };
  static KVPROOF_INLINE Table table(const std::uint8_t* p) {
    const auto half = [&](int at) KVPROOF_LAMBDA {
      return _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(p + at)));
    };
    return {half(0), half(16)};
  }
  template <int K, int COPY>
  static KVPROOF_INLINE Bytes look_up(const Table& t, Bytes index) {
    constexpr int bits = low_bits(K);
    const Bytes first = index & std::uint8_t((1 << bits) - 1);
    if constexpr (!top_bit(K)) {
      return shuffle(t.low, first);
    } else if constexpr (bits == 2) {
      return shuffle(t.low, first | (right<COPY>(index) & std::uint8_t(4)));
    } else {
      return Bytes(_mm256_blendv_epi8(__m256i(shuffle(t.low, first)),
                                      __m256i(shuffle(t.high, first)),
                                      __m256i(left<3 - COPY>(index))));
    }
  }
  template <int MASK>
  static KVPROOF_INLINE Bytes merge(Bytes a, Bytes b) {  // mask ? a : b
    return (a & std::uint8_t(MASK)) | (b & std::uint8_t(~MASK));
  }
  static KVPROOF_INLINE Bytes bytes(Bytes x) { return x ^ std::uint8_t(OFFSET); }
  static KVPROOF_INLINE Ints dot(Ints sum, Bytes entry, const std::int8_t* a) {
    std::int32_t four;
    std::memcpy(&four, a, 4);
    return Ints(DOT::add(__m256i(sum), __m256i(entry), _mm256_set1_epi32(four)));
  }
  static KVPROOF_INLINE Floats larger(Floats a, Floats b) {
    return Floats(_mm256_max_ps(__m256(a), __m256(b)));
  }
  static KVPROOF_INLINE Floats larger_magnitude(Floats a, Floats b) {
    return larger(Floats(Ints(a) & 0x7fffffff), Floats(Ints(b) & 0x7fffffff));
  }
  static KVPROOF_INLINE float largest(Floats x) {
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(__m256(x)), _mm256_extractf128_ps(__m256(x), 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
  }
  template <class V>
  static KVPROOF_INLINE auto total(V x) {
    auto sum = x[0];
    for (int i = 1; i < LANES; ++i) sum += x[i];
    return sum;
  }
  static void widen(const std::uint8_t* halves, int n, float* out) {
    for (int i = 0; i < n; i += 8)
      _mm256_storeu_ps(
          out + i,
          _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(halves + 2 * i))));
  }

 private:
  static KVPROOF_INLINE Bytes shuffle(__m256i table, Bytes index) {
    return Bytes(_mm256_shuffle_epi8(table, __m256i(index)));
  }
};

}  // namespace
}  // namespace kvproof
