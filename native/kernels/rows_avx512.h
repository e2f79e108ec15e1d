// Stages of rows.h with 512-bit instructions: a table of 64 bytes is one permutation, and sums of
// products of bytes are one instruction.
#pragma once

#include "rows_avx2.h"

namespace kvproof {
namespace {

struct RowsAvx512 {
  static constexpr int STEP = 64;

  static __m512i load(const void* p) { return _mm512_loadu_si512(p); }
  // Sums of products of unsigned with signed bytes, and of words. In place by decree: GCC 12 copies
  // every sum once an iteration, and keeps some of them in memory.
  static void add_bytes(__m512i& sum, __m512i a, __m512i b) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
  }
  static void add_words(__m512i& sum, __m512i a, __m512i b) {
    asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
  }
  // Sums of sixteen registers, in order: transpose and add, first within 128-bit lanes.
  static __m512i sums(const __m512i* a) {
    __m512i h[8], v[4], s[2];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i)
      h[i] = _mm512_add_epi32(_mm512_unpacklo_epi32(a[2 * i], a[2 * i + 1]),
                              _mm512_unpackhi_epi32(a[2 * i], a[2 * i + 1]));
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
      v[i] = _mm512_add_epi32(_mm512_unpacklo_epi64(h[2 * i], h[2 * i + 1]),
                              _mm512_unpackhi_epi64(h[2 * i], h[2 * i + 1]));
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i)
      s[i] = _mm512_add_epi32(_mm512_shuffle_i32x4(v[2 * i], v[2 * i + 1], 0x44),
                              _mm512_shuffle_i32x4(v[2 * i], v[2 * i + 1], 0xee));
    return _mm512_add_epi32(_mm512_shuffle_i32x4(s[0], s[1], 0x88),
                            _mm512_shuffle_i32x4(s[0], s[1], 0xdd));
  }
  static std::int32_t sum(__m512i x) {
    return RowsAvx2::sum(
        _mm256_add_epi32(_mm512_castsi512_si256(x), _mm512_extracti64x4_epi64(x, 1)));
  }
  // Sums of `count` registers. Both arrays have room for a multiple of 16.
  static void reduce(__m512i* a, int count, std::int32_t* out) {
    int i = 0;
    for (; i + 4 <= count; i += 16) {
      for (int k = count; k < i + 16; ++k) a[k] = _mm512_setzero_si512();
      _mm512_storeu_si512(out + i, sums(a + i));
    }
    for (; i < count; ++i) out[i] = sum(a[i]);
  }

  template <int LEVELS>
  static void levels(const Batch& b, const float* inverse, std::uint8_t* level,
                     std::int32_t* beyond) {
    const __m512i last = _mm512_set1_epi16(16 * (LEVELS - 1)), ones = _mm512_set1_epi16(1);
    __m512i above[MAX_ROWS];
    for (int r = 0; r < b.rows; ++r) {
      const float* const y = b.row(r);
      const __m512 factor = _mm512_set1_ps(inverse[r]);
      __m512i total = _mm512_setzero_si512();
      for (int i = 0; i < b.n; i += STEP, level += STEP) {
        const auto positions = [&](int at) {
          return _mm512_cvtps_epi32(
              _mm512_mul_ps(_mm512_abs_ps(_mm512_loadu_ps(y + i + at)), factor));
        };
        const __m512i low = _mm512_packs_epi32(positions(0), positions(16));
        const __m512i high = _mm512_packs_epi32(positions(32), positions(48));
        add_words(total, _mm512_subs_epu16(low, last), ones);
        add_words(total, _mm512_subs_epu16(high, last), ones);
        const __m512i sixteenth = _mm512_set1_epi16(1 << 11);  // mulhrs: (x + 8) >> 4
        const __m512i at = _mm512_packus_epi16(_mm512_mulhrs_epi16(low, sixteenth),
                                               _mm512_mulhrs_epi16(high, sixteenth));
        _mm512_storeu_si512(level, _mm512_min_epu8(at, _mm512_set1_epi8(LEVELS - 1)));
      }
      above[r] = total;
    }
    reduce(above, b.rows, beyond);
  }

  template <int N>
  struct Table {
    __m512i entry[(N + 63) / 64];
    explicit Table(const LevelTable& table) {
      for (int k = 0; k < (N + 63) / 64; ++k) entry[k] = load(table.at + 64 * k);
    }
    __m512i of(__m512i level) const {
      if constexpr (N <= 64)
        return _mm512_permutexvar_epi8(level, entry[0]);
      else
        return _mm512_permutex2var_epi8(entry[0], level, entry[1]);
    }
  };

  // Two rows at a time: their sums of eight tries fold together.
  template <int LEVELS, int TRIES>
  static void costs(const Batch& b, const std::uint8_t* level, const UnitSearch& search,
                    std::int32_t (*cost)[TRIES]) {
    const __m512i ones = _mm512_set1_epi8(1);
    for (int first = 0; first < TRIES; first += 8)
      for (int r = 0; r < b.rows; r += 2) {
        const int other = smaller(r + 1, b.rows - 1);
        __m512i total[16];
#pragma GCC unroll 16
        for (int k = 0; k < 16; ++k) total[k] = _mm512_setzero_si512();
        for (int i = 0; i < b.n; i += STEP) {
          const __m512i at[2] = {load(level + r * b.n + i), load(level + other * b.n + i)};
#pragma GCC unroll 8
          for (int k = 0; k < 8; ++k) {
            const Table<LEVELS> table(search.cost[first + k]);
            add_bytes(total[k], table.of(at[0]), ones);
            add_bytes(total[8 + k], table.of(at[1]), ones);
          }
        }
        const __m512i both = sums(total);
        RowsAvx2::store(cost[r] + first, _mm512_castsi512_si256(both));
        RowsAvx2::store(cost[other] + first, other == r ? _mm512_castsi512_si256(both)
                                                        : _mm512_extracti64x4_epi64(both, 1));
      }
  }

  template <int TRIES>
  static int cheapest(const std::int32_t* cost) {
    return RowsAvx2::cheapest<TRIES>(cost);
  }

  template <int LEVELS>
  static void products(const Batch& b, const std::uint8_t* level, const UnitSearch& search,
                       const int* best, std::int32_t (*out)[2]) {
    __m512i total[2 * MAX_ROWS];
    for (int r = 0; r < b.rows; ++r) {
      const Table<LEVELS> table(search.entry[best[r]]);
      __m512i of_levels = _mm512_setzero_si512(), squares = _mm512_setzero_si512();
      for (int i = 0; i < b.n; i += STEP, level += STEP) {
        const __m512i at = load(level), entry = table.of(at);
        add_bytes(of_levels, at, entry);
        add_bytes(squares, entry, entry);
      }
      total[2 * r] = of_levels;
      total[2 * r + 1] = squares;
    }
    reduce(total, 2 * b.rows, out[0]);
  }

  template <int F>
  static void codes(const Batch& b, const float* inverse, const UnitSearch& search,
                    std::uint8_t* out, std::int32_t (*sums_out)[2]) {
    const Table<BUCKETS<F>> below(search.below), cut(search.cut), half(search.half);
    const __m512i zero = _mm512_setzero_si512();
    __m512i total[2 * MAX_ROWS];
    for (int r = 0; r < b.rows; ++r, out += row_bytes(F, b.dim)) {
      const float* const y = b.row(r);
      const __m512 factor = _mm512_set1_ps(inverse[r]);
      __m512i of_row = zero, squares = zero;
      for (int i = 0; i < b.n; i += STEP) {
        const auto scaled = [&](int at) {
          return _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(y + i + at), factor));
        };
        const __m512i z[2] = {_mm512_packs_epi32(scaled(0), scaled(32)),
                              _mm512_packs_epi32(scaled(16), scaled(48))};
        const __m512i a[2] = {_mm512_abs_epi16(z[0]), _mm512_abs_epi16(z[1])};
        const __m512i rest_mask = _mm512_set1_epi16((1 << SHIFT<F>)-1);
        const __m512i bucket =
            _mm512_min_epu8(_mm512_packus_epi16(_mm512_srli_epi16(a[0], SHIFT<F>),
                                                _mm512_srli_epi16(a[1], SHIFT<F>)),
                            _mm512_set1_epi8(BUCKETS<F> - 1));
        const __m512i rest = _mm512_packus_epi16(_mm512_and_si512(a[0], rest_mask),
                                                 _mm512_and_si512(a[1], rest_mask));
        const __m512i low = below.of(bucket);
        const __m512i index = _mm512_mask_add_epi8(
            low, _mm512_cmpgt_epi8_mask(rest, cut.of(bucket)), low, _mm512_set1_epi8(1));
        const __m512i entry = half.of(index);
        add_words(of_row, a[0], _mm512_unpacklo_epi8(entry, zero));
        add_words(of_row, a[1], _mm512_unpackhi_epi8(entry, zero));
        add_bytes(squares, entry, entry);
        const __mmask64 negative = _mm512_movepi8_mask(_mm512_packs_epi16(z[0], z[1]));
        // HALF + index, or HALF - 1 - index
        const __m512i up = _mm512_add_epi8(index, _mm512_set1_epi8(HALF<F>));
        const __m512i code =
            _mm512_mask_sub_epi8(up, negative, _mm512_set1_epi8(HALF<F> - 1), index);
        // Lane k has words of four codes: value 4 k and on, 32 values later, 16 later, 48 later.
        if (F == TQ4 && i + STEP <= b.dim) {
          const __m512i bytes =
              _mm512_or_si512(code, _mm512_slli_epi16(_mm512_bsrli_epi128(code, 8), 4));
          const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 0, 0, 0, 0, 0, 0, 0, 0);
          RowsAvx2::store(out + i / 2,
                          _mm512_castsi512_si256(_mm512_permutexvar_epi32(order, bytes)));
          continue;
        }
        const __m512i natural = _mm512_permutexvar_epi32(
            _mm512_setr_epi32(0, 4, 8, 12, 2, 6, 10, 14, 1, 5, 9, 13, 3, 7, 11, 15), code);
        const __m256i group[2] = {_mm512_castsi512_si256(natural),
                                  _mm512_extracti64x4_epi64(natural, 1)};
        for (int k = 0; k < 2; ++k) RowsAvx2::store_codes<F>(group[k], i + GROUP * k, b.dim, out);
      }
      total[2 * r] = of_row;
      total[2 * r + 1] = squares;
    }
    reduce(total, 2 * b.rows, sums_out[0]);
  }
};

}  // namespace
}  // namespace kvproof
