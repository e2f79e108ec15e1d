// Unpacking of stored codes, and the search through a trellis, with 256-bit instructions: shared by
// the AVX2 and AVX-512 kernels.
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
    return _mm256_or_si256(two, _mm256_and_si256(natural_codes(high), _mm256_set1_epi8(4)));
  }
  // Bytes of all ones where the bit of a value is set: bits in natural order, or by steps of the
  // trellis formats (bits 4j .. 4j + 3 are values j, j + 8, j + 16, j + 24).
  static Codes natural_codes(std::uint32_t bits) {
    const __m256i spread = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1,  //
                                            2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3);
    return test(bits, spread, _mm256_set1_epi64x(std::int64_t(0x8040201008040201)));
  }
  static Codes step_codes(std::uint32_t bits) {
    const __m256i spread = _mm256_set1_epi64x(0x0303020201010000);
    const __m256i bit = _mm256_setr_epi64x(0x1001100110011001, 0x2002200220022002,
                                           0x4004400440044004, std::int64_t(0x8008800880088008));
    return test(bits, spread, bit);
  }
  static Codes test(std::uint32_t bits, __m256i spread, __m256i bit) {
    const __m256i bytes = _mm256_shuffle_epi8(_mm256_set1_epi32(std::int32_t(bits)), spread);
    return _mm256_cmpeq_epi8(_mm256_and_si256(bytes, bit), bit);
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

  // First i of before[i] + (y - value[i])^2 == sum, which one of them is.
  static int first_of_eight(float sum, const float* before, float y, const float* value) {
    const __m256 miss = _mm256_sub_ps(_mm256_set1_ps(y), _mm256_loadu_ps(value));
    const __m256 sums = _mm256_add_ps(_mm256_loadu_ps(before), _mm256_mul_ps(miss, miss));
    const __m256 same = _mm256_cmp_ps(sums, _mm256_set1_ps(sum), _CMP_EQ_OQ);
    return __builtin_ctz(unsigned(_mm256_movemask_ps(same)) | 0x80);
  }
  // 8 x 8 floats, columns for rows.
  static void turn8x8(const float* from, float* to) {
    __m256 two[8], four[8];
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
      const __m256 a = _mm256_loadu_ps(from + 8 * i), b = _mm256_loadu_ps(from + 8 * i + 8);
      two[i] = _mm256_unpacklo_ps(a, b);
      two[i + 1] = _mm256_unpackhi_ps(a, b);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4)
#pragma GCC unroll 2
      for (int k = 0; k < 2; ++k) {
        const __m256d a = _mm256_castps_pd(two[i + k]), b = _mm256_castps_pd(two[i + k + 2]);
        four[i + 2 * k] = _mm256_castpd_ps(_mm256_unpacklo_pd(a, b));
        four[i + 2 * k + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(a, b));
      }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      _mm256_storeu_ps(to + 8 * i, _mm256_permute2f128_ps(four[i], four[i + 4], 0x20));
      _mm256_storeu_ps(to + 8 * i + 32, _mm256_permute2f128_ps(four[i], four[i + 4], 0x31));
    }
  }

  static Codes codes8(const std::uint8_t* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }
  static Codes codes8_half(const std::uint8_t* p) {
    return _mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static void store_codes(std::uint8_t* p, Codes codes) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), codes);
  }

  // Repacking: bits to every second bit, carry-less products, 32-entry lookups.
  static std::uint64_t every_second(std::uint32_t bits) {
    return _pdep_u64(bits, 0x5555555555555555);
  }
  static std::uint64_t carryless(std::uint64_t x, std::uint32_t taps) {
    return std::uint64_t(_mm_cvtsi128_si64(_mm_clmulepi64_si128(
        _mm_cvtsi64_si128(std::int64_t(x)), _mm_cvtsi64_si128(std::int64_t(taps)), 0)));
  }
  struct ByteLut {
    __m256i low, high;
    explicit ByteLut(const std::int8_t* e) : low(twice(e)), high(twice(e + 16)) {}
    static __m256i twice(const std::int8_t* e) {
      return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(e)));
    }
    // 32 bytes of the codes whose low nibbles are `even` and `odd` and whose fifth bits are masks.
    void store(std::uint64_t even, std::uint64_t odd, Codes fifth, std::uint8_t* out) const {
      const Codes nibbles = Nibbles{_mm_set_epi64x(std::int64_t(odd), std::int64_t(even))};
      store_codes(out, _mm256_blendv_epi8(_mm256_shuffle_epi8(low, nibbles),
                                          _mm256_shuffle_epi8(high, nibbles), fifth));
    }
  };

  // Costs of all states after n steps of each walk, and for each step and state whether the higher
  // predecessor was the cheaper one. Distances [walk][n][4], decisions [walk][n][states / 8].
  static void walk(const float* distance, int n, int walks, const Trellis& trellis,
                   float (*cost)[MAX_STATES], std::uint8_t* decisions) {
    if (trellis.states == 8) {
      if (walks == 1) walk8<1>(distance, n, trellis, cost, decisions);
      if (walks == 2) walk8<2>(distance, n, trellis, cost, decisions);
      if (walks == 3) walk8<3>(distance, n, trellis, cost, decisions);
      if (walks == 4) walk8<4>(distance, n, trellis, cost, decisions);
      return;
    }
    for (int w = 0; w < walks; ++w)
      walk64(distance + w * 4 * n, n, trellis, cost[w], decisions + w * n * (MAX_STATES / 8));
  }

 private:
  static __m256i subsets(const Trellis& trellis, int first) {
    return _mm256_cvtepu8_epi32(
        _mm_loadl_epi64(reinterpret_cast<const __m128i*>(trellis.subset_of + first)));
  }
  static __m256 four(const float* distance) {
    return _mm256_broadcast_ps(reinterpret_cast<const __m128*>(distance));
  }
  static std::uint8_t less(__m256 a, __m256 b) {
    return std::uint8_t(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_LT_OQ)));
  }

  template <int WALKS>
  static void walk8(const float* distance, int n, const Trellis& trellis, float (*cost)[MAX_STATES],
                    std::uint8_t* decisions) {
    const __m256i low_states = _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3);
    const __m256i high_states = _mm256_setr_epi32(4, 4, 5, 5, 6, 6, 7, 7);
    const __m256i select_low = subsets(trellis, 0), select_high = subsets(trellis, 8);
    __m256 all[WALKS];
#pragma GCC unroll 4
    for (int w = 0; w < WALKS; ++w) all[w] = _mm256_load_ps(cost[w]);
    for (int t = 0; t < n; ++t) {
#pragma GCC unroll 4
      for (int w = 0; w < WALKS; ++w) {
        const __m256 d = four(distance + 4 * (w * n + t));
        const __m256 low = _mm256_add_ps(_mm256_permutevar8x32_ps(all[w], low_states),
                                         _mm256_permutevar_ps(d, select_low));
        const __m256 high = _mm256_add_ps(_mm256_permutevar8x32_ps(all[w], high_states),
                                          _mm256_permutevar_ps(d, select_high));
        decisions[w * n + t] = less(high, low);
        all[w] = _mm256_min_ps(high, low);
      }
    }
#pragma GCC unroll 4
    for (int w = 0; w < WALKS; ++w) _mm256_store_ps(cost[w], all[w]);
  }

  // A register of eight states takes its subsets from one pattern, XORed with a number of its own:
  // subsets are linear in the bits of the path.
  static void walk64(const float* distance, int n, const Trellis& trellis, float* cost,
                     std::uint8_t* decisions) {
    constexpr int STATES = 64;
    const __m256i select = subsets(trellis, 0);
    const __m256i pairs = _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3);
    alignas(32) float next[STATES], added[4][8];
    const float* low_added[STATES / 8];
    const float* high_added[STATES / 8];
    for (int r = 0; r < STATES / 8; ++r) {
      low_added[r] = added[trellis.subset_of[8 * r]];
      high_added[r] = added[trellis.subset_of[STATES + 8 * r]];
    }
    float *from = cost, *to = next;
    for (int t = 0; t < n; ++t) {
      for (int x = 0; x < 4; ++x)
        _mm256_store_ps(added[x],
                        _mm256_permutevar_ps(four(distance + 4 * t),
                                             _mm256_xor_si256(select, _mm256_set1_epi32(x))));
#pragma GCC unroll 8
      for (int r = 0; r < STATES / 8; ++r) {
        const __m256 low = _mm256_add_ps(_mm256_permutevar_ps(four(from + 4 * r), pairs),
                                         _mm256_load_ps(low_added[r]));
        const __m256 high =
            _mm256_add_ps(_mm256_permutevar_ps(four(from + 4 * r + STATES / 2), pairs),
                          _mm256_load_ps(high_added[r]));
        decisions[t * (STATES / 8) + r] = less(high, low);
        _mm256_store_ps(to + 8 * r, _mm256_min_ps(high, low));
      }
      float* const swap = from;
      from = to;
      to = swap;
    }
    if (from != cost) std::memcpy(cost, from, sizeof next);
  }
};

}  // namespace
}  // namespace kvproof
