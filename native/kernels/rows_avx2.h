// Stages of rows.h with 256-bit instructions.
//
// A table of 64 bytes is four shuffles, each of 16 entries. Shuffle k sees the level less 16 k: a
// negative byte gives 0, and any other the entry of its low four bits. `change` holds what a table
// has from 16 entries to the next ones, so that the XOR of the shuffles is the entry.
#pragma once

#include "rows.h"

namespace kvproof {
namespace {

struct RowsAvx2 {
  static constexpr int STEP = 32;

  static __m256i load(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
  static void store(void* p, __m256i x) { _mm256_storeu_si256(static_cast<__m256i*>(p), x); }
  static __m256i twice(const std::uint8_t* p) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static std::int32_t sum(__m256i x) {
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
  }
  // Sums of eight registers, in order.
  static __m256i sums(const __m256i* a) {
    __m256i h[4], v[2];
    for (int i = 0; i < 4; ++i)
      h[i] = _mm256_add_epi32(_mm256_unpacklo_epi32(a[2 * i], a[2 * i + 1]),
                              _mm256_unpackhi_epi32(a[2 * i], a[2 * i + 1]));
    for (int i = 0; i < 2; ++i)
      v[i] = _mm256_add_epi32(_mm256_unpacklo_epi64(h[2 * i], h[2 * i + 1]),
                              _mm256_unpackhi_epi64(h[2 * i], h[2 * i + 1]));
    return _mm256_add_epi32(_mm256_permute2x128_si256(v[0], v[1], 0x20),
                            _mm256_permute2x128_si256(v[0], v[1], 0x31));
  }
  static __m256i add_pairs(__m256i sum, __m256i products) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(products, _mm256_set1_epi16(1)));
  }

  // Sums of `count` registers.
  static void reduce(__m256i* a, int count, std::int32_t* out) {
    int i = 0;
    for (; i + 8 <= count; i += 8) store(out + i, sums(a + i));
    for (; i < count; ++i) out[i] = sum(a[i]);
  }

  // [32 levels][less 0, 16, 32, ...]
  template <int LEVELS>
  static void levels(const Batch& b, const float* inverse, std::uint8_t* level,
                     std::int32_t* beyond) {
    const __m256 sign = _mm256_set1_ps(-0.f);
    const __m256i last = _mm256_set1_epi16(16 * (LEVELS - 1));
    __m256i above[MAX_ROWS];
    for (int r = 0; r < b.rows; ++r) {
      const float* const y = b.row(r);
      const __m256 factor = _mm256_set1_ps(inverse[r]);
      above[r] = _mm256_setzero_si256();
      for (int i = 0; i < b.n; i += STEP) {
        const auto positions = [&](int at) {
          const __m256 magnitude = _mm256_andnot_ps(sign, _mm256_loadu_ps(y + i + at));
          return _mm256_cvtps_epi32(_mm256_mul_ps(magnitude, factor));
        };
        const __m256i low = _mm256_packs_epi32(positions(0), positions(8));
        const __m256i high = _mm256_packs_epi32(positions(16), positions(24));
        above[r] = add_pairs(above[r], _mm256_subs_epu16(low, last));
        above[r] = add_pairs(above[r], _mm256_subs_epu16(high, last));
        const __m256i sixteenth = _mm256_set1_epi16(1 << 11);  // mulhrs: (x + 8) >> 4
        __m256i at = _mm256_packus_epi16(_mm256_mulhrs_epi16(low, sixteenth),
                                         _mm256_mulhrs_epi16(high, sixteenth));
        at = _mm256_min_epu8(at, _mm256_set1_epi8(LEVELS - 1));
        for (int k = 0; k < LEVELS / 16; ++k, level += STEP)
          store(level, _mm256_sub_epi8(at, _mm256_set1_epi8(char(16 * k))));
      }
    }
    reduce(above, b.rows, beyond);
  }

  template <int N>
  struct Table {
    __m256i change[N / 16];
    explicit Table(const LevelTable& table) {
      for (int k = 0; k < N / 16; ++k) change[k] = twice(table.change + 16 * k);
    }
    __m256i of_stored(const std::uint8_t* level) const {
      __m256i out = _mm256_shuffle_epi8(change[0], load(level));
      for (int k = 1; k < N / 16; ++k)
        out = _mm256_xor_si256(out, _mm256_shuffle_epi8(change[k], load(level + STEP * k)));
      return out;
    }
    __m256i of(__m256i level) const {
      __m256i out = _mm256_shuffle_epi8(change[0], level);
      for (int k = 1; k < N / 16; ++k)
        out = _mm256_xor_si256(
            out,
            _mm256_shuffle_epi8(change[k], _mm256_sub_epi8(level, _mm256_set1_epi8(char(16 * k)))));
      return out;
    }
  };

  // Two tries at a time read the levels half as often.
  template <int LEVELS, int TRIES>
  static void costs(const Batch& b, const std::uint8_t* level, const UnitSearch& search,
                    std::int32_t (*cost)[TRIES]) {
    constexpr int PLACES = LEVELS / 16;
    __m256i total[MAX_ROWS][TRIES];
    for (int k = 0; k < TRIES; k += 2) {
      const Table<LEVELS> first(search.cost[k]), second(search.cost[k + 1]);
      const std::uint8_t* at = level;
      for (int r = 0; r < b.rows; ++r) {
        const __m256i zero = _mm256_setzero_si256();
        __m256i of_first = zero, of_second = zero;
        for (int i = 0; i < b.n; i += STEP, at += STEP * PLACES) {
          of_first = _mm256_add_epi64(of_first, _mm256_sad_epu8(first.of_stored(at), zero));
          of_second = _mm256_add_epi64(of_second, _mm256_sad_epu8(second.of_stored(at), zero));
        }
        total[r][k] = of_first;
        total[r][k + 1] = of_second;
      }
    }
    reduce(total[0], b.rows * TRIES, cost[0]);
  }

  template <int TRIES>
  static int cheapest(const std::int32_t* cost) {
    __m256i least = load(cost);
    for (int k = 8; k < TRIES; k += 8) least = _mm256_min_epi32(least, load(cost + k));
    least = _mm256_min_epi32(least, _mm256_permute2x128_si256(least, least, 1));
    least = _mm256_min_epi32(least, _mm256_shuffle_epi32(least, 0x4e));
    least = _mm256_min_epi32(least, _mm256_shuffle_epi32(least, 0xb1));
    unsigned at = 0;
    for (int k = 0; k < TRIES; k += 8) {
      const __m256i found = _mm256_cmpeq_epi32(least, load(cost + k));
      at |= unsigned(_mm256_movemask_ps(_mm256_castsi256_ps(found))) << k;
    }
    return __builtin_ctz(at);
  }

  template <int LEVELS>
  static void products(const Batch& b, const std::uint8_t* level, const UnitSearch& search,
                       const int* best, std::int32_t (*out)[2]) {
    constexpr int PLACES = LEVELS / 16;
    __m256i total[MAX_ROWS][2];
    for (int r = 0; r < b.rows; ++r) {
      const Table<LEVELS> table(search.entry[best[r]]);
      __m256i of_levels = _mm256_setzero_si256(), squares = _mm256_setzero_si256();
      for (int i = 0; i < b.n; i += STEP, level += STEP * PLACES) {
        const __m256i entry = table.of_stored(level);
        of_levels = add_pairs(of_levels, _mm256_maddubs_epi16(load(level), entry));
        squares = add_pairs(squares, _mm256_maddubs_epi16(entry, entry));
      }
      total[r][0] = of_levels;
      total[r][1] = squares;
    }
    reduce(total[0], 2 * b.rows, out[0]);
  }

  template <int F>
  static void codes(const Batch& b, const float* inverse, const UnitSearch& search,
                    std::uint8_t* out, std::int32_t (*sums_out)[2]) {
    const Table<BUCKETS<F>> below(search.below), cut(search.cut);
    const __m256i half = twice(search.half.at), zero = _mm256_setzero_si256();
    __m256i total[MAX_ROWS][2];
    for (int r = 0; r < b.rows; ++r, out += row_bytes(F, b.dim)) {
      const float* const y = b.row(r);
      const __m256 factor = _mm256_set1_ps(inverse[r]);
      __m256i of_row = zero, squares = zero;
      for (int i = 0; i < b.n; i += STEP) {
        const auto scaled = [&](int at) {
          return _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(y + i + at), factor));
        };
        const __m256i z[2] = {_mm256_packs_epi32(scaled(0), scaled(16)),
                              _mm256_packs_epi32(scaled(8), scaled(24))};
        const __m256i a[2] = {_mm256_abs_epi16(z[0]), _mm256_abs_epi16(z[1])};
        const __m256i rest_mask = _mm256_set1_epi16((1 << SHIFT<F>)-1);
        const __m256i bucket =
            _mm256_min_epu8(_mm256_packus_epi16(_mm256_srli_epi16(a[0], SHIFT<F>),
                                                _mm256_srli_epi16(a[1], SHIFT<F>)),
                            _mm256_set1_epi8(BUCKETS<F> - 1));
        const __m256i rest = _mm256_packus_epi16(_mm256_and_si256(a[0], rest_mask),
                                                 _mm256_and_si256(a[1], rest_mask));
        const __m256i index =
            _mm256_sub_epi8(below.of(bucket), _mm256_cmpgt_epi8(rest, cut.of(bucket)));
        const __m256i entry = _mm256_shuffle_epi8(half, index);
        of_row =
            _mm256_add_epi32(of_row, _mm256_madd_epi16(a[0], _mm256_unpacklo_epi8(entry, zero)));
        of_row =
            _mm256_add_epi32(of_row, _mm256_madd_epi16(a[1], _mm256_unpackhi_epi8(entry, zero)));
        squares = add_pairs(squares, _mm256_maddubs_epi16(entry, entry));
        const __m256i negative = _mm256_cmpgt_epi8(zero, _mm256_packs_epi16(z[0], z[1]));
        // HALF + index, or HALF - 1 - index
        const __m256i code =
            _mm256_add_epi8(_mm256_xor_si256(index, negative), _mm256_set1_epi8(HALF<F>));
        // Words of four codes: 0, 4, 2, 6 of the values in the low half, 1, 5, 3, 7 in the high
        // one.
        const __m256i natural =
            _mm256_permutevar8x32_epi32(code, _mm256_setr_epi32(0, 4, 2, 6, 1, 5, 3, 7));
        store_codes<F>(natural, i, b.dim, out);
      }
      total[r][0] = of_row;
      total[r][1] = squares;
    }
    reduce(total[0], 2 * b.rows, sums_out[0]);
  }

  // Up to 32 codes, one a byte, to the group at s of a row, if the row reaches it.
  template <int F>
  static void store_codes(__m256i code, int s, int dim, std::uint8_t* row) {
    if (s + GROUP <= dim) {
      pack<F>(code, s, dim, row);
    } else if (s < dim) {
      alignas(32) std::uint8_t tail[GROUP];
      store(tail, code);
      pack_group<F>(tail, s, dim - s, dim, row);
    }
  }
  // 32 codes.
  template <int F>
  static void pack(__m256i code, int s, int dim, std::uint8_t* row) {
    if constexpr (F == TQ5 || F == TQ3) {
      constexpr int TOP = F == TQ5 ? 4 : 2;
      const auto bits = std::uint32_t(_mm256_movemask_epi8(_mm256_slli_epi16(code, 7 - TOP)));
      std::memcpy(row + dim * TOP / 8 + s / 8, &bits, 4);
      code = _mm256_and_si256(code, _mm256_set1_epi8((1 << TOP) - 1));
    }
    if constexpr (F == TQ4 || F == TQ5) {
      const __m128i high = _mm256_extracti128_si256(code, 1);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(row + s / 2),
                       _mm_or_si128(_mm256_castsi256_si128(code), _mm_slli_epi16(high, 4)));
    } else {
      code = _mm256_sllv_epi64(code, _mm256_setr_epi64x(0, 2, 4, 6));
      const __m128i two =
          _mm_or_si128(_mm256_castsi256_si128(code), _mm256_extracti128_si256(code, 1));
      _mm_storel_epi64(reinterpret_cast<__m128i*>(row + s / 4),
                       _mm_or_si128(two, _mm_unpackhi_epi64(two, two)));
    }
  }
};

}  // namespace
}  // namespace kvproof
