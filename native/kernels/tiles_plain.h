// The operations of tiles_leaf.h lane by lane: what they mean. SHIFT: entries are int8 and so much.
#pragma once

#include "half.h"
#include "tiles_leaf.h"

namespace kvproof {
namespace {

template <int SHIFT>
struct PlainTiles {
  static constexpr int OFFSET = SHIFT, ROWS = 8;
  static constexpr bool SIX_BITS = true;
  struct Table {
    std::uint8_t entry[64];
  };
  static Table table(const std::uint8_t* p) {
    Table t;
    std::memcpy(t.entry, p, 64);
    return t;
  }
  template <int K, int COPY>
  static Bytes look_up(const Table& t, Bytes index) {
    Bytes out;
    for (int i = 0; i < 4 * LANES; ++i) out[i] = t.entry[index[i] & 63];
    return out;
  }
  // Bits of MASK from a, the others from b.
  template <int MASK>
  static Bytes merge(Bytes a, Bytes b) {
    constexpr auto mask = std::uint8_t(MASK), rest = std::uint8_t(~MASK);
    return (a & mask) | (b & rest);
  }
  static Bytes even_odd(Bytes even, Bytes odd) {  // bytes of each
    for (int i = 1; i < 4 * LANES; i += 2) even[i] = odd[i];
    return even;
  }
  static Shorts scaled(Shorts x, Shorts factor) {  // x * factor / 2^15, rounded
    for (int i = 0; i < 2 * LANES; ++i)
      x[i] = std::uint16_t((std::int16_t(x[i]) * std::int16_t(factor[i]) + (1 << 14)) >> 15);
    return x;
  }
  static Bytes bytes(Bytes x) { return x ^ std::uint8_t(OFFSET); }  // stored int8
  // Adds to each lane the products of its four entries with four int8.
  static Ints dot(Ints sum, Bytes entry, const std::int8_t* a) {
    for (int i = 0; i < LANES; ++i)
      for (int j = 0; j < 4; ++j) sum[i] += std::int32_t(entry[4 * i + j]) * a[j];
    return sum;
  }
  static Floats larger(Floats a, Floats b) { return a > b ? a : b; }
  static Floats larger_magnitude(Floats a, Floats b) {
    return larger(Floats(Ints(a) & 0x7fffffff), Floats(Ints(b) & 0x7fffffff));
  }
  static float largest(Floats x) {
    float top = x[0];
    for (int i = 1; i < LANES; ++i) top = x[i] > top ? x[i] : top;
    return top;
  }
  template <class V>
  static auto total(V x) {
    auto sum = x[0];
    for (int i = 1; i < LANES; ++i) sum += x[i];
    return sum;
  }
  static void widen(const std::uint8_t* halves, int n, float* out) {
    for (int i = 0; i < n; ++i) out[i] = half_to_float(load_u16(halves + 2 * i));
  }
};

}  // namespace
}  // namespace kvproof
