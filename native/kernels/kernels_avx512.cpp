// AVX-512 kernels (F, BW, DQ, VL, VNNI, VBMI).
//
// vpermw looks at five bits of each 16-bit lane, so with the table in twice it takes the lowest
// nibble of a word as it is stored: 4-bit codes need a shift and a lookup, no mask. vpdpwssd takes
// 32 products. Keys of 4-bit formats are multiplied with a token in each lane, which leaves nothing
// to add up across lanes. Other codes are unpacked by the 256-bit instructions of codes_avx2.h.
#if defined(__x86_64__)
#include "codes_avx2.h"
#include "foreign.h"
#include "leaf.h"
#include "rows_avx512.h"
#include "trellis.h"

namespace kvproof {
namespace {

struct Avx512 : CodesAvx2 {
  using RowStages = RowsAvx512;
  static constexpr bool UNSIGNED_ROWS = false;
  static constexpr bool FUSED_MADD = true;
  static constexpr bool TOKENS_IN_LANES = true, BYTE_PRODUCTS = false;
  using RowValue = std::int16_t;
  static constexpr int LANES = 16;
  using F = __m512;
  using W = __m512i;

  struct Lut {
    __m512i table;  // 32 entries, or 16 twice: vpermw looks at five bits
    explicit Lut(const std::int16_t* e) : table(_mm512_loadu_si512(e)) {}
  };

  static F zero() { return _mm512_setzero_ps(); }
  static F set(float x) { return _mm512_set1_ps(x); }
  static F load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, F x) { _mm512_storeu_ps(p, x); }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F max(F a, F b) { return _mm512_max_ps(a, b); }
  static F min(F a, F b) { return _mm512_min_ps(a, b); }
  static F abs(F a) { return _mm512_abs_ps(a); }
  static F above(F x, float limit, F value) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, set(limit), _CMP_GT_OQ), value);
  }
  // Sum of sixteen lanes: halves added, 8, 4, 2, 1.
  static float fold(const F* part) {
    const __m256 eight =
        _mm256_add_ps(_mm512_castps512_ps256(*part), _mm512_extractf32x8_ps(*part, 1));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
  }
  template <int COUNT>
  static F look_up(const float* entry, W index) {
    if constexpr (COUNT <= 8)
      return _mm512_permutexvar_ps(index, _mm512_castps256_ps512(_mm256_loadu_ps(entry)));
    return _mm512_permutexvar_ps(index, _mm512_loadu_ps(entry));
  }
  static void store_by_four(const F* x, float* out) {  // lane i of the four to out[4 * i]
    const F a = _mm512_unpacklo_ps(x[0], x[1]), b = _mm512_unpackhi_ps(x[0], x[1]);
    const F c = _mm512_unpacklo_ps(x[2], x[3]), d = _mm512_unpackhi_ps(x[2], x[3]);
    const F rows[4] = {_mm512_shuffle_ps(a, c, 0x44), _mm512_shuffle_ps(a, c, 0xee),
                       _mm512_shuffle_ps(b, d, 0x44), _mm512_shuffle_ps(b, d, 0xee)};
    for (int i = 0; i < 4; ++i) {
      _mm_storeu_ps(out + 4 * i, _mm512_castps512_ps128(rows[i]));
      _mm_storeu_ps(out + 4 * i + 16, _mm512_extractf32x4_ps(rows[i], 1));
      _mm_storeu_ps(out + 4 * i + 32, _mm512_extractf32x4_ps(rows[i], 2));
      _mm_storeu_ps(out + 4 * i + 48, _mm512_extractf32x4_ps(rows[i], 3));
    }
  }
  static bool all_below(F x, F limit) { return _mm512_cmp_ps_mask(x, limit, _CMP_LT_OQ) == 0xffff; }
  static F add_exponent(F p, F bits) {
    return _mm512_castsi512_ps(
        _mm512_add_epi32(_mm512_castps_si512(p), _mm512_slli_epi32(_mm512_castps_si512(bits), 23)));
  }
  static F scale_by_power(F p, W n) {
    const W bits = _mm512_slli_epi32(_mm512_add_epi32(n, _mm512_set1_epi32(127)), 23);
    return _mm512_mul_ps(p, _mm512_castsi512_ps(bits));
  }

  static W zero_words() { return _mm512_setzero_si512(); }
  static W set_words(std::int32_t x) { return _mm512_set1_epi32(x); }
  static W load_words(const std::int16_t* p) { return _mm512_loadu_si512(p); }
  static void store_words(void* p, W x) { _mm512_storeu_si512(p, x); }
  // The value in a register: GCC would otherwise read it again from memory at each use, and the
  // load ports are what limits the products.
  static F held(F x) {
    asm("" : "+v"(x));
    return x;
  }
  static W held(W x) {
    asm("" : "+v"(x));
    return x;
  }
  static W multiply(W a, W b) { return _mm512_madd_epi16(a, b); }
  static W madd(W acc, W a, W b) { return _mm512_dpwssd_epi32(acc, a, b); }
  static W pair(W even, W odd) {
    return _mm512_mask_blend_epi16(0xaaaaaaaa, even, _mm512_slli_epi32(odd, 16));
  }
  static W scale_entries(W x, int shift, W factor) {
    return _mm512_mulhrs_epi16(_mm512_sll_epi16(x, _mm_cvtsi32_si128(shift)), factor);
  }
  static W add_entries(W a, W b) { return _mm512_add_epi16(a, b); }
  static W add_words(W a, W b) { return _mm512_add_epi32(a, b); }
  static W count_above(W count, F x, F limit) {
    return _mm512_mask_add_epi32(count, _mm512_cmp_ps_mask(x, limit, _CMP_GT_OQ), count,
                                 _mm512_set1_epi32(1));
  }
  static F to_float(W x) { return _mm512_cvtepi32_ps(x); }
  static W to_words(F x) { return _mm512_cvtps_epi32(x); }

  // Sums of sixteen registers, one per lane: transpose and add, first within 128-bit lanes.
  static F reduce(const F* a) {
    F h[8], v[4], s[2];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i)
      h[i] = add(_mm512_unpacklo_ps(a[2 * i], a[2 * i + 1]),
                 _mm512_unpackhi_ps(a[2 * i], a[2 * i + 1]));
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const __m512d x = _mm512_castps_pd(h[2 * i]), y = _mm512_castps_pd(h[2 * i + 1]);
      v[i] = add(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)),
                 _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i)
      s[i] = add(_mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0x44),
                 _mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0xee));
    return add(_mm512_shuffle_f32x4(s[0], s[1], 0x88), _mm512_shuffle_f32x4(s[0], s[1], 0xdd));
  }
  static W reduce(const W* a) { return RowsAvx512::sums(a); }

  template <int N>
  static F repeat(const float* p) {
    if constexpr (N == 1)
      return set(*p);
    else if constexpr (N == 2) {
      double both;
      std::memcpy(&both, p, 8);
      return _mm512_castpd_ps(_mm512_set1_pd(both));
    } else
      return _mm512_broadcast_f32x4(_mm_loadu_ps(p));
  }
  template <int N>
  static W repeat_words(const std::int32_t* p) {
    return _mm512_castps_si512(repeat<N>(reinterpret_cast<const float*>(p)));
  }
  template <int N>
  static F spread(const float* p) {
    if constexpr (N == 1)
      return load(p);
    else if constexpr (N == 2)
      return _mm512_permutexvar_ps(
          _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7),
          _mm512_castps256_ps512(_mm256_loadu_ps(p)));
    else
      return _mm512_permutexvar_ps(
          _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3),
          _mm512_castps128_ps512(_mm_loadu_ps(p)));
  }

  // Hadamard over the sixteen lanes: each level adds the partner, and odd halves with the other
  // sign. A product with 1 or -1 is exact, so the fused sum is that of the reference.
  static F butterflies(F x) {
    const F s1 = _mm512_broadcast_f32x4(_mm_setr_ps(1, -1, 1, -1));
    const F s2 = _mm512_broadcast_f32x4(_mm_setr_ps(1, 1, -1, -1));
    const F s4 = _mm512_broadcast_f32x8(_mm256_setr_ps(1, 1, 1, 1, -1, -1, -1, -1));
    const F s8 = _mm512_setr_ps(1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1, -1, -1, -1);
    x = fma(x, s1, _mm512_permute_ps(x, 0xb1));
    x = fma(x, s2, _mm512_permute_ps(x, 0x4e));
    x = fma(x, s4, _mm512_shuffle_f32x4(x, x, 0xb1));
    return fma(x, s8, _mm512_shuffle_f32x4(x, x, 0x4e));
  }

  static F load_f16(const std::uint8_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static void store_f16(std::uint8_t* p, F x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  static F load_bf16(const std::uint8_t* p) {
    const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
  }
  static F load_fp8(const std::uint8_t* p) {
    // The bits of a half 256 times smaller; 0x7f is NaN.
    const __m256i x = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    const __m256i body = _mm256_and_si256(x, _mm256_set1_epi16(0x7f));
    const __m256i nan = _mm256_srli_epi16(_mm256_cmpeq_epi16(body, _mm256_set1_epi16(0x7f)), 1);
    const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(x, _mm256_set1_epi16(0x80)), 8);
    const __m256i half = _mm256_or_si256(_mm256_or_si256(_mm256_slli_epi16(body, 7), sign), nan);
    return _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256.f));
  }

  static void key_words(const Lut& lut, Nibbles codes, W* out) {
    // Each 32-bit word four times, shifted by 0, 4, 8 and 12.
    const W copies =
        _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3),
                                 _mm512_castsi128_si512(codes.bytes));
    const W shifts = _mm512_set4_epi32(0x000c000c, 0x00080008, 0x00040004, 0);
    out[0] = _mm512_permutexvar_epi16(_mm512_srlv_epi16(copies, shifts), lut.table);
  }
  static void store_values(const Lut& lut, Nibbles a, Nibbles b, std::int16_t* out) {
    // Words of a in even lanes, of b in odd ones; then their words by turns, twice.
    const W both = _mm512_mask_broadcast_i32x4(_mm512_broadcast_i32x4(a.bytes), 0xf0f0, b.bytes);
    const W turns = _mm512_broadcast_i64x4(
        _mm256_setr_epi16(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15));
    const W twice = _mm512_permutexvar_epi16(turns, both);
    for (int i = 0; i < 2; ++i) {
      const W shifts = _mm512_inserti64x4(_mm512_set1_epi16(std::int16_t(8 * i)),
                                          _mm256_set1_epi16(std::int16_t(8 * i + 4)), 1);
      store_words(out + 32 * i,
                  _mm512_permutexvar_epi16(_mm512_srlv_epi16(twice, shifts), lut.table));
    }
  }
  static void key_words(const Lut& lut, __m256i codes, W* out) {
    out[0] = _mm512_permutexvar_epi16(_mm512_cvtepu8_epi16(codes), lut.table);
  }
  static void key_words_signed(__m256i codes, W* out) { out[0] = _mm512_cvtepi8_epi16(codes); }
  static void store_values(const Lut& lut, Codes a, Codes b, std::int16_t* out) {
    W words[2];
    key_words(lut, _mm256_unpacklo_epi8(a, b), words);
    key_words(lut, _mm256_unpackhi_epi8(a, b), words + 1);
    for (int i = 0; i < 2; ++i) store_words(out + 32 * i, words[i]);
  }
  static void store_values_signed(Codes a, Codes b, std::int16_t* out) {
    W words[2];
    key_words_signed(_mm256_unpacklo_epi8(a, b), words);
    key_words_signed(_mm256_unpackhi_epi8(a, b), words + 1);
    for (int i = 0; i < 2; ++i) store_words(out + 32 * i, words[i]);
  }
  static void key_words_bytes(Codes codes, W* out) { key_words_signed(codes, out); }
  static void store_values_bytes(Codes a, Codes b, std::int16_t* out) {
    store_values_signed(a, b, out);
  }
  template <class Any>
  static void key_words_row(const Lut& lut, Any codes, W* out) {
    key_words(lut, codes, out);
  }
  template <class Any>
  static void store_values_row(const Lut& lut, Any a, Any b, std::int16_t* out) {
    store_values(lut, a, b, out);
  }
  // Entries of 32 trellis states, in natural order: eight indices of 12 bits are 48 bits, of which
  // each 32-bit lane takes the three bytes that hold its own.
  static void key_words_pairs(const std::int32_t* pairs, const std::uint8_t* p, W* out) {
    std::uint64_t low, high;
    std::memcpy(&low, p, 8);
    std::memcpy(&high, p + 6, 8);
    const __m512i bytes =
        _mm512_broadcast_i32x4(_mm_set_epi64x(std::int64_t(high), std::int64_t(low)));
    const __m512i place =
        _mm512_set_epi32(0x800f0e0d, 0x800e0d0c, 0x800d0c0b, 0x800d0c0b, 0x800c0b0a, 0x800b0a09,
                         0x800a0908, 0x800a0908, 0x80070605, 0x80060504, 0x80050403, 0x80050403,
                         0x80040302, 0x80030201, 0x80020100, 0x80020100);
    const __m512i shift = _mm512_setr_epi32(0, 6, 4, 2, 0, 6, 4, 2, 0, 6, 4, 2, 0, 6, 4, 2);
    const __m512i index =
        _mm512_and_si512(_mm512_srlv_epi32(_mm512_shuffle_epi8(bytes, place), shift),
                         _mm512_set1_epi32(WideTrellis::PAIRS - 1));
    out[0] = _mm512_i32gather_epi32(index, pairs, 4);
  }
  // +1 where a bit is set, else -1, in natural order.
  static void key_words_signs(const std::uint8_t* p, W* out) {
    std::uint32_t bits;
    std::memcpy(&bits, p, 4);
    out[0] = _mm512_mask_blend_epi16(bits, _mm512_set1_epi16(-1), _mm512_set1_epi16(1));
  }
  // Words of two tokens by turns, within 128-bit lanes.
  static void store_turns(W a, W b, std::int16_t* out) {
    store_words(out, _mm512_unpacklo_epi16(a, b));
    store_words(out + 32, _mm512_unpackhi_epi16(a, b));
  }
  static F eight(const float* p, int) { return _mm512_broadcast_f32x8(_mm256_loadu_ps(p)); }
  // See score_lanes.
  template <class Group>
  static void tokens_to_lanes(Group group, W* word) {
    W four[4], low[2], high[2];
#pragma GCC unroll 4
    for (int e = 0; e < 4; ++e) {
      four[e] = _mm512_castsi128_si512(group(4 * e));
      four[e] = _mm512_inserti32x4(four[e], group(4 * e + 1), 1);
      four[e] = _mm512_inserti32x4(four[e], group(4 * e + 2), 2);
      four[e] = _mm512_inserti32x4(four[e], group(4 * e + 3), 3);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      low[i] = _mm512_unpacklo_epi32(four[2 * i], four[2 * i + 1]);
      high[i] = _mm512_unpackhi_epi32(four[2 * i], four[2 * i + 1]);
    }
    word[0] = _mm512_unpacklo_epi64(low[0], low[1]);
    word[1] = _mm512_unpackhi_epi64(low[0], low[1]);
    word[2] = _mm512_unpacklo_epi64(high[0], high[1]);
    word[3] = _mm512_unpackhi_epi64(high[0], high[1]);
  }

  template <int MR>
  static void lanes_to_tokens(const F* row, F* out) {
    const W natural = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    if constexpr (MR == 1) {
      out[0] = _mm512_permutexvar_ps(natural, row[0]);
    } else if constexpr (MR == 2) {
      const W low = _mm512_setr_epi32(0, 16, 4, 20, 8, 24, 12, 28, 1, 17, 5, 21, 9, 25, 13, 29);
      out[0] = _mm512_permutex2var_ps(row[0], low, row[1]);
      out[1] = _mm512_permutex2var_ps(row[0], _mm512_add_epi32(low, _mm512_set1_epi32(2)), row[1]);
    } else {
      const __m512d a = _mm512_castps_pd(_mm512_unpacklo_ps(row[0], row[1]));
      const __m512d b = _mm512_castps_pd(_mm512_unpackhi_ps(row[0], row[1]));
      const __m512d c = _mm512_castps_pd(_mm512_unpacklo_ps(row[2], row[3]));
      const __m512d d = _mm512_castps_pd(_mm512_unpackhi_ps(row[2], row[3]));
      out[0] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c));
      out[1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
      out[2] = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d));
      out[3] = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
    }
  }
  template <int F, int STEP>
  static W key_step(const Lut& lut, W word) {
    return _mm512_permutexvar_epi16(_mm512_srli_epi16(word, 4 * STEP), lut.table);
  }
  template <int WORD, int STEP>
  static W key_step5(const Lut& lut, W word, W fifth) {
    // The code's nibble to bits 0..3 of each 16, its fifth bit to bit 4.
    constexpr int BIT = fifth_bit(4 * WORD + STEP % 2 * 16) + STEP / 2 * 8, BY = BIT - 4;
    if constexpr (STEP) word = _mm512_srli_epi16(word, 4 * STEP);
    if constexpr (BY > 0) fifth = _mm512_srli_epi16(fifth, BY);
    if constexpr (BY < 0) fifth = _mm512_slli_epi16(fifth, -BY);
    const W code = _mm512_or_si512(_mm512_and_si512(word, _mm512_set1_epi16(15)),
                                   _mm512_and_si512(fifth, _mm512_set1_epi16(16)));
    return _mm512_permutexvar_epi16(code, lut.table);
  }
  // 4-bit codes: number 4k + s of keys is step s of 32-bit word k, a pair of codes two bytes apart;
  // vector v of value pairs holds the low nibbles of bytes 2i + v, then the high ones. Other keys
  // come out in natural order; their value pairs are interleaved within 128-bit lanes of bytes.
  static int key_element(int format, int p) { return packed4(format) ? lane_element(p) : p; }
  static int value_element(int format, int p) {
    if (format == TBQ3_TCQ) return p % 16 / 4 * 8 + p / 16 * 4 + p % 4;
    if (packed4(format)) return p % 8 * 2 + p / 16 + p % 16 / 8 * 16;
    return p % 16 / 8 * 16 + p / 16 * 8 + p % 8;
  }
};

}  // namespace

constinit const Kernels kernels_avx512 = make_kernels<Avx512>("avx512");

}  // namespace kvproof
#endif
