// Stages of rows.h with 512-bit instructions: a table of 64 bytes is one permutation, and sums of
// products of bytes are one instruction.
#pragma once

#include "rows_avx2.h"

namespace kvproof {
namespace {

struct RowsAvx512 {
  static constexpr int STEP = 64;

  static __m512i load(const void* p) { return _mm512_loadu_si512(p); }
  static __m256i half_sum(__m512i x) {
    return _mm256_add_epi32(_mm512_castsi512_si256(x), _mm512_extracti64x4_epi64(x, 1));
  }
  static std::int32_t sum(__m512i x) { return RowsAvx2::sum(half_sum(x)); }

  template <int LEVELS>
  static std::int32_t levels(const float* y, int n, float inverse, std::uint8_t* level) {
    const __m512 factor = _mm512_set1_ps(inverse);
    const __m512i last = _mm512_set1_epi16(16 * (LEVELS - 1)), ones = _mm512_set1_epi16(1);
    __m512i beyond = _mm512_setzero_si512();
    for (int i = 0; i < n; i += STEP) {
      const auto positions = [&](int at) {
        return _mm512_cvtps_epi32(
            _mm512_mul_ps(_mm512_abs_ps(_mm512_loadu_ps(y + i + at)), factor));
      };
      const __m512i a = _mm512_packs_epi32(positions(0), positions(16));
      const __m512i b = _mm512_packs_epi32(positions(32), positions(48));
      beyond = _mm512_dpwssd_epi32(beyond, _mm512_subs_epu16(a, last), ones);
      beyond = _mm512_dpwssd_epi32(beyond, _mm512_subs_epu16(b, last), ones);
      const __m512i sixteenth = _mm512_set1_epi16(1 << 11);  // mulhrs: (x + 8) >> 4
      const __m512i at =
          _mm512_packus_epi16(_mm512_mulhrs_epi16(a, sixteenth), _mm512_mulhrs_epi16(b, sixteenth));
      _mm512_storeu_si512(level + i, _mm512_min_epu8(at, _mm512_set1_epi8(LEVELS - 1)));
    }
    return sum(beyond);
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

  template <int LEVELS, int TRIES>
  static void costs(const std::uint8_t* level, int n, const UnitSearch& search,
                    std::int32_t* cost) {
    const __m512i ones = _mm512_set1_epi8(1);
    for (int first = 0; first < TRIES; first += 8) {
      __m512i total[8];
#pragma GCC unroll 8
      for (int k = 0; k < 8; ++k) total[k] = _mm512_setzero_si512();
      for (int i = 0; i < n; i += STEP) {
        const __m512i at = load(level + i);
#pragma GCC unroll 8
        for (int k = 0; k < 8; ++k)
          total[k] =
              _mm512_dpbusd_epi32(total[k], Table<LEVELS>(search.cost[first + k]).of(at), ones);
      }
      __m256i halves[8];
#pragma GCC unroll 8
      for (int k = 0; k < 8; ++k) halves[k] = half_sum(total[k]);
      RowsAvx2::store(cost + first, RowsAvx2::sums(halves));
    }
  }

  template <int LEVELS>
  static void products(const std::uint8_t* level, int n, const LevelTable& entries,
                       std::int32_t* out) {
    const Table<LEVELS> table(entries);
    __m512i of_levels = _mm512_setzero_si512(), squares = _mm512_setzero_si512();
    for (int i = 0; i < n; i += STEP) {
      const __m512i at = load(level + i), entry = table.of(at);
      of_levels = _mm512_dpbusd_epi32(of_levels, at, entry);
      squares = _mm512_dpbusd_epi32(squares, entry, entry);
    }
    out[0] = sum(of_levels);
    out[1] = sum(squares);
  }

  template <int F>
  static void codes(const float* y, int n, int dim, float inverse, const UnitSearch& search,
                    std::uint8_t* out, std::int32_t* sums) {
    const Table<BUCKETS<F>> below(search.below), cut(search.cut), half(search.half);
    const __m512i zero = _mm512_setzero_si512();
    const __m512 factor = _mm512_set1_ps(inverse);
    __m512i of_row = zero, squares = zero;
    for (int i = 0; i < n; i += STEP) {
      const auto scaled = [&](int at) {
        return _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(y + i + at), factor));
      };
      const __m512i z[2] = {_mm512_packs_epi32(scaled(0), scaled(32)),
                            _mm512_packs_epi32(scaled(16), scaled(48))};
      const __m512i a[2] = {_mm512_abs_epi16(z[0]), _mm512_abs_epi16(z[1])};
      const __m512i rest_mask = _mm512_set1_epi16((1 << SHIFT<F>)-1);
      const __m512i bucket = _mm512_min_epu8(
          _mm512_packus_epi16(_mm512_srli_epi16(a[0], SHIFT<F>), _mm512_srli_epi16(a[1], SHIFT<F>)),
          _mm512_set1_epi8(BUCKETS<F> - 1));
      const __m512i rest =
          _mm512_packus_epi16(_mm512_and_si512(a[0], rest_mask), _mm512_and_si512(a[1], rest_mask));
      const __m512i low = below.of(bucket);
      const __m512i index = _mm512_mask_add_epi8(low, _mm512_cmpgt_epi8_mask(rest, cut.of(bucket)),
                                                 low, _mm512_set1_epi8(1));
      const __m512i entry = half.of(index);
      of_row = _mm512_dpwssd_epi32(of_row, a[0], _mm512_unpacklo_epi8(entry, zero));
      of_row = _mm512_dpwssd_epi32(of_row, a[1], _mm512_unpackhi_epi8(entry, zero));
      squares = _mm512_dpbusd_epi32(squares, entry, entry);
      const __mmask64 negative = _mm512_movepi8_mask(_mm512_packs_epi16(z[0], z[1]));
      // HALF + index, or HALF - 1 - index
      const __m512i up = _mm512_add_epi8(index, _mm512_set1_epi8(HALF<F>));
      const __m512i code = _mm512_mask_sub_epi8(up, negative, _mm512_set1_epi8(HALF<F> - 1), index);
      // Lane k has words of four codes: value 4 k and on, 32 values later, 16 later, 48 later.
      if (F == TQ4 && i + STEP <= dim) {
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
      for (int k = 0; k < 2; ++k) RowsAvx2::store_codes<F>(group[k], i + GROUP * k, dim, out);
    }
    sums[0] = sum(of_row);
    sums[1] = sum(squares);
  }
};

}  // namespace
}  // namespace kvproof
