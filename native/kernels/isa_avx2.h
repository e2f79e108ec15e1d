// The operations of leaf.h with AVX2, FMA and F16C: shared by the AVX2 kernels and those that add
// VNNI to them.
//
// A table of 16 int16 is two byte shuffles (low and high bytes), one of bytes is one; a vpmaddwd
// and a vpaddd take 16 products. On Zen 3 both halves of a decode attention are then bound by the
// four vector pipes: per 64 codes of tq4 9 to 12 operations to unpack and 8 per query row
// (docs/performance.md).
#pragma once

#include "codes_avx2.h"
#include "foreign.h"
#include "leaf.h"
#include "rows_avx2.h"
#include "trellis.h"

namespace kvproof {
namespace {

struct Avx2 : CodesAvx2 {
  using RowStages = RowsAvx2;
  static constexpr bool UNSIGNED_ROWS = true;
  static constexpr bool FUSED_MADD = false;
  static constexpr bool TOKENS_IN_LANES = true, BYTE_PRODUCTS = false;
  using RowValue = std::uint8_t;
  static constexpr int LANES = 8;
  using F = __m256;
  using W = __m256i;

  struct Lut {
    // Low and high bytes of the first 16 entries; low bytes of the others.
    __m256i low, high, second;
    explicit Lut(const std::int16_t* e) {
      alignas(16) std::uint8_t l[32], h[16];
      for (int i = 0; i < 32; ++i) l[i] = std::uint8_t(e[i]);
      for (int i = 0; i < 16; ++i) h[i] = std::uint8_t(e[i] >> 8);
      low = twice(l);
      high = twice(h);
      second = twice(l + 16);
    }
    static __m256i twice(const std::uint8_t* p) {
      return _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(p)));
    }
    // Bytes of 32 entries; the top bit of a byte of `top` chooses the second half.
    __m256i byte(__m256i nibbles, __m256i top) const {
      return _mm256_blendv_epi8(_mm256_shuffle_epi8(low, nibbles),
                                _mm256_shuffle_epi8(second, nibbles), top);
    }
    __m256i byte(const Fives& codes) const { return byte(Nibbles{codes.bytes}, codes.top()); }
  };

  static F zero() { return _mm256_setzero_ps(); }
  static F set(float x) { return _mm256_set1_ps(x); }
  static F load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, F x) { _mm256_storeu_ps(p, x); }
  static F add(F a, F b) { return _mm256_add_ps(a, b); }
  static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F max(F a, F b) { return _mm256_max_ps(a, b); }
  static F min(F a, F b) { return _mm256_min_ps(a, b); }
  static F abs(F a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.f), a); }
  static F mask_above(F x, F limit) { return _mm256_cmp_ps(x, limit, _CMP_GT_OQ); }
  static F above(F x, float limit, F value) {
    return _mm256_and_ps(mask_above(x, set(limit)), value);
  }
  // Sum of sixteen lanes: halves added, 8, 4, 2, 1.
  static float fold(const F* part) {
    const F eight = add(part[0], part[1]);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
  }
  template <int COUNT>
  static F look_up(const float* entry, W index) {
    const F low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(entry), index);
    if constexpr (COUNT <= 8) return low;
    const F high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(entry + 8), index);
    return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(index, 28)));
  }
  static void store_by_four(const F* x, float* out) {  // lane i of the four to out[4 * i]
    const F a = _mm256_unpacklo_ps(x[0], x[1]), b = _mm256_unpackhi_ps(x[0], x[1]);
    const F c = _mm256_unpacklo_ps(x[2], x[3]), d = _mm256_unpackhi_ps(x[2], x[3]);
    const F rows[4] = {_mm256_shuffle_ps(a, c, 0x44), _mm256_shuffle_ps(a, c, 0xee),
                       _mm256_shuffle_ps(b, d, 0x44), _mm256_shuffle_ps(b, d, 0xee)};
    for (int i = 0; i < 4; ++i) {
      _mm_storeu_ps(out + 4 * i, _mm256_castps256_ps128(rows[i]));
      _mm_storeu_ps(out + 4 * i + 16, _mm256_extractf128_ps(rows[i], 1));
    }
  }
  static bool all_below(F x, F limit) {
    return _mm256_movemask_ps(_mm256_cmp_ps(x, limit, _CMP_LT_OQ)) == 0xff;
  }
  // p times 2^n, n in the low bits of a float.
  static F add_exponent(F p, F bits) {
    return _mm256_castsi256_ps(
        _mm256_add_epi32(_mm256_castps_si256(p), _mm256_slli_epi32(_mm256_castps_si256(bits), 23)));
  }
  static F scale_by_power(F p, W n) {
    const W bits = _mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(p, _mm256_castsi256_ps(bits));
  }

  static W zero_words() { return _mm256_setzero_si256(); }
  static W set_words(std::int32_t x) { return _mm256_set1_epi32(x); }
  static W load_words(const std::int16_t* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }
  static void store_words(void* p, W x) { _mm256_storeu_si256(static_cast<__m256i*>(p), x); }
  // The value in a register: GCC would otherwise read it again from memory at each use, and the
  // load ports are what limits the products.
  static F held(F x) {
    asm("" : "+x"(x));
    return x;
  }
  static W held(W x) {
    asm("" : "+x"(x));
    return x;
  }
  static W multiply(W a, W b) { return _mm256_madd_epi16(a, b); }
  static W madd(W acc, W a, W b) {
    // In place by decree: GCC 12 copies every accumulator once an iteration, and spills some.
    const W products = _mm256_madd_epi16(a, b);
    asm("vpaddd %1, %0, %0" : "+x"(acc) : "x"(products));
    return acc;
  }
  static W pair(W even, W odd) {
    return _mm256_blend_epi16(even, _mm256_slli_epi32(odd, 16), 0xaa);
  }
  static W scale_entries(W x, int shift, W factor) {
    return _mm256_mulhrs_epi16(_mm256_sll_epi16(x, _mm_cvtsi32_si128(shift)), factor);
  }
  static W add_entries(W a, W b) { return _mm256_add_epi16(a, b); }
  static W add_words(W a, W b) { return _mm256_add_epi32(a, b); }
  static W count_above(W count, F x, F limit) {  // a true lane is -1
    return _mm256_sub_epi32(count, _mm256_castps_si256(mask_above(x, limit)));
  }
  static F to_float(W x) { return _mm256_cvtepi32_ps(x); }
  static W to_words(F x) { return _mm256_cvtps_epi32(x); }

  // Sums of eight registers, one per lane: transpose and add.
  static F reduce(const F* a) {
    F h[4], v[2];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
      h[i] = add(_mm256_unpacklo_ps(a[2 * i], a[2 * i + 1]),
                 _mm256_unpackhi_ps(a[2 * i], a[2 * i + 1]));
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      const __m256d x = _mm256_castps_pd(h[2 * i]), y = _mm256_castps_pd(h[2 * i + 1]);
      v[i] = add(_mm256_castpd_ps(_mm256_unpacklo_pd(x, y)),
                 _mm256_castpd_ps(_mm256_unpackhi_pd(x, y)));
    }
    return add(_mm256_permute2f128_ps(v[0], v[1], 0x20), _mm256_permute2f128_ps(v[0], v[1], 0x31));
  }
  static W reduce(const W* a) {
    // Blends run on every port, so they take the place of half of the shuffles.
    W h[4], v[2];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const __m256d x = _mm256_castsi256_pd(a[2 * i]), y = _mm256_castsi256_pd(a[2 * i + 1]);
      h[i] = _mm256_add_epi32(_mm256_blend_epi32(a[2 * i], a[2 * i + 1], 0xcc),
                              _mm256_castpd_si256(_mm256_shuffle_pd(x, y, 0x5)));
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      const F x = _mm256_castsi256_ps(h[2 * i]), y = _mm256_castsi256_ps(h[2 * i + 1]);
      v[i] = _mm256_add_epi32(_mm256_castps_si256(_mm256_shuffle_ps(x, y, 0x88)),
                              _mm256_castps_si256(_mm256_shuffle_ps(x, y, 0xdd)));
    }
    return _mm256_add_epi32(_mm256_blend_epi32(v[0], v[1], 0xf0),
                            _mm256_permute2x128_si256(v[0], v[1], 0x21));
  }

  template <int N>
  static F repeat(const float* p) {
    if constexpr (N == 1)
      return _mm256_broadcast_ss(p);
    else if constexpr (N == 2)
      return _mm256_castpd_ps(_mm256_broadcast_sd(reinterpret_cast<const double*>(p)));
    else
      return _mm256_broadcast_ps(reinterpret_cast<const __m128*>(p));
  }
  template <int N>
  static W repeat_words(const std::int32_t* p) {
    return _mm256_castps_si256(repeat<N>(reinterpret_cast<const float*>(p)));
  }
  template <int N>
  static F spread(const float* p) {
    if constexpr (N == 1)
      return load(p);
    else if constexpr (N == 2)
      return _mm256_permutevar8x32_ps(_mm256_castps128_ps256(_mm_loadu_ps(p)),
                                      _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3));
    else
      return _mm256_set_m128(_mm_broadcast_ss(p + 1), _mm_broadcast_ss(p));
  }

  // Hadamard over the eight lanes: each level adds the partner, and odd halves with the other sign.
  // A product with 1 or -1 is exact, so the fused sum is that of the reference.
  static F butterflies(F x) {
    const F s1 = _mm256_setr_ps(1, -1, 1, -1, 1, -1, 1, -1);
    const F s2 = _mm256_setr_ps(1, 1, -1, -1, 1, 1, -1, -1);
    const F s4 = _mm256_setr_ps(1, 1, 1, 1, -1, -1, -1, -1);
    x = fma(x, s1, _mm256_permute_ps(x, 0xb1));
    x = fma(x, s2, _mm256_permute_ps(x, 0x4e));
    return fma(x, s4, _mm256_permute2f128_ps(x, x, 0x01));
  }

  static F load_f16(const std::uint8_t* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static void store_f16(std::uint8_t* p, F x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                     _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  static F load_bf16(const std::uint8_t* p) {
    const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
  }
  static F load_fp8(const std::uint8_t* p) {
    // The bits of a half 256 times smaller; 0x7f is NaN.
    const __m128i x = _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    const __m128i body = _mm_and_si128(x, _mm_set1_epi16(0x7f));
    const __m128i nan = _mm_srli_epi16(_mm_cmpeq_epi16(body, _mm_set1_epi16(0x7f)), 1);
    const __m128i sign = _mm_slli_epi16(_mm_and_si128(x, _mm_set1_epi16(0x80)), 8);
    const __m128i half = _mm_or_si128(_mm_or_si128(_mm_slli_epi16(body, 7), sign), nan);
    return _mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(256.f));
  }

  static void key_words(const Lut& lut, __m256i codes, W* out) {
    const __m256i l = _mm256_shuffle_epi8(lut.low, codes), h = _mm256_shuffle_epi8(lut.high, codes);
    out[0] = _mm256_unpacklo_epi8(l, h);
    out[1] = _mm256_unpackhi_epi8(l, h);
  }
  static void key_words_signed(__m256i codes, W* out) {
    out[0] = _mm256_srai_epi16(_mm256_unpacklo_epi8(codes, codes), 8);
    out[1] = _mm256_srai_epi16(_mm256_unpackhi_epi8(codes, codes), 8);
  }
  static void store_values(const Lut& lut, Codes a, Codes b, std::int16_t* out) {
    W words[4];
    key_words(lut, _mm256_unpacklo_epi8(a, b), words);
    key_words(lut, _mm256_unpackhi_epi8(a, b), words + 2);
    for (int i = 0; i < 4; ++i) store_words(out + 16 * i, words[i]);
  }
  static void store_values_signed(Codes a, Codes b, std::int16_t* out) {
    W words[4];
    key_words_signed(_mm256_unpacklo_epi8(a, b), words);
    key_words_signed(_mm256_unpackhi_epi8(a, b), words + 2);
    for (int i = 0; i < 4; ++i) store_words(out + 16 * i, words[i]);
  }
  // Entries of the row formats are bytes, shifted to be unsigned: one lookup, and the even and odd
  // bytes of each word are its two numbers without an interleave.
  static void even_odd(W bytes, W* out) {
    out[0] = _mm256_and_si256(bytes, _mm256_set1_epi16(0xff));
    out[1] = _mm256_srli_epi16(bytes, 8);
  }
  static void key_words_row(const Lut& lut, Codes codes, W* out) {
    even_odd(_mm256_shuffle_epi8(lut.low, codes), out);
  }
  static void key_words_row(const Lut& lut, const Fives& codes, W* out) {
    even_odd(lut.byte(codes), out);
  }
  static void store_values_row(const Lut& lut, const Fives& a, const Fives& b, std::uint8_t* out) {
    const W of_a = lut.byte(a), of_b = lut.byte(b);
    store_words(out, _mm256_unpacklo_epi16(of_a, of_b));
    store_words(out + 32, _mm256_unpackhi_epi16(of_a, of_b));
  }
  static W shifted(Codes bytes) {  // signed bytes to unsigned ones, 128 higher
    return _mm256_xor_si256(bytes, _mm256_set1_epi8(-128));
  }
  static void key_words_bytes(Codes bytes, W* out) { even_odd(shifted(bytes), out); }
  // Value pairs stay bytes, two of each token by turns: half of the stores and loads.
  static void store_values_bytes(Codes a, Codes b, std::uint8_t* out) {
    store_words(out, shifted(_mm256_unpacklo_epi16(a, b)));
    store_words(out + 32, shifted(_mm256_unpackhi_epi16(a, b)));
  }
  static void store_values_row(const Lut& lut, Codes a, Codes b, std::uint8_t* out) {
    store_words(out, _mm256_shuffle_epi8(lut.low, _mm256_unpacklo_epi16(a, b)));
    store_words(out + 32, _mm256_shuffle_epi8(lut.low, _mm256_unpackhi_epi16(a, b)));
  }
  // The same pairs as numbers, for tiles that many rows read.
  static void store_even_odd(W first, W second, std::int16_t* out) {
    W words[4];
    even_odd(first, words);
    even_odd(second, words + 2);
    for (int i = 0; i < 4; ++i) store_words(out + 16 * i, words[i]);
  }
  static void store_values_bytes(Codes a, Codes b, std::int16_t* out) {
    store_even_odd(shifted(_mm256_unpacklo_epi16(a, b)), shifted(_mm256_unpackhi_epi16(a, b)), out);
  }
  static void store_values_row(const Lut& lut, Codes a, Codes b, std::int16_t* out) {
    store_even_odd(_mm256_shuffle_epi8(lut.low, _mm256_unpacklo_epi16(a, b)),
                   _mm256_shuffle_epi8(lut.low, _mm256_unpackhi_epi16(a, b)), out);
  }
  static void store_values_row(const Lut& lut, const Fives& a, const Fives& b, std::int16_t* out) {
    const W of_a = lut.byte(a), of_b = lut.byte(b);
    store_even_odd(_mm256_unpacklo_epi16(of_a, of_b), _mm256_unpackhi_epi16(of_a, of_b), out);
  }
  // Entries of 32 trellis states, in natural order. Each load takes two; on Zen 3 a gather of eight
  // takes 1.8 times as long.
  static W pairs_of_eight(const std::int32_t* pairs, const std::uint8_t* p) {
    std::uint64_t bits;
    std::memcpy(&bits, p, 8);
    const auto pair = [&](unsigned i) { return pairs[_bextr_u64(bits, 6 * i, 12)]; };
    __m128i low = _mm_cvtsi32_si128(pair(0)), high = _mm_cvtsi32_si128(pair(4));
    low = _mm_insert_epi32(low, pair(1), 1);
    low = _mm_insert_epi32(low, pair(2), 2);
    low = _mm_insert_epi32(low, pair(3), 3);
    high = _mm_insert_epi32(high, pair(5), 1);
    high = _mm_insert_epi32(high, pair(6), 2);
    high = _mm_insert_epi32(high, pair(7), 3);
    return _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
  }
  static void key_words_pairs(const std::int32_t* pairs, const std::uint8_t* p, W* out) {
    out[0] = pairs_of_eight(pairs, p);
    out[1] = pairs_of_eight(pairs, p + 6);
  }
  // +1 where a bit is set, else -1, in natural order.
  static void key_words_signs(const std::uint8_t* p, W* out) {
    const W bit = _mm256_setr_epi16(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192,
                                    16384, std::int16_t(-32768));
    for (int i = 0; i < 2; ++i) {
      const W clear = _mm256_cmpeq_epi16(
          _mm256_and_si256(_mm256_set1_epi16(std::int16_t(load_u16(p + 2 * i))), bit),
          _mm256_setzero_si256());
      out[i] = _mm256_or_si256(clear, _mm256_set1_epi16(1));
    }
  }
  // Words of two tokens by turns, within 128-bit lanes.
  static void store_turns(W a, W b, std::int16_t* out) {
    store_words(out, _mm256_unpacklo_epi16(a, b));
    store_words(out + 16, _mm256_unpackhi_epi16(a, b));
  }
  static F eight(const float* p, int) { return load(p); }
  // See score_lanes.
  template <class Group>
  static void tokens_to_lanes(Group group, W* word) {
    W two[4], low[2], high[2];
#pragma GCC unroll 4
    for (int e = 0; e < 4; ++e)
      two[e] = _mm256_inserti128_si256(_mm256_castsi128_si256(group(2 * e)), group(2 * e + 1), 1);
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      low[i] = _mm256_unpacklo_epi32(two[2 * i], two[2 * i + 1]);
      high[i] = _mm256_unpackhi_epi32(two[2 * i], two[2 * i + 1]);
    }
    word[0] = _mm256_unpacklo_epi64(low[0], low[1]);
    word[1] = _mm256_unpackhi_epi64(low[0], low[1]);
    word[2] = _mm256_unpacklo_epi64(high[0], high[1]);
    word[3] = _mm256_unpackhi_epi64(high[0], high[1]);
  }
  template <int F, int STEP>
  static W key_step(const Lut& lut, W word) {
    const W mask = _mm256_set1_epi8(15), even = _mm256_set1_epi16(0xff);
    const W codes = _mm256_and_si256(STEP % 2 ? _mm256_srli_epi16(word, 4) : word, mask);
    const W l = _mm256_shuffle_epi8(lut.low, codes);
    if constexpr (path_of(F) == ROW)
      return STEP / 2 ? _mm256_srli_epi16(l, 8) : _mm256_and_si256(l, even);
    const W h = _mm256_shuffle_epi8(lut.high, codes);
    return STEP / 2 ? _mm256_or_si256(_mm256_srli_epi16(l, 8), _mm256_andnot_si256(even, h))
                    : _mm256_or_si256(_mm256_and_si256(l, even), _mm256_slli_epi16(h, 8));
  }
  template <int WORD, int STEP>
  static W key_step5(const Lut& lut, W word, W fifth) {
    const W codes =
        _mm256_and_si256(STEP % 2 ? _mm256_srli_epi16(word, 4) : word, _mm256_set1_epi8(15));
    constexpr int BIT = fifth_bit(4 * WORD + STEP % 2 * 16);
    const W bytes = lut.byte(codes, BIT == 7 ? fifth : _mm256_slli_epi16(fifth, 7 - BIT));
    return STEP / 2 ? _mm256_srli_epi16(bytes, 8)
                    : _mm256_and_si256(bytes, _mm256_set1_epi16(0xff));
  }
  template <int MR>
  static void lanes_to_tokens(const F* row, F* out) {
    if constexpr (MR == 1) {
      out[0] = _mm256_permutevar8x32_ps(row[0], _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    } else if constexpr (MR == 2) {
      const __m256d low = _mm256_castps_pd(_mm256_unpacklo_ps(row[0], row[1]));
      const __m256d high = _mm256_castps_pd(_mm256_unpackhi_ps(row[0], row[1]));
      out[0] = _mm256_castpd_ps(_mm256_permute4x64_pd(low, 0xd8));
      out[1] = _mm256_castpd_ps(_mm256_permute4x64_pd(high, 0xd8));
    } else {
      const __m256d a = _mm256_castps_pd(_mm256_unpacklo_ps(row[0], row[1]));
      const __m256d b = _mm256_castps_pd(_mm256_unpackhi_ps(row[0], row[1]));
      const __m256d c = _mm256_castps_pd(_mm256_unpacklo_ps(row[2], row[3]));
      const __m256d d = _mm256_castps_pd(_mm256_unpackhi_ps(row[2], row[3]));
      out[0] = _mm256_castpd_ps(_mm256_unpacklo_pd(a, c));
      out[1] = _mm256_castpd_ps(_mm256_unpackhi_pd(a, c));
      out[2] = _mm256_castpd_ps(_mm256_unpacklo_pd(b, d));
      out[3] = _mm256_castpd_ps(_mm256_unpackhi_pd(b, d));
    }
  }

  // Interleaves work within 128-bit lanes: vector v of keys holds codes 8v.. of each lane's 16,
  // vector v of value pairs 4v.. of them. Row formats: vector v of keys holds codes 2i + v; vectors
  // 2u and 2u + 1 of value pairs hold the even and the odd ones of codes 8u.. of each lane's 16.
  static int key_element(int format, int p) {
    if (format == TBQ3_TCQ || format == QJL1_256) return p;
    return path_of(format) == ROW ? p % 16 * 2 + p / 16 : p % 16 / 8 * 16 + p / 16 * 8 + p % 8;
  }
  static int value_element(int format, int p) {
    if (format == TBQ3_TCQ) return p / 16 * 16 + p % 8 / 4 * 8 + p % 16 / 8 * 4 + p % 4;
    if (path_of(format) == ROW) return p % 8 / 4 * 16 + p / 16 * 8 + p % 4 * 2 + p / 8 % 2;
    return p % 8 / 4 * 16 + p / 8 * 4 + p % 4;
  }
};

}  // namespace
}  // namespace kvproof
