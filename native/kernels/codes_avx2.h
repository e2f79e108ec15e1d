// Unpacking of stored codes with 256-bit instructions, shared by the AVX2 and AVX-512 kernels.
//
// A group of 32 codes becomes one register of 32 bytes in natural order: broadcast the packed
// bytes, shift every lane by its own amount, mask.
#pragma once

// GCC 12 takes its own undefined-on-purpose registers for uninitialised ones (GCC bug 105593).
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop

#include "half.h"
#include "kernels.h"

namespace kvproof {
namespace {

struct CodesAvx2 {
  using Codes = __m256i;

  struct Nibbles {  // the 16 bytes of a group of 4-bit codes, as stored
    __m128i bytes;
    operator Codes() const {
      const __m256i shift = _mm256_setr_epi64x(0, 0, 4, 4);
      return _mm256_and_si256(_mm256_srlv_epi64(_mm256_broadcastsi128_si256(bytes), shift),
                              _mm256_set1_epi8(15));
    }
  };
  static Nibbles codes4(const std::uint8_t* p) {
    return {_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))};
  }
  static Nibbles codes4_half(const std::uint8_t* p) {
    return {_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))};
  }

  static Codes planes(std::uint64_t low, std::uint32_t high) {
    const __m256i two = _mm256_and_si256(
        _mm256_srlv_epi64(_mm256_set1_epi64x(std::int64_t(low)), _mm256_setr_epi64x(0, 2, 4, 6)),
        _mm256_set1_epi8(3));
    const __m256i spread = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1,  //
                                            2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3);
    const __m256i bit = _mm256_set1_epi64x(std::int64_t(0x8040201008040201));
    const __m256i bytes = _mm256_shuffle_epi8(_mm256_set1_epi32(std::int32_t(high)), spread);
    const __m256i third =
        _mm256_and_si256(_mm256_cmpeq_epi8(_mm256_and_si256(bytes, bit), bit), _mm256_set1_epi8(4));
    return _mm256_or_si256(two, third);
  }
  static Codes codes3_planes(const std::uint8_t* low, const std::uint8_t* high) {
    std::uint64_t l;
    std::uint32_t h;
    std::memcpy(&l, low, 8);
    std::memcpy(&h, high, 4);
    return planes(l, h);
  }
  static Codes codes3_planes_half(const std::uint8_t* low, const std::uint8_t* high) {
    std::uint32_t l;
    std::memcpy(&l, low, 4);
    std::uint32_t h = load_u16(high);  // four bits to the low half of each byte
    h = (h | h << 8) & 0x00ff00ff;
    h = (h | h << 4) & 0x0f0f0f0f;
    return planes(l, h);
  }

  static Codes codes3_stream(const std::uint8_t* p) {
    // Four codes are 12 bits: each 32-bit lane takes the two bytes they start in, then spreads
    // them to its four bytes. Two overlapping loads stay inside the 12 bytes.
    std::uint64_t first;
    std::uint32_t rest;
    std::memcpy(&first, p, 8);
    std::memcpy(&rest, p + 8, 4);
    const __m256i bytes =
        _mm256_broadcastsi128_si256(_mm_set_epi64x(std::int64_t(rest), std::int64_t(first)));
    const __m256i place =
        _mm256_setr_epi8(0, 1, -1, -1, 1, 2, -1, -1, 3, 4, -1, -1, 4, 5, -1, -1,  //
                         6, 7, -1, -1, 7, 8, -1, -1, 9, 10, -1, -1, 10, 11, -1, -1);
    __m256i x = _mm256_srlv_epi32(_mm256_shuffle_epi8(bytes, place),
                                  _mm256_setr_epi32(0, 4, 0, 4, 0, 4, 0, 4));
    x = _mm256_and_si256(_mm256_or_si256(x, _mm256_slli_epi32(x, 10)),
                         _mm256_set1_epi32(0x003f003f));
    return _mm256_and_si256(_mm256_or_si256(x, _mm256_slli_epi32(x, 5)),
                            _mm256_set1_epi32(0x07070707));
  }

  static Codes codes8(const std::uint8_t* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }
  static void store_codes(std::uint8_t* p, Codes codes) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), codes);
  }
};

}  // namespace
}  // namespace kvproof
