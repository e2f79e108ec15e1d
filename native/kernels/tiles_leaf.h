// Leaf kernels over tiles, as templates over an instruction set I. Each tiles_<isa>.cpp defines I,
// includes this file and fills its table, compiled for that set: the vectors of 64 bytes below are
// the compiler's, and become whatever the set has.
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

typedef std::uint8_t Bytes64 __attribute__((vector_size(64)));
typedef std::uint16_t Shorts32 __attribute__((vector_size(64)));
typedef std::int32_t Ints16 __attribute__((vector_size(64)));
typedef float Floats16 __attribute__((vector_size(64)));

// What takes vectors has to be inlined, lambdas too: a call would pass them through memory.
#define KVPROOF_LAMBDA __attribute__((always_inline))
#define KVPROOF_INLINE inline KVPROOF_LAMBDA

template <class V>
KVPROOF_INLINE V load64(const void* p) {
  V v;
  std::memcpy(&v, p, 64);
  return v;
}
template <class V>
KVPROOF_INLINE void store64(void* p, V v) {
  std::memcpy(p, &v, 64);
}
KVPROOF_INLINE Floats16 all(float x) { return Floats16{} + x; }
KVPROOF_INLINE Ints16 all(std::int32_t x) { return Ints16{} + x; }
KVPROOF_INLINE Floats16 to_floats(Ints16 x) { return __builtin_convertvector(x, Floats16); }
template <int N>
KVPROOF_INLINE Bytes64 right(Bytes64 x) {  // by 16-bit lanes: neighbours' bits come in from above
  return N ? Bytes64(Shorts32(x) >> N) : x;
}
template <int N>
KVPROOF_INLINE Bytes64 left(Bytes64 x) {
  return Bytes64(Shorts32(x) << N);
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

// The tables of a side, in registers where the set has them.
template <class I, int K>
struct Tables {
  // Places at which the bit of a second plane is looked for.
  static constexpr int COPIES = second_plane(K) == 0 ? 1 : first_plane(K) == 2 ? 4 : 2;
  typename I::Table entry[COPIES], fine[COPIES];
  KVPROOF_INLINE explicit Tables(const TileTable& t) {
    if constexpr (first_plane(K) != 8) {
      for (int i = 0; i < COPIES; ++i) {
        entry[i] = I::table(t.entry[i]);
        if constexpr (tile_fine(K)) fine[i] = I::table(t.fine[i]);
      }
    }
  }
};

// Visits the 8 quad rows of half h of a block of n quad rows (8 or 16) whose planes start at `src`:
// each(quad 0..7, entries, fine entries).
template <class I, int K, class Fn>
KVPROOF_INLINE void visit8(const std::uint8_t* src, int n, int h, const Tables<I, K>& t,
                           Fn&& each) {
  constexpr int bits = first_plane(K);
  const std::uint8_t* first = src + h * bits * LINE;
  const std::uint8_t* second = src + (n * bits / 8 + h) * LINE;
  const auto give = [&](auto quad, Bytes64 index, int copy) KVPROOF_LAMBDA {
    if constexpr (tile_fine(K))
      each(quad, I::look_up(t.entry[copy], index), I::look_up(t.fine[copy], index));
    else
      each(quad, I::look_up(t.entry[copy], index), Bytes64{});
  };
  if constexpr (bits == 8) {
    repeat<8>([&](auto q) KVPROOF_LAMBDA {
      each(q, I::bytes(load64<Bytes64>(first + q * LINE)), Bytes64{});
    });
  } else if constexpr (bits == 4) {
    Bytes64 fifth{};
    if constexpr (second_plane(K)) fifth = load64<Bytes64>(second);
    repeat<4>([&](auto l) KVPROOF_LAMBDA {
      const Bytes64 x = load64<Bytes64>(first + l * LINE);
      if constexpr (second_plane(K)) {
        // Bits 2 l and 2 l + 1 of the fifth plane to places 4 and 5.
        constexpr int up = 4 - 2 * int(l);
        Bytes64 f;
        if constexpr (up >= 0)
          f = left<up>(fifth);
        else
          f = right<-up>(fifth);
        give(std::integral_constant<int, 2 * l>{}, I::template merge<0x0f>(x, f), 0);
        give(std::integral_constant<int, 2 * l + 1>{}, I::template merge<0x0f>(right<4>(x), f), 1);
      } else {
        give(std::integral_constant<int, 2 * l>{}, x, 0);
        give(std::integral_constant<int, 2 * l + 1>{}, right<4>(x), 0);
      }
    });
  } else {
    static_assert(bits == 2);
    Bytes64 third{};
    if constexpr (second_plane(K)) third = load64<Bytes64>(second);
    repeat<2>([&](auto l) KVPROOF_LAMBDA {
      const Bytes64 x = load64<Bytes64>(first + l * LINE);
      // Bits 4 l .. 4 l + 3 of the third plane to places 2 .. 5.
      Bytes64 f{};
      if constexpr (second_plane(K)) f = l == 0 ? left<2>(third) : right<2>(third);
      repeat<4>([&](auto k) KVPROOF_LAMBDA {
        const Bytes64 low = right<2 * k>(x);
        if constexpr (second_plane(K))
          give(std::integral_constant<int, 4 * l + k>{}, I::template merge<0x03>(low, f), k);
        else
          give(std::integral_constant<int, 4 * l + k>{}, low, 0);
      });
    });
  }
}

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

// ---- products by dot instructions
// ---------------------------------------------------------------------

// Adds the products of 8 quad rows with the left sides at a.
template <class I, int K, int MR>
KVPROOF_INLINE void multiply8(const std::uint8_t* src, int n, int h, const Tables<I, K>& table,
                              const std::int8_t* a, Ints16* high, Ints16* low) {
  visit8<I, K>(src, n, h, table, [&](auto quad, Bytes64 entry, Bytes64 fine) KVPROOF_LAMBDA {
    for (int r = 0; r < MR; ++r) {
      const std::int8_t *const up = a + r * LINE + 4 * quad, *const down = up + MR * LINE;
      high[r] = I::dot(high[r], entry, up);
      low[r] = I::dot(low[r], entry, down);
      if constexpr (tile_fine(K)) low[r] = I::dot(low[r], fine, up);
    }
  });
}

template <class I, int K, int MR>
void keys_by_dots(const TileWork& given) {
  const TileWork w = given;  // a copy, which no store can change
  const Tables<I, K> table(*w.table);
  const int blocks = (w.dim + BLOCK_DIMS - 1) / BLOCK_DIMS;
  for (int t = 0; t < w.n_tiles; ++t) {
    const std::uint8_t* const tile = w.tiles + t * w.stride;
    for (int cg = 0; cg < 4; ++cg) {
      const int at = t * TILE + cg * 16;
      Ints16 high[MR], low[MR];
      Floats16 sum[MR];
      for (int r = 0; r < MR; ++r) sum[r] = all(0.f), high[r] = low[r] = all(0);
      for (int kb = 0; kb < blocks; ++kb) {
        const int n = quads_of_block(w.dim, kb);
        const std::uint8_t* const src = key_block<K>(tile, kb, n, cg);
        for (int h = 0; h < n / 8; ++h) {
          multiply8<I, K, MR>(src, n, h, table, w.a + std::ptrdiff_t(kb) * 2 * MR * LINE + h * 32,
                              high, low);
          if constexpr (tile_blocks(K)) {
            const int b = kb * 2 + h;
            const Floats16 scale = load64<Floats16>(w.scales + b * SUPER + at);
            for (int r = 0; r < MR; ++r) {
              sum[r] += to_floats((high[r] << 7) + low[r] + w.start[b * OCTET + r]) * scale;
              high[r] = low[r] = all(0);
            }
          }
        }
      }
      for (int r = 0; r < MR; ++r) {
        if constexpr (!tile_blocks(K))
          sum[r] =
              to_floats((high[r] << 7) + low[r] + w.start[r]) * load64<Floats16>(w.scales + at);
        store64(w.scores + r * SUPER + at, sum[r]);
      }
    }
  }
}

// out[row r][16 dims of group g] = what is there * alpha + products * step.
KVPROOF_INLINE void add_values(const TileWork& w, int r, int g, int b, Ints16 high, Ints16 low) {
  float* const o = w.out + std::ptrdiff_t(r) * w.dim + g * 16;
  const Floats16 x = to_floats((high << 8) + low + w.start[b * OCTET + r]);
  store64(o, load64<Floats16>(o) * w.alpha[r] + x * w.step[r]);
}

template <class I, int K, int MR>
void values_by_dots(const TileWork& given) {
  const TileWork w = given;
  const Tables<I, K> table(*w.table);
  for (int g = 0; g < w.dim / 16; ++g) {
    const int b = tile_blocks(K) ? g / 2 : 0;
    const std::int8_t* const a = w.a + std::ptrdiff_t(b) * (SUPER / TILE) * 2 * MR * LINE;
    Ints16 high[MR], low[MR];
    for (int r = 0; r < MR; ++r) high[r] = low[r] = all(0);
    for (int t = 0; t < w.n_tiles; ++t) {
      const std::uint8_t* const src = w.tiles + t * w.stride + g * block_codes(K, QUADS);
      for (int h = 0; h < 2; ++h)
        multiply8<I, K, MR>(src, QUADS, h, table, a + t * 2 * MR * LINE + h * 32, high, low);
    }
    for (int r = 0; r < MR; ++r) add_values(w, r, g, b, high[r], low[r]);
  }
}

// ---- softmax and weights
// ------------------------------------------------------------------------------

// 2^x for x <= 0, relative error below 3e-6, which is a fifth of a step of the weights. Nothing is
// less than 2^-100: what is masked (-inf) adds no more than that, and there are no denormals.
template <class I>
KVPROOF_INLINE Floats16 power(Floats16 x) {
  constexpr float round = 12582912.f;  // 1.5 * 2^23: what is left of a sum with it is an integer
  const Floats16 in = I::larger(x, all(-100.f));
  const Floats16 shifted = in + round;
  const Floats16 f = in - (shifted - round);
  Floats16 p = all(9.582852944731712e-3f);
  p = p * f + 5.5906426161527634e-2f;
  p = p * f + 2.4024099111557007e-1f;
  p = p * f + 6.931241750717163e-1f;
  p = p * f + 1.f;
  return Floats16(Ints16(p) + (Ints16(shifted) << 23));
}

template <class I, bool PRODUCTS>
float softmax_storing(float* scores, int n, float factor, const float* units, float* maximum,
                      float* sum, float* alpha) {
  Floats16 tops[2] = {load64<Floats16>(scores), load64<Floats16>(scores + 16)};
  for (int i = 32; i < n; i += 32)
    for (int k = 0; k < 2; ++k) tops[k] = I::larger(tops[k], load64<Floats16>(scores + i + 16 * k));
  const float seen = I::largest(I::larger(tops[0], tops[1])) * factor, before = *maximum;
  const float top = seen > before ? seen : before;
  *alpha = 1;
  if (!(top > -__builtin_inff())) {  // nothing seen yet
    for (int i = 0; i < n; i += 16) store64(scores + i, all(0.f));
    return 0;
  }
  if (top != before) *alpha = before > -__builtin_inff() ? power<I>(all(before - top))[0] : 0;
  *maximum = top;
  Floats16 totals[2] = {all(0.f), all(0.f)}, most[2] = {all(0.f), all(0.f)};
  for (int i = 0; i < n; i += 32)
    for (int k = 0; k < 2; ++k) {
      float* const at = scores + i + 16 * k;
      const Floats16 p = power<I>(load64<Floats16>(at) * factor - top);
      const Floats16 product = p * load64<Floats16>(units + i + 16 * k);
      totals[k] += p;
      most[k] = I::larger_magnitude(most[k], product);
      store64(at, PRODUCTS ? product : p);
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
  const Floats16 round = all(12582912.f);
  Ints16 sum = all(0), sum_of_high = all(0);
  for (int t = 0; t < n; t += TILE, high += stride, low += stride) {
    Ints16 x[4];
    for (int i = 0; i < 4; ++i) {
      const int at = t + 16 * i;
      if constexpr (SCALES)
        x[i] = Ints16((load64<Floats16>(p + at) * inverse) * load64<Floats16>(scales + at) + round);
      else
        x[i] = Ints16(load64<Floats16>(p + at) * inverse + round);
      if constexpr (I::OFFSET) {
        const Ints16 number = x[i] - Ints16(round);
        sum += number;
        sum_of_high += (number + 128) >> 8;
      }
    }
    const Ints16 a = (x[0] & 0xffff) | x[1] << 16, b = (x[2] & 0xffff) | x[3] << 16;
    const Ints16 up_a = Ints16(Shorts32(a) + 128), up_b = Ints16(Shorts32(b) + 128);
    store64(low, (a & 0x00ff00ff) | Ints16(Shorts32(b) << 8));
    store64(high, Ints16(Shorts32(up_a) >> 8) | (up_b & all(std::int32_t(0xff00ff00))));
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
  for (int i = 0; i < n; i += 16)
    store64(sum + i, load64<Floats16>(sum + i) + load64<Floats16>(x + i) * factor);
}

// Fills the table of a set whose octets decode for themselves.
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

}  // namespace
}  // namespace kvproof
