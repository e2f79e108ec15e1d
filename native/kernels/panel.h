// Products of many query rows: templates over an instruction set I (see leaf.h), which includes
// this file.
//
// A panel is 2 * LANES query rows, one in each lane of two registers. A tile of K or V is decoded
// once for all panels of a block and read by broadcasts, so that nothing is added up across lanes
// and maxima, sums and scales of the softmax are vectors. Coded tiles are int16 with one unit a
// token: row formats as they are stored, block formats after `level` has folded the scales of their
// blocks into the entries.
#pragma once

#include <type_traits>

#include "half.h"
#include "kernels.h"

namespace kvproof {
namespace {

template <class I>
constexpr int PANEL = 2 * I::LANES;
// Columns of results that are kept in registers, two vectors each.
template <class I>
constexpr int STRIP = I::LANES == 16 ? 12 : 6;

// step(0..3) for every four of n, then for the rest; advance(k) after k of them. A loop's own
// instructions cost a tenth of the products where it is not unrolled, and GCC 12 spills all sums
// where a pragma unrolls it.
template <class Step, class Advance>
inline void by_four(int n, Step step, Advance advance) {
  for (; n >= 4; n -= 4) {
    step(0);
    step(1);
    step(2);
    step(3);
    advance(4);
  }
  for (; n > 0; --n) {
    step(0);
    advance(1);
  }
}

// acc[j] += a x b over `steps` steps: the two vectors of each step of a, with number j of b
// broadcast. Numbers of b are `between` apart in a step, steps `along`. For words (pairs of int16)
// both count words.
template <class I, int N>
inline void products(const std::int32_t* a, const std::int32_t* b, std::ptrdiff_t between,
                     std::ptrdiff_t along, int steps, typename I::W (*acc)[2]) {
  constexpr int L = I::LANES;
  by_four(
      steps,
      [&](int s) {
        const auto* words = reinterpret_cast<const std::int16_t*>(a + s * 2 * L);
        const std::int32_t* const one_of = b + s * along;
        const typename I::W low = I::held(I::load_words(words));
        const typename I::W high = I::held(I::load_words(words + 2 * L));
#pragma GCC unroll 12
        for (int j = 0; j < N; ++j) {
          const typename I::W one = I::held(I::set_words(one_of[j * between]));
          acc[j][0] = madd_pair<I>(acc[j][0], low, one);
          acc[j][1] = madd_pair<I>(acc[j][1], high, one);
        }
      },
      [&](int done) {
        a += done * 2 * L;
        b += done * along;
      });
}

template <class I, int N>
inline void products(const float* a, const float* b, std::ptrdiff_t between, std::ptrdiff_t along,
                     int steps, typename I::F (*acc)[2]) {
  constexpr int L = I::LANES;
  by_four(
      steps,
      [&](int s) {
        const typename I::F low = I::held(I::load(a + s * 2 * L));
        const typename I::F high = I::held(I::load(a + s * 2 * L + L));
        const float* const one_of = b + s * along;
#pragma GCC unroll 12
        for (int j = 0; j < N; ++j) {
          const typename I::F one = I::held(I::set(one_of[j * between]));
          acc[j][0] = I::fma(low, one, acc[j][0]);
          acc[j][1] = I::fma(high, one, acc[j][1]);
        }
      },
      [&](int done) {
        a += done * 2 * L;
        b += done * along;
      });
}

// fn(first column, constant of their number) for strips that cover n columns, n even.
template <int N, class Fn>
inline void each_strip(int n, Fn fn) {
  int i = 0;
  // Eight are two fours rather than six and two.
  for (; i + N <= n && n - i != 8; i += N) fn(i, std::integral_constant<int, N>{});
  for (; i + 4 <= n; i += 4) fn(i, std::integral_constant<int, 4>{});
  for (; i < n; i += 2) fn(i, std::integral_constant<int, 2>{});
}

// Scores of a panel (words [width / 2][panel]) against n tokens, n even: [token][panel].
template <class I>
void panel_scores(const std::int32_t* query, const std::int16_t* keys, int width, const float* unit,
                  int n, float* scores) {
  constexpr int L = I::LANES;
  each_strip<STRIP<I>>(n, [&](int t, auto columns) {
    constexpr int N = decltype(columns)::value;
    typename I::W acc[N][2];
#pragma GCC unroll 12
    for (int j = 0; j < N; ++j) acc[j][0] = acc[j][1] = I::zero_words();
    const auto* k = reinterpret_cast<const std::int32_t*>(keys + std::ptrdiff_t(t) * width);
    products<I, N>(query, k, width / 2, 1, width / 2, acc);
#pragma GCC unroll 12
    for (int j = 0; j < N; ++j)
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v)
        I::store(scores + (t + j) * PANEL<I> + v * L,
                 I::mul(I::to_float(acc[j][v]), I::set(unit[t + j])));
  });
}

// The same for elements: query [width][panel], keys [token][width]; adds to what is there, unless
// it is the first slice.
template <class I>
void panel_scores_real(const float* query, const float* keys, int width, int n, bool first,
                       float* scores) {
  constexpr int L = I::LANES;
  each_strip<STRIP<I>>(n, [&](int t, auto columns) {
    constexpr int N = decltype(columns)::value;
    typename I::F acc[N][2];
    float* const to = scores + t * PANEL<I>;
#pragma GCC unroll 12
    for (int j = 0; j < N; ++j)
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v)
        acc[j][v] = first ? I::zero() : I::load(to + j * PANEL<I> + v * L);
    products<I, N>(query, keys + std::ptrdiff_t(t) * width, width, 1, width, acc);
#pragma GCC unroll 12
    for (int j = 0; j < N; ++j)
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) I::store(to + j * PANEL<I> + v * L, acc[j][v]);
  });
}

// 2^x for x up to 1, relative error below 3e-6 (ROUGH) or 2e-7. With MASKED exactly 0 below -126,
// which -inf is. Sums are in pairs, since the wait for a result costs more here than a product.
template <class I, bool ROUGH, bool MASKED>
inline typename I::F power(typename I::F x) {
  using F = typename I::F;
  // Adding 1.5 * 2^23 rounds to an integer, and leaves it in the low bits.
  const F magic = I::set(12582912.f), in = I::max(x, I::set(-126.f));
  const F rounded = I::add(in, magic), f = I::sub(in, I::sub(rounded, magic)),
          square = I::mul(f, f);
  F p;
  if constexpr (ROUGH) {
    p = I::fma(I::set(5.591785907745361e-2f), f, I::set(2.40247443318367e-1f));
    p = I::fma(I::set(9.570102207362652e-3f), square, p);
    p = I::fma(p, square, I::fma(I::set(6.931217908859253e-1f), f, I::set(9.999992847442627e-1f)));
  } else {
    p = I::fma(I::set(1.3276472454890609e-3f), f, I::set(9.675540961325169e-3f));
    p = I::fma(p, square, I::fma(I::set(5.550713092088699e-2f), f, I::set(2.4022120237350464e-1f)));
    p = I::fma(p, square, I::fma(I::set(6.931469440460205e-1f), f, I::set(1.f)));
  }
  if constexpr (requires { I::add_exponent(p, rounded); })
    p = I::add_exponent(p, rounded);
  else
    p = I::scale_by_power(p, I::to_words(I::sub(rounded, magic)));
  if constexpr (MASKED) p = I::above(x, -126.f, p);
  return p;
}

// Online softmax (base 2) of n tokens, n even. Scores times `factor` become probabilities relative
// to the new maximum (exactly 0 for -inf, which needs `masked`), or with `unit` (one a token) words
// of pairs of tokens: 16-bit weights of probability times unit, of which `step` is one; the sum of
// a row's weights stays below `room`. Returns true if an earlier sum has to be multiplied by alpha.
template <class I, Path VALUES, bool MASKED>
inline bool panel_softmax_of(float* scores, int n, const float* factor, const float* unit,
                             float room, float* maximum, float* sum, float* alpha,
                             std::int32_t* words, float* step) {
  constexpr int L = I::LANES;
  constexpr float LOWEST = -3e38f, FOURS = 0x1.8p25f;  // a sum with it is a multiple of 4
  constexpr bool CODED = VALUES != REAL;
  using F = typename I::F;
  const F by[2] = {I::load(factor), I::load(factor + L)};
  F top[2] = {I::load(scores), I::load(scores + L)};
  for (int t = 1; t < n; ++t)
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) top[v] = I::max(top[v], I::load(scores + t * PANEL<I> + v * L));
  F shift[2], total[2], most[2], all[2];
#pragma GCC unroll 2
  for (int v = 0; v < 2; ++v) {
    // Maxima are rounded up, so that they, and with them the sums of values, seldom change.
    const F before = I::load(maximum + v * L), here = I::mul(top[v], by[v]);
    const F above_it = I::sub(I::add(I::add(here, I::set(2.f)), I::set(FOURS)), I::set(FOURS));
    const F now = I::max(before, I::max(here, above_it));
    I::store(maximum + v * L, now);
    // A row that saw nothing yet keeps weight 0.
    shift[v] = I::sub(I::zero(), I::max(now, I::set(LOWEST)));
    const F fade = exp2<I>(I::add(I::max(before, I::set(LOWEST)), shift[v]));
    I::store(alpha + v * L, fade);
    total[v] = I::mul(I::load(sum + v * L), fade);
    most[v] = all[v] = I::zero();
  }
  for (int t = 0; t < n; ++t)
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) {
      float* const s = scores + t * PANEL<I> + v * L;
      F e = power<I, CODED, MASKED>(I::fma(I::load(s), by[v], shift[v]));
      total[v] = I::add(total[v], e);
      if constexpr (CODED) {
        e = I::mul(e, I::set(unit[t]));
        const F a = I::abs(e);
        most[v] = I::max(most[v], a);
        if constexpr (VALUES == BLOCK) all[v] = I::add(all[v], a);
      }
      I::store(s, e);
    }
  for (int v = 0; v < 2; ++v) I::store(sum + v * L, total[v]);
  if constexpr (CODED) {
    // One step is the larger of most / 32767 and all / room. Below 1e-30 the reciprocal would
    // overflow, and the weight is nothing.
    for (int v = 0; v < 2; ++v) {
      F one = I::max(I::set(1e-30f), I::mul(most[v], I::set(1 / 32767.f)));
      if constexpr (VALUES == BLOCK) one = I::max(one, I::mul(all[v], I::set(1 / room)));
      I::store(step + v * L, one);
    }
    alignas(64) float inverse[PANEL<I>];
    for (int j = 0; j < PANEL<I>; ++j) inverse[j] = 1 / step[j];
    const F steps[2] = {I::load(inverse), I::load(inverse + L)};
    for (int t = 0; t < n; t += 2)
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) {
        const float* const s = scores + t * PANEL<I> + v * L;
        const typename I::W even = I::to_words(I::mul(I::load(s), steps[v]));
        const typename I::W odd = I::to_words(I::mul(I::load(s + PANEL<I>), steps[v]));
        I::store_words(words + t / 2 * PANEL<I> + v * L, I::pair(even, odd));
      }
  }
  bool rescale = false;
  for (int j = 0; j < PANEL<I>; ++j) rescale |= alpha[j] != 1;
  return rescale;
}

template <class I>
bool panel_softmax(float* scores, int n, bool masked, const float* factor, const float* unit,
                   float room, float* maximum, float* sum, float* alpha, std::int32_t* words,
                   float* step) {
  const auto of = [&](auto masks) {
    constexpr bool MASKED = decltype(masks)::value;
    // Of row formats any 64 weights have room.
    return !unit                   ? panel_softmax_of<I, REAL, MASKED>
           : room < 32767.f * TILE ? panel_softmax_of<I, BLOCK, MASKED>
                                   : panel_softmax_of<I, ROW, MASKED>;
  };
  const auto chosen = masked ? of(std::true_type{}) : of(std::false_type{});
  return chosen(scores, n, factor, unit, room, maximum, sum, alpha, words, step);
}

// out [width][panel] += weights x values x step: weights words [pair][panel], values
// [pair][width][2].
template <class I>
void panel_values(const std::int32_t* weights, const std::int16_t* values, int width, int pairs,
                  const float* step, float* out) {
  constexpr int L = I::LANES;
  each_strip<STRIP<I>>(width, [&](int d, auto columns) {
    constexpr int N = decltype(columns)::value;
    typename I::W acc[N][2];
#pragma GCC unroll 12
    for (int j = 0; j < N; ++j) acc[j][0] = acc[j][1] = I::zero_words();
    const auto* v = reinterpret_cast<const std::int32_t*>(values) + d;
    products<I, N>(weights, v, 1, width, pairs, acc);
    const typename I::F by[2] = {I::load(step), I::load(step + L)};
#pragma GCC unroll 12
    for (int j = 0; j < N; ++j)
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        float* const to = out + (d + j) * PANEL<I> + i * L;
        I::store(to, I::fma(I::to_float(acc[j][i]), by[i], I::load(to)));
      }
  });
}

// The same for elements: weights [token][panel], values [token][width].
template <class I>
void panel_values_real(const float* weights, const float* values, int width, int n, float* out) {
  constexpr int L = I::LANES;
  each_strip<STRIP<I>>(width, [&](int d, auto columns) {
    constexpr int N = decltype(columns)::value;
    typename I::F acc[N][2];
    float* const to = out + d * PANEL<I>;
#pragma GCC unroll 12
    for (int j = 0; j < N; ++j)
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) acc[j][i] = I::load(to + j * PANEL<I> + i * L);
    products<I, N>(weights, values + d, 1, width, n, acc);
#pragma GCC unroll 12
    for (int j = 0; j < N; ++j)
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) I::store(to + j * PANEL<I> + i * L, acc[j][i]);
  });
}

// out [width][panel] times alpha.
template <class I>
void panel_scale(float* out, int width, const float* alpha) {
  const typename I::F by[2] = {I::load(alpha), I::load(alpha + I::LANES)};
  for (int d = 0; d < width; ++d, out += PANEL<I>)
    for (int i = 0; i < 2; ++i)
      I::store(out + i * I::LANES, I::mul(I::load(out + i * I::LANES), by[i]));
}

// Entries times factor / 2^15, rounded, after `shift` bits to the left.
template <class I>
inline typename I::W levelled(typename I::W entries, int shift, typename I::W factor) {
  if constexpr (requires { I::scale_entries(entries, shift, factor); }) {
    return I::scale_entries(entries, shift, factor);
  } else {
    std::int16_t x[2 * I::LANES], f[2 * I::LANES];
    I::store_words(x, entries);
    I::store_words(f, factor);
    for (int i = 0; i < 2 * I::LANES; ++i) {
      const int product = std::int16_t(x[i] << shift) * f[i];
      x[i] = std::int16_t(((product >> 14) + 1) >> 1);
    }
    return I::load_words(x);
  }
}
template <class I>
inline void level_group(std::int16_t* entries, int n, int shift, std::int32_t factors) {
  const typename I::W factor = I::set_words(factors);
  for (int i = 0; i < n; i += 2 * I::LANES)
    I::store_words(entries + i, levelled<I>(I::load_words(entries + i), shift, factor));
}
// Factors up to 1 in 2^-15.
template <class I>
inline typename I::W factor_words(typename I::F x) {
  return I::to_words(I::min(x, I::set(32767.f)));
}

// Brings the groups of n tokens to one unit a token: entries [token][groups * 32] that counted
// scales[token][group] count unit[token] afterwards. They keep to 16 bits, and no row is longer
// than `norm`.
template <class I>
void level_keys(std::int16_t* keys, int n, int groups, int largest, float* scales, float norm,
                float* unit) {
  constexpr int L = I::LANES;
  double top[TILE], square[TILE];
  float factor[TILE];
  int shift = 0;
  while (largest << (shift + 1) <= 32767) ++shift;
  const std::int16_t* entry = keys;
  float* s = scales;
  for (int t = 0; t < n; ++t, s += groups) {
    float most = 0;
    for (int g = 0; g < groups; ++g)
      most = __builtin_fabsf(s[g]) > most ? __builtin_fabsf(s[g]) : most;
    // Scales relative to the largest: squares of the smallest would vanish.
    const double inverse = most > 0 ? 1.0 / most : 0;
    for (int g = 0; g < groups; ++g) s[g] = float(s[g] * inverse);
    typename I::F sum = I::zero();
    for (int g = 0; g < groups; ++g, entry += GROUP) {
      typename I::W pairs = I::zero_words();
      for (int i = 0; i < GROUP; i += 2 * L) {
        const typename I::W words = I::load_words(entry + i);
        pairs = I::madd(pairs, words, words);
      }
      const typename I::F scale = I::set(s[g]);
      sum = I::fma(I::mul(I::to_float(pairs), scale), scale, sum);
    }
    alignas(64) float lanes[L];
    I::store(lanes, sum);
    double total = 0;
    for (int j = 0; j < L; ++j) total += lanes[j];
    top[t] = most;
    square[t] = total;
  }
  const double least = 1.0 / (1 << shift);
  for (int t = 0; t < n; ++t) {
    const double by_norm = __builtin_sqrt(square[t]) / norm,
                 one = by_norm > least ? by_norm : least;
    unit[t] = float(top[t] * one);
    factor[t] = float(32768 * least / one);
  }
  s = scales;
  for (int t = 0; t < n; ++t, s += groups, keys += groups * GROUP)
    for (int first = 0; first < groups; first += L) {
      alignas(64) std::int32_t factors[L];
      const typename I::W words = factor_words<I>(I::mul(I::load(s + first), I::set(factor[t])));
      I::store_words(factors, I::pair(words, words));
      for (int g = first; g < smaller(groups, first + L); ++g)
        level_group<I>(keys + g * GROUP, GROUP, shift, factors[g - first]);
    }
}

// Largest of `columns` scales of each token, in planes as they are: see decode_values.
template <class I>
void value_units(const float* scales, int columns, float* unit) {
  for (int i = 0; i < TILE; i += I::LANES) {
    typename I::F top = I::zero();
    for (int c = 0; c < columns; ++c) top = I::max(top, I::abs(I::load(scales + c * TILE + i)));
    I::store(unit + i, top);
  }
}

// As level_keys for pairs of values [token / 2][groups * 32][2] of one slice, to given units (in
// planes), of which entries count 2^-shift afterwards. There is a scale for `block_groups` groups.
template <class I>
void level_values(std::int16_t* values, int n, int groups, int block_groups, int shift,
                  const float* scales, const float* unit) {
  constexpr int L = I::LANES, HALF = TILE / 2;
  alignas(64) float inverse[TILE];
  for (int i = 0; i < TILE; ++i) inverse[i] = 32768 / (unit[i] > 1e-30f ? unit[i] : 1e-30f);
  for (int g = 0; g < groups; g += block_groups, scales += TILE) {
    alignas(64) std::int32_t factors[HALF];
    for (int i = 0; i < HALF; i += L) {
      const auto plane = [&](int at) {
        return factor_words<I>(I::mul(I::load(scales + at + i), I::load(inverse + at + i)));
      };
      I::store_words(factors + i, I::pair(plane(0), plane(HALF)));
    }
    for (int i = 0; i < (n + 1) / 2; ++i)
      level_group<I>(values + 2 * GROUP * (std::ptrdiff_t(i) * groups + g),
                     2 * GROUP * block_groups, shift, factors[i]);
  }
}

template <class I>
void centre(std::int16_t* entry, int n, int offset) {
  for (int i = 0; i < n; ++i) entry[i] = std::int16_t(entry[i] - offset);
}

}  // namespace
}  // namespace kvproof
