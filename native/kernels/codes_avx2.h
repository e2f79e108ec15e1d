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

  // Repacks the whole pairs of groups of each row; returns how many values of a row that were.
  template <int F>
  static int repack_pairs(const Rows& rows, const Book& book, std::uint8_t* out,
                          std::ptrdiff_t stride) {
    if constexpr (F == TQ5)
      repack_fives(rows, out, stride);
    else if constexpr (!has_trellis(F))
      repack_codes<F, 0, 0>(rows, book, out, stride);
    else if (book.trellis->n_taps[0] == 1 && book.trellis->n_taps[1] == 3)
      repack_codes<F, 1, 3>(rows, book, out, stride);
    else
      repack_codes<F, MAX_TAPS[0], MAX_TAPS[1]>(rows, book, out, stride);
    return rows.dim / 64 * 64;
  }

  static void repack_fives(const Rows& rows, std::uint8_t* out, std::ptrdiff_t stride) {
    const std::size_t dim = std::size_t(rows.dim);
    const std::uint8_t* row = rows.base;
    for (int t = 0; t < rows.n; ++t, row += rows.stride, out += stride) {
      for (std::size_t s = 0; s + 64 <= dim; s += 64) {
        store_codes(out + s / 2, codes8(row + s / 2));
        for (std::size_t at = dim / 2 + s / 8; at < dim / 2 + s / 8 + 8; at += 4)
          store_natural_fifth(load_u32(row + at), out + at);
      }
    }
  }

  // Four groups at a time: those of a row, then the last two of two rows.
  template <int F, int TAPS0, int TAPS1>
  static void repack_codes(const Rows& rows, const Book& book, std::uint8_t* out,
                           std::ptrdiff_t stride) {
    constexpr bool TRELLIS = has_trellis(F);
    constexpr int BITS = code_bits(F);
    const std::size_t dim = std::size_t(rows.dim), path_at = std::size_t(BITS - 1) * (dim / 8);
    const std::size_t wide = dim / 128 * 128;
    const bool stored_start = TRELLIS && book.trellis->start_bytes;
    const Taps<TAPS0, TAPS1> taps(book);
    const auto start = [&](const std::uint8_t* row) {  // the path's 32 bits before a row
      return stored_start ? std::uint32_t(row[path_at + dim / 8]) << 24 : 0;
    };
    const std::uint8_t* row = rows.base;
    std::uint8_t* to = out;
    for (int t = 0; t < rows.n && wide; ++t, row += rows.stride, to += stride) {
      __m128i last = _mm_insert_epi32(_mm_setzero_si128(), std::int32_t(start(row)), 3);
      for (std::size_t s = 0; s < wide; s += 128) {
        __m256i codes, subsets = _mm256_setzero_si256();
        if constexpr (F == TCQ2)
          codes = spread(_mm256_cvtepu32_epi64(codes4(row + s / 8).bytes));
        else
          codes = codes8(row + s / 4);
        if constexpr (TRELLIS) {
          const __m128i path = codes4(row + path_at + s / 8).bytes;
          subsets = taps.subsets(path, _mm_alignr_epi8(path, last, 12));
          last = path;
        }
        const auto [even, odd] = nibble_rows<TRELLIS>(subsets, codes);
        store_codes(to + s / 2, _mm256_permute2x128_si256(even, odd, 0x20));
        store_codes(to + s / 2 + 32, _mm256_permute2x128_si256(even, odd, 0x31));
        if constexpr (BITS == 4)
          store_half(to + dim / 2 + s / 8, step_fifths(codes4(row + dim / 4 + s / 8).bytes));
      }
    }
    if (dim % 128 < 64) return;
    row = rows.base;
    for (int t = 0; t < rows.n; t += 2, row += 2 * rows.stride, out += 2 * stride) {
      const std::uint8_t* const b = t + 1 < rows.n ? row + rows.stride : row;
      std::uint8_t* const to_b = t + 1 < rows.n ? out + stride : out;
      __m256i codes, subsets = _mm256_setzero_si256();
      if constexpr (F == TCQ2)
        codes = spread(_mm256_cvtepu32_epi64(two_words(row + wide / 8, b + wide / 8)));
      else
        codes = _mm256_inserti128_si256(_mm256_castsi128_si256(codes4(row + wide / 4).bytes),
                                        codes4(b + wide / 4).bytes, 1);
      if constexpr (TRELLIS) {
        const std::size_t at = path_at + wide / 8;
        const __m128i path = two_words(row + at, b + at);
        const auto before = [&](const std::uint8_t* p) {
          return std::int32_t(wide ? load_u32(p + at - 4) : start(p));
        };
        subsets = taps.subsets(path, _mm_or_si128(_mm_slli_epi64(path, 32),
                                                  _mm_set_epi32(0, before(b), 0, before(row))));
      }
      const auto [even, odd] = nibble_rows<TRELLIS>(subsets, codes);
      store_half(out + wide / 2, _mm256_castsi256_si128(even));
      store_half(out + wide / 2 + 16, _mm256_castsi256_si128(odd));
      store_half(to_b + wide / 2, _mm256_extracti128_si256(even, 1));
      store_half(to_b + wide / 2 + 16, _mm256_extracti128_si256(odd, 1));
      if constexpr (BITS == 4) {
        const __m128i fifths =
            step_fifths(two_words(row + dim / 4 + wide / 8, b + dim / 4 + wide / 8));
        const std::size_t at = dim / 2 + wide / 8;
        _mm_storel_epi64(reinterpret_cast<__m128i*>(out + at), fifths);
        _mm_storel_epi64(reinterpret_cast<__m128i*>(to_b + at), _mm_unpackhi_epi64(fifths, fifths));
      }
    }
  }

  // The two sets of taps as shifts, filled up with shifts that leave nothing.
  template <int TAPS0, int TAPS1>
  struct Taps {
    __m256i low[TAPS0 + 1], high[TAPS1 + 1];
    explicit Taps(const Book& book) {
      const auto fill = [&](int bit, int n, __m256i* to) {
        for (int j = 0; j < n; ++j)
          to[j] =
              _mm256_set1_epi64x(j < book.trellis->n_taps[bit] ? book.trellis->tap[bit][j] : 64);
      };
      fill(0, TAPS0, low);
      fill(1, TAPS1, high);
    }
    // Subset bits of four groups, as 2-bit fields, from the path's bits and those 32 before them.
    __m256i subsets(__m128i path, __m128i before) const {
      const __m256i window =
          _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_unpacklo_epi32(before, path)),
                                  _mm_unpackhi_epi32(before, path), 1);
      __m256i bit0 = _mm256_sllv_epi64(window, low[0]), bit1 = _mm256_sllv_epi64(window, high[0]);
#pragma GCC unroll 8
      for (int j = 1; j < TAPS0; ++j)
        bit0 = _mm256_xor_si256(bit0, _mm256_sllv_epi64(window, low[j]));
#pragma GCC unroll 8
      for (int j = 1; j < TAPS1; ++j)
        bit1 = _mm256_xor_si256(bit1, _mm256_sllv_epi64(window, high[j]));
      return spread(_mm256_blend_epi32(_mm256_srli_epi64(bit0, 32), bit1, 0xaa));
    }
  };

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
  // As nibbles() does: 16 bytes of groups 0 and 2, and of groups 1 and 3. Without a trellis the
  // codes are the low bits of each nibble.
  struct NibbleRows {
    __m256i first, second;
  };
  template <bool TRELLIS>
  static NibbleRows nibble_rows(__m256i subsets, __m256i codes) {
    const __m256i low = _mm256_set1_epi8(0x33);
    __m256i even, odd;
    if constexpr (TRELLIS) {
      even = _mm256_or_si256(_mm256_and_si256(subsets, low),
                             _mm256_slli_epi16(_mm256_and_si256(codes, low), 2));
      odd = _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(subsets, 2), low),
                            _mm256_andnot_si256(low, codes));
    } else {
      even = _mm256_and_si256(codes, low);
      odd = _mm256_and_si256(_mm256_srli_epi16(codes, 2), low);
    }
    return {_mm256_unpacklo_epi64(even, odd), _mm256_unpackhi_epi64(even, odd)};
  }
  static void store_half(std::uint8_t* p, __m128i x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), x);
  }
  // As fifth_bits() does. By steps, nibble k of a word goes to byte k % 4; in natural order each
  // byte looks at one bit, and all answers are gathered.
  static __m128i step_fifths(__m128i x) {
    const __m128i a =
        _mm_shuffle_epi8(x, _mm_setr_epi8(0, 0, 1, 1, 4, 4, 5, 5, 8, 8, 9, 9, 12, 12, 13, 13));
    const __m128i b =
        _mm_shuffle_epi8(x, _mm_setr_epi8(2, 2, 3, 3, 6, 6, 7, 7, 10, 10, 11, 11, 14, 14, 15, 15));
    const __m128i low = _mm_or_si128(_mm_and_si128(a, _mm_set1_epi16(0x000f)),
                                     _mm_and_si128(_mm_srli_epi16(a, 4), _mm_set1_epi16(0x0f00)));
    const __m128i high = _mm_or_si128(_mm_and_si128(_mm_slli_epi16(b, 4), _mm_set1_epi16(0x00f0)),
                                      _mm_and_si128(b, _mm_set1_epi16(std::int16_t(0xf000))));
    return _mm_or_si128(low, high);
  }
  static void store_natural_fifth(std::uint32_t bits, std::uint8_t* out) {
    struct Look {
      alignas(32) std::uint8_t byte[32] = {}, bit[32] = {};
      constexpr Look() {
        for (int i = 0; i < 32; ++i) {
          byte[fifth_bit(i)] = std::uint8_t(i / 8);
          bit[fifth_bit(i)] = std::uint8_t(1 << i % 8);
        }
      }
    };
    static constexpr Look look;
    const auto load = [](const std::uint8_t* p) {
      return _mm256_load_si256(reinterpret_cast<const __m256i*>(p));
    };
    const std::int32_t word = _mm256_movemask_epi8(test(bits, load(look.byte), load(look.bit)));
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
