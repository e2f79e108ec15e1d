// Scalar kernels: the operations of leaf.h as plain loops over four lanes, no intrinsics.
#include "foreign.h"
#include "leaf.h"
#include "rows.h"
#include "trellis.h"

namespace kvproof {
namespace {

struct Scalar {
  static constexpr bool UNSIGNED_ROWS = false;
  static constexpr bool TOKENS_IN_LANES = false, BYTE_PRODUCTS = false;
  using RowValue = std::int16_t;
  static constexpr int LANES = 4;
  struct F {
    float v[4];
  };
  struct W {  // 32-bit words; as multiplicands, pairs of int16 (low half first)
    std::int32_t v[4];
  };
  struct Codes {
    std::uint8_t c[GROUP];
  };
  struct Lut {
    const std::int16_t* entry;
    explicit Lut(const std::int16_t* e) : entry(e) {}
  };

  template <class Op>
  static F each(Op op) {
    F out;
    for (int i = 0; i < 4; ++i) out.v[i] = op(i);
    return out;
  }
  template <class Op>
  static W each_word(Op op) {
    W out;
    for (int i = 0; i < 4; ++i) out.v[i] = op(i);
    return out;
  }

  static F zero() { return set(0); }
  static F set(float x) {
    return each([=](int) { return x; });
  }
  static F load(const float* p) {
    return each([=](int i) { return p[i]; });
  }
  static void store(float* p, F x) { std::memcpy(p, x.v, sizeof x.v); }
  static F add(F a, F b) {
    return each([=](int i) { return a.v[i] + b.v[i]; });
  }
  static F sub(F a, F b) {
    return each([=](int i) { return a.v[i] - b.v[i]; });
  }
  static F mul(F a, F b) {
    return each([=](int i) { return a.v[i] * b.v[i]; });
  }
  static F fma(F a, F b, F c) {
    return each([=](int i) { return a.v[i] * b.v[i] + c.v[i]; });
  }
  static F max(F a, F b) {
    return each([=](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
  }
  static F min(F a, F b) {
    return each([=](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
  }
  static F abs(F a) {
    return each([=](int i) { return __builtin_fabsf(a.v[i]); });
  }
  static F above(F x, float limit, F value) {
    return each([=](int i) { return x.v[i] > limit ? value.v[i] : 0; });
  }
  // Sum of sixteen lanes: halves added, 8, 4, 2, 1.
  static float fold(const F* part) {
    const F sum = add(add(part[0], part[2]), add(part[1], part[3]));
    return (sum.v[0] + sum.v[2]) + (sum.v[1] + sum.v[3]);
  }
  template <int COUNT>
  static F look_up(const float* entry, W index) {
    return each([=](int i) { return entry[index.v[i]]; });
  }
  static bool all_below(F x, F limit) {
    return x.v[0] < limit.v[0] && x.v[1] < limit.v[1] && x.v[2] < limit.v[2] && x.v[3] < limit.v[3];
  }
  static F scale_by_power(F p, W n) {
    return each([=](int i) { return p.v[i] * from_bits(std::uint32_t(n.v[i] + 127) << 23); });
  }

  static W zero_words() { return set_words(0); }
  static W set_words(std::int32_t x) {
    return each_word([=](int) { return x; });
  }
  static W load_words(const std::int16_t* p) {
    W out;
    std::memcpy(out.v, p, sizeof out.v);
    return out;
  }
  static void store_words(void* p, W x) { std::memcpy(p, x.v, sizeof x.v); }
  static F held(F x) { return x; }
  static W held(W x) { return x; }
  static W multiply(W a, W b) { return madd(zero_words(), a, b); }
  static W madd(W acc, W a, W b) {
    return each_word([=](int i) {
      return acc.v[i] + std::int16_t(a.v[i]) * std::int16_t(b.v[i]) +
             (a.v[i] >> 16) * (b.v[i] >> 16);
    });
  }
  static W pair(W even, W odd) {
    return each_word([=](int i) {
      return std::int32_t(std::uint32_t(odd.v[i]) << 16 | (std::uint32_t(even.v[i]) & 0xffff));
    });
  }
  static W add_entries(W a, W b) {
    std::int16_t x[8], y[8];
    std::memcpy(x, a.v, sizeof x);
    std::memcpy(y, b.v, sizeof y);
    for (int i = 0; i < 8; ++i) x[i] = std::int16_t(x[i] + y[i]);
    std::memcpy(a.v, x, sizeof x);
    return a;
  }
  static W add_words(W a, W b) {
    return each_word([=](int i) { return a.v[i] + b.v[i]; });
  }
  static W count_above(W count, F x, F limit) {
    return each_word([=](int i) { return count.v[i] + (x.v[i] > limit.v[i]); });
  }
  static F to_float(W x) {
    return each([=](int i) { return float(x.v[i]); });
  }
  static W to_words(F x) {  // adding 1.5 * 2^23 rounds to nearest even; |x| stays below 2^22
    return each_word(
        [=](int i) { return std::int32_t(to_bits(x.v[i] + 12582912.f) - to_bits(12582912.f)); });
  }
  static F reduce(const F* a) {
    return each([=](int i) { return (a[i].v[0] + a[i].v[1]) + (a[i].v[2] + a[i].v[3]); });
  }
  static W reduce(const W* a) {
    return each_word([=](int i) { return a[i].v[0] + a[i].v[1] + a[i].v[2] + a[i].v[3]; });
  }
  template <int N>
  static F repeat(const float* p) {
    return each([=](int i) { return p[i % N]; });
  }
  template <int N>
  static W repeat_words(const std::int32_t* p) {
    return each_word([=](int i) { return p[i % N]; });
  }
  template <int N>
  static F spread(const float* p) {
    return each([=](int i) { return p[i / N]; });
  }
  static F butterflies(F x) {
    const float a = x.v[0] + x.v[1], b = x.v[0] - x.v[1];
    const float c = x.v[2] + x.v[3], d = x.v[2] - x.v[3];
    return {{a + c, b + d, a - c, b - d}};
  }

  static F load_f16(const std::uint8_t* p) {
    return each([=](int i) { return half_to_float(load_u16(p + 2 * i)); });
  }
  static void store_f16(std::uint8_t* p, F x) {
    for (int i = 0; i < 4; ++i) {
      const std::uint16_t h = float_to_half(x.v[i]);
      std::memcpy(p + 2 * i, &h, 2);
    }
  }
  static F load_bf16(const std::uint8_t* p) {
    return each([=](int i) { return from_bits(std::uint32_t(load_u16(p + 2 * i)) << 16); });
  }
  static F load_fp8(const std::uint8_t* p) {
    return each([=](int i) {  // the bits of a half 256 times smaller, and NaN at 0x7f
      const unsigned body = p[i] & 0x7f, sign = unsigned(p[i] & 0x80) << 8;
      return half_to_float(std::uint16_t(sign | (body == 0x7f ? 0x7fff : body << 7))) * 256;
    });
  }

  static Codes codes4(const std::uint8_t* p) {
    Codes out;
    for (int j = 0; j < 16; ++j) {
      out.c[j] = p[j] & 15;
      out.c[j + 16] = p[j] >> 4;
    }
    return out;
  }
  static Codes codes4_half(const std::uint8_t* p) {
    std::uint8_t bytes[16] = {};
    std::memcpy(bytes, p, 8);
    return codes4(bytes);
  }
  static Codes codes3_planes(const std::uint8_t* low, const std::uint8_t* high) {
    Codes out;
    for (int i = 0; i < GROUP; ++i)
      out.c[i] = std::uint8_t((low[i % 8] >> i / 8 * 2 & 3) | (high[i / 8] >> i % 8 & 1) << 2);
    return out;
  }
  static Codes codes3_planes_half(const std::uint8_t* low, const std::uint8_t* high) {
    std::uint8_t bytes[8] = {}, bits[4];
    std::memcpy(bytes, low, 4);
    for (int s = 0; s < 4; ++s) bits[s] = high[s / 2] >> s % 2 * 4 & 15;
    return codes3_planes(bytes, bits);
  }
  static Codes codes3_stream(const std::uint8_t* p) {
    Codes out;
    for (int i = 0; i < GROUP; i += 8) {
      const std::uint32_t bits = p[0] | p[1] << 8 | p[2] << 16;
      for (int j = 0; j < 8; ++j) out.c[i + j] = bits >> 3 * j & 7;
      p += 3;
    }
    return out;
  }
  static Codes codes5(const std::uint8_t* low, const std::uint8_t* fifth) {
    Codes out = codes4(low);
    for (int i = 0; i < GROUP; ++i)
      out.c[i] |= (fifth[fifth_bit(i) / 8] >> fifth_bit(i) % 8 & 1) << 4;
    return out;
  }
  static Codes codes5_half(const std::uint8_t* low, const std::uint8_t* fifth) {
    std::uint8_t bytes[16] = {};
    std::memcpy(bytes, low, 8);
    return codes5(bytes, fifth);
  }
  static Codes codes8(const std::uint8_t* p) {
    Codes out;
    std::memcpy(out.c, p, GROUP);
    return out;
  }
  static Codes codes8_half(const std::uint8_t* p) {
    Codes out = {};
    std::memcpy(out.c, p, GROUP / 2);
    return out;
  }
  static void store_codes(std::uint8_t* p, const Codes& codes) { std::memcpy(p, codes.c, GROUP); }

  static void key_words(const Lut& lut, const Codes& codes, W* out) {
    std::int16_t v[GROUP];
    for (int i = 0; i < GROUP; ++i) v[i] = lut.entry[codes.c[i] & 31];
    std::memcpy(out, v, sizeof v);
  }
  static void key_words_signed(const Codes& codes, W* out) {
    std::int16_t v[GROUP];
    for (int i = 0; i < GROUP; ++i) v[i] = std::int8_t(codes.c[i]);
    std::memcpy(out, v, sizeof v);
  }
  static void key_words_bytes(const Codes& codes, W* out) { key_words_signed(codes, out); }
  static void store_values(const Lut& lut, const Codes& a, const Codes& b, std::int16_t* out) {
    for (int i = 0; i < GROUP; ++i) {
      out[2 * i] = lut.entry[a.c[i] & 31];
      out[2 * i + 1] = lut.entry[b.c[i] & 31];
    }
  }
  static void store_values_signed(const Codes& a, const Codes& b, std::int16_t* out) {
    for (int i = 0; i < GROUP; ++i) {
      out[2 * i] = std::int8_t(a.c[i]);
      out[2 * i + 1] = std::int8_t(b.c[i]);
    }
  }
  static void store_values_bytes(const Codes& a, const Codes& b, std::int16_t* out) {
    store_values_signed(a, b, out);
  }
  // Entries of 32 trellis states: 16 overlapping fields of 12 bits.
  static void key_words_pairs(const std::int32_t* pairs, const std::uint8_t* p, W* out) {
    std::int32_t v[16];
    for (int i = 0; i < 16; i += 4, p += 3) {
      const std::uint32_t bits = p[0] | p[1] << 8 | p[2] << 16 | std::uint32_t(p[3]) << 24;
      for (int j = 0; j < 4; ++j) v[i + j] = pairs[bits >> 6 * j & (WideTrellis::PAIRS - 1)];
    }
    std::memcpy(out, v, sizeof v);
  }
  // +1 where a bit is set, else -1.
  static void key_words_signs(const std::uint8_t* p, W* out) {
    std::int16_t v[GROUP];
    for (int i = 0; i < GROUP; ++i) v[i] = p[i / 8] >> i % 8 & 1 ? 1 : -1;
    std::memcpy(out, v, sizeof v);
  }
  // Words of two tokens by turns.
  static void store_turns(W a, W b, std::int16_t* out) {
    std::int16_t x[8], y[8];
    std::memcpy(x, a.v, sizeof x);
    std::memcpy(y, b.v, sizeof y);
    for (int i = 0; i < 8; ++i) {
      out[2 * i] = x[i];
      out[2 * i + 1] = y[i];
    }
  }
  static F eight(const float* p, int i) { return load(p + i % 8); }
  // First i of before[i] + (y - value[i])^2 == sum, which one of them is.
  static int first_of_eight(float sum, const float* before, float y, const float* value) {
    int i = 0;
    for (; i < 7; ++i) {
      const float miss = y - value[i];
      if (before[i] + miss * miss == sum) break;
    }
    return i;
  }
  static void turn8x8(const float* from, float* to) {
    for (int i = 0; i < 8; ++i)
      for (int j = 0; j < 8; ++j) to[8 * j + i] = from[8 * i + j];
  }
  static void key_words_row(const Lut& lut, const Codes& codes, W* out) {
    key_words(lut, codes, out);
  }
  static void store_values_row(const Lut& lut, const Codes& a, const Codes& b, std::int16_t* out) {
    store_values(lut, a, b, out);
  }

  template <int F>
  static int repack_pairs(const Rows&, const Book&, std::uint8_t*, std::ptrdiff_t) {
    return 0;
  }

  // Encoding of trellis codes.
  static void store_by_four(const F* x, float* out) {
    for (int i = 0; i < 4; ++i)
      for (int s = 0; s < 4; ++s) out[4 * i + s] = x[s].v[i];
  }
  static void walk(const float* distance, int n, int walks, const Trellis& trellis,
                   float (*cost)[MAX_STATES], std::uint8_t* decisions) {
    const int states = trellis.states, half = states / 2;
    for (int step = 0; step < walks * n; ++step, distance += 4, decisions += states / 8) {
      float* const all = cost[step / n];
      float before[MAX_STATES];
      std::memcpy(before, all, std::size_t(states) * sizeof(float));
      for (int first = 0; first < states; first += 8) {
        unsigned from_high = 0;
        for (int s = first; s < first + 8; ++s) {
          const float low = before[s / 2] + distance[trellis.subset_of[s]];
          const float high = before[s / 2 + half] + distance[trellis.subset_of[s + states]];
          all[s] = high < low ? high : low;
          from_high |= unsigned(high < low) << s % 8;
        }
        decisions[first / 8] = std::uint8_t(from_high);
      }
    }
  }
  static int key_element(int, int position) { return position; }
  static int value_element(int, int position) { return position; }
};

}  // namespace

constinit const Kernels kernels_scalar = make_kernels<Scalar>("scalar");

}  // namespace kvproof
