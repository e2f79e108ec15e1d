// Leaf kernels over tiles, as templates over an instruction set I. Each tiles_<isa>.cpp defines I,
// includes this file and fills its table, compiled for that set. Its vectors are the compiler's, of
// KVPROOF_LANES 32-bit lanes.
//
// Left sides are int8 [block][2 * rows][64]: the high parts of the rows of an octet, then the low
// ones. A block is 64 dims of keys, or one tile of weights (four of them for each scale). See
// TileKernels::split_keys for those of matrix units.
#pragma once

#include <cstring>
#include <utility>

#include "tiles.h"

namespace kvproof {
namespace {

#ifndef KVPROOF_LANES
#define KVPROOF_LANES 16
#endif
// Of 32 bits, in a register: a line of a tile is 16 / LANES of them.
constexpr int LANES = KVPROOF_LANES;
typedef std::uint8_t Bytes __attribute__((vector_size(4 * LANES)));
typedef std::uint16_t Shorts __attribute__((vector_size(4 * LANES)));
typedef std::uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef std::int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef float Floats __attribute__((vector_size(4 * LANES)));

// What takes vectors has to be inlined, lambdas too: a call would pass them through memory.
#define KVPROOF_LAMBDA __attribute__((always_inline))
#define KVPROOF_INLINE inline KVPROOF_LAMBDA

template <class V>
KVPROOF_INLINE V load(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
template <class V>
KVPROOF_INLINE void store(void* p, V v) {
  std::memcpy(p, &v, sizeof v);
}
KVPROOF_INLINE Floats all(float x) { return Floats{} + x; }
KVPROOF_INLINE Ints all(std::int32_t x) { return Ints{} + x; }
KVPROOF_INLINE Floats to_floats(Ints x) { return __builtin_convertvector(x, Floats); }
template <int N>
KVPROOF_INLINE Bytes right(Bytes x) {  // by 16-bit lanes: neighbours' bits come in from above
  return N ? Bytes(Shorts(x) >> N) : x;
}
template <int N>
KVPROOF_INLINE Bytes left(Bytes x) {
  return Bytes(Shorts(x) << N);
}
template <int UP>
KVPROOF_INLINE Bytes shift(Bytes x) {
  if constexpr (UP < 0)
    return right<-UP>(x);
  else
    return left<UP>(x);
}

// Calls each(constant 0), ... each(constant N - 1).
template <int... K, class Fn>
KVPROOF_INLINE void repeat_each(std::integer_sequence<int, K...>, Fn&& each) {
  (each(std::integral_constant<int, K>{}), ...);
}
template <int N, class Fn>
KVPROOF_INLINE void repeat(Fn&& each) {
  repeat_each(std::make_integer_sequence<int, N>{}, each);
}

// Place of the top bit of an index, after the first possible one.
template <int PLACE>
using Copy = std::integral_constant<int, PLACE>;

// The tables of a side, in registers where the set has them: one for each place, if look-ups see
// it (I::SIX_BITS), or the first one.
template <class I, int K>
struct Tables {
  static constexpr int COPIES = !top_bit(K) || !I::SIX_BITS ? 1 : low_bits(K) == 2 ? 4 : 2;
  typename I::Table entry[COPIES], fine[COPIES];
  KVPROOF_INLINE explicit Tables(const TileTable& t) {
    if constexpr (low_bits(K) != 8) {
      for (int i = 0; i < COPIES; ++i) {
        entry[i] = I::table(t.entry[i]);
        if constexpr (tile_fine(K)) fine[i] = I::table(t.fine[i]);
      }
    }
  }
  template <int COPY>
  KVPROOF_INLINE Bytes look_up(const typename I::Table* t, Bytes index) const {
    return I::template look_up<K, COPY>(t[COPIES > COPY ? COPY : 0], index);
  }
};

// Bytes of n quad rows of 16 lanes.
constexpr int block_codes(int kind, int n) { return n * LINE * kind_bits(kind) / 8; }

template <int K>
KVPROOF_INLINE const std::uint8_t* key_block(const std::uint8_t* tile, int kb, int n, int cg) {
  return tile + std::ptrdiff_t(kb) * 4 * block_codes(K, QUADS) + cg * block_codes(K, n);
}
KVPROOF_INLINE int quads_of_block(int dim, int kb) {
  const int left = (dim - kb * BLOCK_DIMS) / 4;
  return left < QUADS ? left : QUADS;
}

// ---- the path of trellis formats
// ---------------------------------------------------------------------------
//
// A subset is the XOR of the path's bits some steps back. In a line of keys a byte holds 8 steps of
// a token, so that those of J steps before are the line shifted by J bits with others coming in; in
// values they are the line of a group before, or that of a last group moved on by a lane.

// Zeros, and then whatever is to be kept.
struct Edge {
  alignas(64) std::uint8_t byte[2 * LINE];
};
constexpr Edge EDGE = [] {
  Edge e{};
  for (int i = LINE; i < 2 * LINE; ++i) e.byte[i] = 0xff;
  return e;
}();

// The first line of the path in n quad rows.
constexpr int path_at(int kind, int n) { return n / 8 * (kind_bits(kind) - 1) * LINE; }

// XOR of back(J) over the steps J of TAPS.
template <unsigned TAPS, class Back>
KVPROOF_INLINE Bytes sum_of(Back&& back) {
  Bytes sum{};
  repeat<8>([&](auto j) KVPROOF_LAMBDA {
    if constexpr (TAPS >> j & 1) sum ^= back(j);
  });
  return sum;
}

// What comes before a block of keys.
template <class I, int K>
struct KeyPast {
  const std::uint8_t* line;  // the last one of the path in the block before, in the same lanes

  // Lanes of group cg of 16 tokens, from the `lane`-th on.
  KVPROOF_INLINE KeyPast(const std::uint8_t* tile, int kb, int cg, int lane) {
    line = kb == 0 ? EDGE.byte
                   : key_block<K>(tile, kb - 1, QUADS, cg) + path_at(K, QUADS) + LINE + 4 * lane;
  }
  // Bits 1 and 0 of the subsets in half h of n quad rows, whose path is at `path`.
  KVPROOF_INLINE void subsets(const std::uint8_t* path, int n, int h, Bytes* one,
                              Bytes* zero) const {
    const Bytes now = load<Bytes>(path + h * LINE);
    Bytes before;
    if (h == 1)
      before = load<Bytes>(path);
    else  // the last line of the byte before, which is in the block before for the first byte
      before = Bytes(load<Words>(path + (n / 8 - 1) * LINE) << 8 | load<Words>(line) >> 24);
    const auto back = [&](auto j) KVPROOF_LAMBDA {
      if constexpr (j == 0)
        return now;
      else
        return I::template merge<(0xff << j & 0xff)>(left<j>(now), right<8 - j>(before));
    };
    constexpr Taps taps = taps_of(KIND_FORMATS[K]);
    *one = sum_of<taps.one>(back);
    *zero = sum_of<taps.zero>(back);
  }
};

// What comes before a group of values.
template <class I, int K>
struct ValuePast {
  static constexpr Taps TAPS = taps_of(KIND_FORMATS[K]);
  static constexpr int REACH = tile_trellis(K) ? TAPS.reach() : 0;
  bool wraps = false;                        // some of it is in last groups
  std::ptrdiff_t to[REACH + 1] = {};         // from a line to that of so many steps before
  const std::uint8_t* mask[REACH + 1] = {};  // without the lanes before which there is nothing

  ValuePast() = default;
  // Lanes of group g, from the `lane`-th on.
  KVPROOF_INLINE ValuePast(int dim, int g, int lane) {
    if constexpr (tile_trellis(K)) {
      wraps = g < REACH;
      if (!wraps) return;
      for (int j = 0; j <= REACH; ++j) {
        int from = g - j, moved = 0;
        for (; from < 0; from += dim / 16) ++moved;
        to[j] = std::ptrdiff_t(from - g) * block_codes(K, QUADS) - 4 * moved;
        mask[j] = EDGE.byte + LINE + 4 * (lane - moved);
      }
    }
  }
  KVPROOF_INLINE void subsets(const std::uint8_t* path, int, int h, Bytes* one, Bytes* zero) const {
    const std::uint8_t* const now = path + h * LINE;
    const auto give = [&](auto&& back) KVPROOF_LAMBDA {
      *one = sum_of<TAPS.one>(back);
      *zero = sum_of<TAPS.zero>(back);
    };
    if (wraps)
      give([&](auto j) KVPROOF_LAMBDA { return load<Bytes>(now + to[j]) & load<Bytes>(mask[j]); });
    else
      give([&](auto j) KVPROOF_LAMBDA { return load<Bytes>(now - j * block_codes(K, QUADS)); });
  }
};

// Visits the 8 quad rows of half h of a block of n quad rows (8 or 16) whose planes start at `src`:
// each(quad 0..7, entries, fine entries).
template <class I, int K, class Past, class Fn>
KVPROOF_INLINE void visit8(const std::uint8_t* src, int n, int h, const Past& past,
                           const Tables<I, K>& t, Fn&& each) {
  constexpr int bits = low_bits(K);
  const std::uint8_t* first = src + h * bits * LINE;
  const std::uint8_t* second = src + (n * bits / 8 + h) * LINE;
  const auto give = [&](auto quad, Bytes index, auto copy) KVPROOF_LAMBDA {
    const Bytes entry = t.template look_up<copy>(t.entry, index);
    if constexpr (tile_fine(K))
      each(quad, entry, t.template look_up<copy>(t.fine, index));
    else
      each(quad, entry, Bytes{});
  };
  if constexpr (bits == 8) {
    repeat<8>([&](auto q)
                  KVPROOF_LAMBDA { each(q, I::bytes(load<Bytes>(first + q * LINE)), Bytes{}); });
  } else if constexpr (tile_trellis(K)) {
    Bytes one, zero, top{};
    past.subsets(src + path_at(K, n), n, h, &one, &zero);
    if constexpr (top_bit(K)) top = load<Bytes>(src + (n / 4 + h) * LINE);
    repeat<2>([&](auto l) KVPROOF_LAMBDA {
      const Bytes m = load<Bytes>(src + (2 * h + l) * LINE);
      // The subsets of quad rows 4 l .. 4 l + 3, in the bits that m has of them.
      Bytes subset;
      if constexpr (l == 0)
        subset = I::template merge<0x55>(one, left<1>(zero));
      else
        subset = I::template merge<0x55>(right<1>(one), zero);
      repeat<2>([&](auto k) KVPROOF_LAMBDA {  // quad rows 4 l + k and 4 l + k + 2
        Bytes x;
        if constexpr (k == 0)
          x = I::template merge<0x33>(m, left<2>(subset));
        else
          x = I::template merge<0x33>(right<2>(m), subset);
        constexpr std::integral_constant<int, 4 * l + k> low{};
        constexpr std::integral_constant<int, 4 * l + k + 2> high{};
        if constexpr (top_bit(K)) {
          // Bits 2 (2 l + k) and the next to places 4 and 5.
          const Bytes f = shift<4 - 2 * (2 * l + k)>(top);
          give(low, I::template merge<0x0f>(x, f), Copy<0>{});
          give(high, I::template merge<0x0f>(right<4>(x), f), Copy<1>{});
        } else {
          give(low, x, Copy<0>{});
          give(high, right<4>(x), Copy<0>{});
        }
      });
    });
  } else if constexpr (bits == 4) {
    Bytes fifth{};
    if constexpr (top_bit(K)) fifth = load<Bytes>(second);
    repeat<4>([&](auto l) KVPROOF_LAMBDA {
      const Bytes x = load<Bytes>(first + l * LINE);
      if constexpr (top_bit(K)) {
        // Bits 2 l and 2 l + 1 of the fifth plane to places 4 and 5.
        const Bytes f = shift<4 - 2 * l>(fifth);
        give(std::integral_constant<int, 2 * l>{}, I::template merge<0x0f>(x, f), Copy<0>{});
        give(std::integral_constant<int, 2 * l + 1>{}, I::template merge<0x0f>(right<4>(x), f),
             Copy<1>{});
      } else {
        give(std::integral_constant<int, 2 * l>{}, x, Copy<0>{});
        give(std::integral_constant<int, 2 * l + 1>{}, right<4>(x), Copy<0>{});
      }
    });
  } else {
    static_assert(bits == 2);
    Bytes third{};
    if constexpr (top_bit(K)) third = load<Bytes>(second);
    repeat<2>([&](auto l) KVPROOF_LAMBDA {
      const Bytes x = load<Bytes>(first + l * LINE);
      // Bits 4 l .. 4 l + 3 of the third plane to places 2 .. 5.
      Bytes f{};
      if constexpr (top_bit(K)) f = l == 0 ? left<2>(third) : right<2>(third);
      repeat<4>([&](auto k) KVPROOF_LAMBDA {
        const Bytes low = right<2 * k>(x);
        if constexpr (top_bit(K))
          give(std::integral_constant<int, 4 * l + k>{}, I::template merge<0x03>(low, f), k);
        else
          give(std::integral_constant<int, 4 * l + k>{}, low, Copy<0>{});
      });
    });
  }
}

// ---- products by dot instructions
// ---------------------------------------------------------------------

// Adds the products of 8 quad rows with ROWS left sides of MR at a.
template <class I, int K, int MR, int ROWS, class Past>
KVPROOF_INLINE void multiply8(const std::uint8_t* src, int n, int h, const Past& past,
                              const Tables<I, K>& table, const std::int8_t* a, Ints* high,
                              Ints* low) {
  visit8<I, K>(src, n, h, past, table, [&](auto quad, Bytes entry, Bytes fine) KVPROOF_LAMBDA {
    for (int r = 0; r < ROWS; ++r) {
      const std::int8_t *const up = a + r * LINE + 4 * quad, *const down = up + MR * LINE;
      high[r] = I::dot(high[r], entry, up);
      low[r] = I::dot(low[r], entry, down);
      if constexpr (tile_fine(K)) low[r] = I::dot(low[r], fine, up);
    }
  });
}

// Scores of ROWS rows of MR, from the r0-th on, and LANES tokens.
template <class I, int K, int MR, int ROWS>
KVPROOF_INLINE void keys_of_lanes(const TileWork& w, const Tables<I, K>& table, int r0, int t,
                                  int lane) {
  const int blocks = (w.dim + BLOCK_DIMS - 1) / BLOCK_DIMS, at = t * TILE + lane;
  Ints high[ROWS], low[ROWS];
  Floats sum[ROWS];
  for (int r = 0; r < ROWS; ++r) sum[r] = all(0.f), high[r] = low[r] = all(0);
  for (int kb = 0; kb < blocks; ++kb) {
    const int n = quads_of_block(w.dim, kb);
    const std::uint8_t* const src =
        key_block<K>(w.tiles + t * w.stride, kb, n, lane / 16) + lane % 16 * 4;
    const KeyPast<I, K> past(w.tiles + t * w.stride, kb, lane / 16, lane % 16);
    for (int h = 0; h < n / 8; ++h) {
      multiply8<I, K, MR, ROWS>(src, n, h, past, table,
                                w.a + (std::ptrdiff_t(kb) * 2 * MR + r0) * LINE + h * 32, high,
                                low);
      if constexpr (tile_blocks(K)) {
        const int b = kb * 2 + h;
        const Floats scale = load<Floats>(w.scales + b * SUPER + at);
        for (int r = 0; r < ROWS; ++r) {
          sum[r] += to_floats((high[r] << 7) + low[r] + w.start[b * OCTET + r0 + r]) * scale;
          high[r] = low[r] = all(0);
        }
      }
    }
  }
  for (int r = 0; r < ROWS; ++r) {
    if constexpr (!tile_blocks(K))
      sum[r] = to_floats((high[r] << 7) + low[r] + w.start[r0 + r]) * load<Floats>(w.scales + at);
    store(w.scores + (r0 + r) * SUPER + at, sum[r]);
  }
}
template <class I, int K, int MR>
void keys_by_dots(const TileWork& given) {
  const TileWork w = given;  // a copy, which no store can change
  const Tables<I, K> table(*w.table);
  constexpr int ROWS = MR < I::ROWS ? MR : I::ROWS;
  for (int t = 0; t < w.n_tiles; ++t)
    for (int lane = 0; lane < TILE; lane += LANES)
      for (int r = 0; r < MR; r += ROWS) keys_of_lanes<I, K, MR, ROWS>(w, table, r, t, lane);
}

// out[row r][LANES dims from d on] = what is there * alpha + products * step.
KVPROOF_INLINE void add_values(const TileWork& w, int r, int d, int b, Ints high, Ints low) {
  float* const o = w.out + std::ptrdiff_t(r) * w.dim + d;
  const Floats x = to_floats((high << 8) + low + w.start[b * OCTET + r]);
  store(o, load<Floats>(o) * w.alpha[r] + x * w.step[r]);
}

template <class I, int K, int MR>
void values_by_dots(const TileWork& given) {
  const TileWork w = given;
  const Tables<I, K> table(*w.table);
  constexpr int ROWS = MR < I::ROWS ? MR : I::ROWS;
  for (int d = 0; d < w.dim; d += LANES) {
    const int b = tile_blocks(K) ? d / GROUP : 0;
    const std::ptrdiff_t from = d / 16 * block_codes(K, QUADS) + d % 16 * 4;
    const ValuePast<I, K> past(w.dim, d / 16, d % 16);
    for (int r0 = 0; r0 < MR; r0 += ROWS) {
      const std::int8_t* const a = w.a + (std::ptrdiff_t(b) * (SUPER / TILE) * 2 * MR + r0) * LINE;
      Ints high[ROWS], low[ROWS];
      for (int r = 0; r < ROWS; ++r) high[r] = low[r] = all(0);
      for (int t = 0; t < w.n_tiles; ++t)
        for (int h = 0; h < 2; ++h)
          multiply8<I, K, MR, ROWS>(w.tiles + t * w.stride + from, QUADS, h, past, table,
                                    a + t * 2 * MR * LINE + h * 32, high, low);
      for (int r = 0; r < ROWS; ++r) add_values(w, r0 + r, d, b, high[r], low[r]);
    }
  }
}

// ---- softmax and weights
// ------------------------------------------------------------------------------

// 2^x for x <= 0, relative error below 3e-6, which is a fifth of a step of the weights. Nothing is
// less than 2^-100: what is masked (-inf) adds no more than that, and there are no denormals.
template <class I>
KVPROOF_INLINE Floats power(Floats x) {
  constexpr float round = 12582912.f;  // 1.5 * 2^23: what is left of a sum with it is an integer
  const Floats in = I::larger(x, all(-100.f));
  const Floats shifted = in + round;
  const Floats f = in - (shifted - round);
  Floats p = all(9.582852944731712e-3f);
  p = p * f + 5.5906426161527634e-2f;
  p = p * f + 2.4024099111557007e-1f;
  p = p * f + 6.931241750717163e-1f;
  p = p * f + 1.f;
  return Floats(Ints(p) + (Ints(shifted) << 23));
}

template <class I, bool PRODUCTS>
float softmax_storing(float* scores, int n, float factor, const float* units, float* maximum,
                      float* sum, float* alpha) {
  Floats tops[2] = {load<Floats>(scores), load<Floats>(scores + LANES)};
  for (int i = 2 * LANES; i < n; i += 2 * LANES)
    for (int k = 0; k < 2; ++k) tops[k] = I::larger(tops[k], load<Floats>(scores + i + LANES * k));
  const float seen = I::largest(I::larger(tops[0], tops[1])) * factor, before = *maximum;
  const float top = seen > before ? seen : before;
  *alpha = 1;
  if (!(top > -__builtin_inff())) {  // nothing seen yet
    for (int i = 0; i < n; i += LANES) store(scores + i, all(0.f));
    return 0;
  }
  if (top != before) *alpha = before > -__builtin_inff() ? power<I>(all(before - top))[0] : 0;
  *maximum = top;
  Floats totals[2] = {all(0.f), all(0.f)}, most[2] = {all(0.f), all(0.f)};
  for (int i = 0; i < n; i += 2 * LANES)
    for (int k = 0; k < 2; ++k) {
      float* const at = scores + i + LANES * k;
      const Floats p = power<I>(load<Floats>(at) * factor - top);
      const Floats product = p * load<Floats>(units + i + LANES * k);
      totals[k] += p;
      most[k] = I::larger_magnitude(most[k], product);
      store(at, PRODUCTS ? product : p);
    }
  *sum = *sum * *alpha + I::total(totals[0] + totals[1]);
  return I::largest(I::larger(most[0], most[1]));
}
template <class I>
float softmax_row(float* scores, int n, float factor, const float* units, bool store_products,
                  float* maximum, float* sum, float* alpha) {
  const auto softmax = store_products ? softmax_storing<I, true> : softmax_storing<I, false>;
  return softmax(scores, n, factor, units, maximum, sum, alpha);
}

template <class I, bool SCALES>
void weights_scaled(const float* p, const float* scales, int n, float inverse, std::uint8_t* high,
                    std::uint8_t* low, std::ptrdiff_t stride, std::int32_t* sums) {
  // The low 16 bits of a sum with it are the rounded number.
  const Floats round = all(12582912.f);
  Ints sum = all(0), sum_of_high = all(0);
  for (int t = 0; t < n; t += TILE, high += stride, low += stride)
    for (int lane = 0; lane < 16; lane += LANES) {  // of quad rows
      Ints x[4];
      for (int i = 0; i < 4; ++i) {
        const int at = t + 16 * i + lane;
        if constexpr (SCALES)
          x[i] = Ints((load<Floats>(p + at) * inverse) * load<Floats>(scales + at) + round);
        else
          x[i] = Ints(load<Floats>(p + at) * inverse + round);
        if constexpr (I::OFFSET) {
          const Ints number = x[i] - Ints(round);
          sum += number;
          sum_of_high += (number + 128) >> 8;
        }
      }
      // Tokens r, r + 32, r + 16, r + 48 of quad row r.
      const Ints a = (x[0] & 0xffff) | x[1] << 16, b = (x[2] & 0xffff) | x[3] << 16;
      const Ints up_a = Ints(Shorts(a) + 128), up_b = Ints(Shorts(b) + 128);
      store(low + 4 * lane, (a & 0x00ff00ff) | Ints(Shorts(b) << 8));
      store(high + 4 * lane, Ints(Shorts(up_a) >> 8) | (up_b & all(std::int32_t(0xff00ff00))));
    }
  if constexpr (I::OFFSET) {
    sums[0] = I::total(sum);
    sums[1] = I::total(sum_of_high);
  } else {
    sums[0] = sums[1] = 0;
  }
}
template <class I>
void weights_row(const float* p, const float* scales, int n, float inverse, std::uint8_t* high,
                 std::uint8_t* low, std::ptrdiff_t stride, std::int32_t* sums) {
  const auto weights = scales ? weights_scaled<I, true> : weights_scaled<I, false>;
  weights(p, scales, n, inverse, high, low, stride, sums);
}

inline void add_row(const float* x, int n, float factor, float* sum) {
  for (int i = 0; i < n; i += LANES)
    store(sum + i, load<Floats>(sum + i) + load<Floats>(x + i) * factor);
}

template <class I, int K>
constexpr void fill_kind(TileKernels& t) {
  t.keys[K][0] = keys_by_dots<I, K, 1>;
  t.keys[K][1] = keys_by_dots<I, K, 2>;
  t.keys[K][2] = keys_by_dots<I, K, 4>;
  t.keys[K][3] = keys_by_dots<I, K, 8>;
  t.values[K][0] = values_by_dots<I, K, 1>;
  t.values[K][1] = values_by_dots<I, K, 2>;
  t.values[K][2] = values_by_dots<I, K, 4>;
  t.values[K][3] = values_by_dots<I, K, 8>;
}
template <class I, int... K>
constexpr void fill_dots(TileKernels& t, std::integer_sequence<int, K...>) {
  (fill_kind<I, K>(t), ...);
}
template <class I>
constexpr void fill_rows(TileKernels& t) {
  t.softmax = softmax_row<I>;
  t.weights = weights_row<I>;
  t.add = add_row;
  t.widen = I::widen;
}
using TileKindList = std::make_integer_sequence<int, TILE_KINDS>;
// The kernels of a set with dot products: octets decode for themselves.
template <class I>
constexpr TileKernels kernels_by_dots() {
  TileKernels t{};
  t.offset = I::OFFSET;
  fill_dots<I>(t, TileKindList{});
  fill_rows<I>(t);
  return t;
}

}  // namespace
}  // namespace kvproof
