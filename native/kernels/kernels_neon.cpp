// AArch64 kernels: NEON with the dot products of FEAT_DotProd.
//
// Eight lanes are two registers: with four, a tile of sums would leave half of the 32 registers
// empty. Codes whose entries are bytes are multiplied by sdot (score_bytes.h); entries of 16 bits
// and values by smlal, which takes neighbours apart: see madd and madd_pair.
#if defined(__aarch64__)
#include <arm_neon.h>

#include "foreign.h"
#include "leaf.h"
#include "rows.h"
#include "score_bytes.h"
#include "trellis.h"

namespace kvproof {
namespace {

// For each of 32 codes a byte of four, and a bit of it.
struct BitPlaces {
  std::uint8_t byte[32] = {}, bit[32] = {};
  template <class At>
  constexpr explicit BitPlaces(At at) {
    for (int i = 0; i < 32; ++i) {
      byte[i] = std::uint8_t(at(i) / 8);
      bit[i] = std::uint8_t(1 << at(i) % 8);
    }
  }
};
constexpr BitPlaces NATURAL{[](int i) { return i; }}, FIFTHS{fifth_bit};

struct Neon {
  static constexpr bool UNSIGNED_ROWS = false, TOKENS_IN_LANES = false, BYTE_PRODUCTS = true;
  using RowValue = std::int16_t;
  static constexpr int LANES = 8;
  struct F {
    float32x4_t lo, hi;
  };
  struct W {
    int32x4_t lo, hi;
  };
  struct Codes {  // in natural order
    uint8x16_t lo, hi;
  };
  struct Fives : Codes {};

  struct Lut {
    // Low and high bytes of the first 16 entries; low bytes of the others.
    uint8x16_t low, high, second;
    explicit Lut(const std::int16_t* e) {
      std::uint8_t l[32], h[16];
      for (int i = 0; i < 32; ++i) l[i] = std::uint8_t(e[i]);
      for (int i = 0; i < 16; ++i) h[i] = std::uint8_t(e[i] >> 8);
      low = vld1q_u8(l);
      high = vld1q_u8(h);
      second = vld1q_u8(l + 16);
    }
  };

  // ---- floats
  static F zero() { return set(0); }
  static F set(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x)}; }
  static F load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
  static void store(float* p, F x) {
    vst1q_f32(p, x.lo);
    vst1q_f32(p + 4, x.hi);
  }
  static F add(F a, F b) { return {vaddq_f32(a.lo, b.lo), vaddq_f32(a.hi, b.hi)}; }
  static F sub(F a, F b) { return {vsubq_f32(a.lo, b.lo), vsubq_f32(a.hi, b.hi)}; }
  static F mul(F a, F b) { return {vmulq_f32(a.lo, b.lo), vmulq_f32(a.hi, b.hi)}; }
  static F fma(F a, F b, F c) { return {vfmaq_f32(c.lo, a.lo, b.lo), vfmaq_f32(c.hi, a.hi, b.hi)}; }
  static F max(F a, F b) { return {vmaxq_f32(a.lo, b.lo), vmaxq_f32(a.hi, b.hi)}; }
  static F min(F a, F b) { return {vminq_f32(a.lo, b.lo), vminq_f32(a.hi, b.hi)}; }
  static F abs(F a) { return {vabsq_f32(a.lo), vabsq_f32(a.hi)}; }
  static F above(F x, float limit, F value) {
    const W mask = is_above(x, set(limit));
    return {vreinterpretq_f32_s32(vandq_s32(vreinterpretq_s32_f32(value.lo), mask.lo)),
            vreinterpretq_f32_s32(vandq_s32(vreinterpretq_s32_f32(value.hi), mask.hi))};
  }
  static W is_above(F x, F limit) {  // a true lane is -1
    return {vreinterpretq_s32_u32(vcgtq_f32(x.lo, limit.lo)),
            vreinterpretq_s32_u32(vcgtq_f32(x.hi, limit.hi))};
  }
  static W count_above(W count, F x, F limit) {
    const W mask = is_above(x, limit);
    return {vsubq_s32(count.lo, mask.lo), vsubq_s32(count.hi, mask.hi)};
  }
  // Sum of sixteen lanes: halves added, 8, 4, 2, 1.
  static float fold(const F* part) {
    const F eight = add(part[0], part[1]);
    const float32x4_t four = vaddq_f32(eight.lo, eight.hi);
    const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
  }
  // Places of four floats in a table of bytes.
  static uint8x16_t float_at(int32x4_t index) {
    return vreinterpretq_u8_s32(
        vmlaq_n_s32(vdupq_n_s32(0x03020100), index, std::int32_t(0x04040404)));
  }
  template <int COUNT>
  static F look_up(const float* entry, W index) {
    const auto* bytes = reinterpret_cast<const std::uint8_t*>(entry);
    const auto each = [&](int32x4_t i) {
      if constexpr (COUNT <= 8)
        return vreinterpretq_f32_u8(vqtbl2q_u8(vld1q_u8_x2(bytes), float_at(i)));
      else
        return vreinterpretq_f32_u8(vqtbl4q_u8(vld1q_u8_x4(bytes), float_at(i)));
    };
    return {each(index.lo), each(index.hi)};
  }
  static void store_by_four(const F* x, float* out) {  // lane i of the four to out[4 * i]
    vst4q_f32(out, float32x4x4_t{{x[0].lo, x[1].lo, x[2].lo, x[3].lo}});
    vst4q_f32(out + 16, float32x4x4_t{{x[0].hi, x[1].hi, x[2].hi, x[3].hi}});
  }
  static bool all_below(F x, F limit) {
    return vminvq_u32(vandq_u32(vcltq_f32(x.lo, limit.lo), vcltq_f32(x.hi, limit.hi))) != 0;
  }
  static F scale_by_power(F p, W n) {
    const auto each = [](float32x4_t v, int32x4_t k) {
      const int32x4_t bits = vshlq_n_s32(vaddq_s32(k, vdupq_n_s32(127)), 23);
      return vmulq_f32(v, vreinterpretq_f32_s32(bits));
    };
    return {each(p.lo, n.lo), each(p.hi, n.hi)};
  }

  // ---- words: lane i is an int32, or the int16 numbers 2i and 2i + 1
  static W zero_words() { return set_words(0); }
  static W set_words(std::int32_t x) { return {vdupq_n_s32(x), vdupq_n_s32(x)}; }
  static W load_words(const std::int16_t* p) {
    return {vreinterpretq_s32_s16(vld1q_s16(p)), vreinterpretq_s32_s16(vld1q_s16(p + 8))};
  }
  static void store_words(void* p, W x) {
    vst1q_u8(static_cast<std::uint8_t*>(p), vreinterpretq_u8_s32(x.lo));
    vst1q_u8(static_cast<std::uint8_t*>(p) + 16, vreinterpretq_u8_s32(x.hi));
  }
  static F held(F x) { return x; }  // no instruction here multiplies from memory
  static W held(W x) { return x; }
  static int16x8_t shorts(int32x4_t x) { return vreinterpretq_s16_s32(x); }
  static W words(int16x8_t lo, int16x8_t hi) {
    return {vreinterpretq_s32_s16(lo), vreinterpretq_s32_s16(hi)};
  }
  static W multiply(W a, W b) {
    const auto each = [](int16x8_t x, int16x8_t y) {
      return vmlal_high_s16(vmull_s16(vget_low_s16(x), vget_low_s16(y)), x, y);
    };
    return {each(shorts(a.lo), shorts(b.lo)), each(shorts(a.hi), shorts(b.hi))};
  }
  // The products of a register in any of its lanes: whoever uses this adds them all up.
  static W madd(W acc, W a, W b) {
    const auto each = [](int32x4_t sum, int16x8_t x, int16x8_t y) {
      return vmlal_high_s16(vmlal_s16(sum, vget_low_s16(x), vget_low_s16(y)), x, y);
    };
    return {each(acc.lo, shorts(a.lo), shorts(b.lo)), each(acc.hi, shorts(a.hi), shorts(b.hi))};
  }
  // Products with one pair, each in its own lane.
  static W madd_pair(W acc, W a, W pair) {
    const int16x8_t two = shorts(pair.lo);
    const int16x8_t even = vuzp1q_s16(shorts(a.lo), shorts(a.hi));
    const int16x8_t odd = vuzp2q_s16(shorts(a.lo), shorts(a.hi));
    acc.lo = vmlal_laneq_s16(acc.lo, vget_low_s16(even), two, 0);
    acc.hi = vmlal_high_laneq_s16(acc.hi, even, two, 0);
    acc.lo = vmlal_laneq_s16(acc.lo, vget_low_s16(odd), two, 1);
    acc.hi = vmlal_high_laneq_s16(acc.hi, odd, two, 1);
    return acc;
  }
  static W pair(W even, W odd) {
    return {vsliq_n_s32(even.lo, odd.lo, 16), vsliq_n_s32(even.hi, odd.hi, 16)};
  }
  static W scale_entries(W x, int shift, W factor) {
    const auto each = [&](int32x4_t v, int32x4_t f) {
      return vqrdmulhq_s16(vshlq_s16(shorts(v), vdupq_n_s16(std::int16_t(shift))), shorts(f));
    };
    return words(each(x.lo, factor.lo), each(x.hi, factor.hi));
  }
  static W add_entries(W a, W b) {
    return words(vaddq_s16(shorts(a.lo), shorts(b.lo)), vaddq_s16(shorts(a.hi), shorts(b.hi)));
  }
  static W add_words(W a, W b) { return {vaddq_s32(a.lo, b.lo), vaddq_s32(a.hi, b.hi)}; }
  static F to_float(W x) { return {vcvtq_f32_s32(x.lo), vcvtq_f32_s32(x.hi)}; }
  static W to_words(F x) { return {vcvtnq_s32_f32(x.lo), vcvtnq_s32_f32(x.hi)}; }

  // Sums of eight pairs of registers, one per lane.
  static F reduce(const F* a) {
    const auto two = [&](int i) {
      return vpaddq_f32(vaddq_f32(a[i].lo, a[i].hi), vaddq_f32(a[i + 1].lo, a[i + 1].hi));
    };
    return {vpaddq_f32(two(0), two(2)), vpaddq_f32(two(4), two(6))};
  }
  static W reduce(const W* a) {
    const auto two = [&](int i) {
      return vpaddq_s32(vaddq_s32(a[i].lo, a[i].hi), vaddq_s32(a[i + 1].lo, a[i + 1].hi));
    };
    return {vpaddq_s32(two(0), two(2)), vpaddq_s32(two(4), two(6))};
  }

  template <int N>
  static F repeat(const float* p) {
    if constexpr (N == 1) {
      return set(*p);
    } else if constexpr (N == 2) {
      const float32x4_t four = vcombine_f32(vld1_f32(p), vld1_f32(p));
      return {four, four};
    } else {
      return {vld1q_f32(p), vld1q_f32(p)};
    }
  }
  template <int N>
  static W repeat_words(const std::int32_t* p) {
    if constexpr (N == 1) {
      return set_words(*p);
    } else if constexpr (N == 2) {
      const int32x4_t four = vcombine_s32(vld1_s32(p), vld1_s32(p));
      return {four, four};
    } else {
      return {vld1q_s32(p), vld1q_s32(p)};
    }
  }
  template <int N>
  static F spread(const float* p) {
    if constexpr (N == 1) {
      return load(p);
    } else if constexpr (N == 2) {
      const float32x4_t four = vld1q_f32(p);
      return {vzip1q_f32(four, four), vzip2q_f32(four, four)};
    } else {
      return {vdupq_n_f32(p[0]), vdupq_n_f32(p[1])};
    }
  }

  // Hadamard over the eight lanes: neighbours, pairs, halves.
  static F butterflies(F x) {
    const std::uint32_t minus = 0x80000000;
    const uint32x4_t s1 = {0, minus, 0, minus}, s2 = {0, 0, minus, minus};
    const auto signs = [](float32x4_t v, uint32x4_t s) {
      return vreinterpretq_f32_u32(veorq_u32(vreinterpretq_u32_f32(v), s));
    };
    const auto four = [&](float32x4_t v) {
      v = vaddq_f32(vtrn1q_f32(v, v), signs(vtrn2q_f32(v, v), s1));
      return vaddq_f32(vcombine_f32(vget_low_f32(v), vget_low_f32(v)),
                       signs(vcombine_f32(vget_high_f32(v), vget_high_f32(v)), s2));
    };
    const float32x4_t lo = four(x.lo), hi = four(x.hi);
    return {vaddq_f32(lo, hi), vsubq_f32(lo, hi)};
  }

  static F from_halves(uint16x8_t x) {
    return {vcvt_f32_f16(vreinterpret_f16_u16(vget_low_u16(x))),
            vcvt_f32_f16(vreinterpret_f16_u16(vget_high_u16(x)))};
  }
  static F load_f16(const std::uint8_t* p) {
    return from_halves(vreinterpretq_u16_u8(vld1q_u8(p)));
  }
  static void store_f16(std::uint8_t* p, F x) {
    const uint16x4_t lo = vreinterpret_u16_f16(vcvt_f16_f32(x.lo));
    const uint16x4_t hi = vreinterpret_u16_f16(vcvt_f16_f32(x.hi));
    vst1q_u8(p, vreinterpretq_u8_u16(vcombine_u16(lo, hi)));
  }
  static F load_bf16(const std::uint8_t* p) {
    const uint16x8_t x = vreinterpretq_u16_u8(vld1q_u8(p));
    return {vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(x), 16)),
            vreinterpretq_f32_u32(vshll_high_n_u16(x, 16))};
  }
  static F load_fp8(const std::uint8_t* p) {
    // The bits of a half 256 times smaller; 0x7f is NaN.
    const uint16x8_t x = vmovl_u8(vld1_u8(p)), body = vandq_u16(x, vdupq_n_u16(0x7f));
    const uint16x8_t nan = vshrq_n_u16(vceqq_u16(body, vdupq_n_u16(0x7f)), 1);
    const uint16x8_t sign = vshlq_n_u16(vandq_u16(x, vdupq_n_u16(0x80)), 8);
    const F half = from_halves(vorrq_u16(vorrq_u16(vshlq_n_u16(body, 7), sign), nan));
    return mul(half, set(256.f));
  }

  // ---- codes
  static Codes nibbles(uint8x16_t bytes) {
    return {vandq_u8(bytes, vdupq_n_u8(15)), vshrq_n_u8(bytes, 4)};
  }
  static uint8x16_t load_half(const std::uint8_t* p) {
    return vcombine_u8(vld1_u8(p), vdup_n_u8(0));
  }
  static Codes codes4(const std::uint8_t* p) { return nibbles(vld1q_u8(p)); }
  static Codes codes4_half(const std::uint8_t* p) { return nibbles(load_half(p)); }

  static Codes with_bits(Codes codes, std::uint32_t bits, const BitPlaces& at, int value) {
    const uint8x16_t four = vreinterpretq_u8_u32(vdupq_n_u32(bits));
    const uint8x16_t add = vdupq_n_u8(std::uint8_t(value));
    const auto each = [&](uint8x16_t c, int i) {
      const uint8x16_t byte = vqtbl1q_u8(four, vld1q_u8(at.byte + i));
      return vorrq_u8(c, vandq_u8(vtstq_u8(byte, vld1q_u8(at.bit + i)), add));
    };
    return {each(codes.lo, 0), each(codes.hi, 16)};
  }
  static Codes planes(std::uint64_t low, std::uint32_t high) {
    const uint8x16_t twice = vreinterpretq_u8_u64(vdupq_n_u64(low)), three = vdupq_n_u8(3);
    const auto shifted = [&](std::int8_t a, std::int8_t b) {
      return vandq_u8(vshlq_u8(twice, vcombine_s8(vdup_n_s8(a), vdup_n_s8(b))), three);
    };
    return with_bits({shifted(0, -2), shifted(-4, -6)}, high, NATURAL, 4);
  }
  static std::uint32_t load_u32(const std::uint8_t* p) {
    std::uint32_t x;
    std::memcpy(&x, p, 4);
    return x;
  }
  static Codes codes3_planes(const std::uint8_t* low, const std::uint8_t* high) {
    std::uint64_t l;
    std::memcpy(&l, low, 8);
    return planes(l, load_u32(high));
  }
  static Codes codes3_planes_half(const std::uint8_t* low, const std::uint8_t* high) {
    std::uint32_t h = load_u16(high);  // four bits to the low half of each byte
    h = (h | h << 8) & 0x00ff00ff;
    h = (h | h << 4) & 0x0f0f0f0f;
    return planes(load_u32(low), h);
  }
  // Code i starts in bit 3 i: the byte of that bit, and what the next one adds above it.
  static Codes codes3_stream(const std::uint8_t* p) {
    struct Places {
      std::uint8_t byte[32] = {};
      std::int8_t right[32] = {}, left[32] = {};
      constexpr Places() {
        for (int i = 0; i < 32; ++i) {
          byte[i] = std::uint8_t(3 * i / 8);
          right[i] = std::int8_t(-(3 * i % 8));
          left[i] = std::int8_t(8 - 3 * i % 8);
        }
      }
    };
    static constexpr Places AT;
    const uint8x16_t bytes = vcombine_u8(
        vld1_u8(p), vreinterpret_u8_u32(vset_lane_u32(load_u32(p + 8), vdup_n_u32(0), 0)));
    const auto each = [&](int i) {
      const uint8x16_t at = vld1q_u8(AT.byte + i);
      const uint8x16_t first = vshlq_u8(vqtbl1q_u8(bytes, at), vld1q_s8(AT.right + i));
      const uint8x16_t next = vqtbl1q_u8(bytes, vaddq_u8(at, vdupq_n_u8(1)));
      return vandq_u8(vorrq_u8(first, vshlq_u8(next, vld1q_s8(AT.left + i))), vdupq_n_u8(7));
    };
    return {each(0), each(16)};
  }
  static Fives codes5(const std::uint8_t* low, const std::uint8_t* fifth) {
    return {with_bits(codes4(low), load_u32(fifth), FIFTHS, 16)};
  }
  static Fives codes5_half(const std::uint8_t* low, const std::uint8_t* fifth) {
    return {with_bits(codes4_half(low), load_u32(fifth), FIFTHS, 16)};
  }
  static Codes codes8(const std::uint8_t* p) { return {vld1q_u8(p), vld1q_u8(p + 16)}; }
  static Codes codes8_half(const std::uint8_t* p) { return {vld1q_u8(p), vdupq_n_u8(0)}; }
  static void store_codes(std::uint8_t* p, Codes codes) {
    vst1q_u8(p, codes.lo);
    vst1q_u8(p + 16, codes.hi);
  }

  // ---- entries of codes, in natural order
  static uint8x16_t bytes_of(const Lut& lut, const Codes&, uint8x16_t codes) {
    return vqtbl1q_u8(lut.low, codes);
  }
  static uint8x16_t bytes_of(const Lut& lut, const Fives&, uint8x16_t codes) {
    return vqtbl2q_u8(uint8x16x2_t{{lut.low, lut.second}}, codes);
  }
  static W wide(const Lut& lut, uint8x16_t codes) {
    const uint8x16_t l = vqtbl1q_u8(lut.low, codes), h = vqtbl1q_u8(lut.high, codes);
    return {vreinterpretq_s32_u8(vzip1q_u8(l, h)), vreinterpretq_s32_u8(vzip2q_u8(l, h))};
  }
  static W wide_signed(uint8x16_t bytes) {
    const int8x16_t x = vreinterpretq_s8_u8(bytes);
    return words(vmovl_s8(vget_low_s8(x)), vmovl_high_s8(x));
  }
  static void key_words(const Lut& lut, Codes codes, W* out) {
    out[0] = wide(lut, codes.lo);
    out[1] = wide(lut, codes.hi);
  }
  static void key_words_signed(Codes codes, W* out) {
    out[0] = wide_signed(codes.lo);
    out[1] = wide_signed(codes.hi);
  }
  static void key_words_bytes(Codes codes, W* out) { key_words_signed(codes, out); }
  template <class Any>
  static void key_words_row(const Lut& lut, Any codes, W* out) {
    key_words_signed({bytes_of(lut, codes, codes.lo), bytes_of(lut, codes, codes.hi)}, out);
  }
  // Bytes of two tokens by turns: [0] of codes 0..15, [1] of the others.
  static void turns(Codes a, Codes b, Codes* out) {
    out[0] = {vzip1q_u8(a.lo, b.lo), vzip2q_u8(a.lo, b.lo)};
    out[1] = {vzip1q_u8(a.hi, b.hi), vzip2q_u8(a.hi, b.hi)};
  }
  static void store_four(const W* x, std::int16_t* out) {
    for (int i = 0; i < 4; ++i) store_words(out + 16 * i, x[i]);
  }
  static void store_values(const Lut& lut, Codes a, Codes b, std::int16_t* out) {
    Codes both[2];
    W x[4];
    turns(a, b, both);
    key_words(lut, both[0], x);
    key_words(lut, both[1], x + 2);
    store_four(x, out);
  }
  static void store_values_signed(Codes a, Codes b, std::int16_t* out) {
    Codes both[2];
    W x[4];
    turns(a, b, both);
    key_words_signed(both[0], x);
    key_words_signed(both[1], x + 2);
    store_four(x, out);
  }
  static void store_values_bytes(Codes a, Codes b, std::int16_t* out) {
    store_values_signed(a, b, out);
  }
  template <class Any>
  static void store_values_row(const Lut& lut, Any a, Any b, std::int16_t* out) {
    store_values_signed({bytes_of(lut, a, a.lo), bytes_of(lut, a, a.hi)},
                        {bytes_of(lut, b, b.lo), bytes_of(lut, b, b.hi)}, out);
  }
  // Entries of 32 trellis states: 16 overlapping fields of 12 bits.
  static void key_words_pairs(const std::int32_t* pairs, const std::uint8_t* p, W* out) {
    for (int half = 0; half < 2; ++half, p += 6) {
      std::uint64_t bits;
      std::memcpy(&bits, p, 8);
      std::int32_t v[8];
      for (int i = 0; i < 8; ++i) v[i] = pairs[bits >> 6 * i & (WideTrellis::PAIRS - 1)];
      out[half] = {vld1q_s32(v), vld1q_s32(v + 4)};
    }
  }
  // +1 where a bit is set, else -1.
  static void key_words_signs(const std::uint8_t* p, W* out) {
    const uint16x8_t bit = {1, 2, 4, 8, 16, 32, 64, 128};
    const auto eight_of = [&](std::uint8_t bits) {
      return vbslq_s16(vtstq_u16(vdupq_n_u16(bits), bit), vdupq_n_s16(1), vdupq_n_s16(-1));
    };
    for (int i = 0; i < 2; ++i) out[i] = words(eight_of(p[2 * i]), eight_of(p[2 * i + 1]));
  }
  // Words of two tokens by turns.
  static void store_turns(W a, W b, std::int16_t* out) {
    store_words(
        out, words(vzip1q_s16(shorts(a.lo), shorts(b.lo)), vzip2q_s16(shorts(a.lo), shorts(b.lo))));
    store_words(out + 16, words(vzip1q_s16(shorts(a.hi), shorts(b.hi)),
                                vzip2q_s16(shorts(a.hi), shorts(b.hi))));
  }

  // ---- products of bytes: see score_bytes.h
  using Bytes = int8x16_t;
  using Sums = int32x4_t;
  using Scaled = float32x4_t;
  static void key_bytes_signed(Codes codes, Bytes* out) {
    out[0] = vreinterpretq_s8_u8(codes.lo);
    out[1] = vreinterpretq_s8_u8(codes.hi);
  }
  template <class Any>
  static void key_bytes(const Lut& lut, Any codes, Bytes* out) {
    key_bytes_signed({bytes_of(lut, codes, codes.lo), bytes_of(lut, codes, codes.hi)}, out);
  }
  // 16 numbers of 15 bits as 128 * high + low.
  static void split(const std::int16_t* q, std::int8_t* high, std::int8_t* low) {
    const int16x8_t a = vld1q_s16(q), b = vld1q_s16(q + 8), mask = vdupq_n_s16(127);
    vst1q_s8(high, vcombine_s8(vshrn_n_s16(a, 7), vshrn_n_s16(b, 7)));
    vst1q_s8(low, vcombine_s8(vmovn_s16(vandq_s16(a, mask)), vmovn_s16(vandq_s16(b, mask))));
  }
  static Bytes load_bytes(const std::int8_t* p) { return vld1q_s8(p); }
  static Sums no_sums() { return vdupq_n_s32(0); }
  static Sums dot_bytes(Sums sum, Bytes a, Bytes b) { return vdotq_s32(sum, a, b); }
  static Sums joined(Sums high, Sums low) { return vaddq_s32(low, vshlq_n_s32(high, 7)); }
  static Scaled scaled(Sums sum, float scale, Scaled acc) {
    return vfmaq_n_f32(acc, vcvtq_f32_s32(sum), scale);
  }
  static W total(const Sums* s) {  // of eight
    return {vpaddq_s32(vpaddq_s32(s[0], s[1]), vpaddq_s32(s[2], s[3])),
            vpaddq_s32(vpaddq_s32(s[4], s[5]), vpaddq_s32(s[6], s[7]))};
  }
  static F total(const Scaled* s) {
    return {vpaddq_f32(vpaddq_f32(s[0], s[1]), vpaddq_f32(s[2], s[3])),
            vpaddq_f32(vpaddq_f32(s[4], s[5]), vpaddq_f32(s[6], s[7]))};
  }

  // ---- trellises
  static F eight(const float* p, int) { return load(p); }
  static std::uint8_t mask_bits(uint32x4_t lo, uint32x4_t hi) {
    const uint16x8_t bit = {1, 2, 4, 8, 16, 32, 64, 128};
    return std::uint8_t(vaddvq_u16(vandq_u16(vcombine_u16(vmovn_u32(lo), vmovn_u32(hi)), bit)));
  }
  // First i of before[i] + (y - value[i])^2 == sum, which one of them is.
  static int first_of_eight(float sum, const float* before, float y, const float* value) {
    const F miss = sub(set(y), load(value)), sums = add(load(before), mul(miss, miss));
    const float32x4_t wanted = vdupq_n_f32(sum);
    return __builtin_ctz(mask_bits(vceqq_f32(sums.lo, wanted), vceqq_f32(sums.hi, wanted)) | 0x80u);
  }
  static void turn8x8(const float* from, float* to) {
    for (int i = 0; i < 8; i += 4)
      for (int half = 0; half < 8; half += 4) {
        const float* const p = from + 8 * i + half;
        const float32x4x4_t rows = {
            {vld1q_f32(p), vld1q_f32(p + 8), vld1q_f32(p + 16), vld1q_f32(p + 24)}};
        float columns[16];
        vst4q_f32(columns, rows);
        for (int j = 0; j < 4; ++j) vst1q_f32(to + 8 * (half + j) + i, vld1q_f32(columns + 4 * j));
      }
  }
  template <int F>
  static int repack_pairs(const Rows&, const Book&, std::uint8_t*, std::ptrdiff_t) {
    return 0;
  }

  // Eight states from the costs of their predecessors (four, each of two states) on either side.
  struct Step {
    F cost;
    std::uint8_t from_high;
  };
  static Step step(float32x4_t low, float32x4_t high, F add_low, F add_high) {
    const F a = add({vzip1q_f32(low, low), vzip2q_f32(low, low)}, add_low);
    const F b = add({vzip1q_f32(high, high), vzip2q_f32(high, high)}, add_high);
    return {min(b, a), mask_bits(vcltq_f32(b.lo, a.lo), vcltq_f32(b.hi, a.hi))};
  }
  // Where the distances to the subsets of eight states lie among four floats.
  struct Selection {
    uint8x16_t lo, hi;
    explicit Selection(const std::uint8_t* subset, int flip = 0) {
      std::int32_t index[8];
      for (int i = 0; i < 8; ++i) index[i] = subset[i] ^ flip;
      lo = float_at(vld1q_s32(index));
      hi = float_at(vld1q_s32(index + 4));
    }
    F of(const float* distance) const {
      const uint8x16_t four = vreinterpretq_u8_f32(vld1q_f32(distance));
      return {vreinterpretq_f32_u8(vqtbl1q_u8(four, lo)),
              vreinterpretq_f32_u8(vqtbl1q_u8(four, hi))};
    }
  };
  // Costs of all states after n steps of each walk, and for each step and state whether the higher
  // predecessor was the cheaper one. Distances [walk][n][4], decisions [walk][n][states / 8].
  static void walk(const float* distance, int n, int walks, const Trellis& trellis,
                   float (*cost)[MAX_STATES], std::uint8_t* decisions) {
    if (trellis.states == 8) {
      const Selection low(trellis.subset_of), high(trellis.subset_of + 8);
      F all[MAX_WALKS];
      for (int w = 0; w < walks; ++w) all[w] = load(cost[w]);
      for (int t = 0; t < n; ++t)
        for (int w = 0; w < walks; ++w) {
          const float* const d = distance + 4 * (w * n + t);
          const Step next = step(all[w].lo, all[w].hi, low.of(d), high.of(d));
          all[w] = next.cost;
          decisions[w * n + t] = next.from_high;
        }
      for (int w = 0; w < walks; ++w) store(cost[w], all[w]);
      return;
    }
    for (int w = 0; w < walks; ++w)
      walk64(distance + w * 4 * n, n, trellis, cost[w], decisions + w * n * (MAX_STATES / 8));
  }
  // A register of eight states takes its subsets from one pattern, XORed with a number of its own:
  // subsets are linear in the bits of the path.
  static void walk64(const float* distance, int n, const Trellis& trellis, float* cost,
                     std::uint8_t* decisions) {
    constexpr int STATES = 64, EIGHTS = STATES / 8;
    const std::uint8_t* const subset = trellis.subset_of;
    const Selection select[4] = {Selection(subset, 0), Selection(subset, 1), Selection(subset, 2),
                                 Selection(subset, 3)};
    float next[STATES];
    float *from = cost, *to = next;
    for (int t = 0; t < n; ++t) {
      F added[4];
      for (int x = 0; x < 4; ++x) added[x] = select[x].of(distance + 4 * t);
      for (int r = 0; r < EIGHTS; ++r) {
        const Step s = step(vld1q_f32(from + 4 * r), vld1q_f32(from + 4 * r + STATES / 2),
                            added[subset[8 * r]], added[subset[STATES + 8 * r]]);
        decisions[t * EIGHTS + r] = s.from_high;
        store(to + 8 * r, s.cost);
      }
      float* const swap = from;
      from = to;
      to = swap;
    }
    if (from != cost) std::memcpy(cost, from, sizeof next);
  }

  static int key_element(int, int position) { return position; }
  static int value_element(int, int position) { return position; }
};

}  // namespace

constinit const Kernels kernels_neon = make_kernels<Neon>("neon");

}  // namespace kvproof
#endif
