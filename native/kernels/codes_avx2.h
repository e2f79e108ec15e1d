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
  // Bytes of all ones where the bit of a value is set.
  static Codes natural_codes(std::uint32_t bits) {
    const __m256i spread = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1,  //
                                            2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3);
    return test(bits, spread, _mm256_set1_epi64x(std::int64_t(0x8040201008040201)));
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

  // 5-bit codes; the top bit of each byte of `top` is that of a code's fifth bit.
  struct Fives {
    __m128i bytes;
    std::uint32_t fifth;
    __m256i top() const {
      const __m256i shift = _mm256_setr_epi32(
          7 - fifth_bit(0), 7 - fifth_bit(4), 7 - fifth_bit(8), 7 - fifth_bit(12),
          7 - fifth_bit(16), 7 - fifth_bit(20), 7 - fifth_bit(24), 7 - fifth_bit(28));
      return _mm256_sllv_epi32(_mm256_set1_epi32(std::int32_t(fifth)), shift);
    }
    operator Codes() const {
      const __m256i fives = _mm256_and_si256(_mm256_srli_epi16(top(), 3), _mm256_set1_epi8(16));
      return _mm256_or_si256(Nibbles{bytes}, fives);
    }
  };
  static std::uint32_t load_u32(const std::uint8_t* p) {
    std::uint32_t x;
    std::memcpy(&x, p, 4);
    return x;
  }
  static Fives codes5(const std::uint8_t* low, const std::uint8_t* fifth) {
    return {codes4(low).bytes, load_u32(fifth)};
  }
  static Fives codes5_half(const std::uint8_t* low, const std::uint8_t* fifth) {
    return {codes4_half(low).bytes, load_u32(fifth)};
  }

  // Two whole groups of a row to repack.
  struct Pair {
    const std::uint8_t* row;
    std::uint8_t* out;
    int first;  // value
  };

  // Repacks the whole pairs of groups of each row, two pairs at a time; returns how many values of
  // a row that were.
  template <int F>
  static int repack_pairs(const Rows& rows, const Book& book, std::uint8_t* out,
                          std::ptrdiff_t stride) {
    const int pairs = rows.dim / 64;
    Pair one{rows.base, out, 0};
    const auto next = [&](Pair p) {
      p.first += 64;
      if (p.first < 64 * pairs) return p;
      return Pair{p.row + rows.stride, p.out + stride, 0};
    };
    for (int left = rows.n * pairs; left > 0; left -= 2) {
      const Pair two = left > 1 ? next(one) : one;
      repack_two<F>(one, two, rows.dim, book);
      one = next(two);
    }
    return 64 * pairs;
  }

  template <int F>
  static void repack_two(const Pair& one, const Pair& two, int dim, const Book& book) {
    if constexpr (F == TQ5) {
      for (const Pair& p : {one, two}) {
        const int s = p.first;
        store_codes(p.out + s / 2, codes8(p.row + s / 2));
        for (int g = 0; g < 8; g += 4)
          store_fifth<F>(load_u32(p.row + dim / 2 + s / 8 + g), p.out + dim / 2 + s / 8 + g);
      }
    } else {
      constexpr int BITS = code_bits(F);
      __m256i codes, subsets = _mm256_setzero_si256();
      if constexpr (F == TCQ2)
        codes = spread(
            _mm256_cvtepu32_epi64(two_words(one.row + one.first / 8, two.row + two.first / 8)));
      else
        codes =
            _mm256_inserti128_si256(_mm256_castsi128_si256(codes4(one.row + one.first / 4).bytes),
                                    codes4(two.row + two.first / 4).bytes, 1);
      if constexpr (has_trellis(F)) {
        const int path = (BITS - 1) * (dim / 8);
        const __m256i window =
            _mm256_inserti128_si256(_mm256_castsi128_si256(windows(one, path, dim, *book.trellis)),
                                    windows(two, path, dim, *book.trellis), 1);
        __m256i bit[2];
        for (int i = 0; i < 2; ++i) {
          const std::int64_t* tap = book.trellis->tap[i];
          bit[i] = _mm256_sllv_epi64(window, _mm256_set1_epi64x(tap[0]));
          for (int j = 1; j < book.trellis->n_taps[i]; ++j)
            bit[i] =
                _mm256_xor_si256(bit[i], _mm256_sllv_epi64(window, _mm256_set1_epi64x(tap[j])));
        }
        subsets = spread(_mm256_blend_epi32(_mm256_srli_epi64(bit[0], 32), bit[1], 0xaa));
      } else {  // the codes are the low bits of each nibble
        subsets = codes;
        codes = _mm256_setzero_si256();
      }
      // As nibbles() does.
      const __m256i low = _mm256_set1_epi8(0x33);
      const __m256i even = _mm256_or_si256(_mm256_and_si256(subsets, low),
                                           _mm256_slli_epi16(_mm256_and_si256(codes, low), 2));
      const __m256i odd = _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(subsets, 2), low),
                                          _mm256_andnot_si256(low, codes));
      const __m256i first = _mm256_unpacklo_epi64(even, odd);
      const __m256i second = _mm256_unpackhi_epi64(even, odd);
      store_half(one.out + one.first / 2, _mm256_castsi256_si128(first));
      store_half(one.out + one.first / 2 + 16, _mm256_castsi256_si128(second));
      store_half(two.out + two.first / 2, _mm256_extracti128_si256(first, 1));
      store_half(two.out + two.first / 2 + 16, _mm256_extracti128_si256(second, 1));
      if constexpr (BITS == 4)
        for (const Pair& p : {one, two})
          for (int g = 0; g < 8; g += 4)
            store_fifth<F>(load_u32(p.row + dim / 4 + p.first / 8 + g),
                           p.out + dim / 2 + p.first / 8 + g);
    }
  }

  // The path's bits of two groups, each after the 32 before them.
  static __m128i windows(const Pair& p, int path, int dim, const Trellis& trellis) {
    const std::uint8_t* at = p.row + path + p.first / 8;
    std::uint64_t one, two;
    std::memcpy(&two, at, 8);
    if (p.first)
      std::memcpy(&one, at - 4, 8);
    else
      one = two << 32 | (trellis.start_bytes ? std::uint64_t(p.row[path + dim / 8]) << 24 : 0);
    return _mm_set_epi64x(std::int64_t(two), std::int64_t(one));
  }
  static __m128i two_words(const std::uint8_t* a, const std::uint8_t* b) {
    return _mm_unpacklo_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(a)),
                              _mm_loadl_epi64(reinterpret_cast<const __m128i*>(b)));
  }
  // In each 64 bits: bit i of the low half to bit 2i, of the high half to bit 2i + 1.
  static __m256i spread(__m256i x) {
    const __m256i nibble = _mm256_set1_epi8(15);
    const __m256i twice = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 1, 4, 5, 16, 17, 20, 21, 64, 65, 68, 69, 80, 81, 84, 85));
    __m256i low = _mm256_shuffle_epi8(twice, _mm256_and_si256(x, nibble));
    __m256i high = _mm256_shuffle_epi8(twice, _mm256_and_si256(_mm256_srli_epi16(x, 4), nibble));
    low = _mm256_or_si256(low, _mm256_srli_epi64(low, 31));
    high = _mm256_or_si256(high, _mm256_srli_epi64(high, 31));
    return _mm256_unpacklo_epi64(_mm256_unpacklo_epi8(low, high), _mm256_unpackhi_epi8(low, high));
  }
  static void store_half(std::uint8_t* p, __m128i x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), x);
  }
  // As fifth_bits() does: each byte looks at one bit, and all answers are gathered.
  template <int F>
  static void store_fifth(std::uint32_t bits, std::uint8_t* out) {
    struct Look {
      alignas(32) std::uint8_t byte[32] = {}, bit[32] = {};
      constexpr Look() {
        for (int i = 0; i < 32; ++i) {
          const int at = F == TQ5 ? i : i % 8 * 4 + i / 8;
          byte[fifth_bit(i)] = std::uint8_t(at / 8);
          bit[fifth_bit(i)] = std::uint8_t(1 << at % 8);
        }
      }
    };
    static constexpr Look look;
    const auto load = [](const std::uint8_t* p) {
      return _mm256_load_si256(reinterpret_cast<const __m256i*>(p));
    };
    const __m256i found = test(bits, load(look.byte), load(look.bit));
    const std::int32_t word = _mm256_movemask_epi8(found);
    std::memcpy(out, &word, 4);
  }

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
