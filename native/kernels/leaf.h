// Leaf kernels as templates over an instruction set I. Each kernels_<isa>.cpp defines I, includes
// this file and is compiled with that set's flags; everything sits in an unnamed namespace, so that
// no code compiled for one set is ever linked into another.
//
// I provides: LANES float lanes; F (floats) and W (LANES words of 32 bits, each also two int16)
// with the operations used below; Codes, the 32 code bytes of one group in natural order; Lut, the
// int16 table in registers; and the order in which decoded groups come out (key_element,
// value_element), which the driver undoes on the query and on the output.
#pragma once

#include <type_traits>
#include <utility>

#include "half.h"
#include "kernels.h"

namespace kvproof {
namespace {

inline int smaller(int a, int b) { return a < b ? a : b; }

// ---- decode a tile
// -------------------------------------------------------------------------------

// Codes of q4_polar_res, and which 32 values to add to them: 4 * bit + group of the block.
template <class I>
struct WithResidual {
  decltype(I::codes4(nullptr)) codes;
  int shift;
};

// What turns codes into int16 entries.
template <class I, int F>
struct Entries {
  typename I::Lut lut;
  explicit Entries(const Table& t) : lut(t.entry) {}
};
template <class I>
struct Entries<I, TBQ3_TCQ> {
  const std::int32_t* pairs;
  explicit Entries(const Table& t) : pairs(t.pairs) {}
};
template <class I>
struct Entries<I, QJL1_256> {
  explicit Entries(const Table&) {}
};
template <class I>
struct Entries<I, Q4_POLAR_RES> {
  typename I::Lut lut;
  const std::int16_t* residual;
  explicit Entries(const Table& t) : lut(t.entry), residual(t.residual) {}
};

template <class I, int F>
inline auto whole_group(const std::uint8_t* row, int g, int dim) {
  if constexpr (F == TQ4) {
    return I::codes4(row + 16 * g);
  } else if constexpr (F == TQ3) {
    return I::codes3_planes(row + 8 * g, row + dim / 4 + 4 * g);
  } else if constexpr (F == TQ8) {
    return I::codes8(row + GROUP * g);
  } else if constexpr (F == FIVE) {
    return I::codes5(row + 16 * g, row + dim / 2 + 4 * g);
  } else {
    const std::uint8_t* p = row + codes_at(F, g);
    if constexpr (F == TBQ3_TCQ || F == QJL1_256)
      return p;
    else if constexpr (F == Q4_POLAR_RES)
      return WithResidual<I>{I::codes4(p), (row[codes_at(F, g | 3) + 16] & 1) * 4 + g % 4};
    else if constexpr (F == Q8_0)
      return I::codes8(p);
    else if constexpr (F == TBQ3_0)
      return I::codes3_stream(p);
    else
      return I::codes4(p);
  }
}

// The last 16 codes of a row format.
template <class I, int F>
inline auto half_group(const std::uint8_t* row, int g, int dim) {
  if constexpr (F == TQ4)
    return I::codes4_half(row + 16 * g);
  else if constexpr (F == TQ8)
    return I::codes8_half(row + GROUP * g);
  else if constexpr (F == FIVE)
    return I::codes5_half(row + 16 * g, row + dim / 2 + 4 * g);
  else
    return I::codes3_planes_half(row + 8 * g, row + dim / 4 + 4 * g);
}

// fn(group, codes of a row) for the whole groups among [first, last), then for a last half group:
// the loop has no branch inside.
template <class I, int F, class Fn>
inline void each_group(int dim, int first, int last, Fn fn) {
  const int whole = smaller(last, dim / GROUP);
  for (int g = first; g < whole; ++g)
    fn(g, [=](const std::uint8_t* row) { return whole_group<I, F>(row, g, dim); });
  if constexpr (path_of(F) == ROW)
    if (whole < last)
      fn(whole, [=](const std::uint8_t* row) { return half_group<I, F>(row, whole, dim); });
}

// madd with the same pair in all lanes of `pair`, each sum in the lane of its products. The sums of
// madd itself may come out in other lanes of their register, where a set is faster so.
template <class I>
inline typename I::W madd_pair(typename I::W acc, typename I::W a, typename I::W pair) {
  if constexpr (requires { I::madd_pair(acc, a, pair); })
    return I::madd_pair(acc, a, pair);
  else
    return I::madd(acc, a, pair);
}

constexpr int MAX_SCALES = TILE * (MAX_DIM / GROUP) + 16;  // and one register of overshoot

// The int16 values of one group of keys, in registers.
template <class I, int F, class Codes>
inline void key_words(const Entries<I, F>& entries, const Codes& codes, typename I::W* out) {
  if constexpr (F == Q8_0)
    I::key_words_signed(codes, out);
  else if constexpr (F == TQ8)
    I::key_words_bytes(codes, out);
  else if constexpr (F == TBQ3_TCQ)
    I::key_words_pairs(entries.pairs, codes, out);
  else if constexpr (F == QJL1_256)
    I::key_words_signs(codes, out);
  else if constexpr (F == Q4_POLAR_RES) {
    I::key_words(entries.lut, codes.codes, out);
    const std::int16_t* const more = entries.residual + GROUP * codes.shift;
    for (int i = 0; i < GROUP / (2 * I::LANES); ++i)
      out[i] = I::add_entries(out[i], I::load_words(more + 2 * I::LANES * i));
  } else if constexpr (path_of(F) == ROW)
    I::key_words_row(entries.lut, codes, out);
  else
    I::key_words(entries.lut, codes, out);
}

// Pairs of values of two tokens.
template <class I, int F, class Codes, class Value>
inline void value_words(const Entries<I, F>& entries, const Codes& a, const Codes& b, Value* out) {
  if constexpr (F == Q8_0)
    I::store_values_signed(a, b, out);
  else if constexpr (F == TQ8)
    I::store_values_bytes(a, b, out);
  else if constexpr (F == TBQ3_TCQ) {
    typename I::W first[GROUP / (2 * I::LANES)], second[GROUP / (2 * I::LANES)];
    I::key_words_pairs(entries.pairs, a, first);
    I::key_words_pairs(entries.pairs, b, second);
    for (int i = 0; i < GROUP / (2 * I::LANES); ++i)
      I::store_turns(first[i], second[i], out + 4 * I::LANES * i);
  } else if constexpr (F == Q4_POLAR_RES) {
    I::store_values(entries.lut, a.codes, b.codes, out);
    // [bit of b][bit of a][group of the block][64]
    const int at = (b.shift / 4 * 2 + a.shift / 4) * 4 + a.shift % 4;
    const std::int16_t* const more = entries.residual + 2 * GROUP * at;
    for (int i = 0; i < 2 * GROUP; i += 2 * I::LANES)
      I::store_words(out + i, I::add_entries(I::load_words(out + i), I::load_words(more + i)));
  } else if constexpr (path_of(F) == ROW)
    I::store_values_row(entries.lut, a, b, out);
  else
    I::store_values(entries.lut, a, b, out);
}

// Stored scales are collected as halves, in the order of `scales`, and converted together: one at a
// time they cost as much as the codes. A NaN or infinity becomes 0 and is reported.
template <class I, int F>
bool convert_scales(const std::uint16_t* halves, int n, float* scales) {
  constexpr int L = I::LANES;
  const typename I::F infinity = I::set(__builtin_inff());
  bool ok = true;
  for (int i = 0; i < n; i += L) {
    const auto* from = reinterpret_cast<const std::uint8_t*>(halves + i);
    const typename I::F x = F == QJL1_256 ? I::load_bf16(from) : I::load_f16(from);
    ok = ok && I::all_below(I::abs(x), infinity);
    I::store(scales + i, x);
  }
  for (int i = 0; !ok && i < n; ++i)
    if (!(scales[i] - scales[i] == 0)) scales[i] = 0;
  return ok;
}

template <class I, int F>
bool decode_keys_coded(const Rows& rows, const Table& table, void* out, float* scales) {
  const Entries<I, F> entries(table);
  const int groups = groups_of(rows.dim), n_scales = path_of(F) == BLOCK ? rows.n * groups : TILE;
  alignas(64) std::uint16_t halves[path_of(F) == BLOCK ? MAX_SCALES : TILE];
  if (path_of(F) == ROW && rows.n < TILE) std::memset(halves, 0, sizeof halves);
  if (path_of(F) == BLOCK)  // up to one register of overshoot
    std::memset(halves + n_scales / I::LANES * I::LANES, 0, I::LANES * sizeof *halves);
  auto* o = static_cast<std::int16_t*>(out);
  const std::ptrdiff_t unit_at = row_bytes(F, rows.dim) - 2;
  const int n = rows.n, dim = rows.dim;
  const std::uint8_t* row = rows.base;
  for (int t = 0; t < n; ++t, row += rows.stride, o += groups * GROUP) {
    each_group<I, F>(dim, 0, groups, [&](int g, auto codes_of) {
      constexpr int STEPS = GROUP / (2 * I::LANES);
      typename I::W words[STEPS];
      key_words<I, F>(entries, codes_of(row), words);
      for (int i = 0; i < STEPS; ++i) I::store_words(o + g * GROUP + 2 * I::LANES * i, words[i]);
      if constexpr (path_of(F) == BLOCK) halves[t * groups + g] = load_u16(row + scale_at(F, g));
    });
    if constexpr (path_of(F) == ROW) halves[(t & 1) * (TILE / 2) + t / 2] = load_u16(row + unit_at);
  }
  return convert_scales<I, F>(halves, n_scales, scales);
}

template <class I, int F, class Value>
bool decode_values_coded(const Rows& rows, const Table& table, int first, int last, void* out,
                         float* scales) {
  // Partner of an odd last token: its weight is 0, its bytes only have to be readable.
  alignas(64) static const std::uint8_t zeros[MAX_DIM / GROUP * 34 + 64] = {};
  const Entries<I, F> entries(table);
  const int groups = last - first;
  const int n_scales = path_of(F) == BLOCK ? groups / block_groups(F) * TILE : TILE;
  alignas(64) std::uint16_t halves[path_of(F) == BLOCK ? SLICE * TILE : TILE];
  if (rows.n < TILE) std::memset(halves, 0, std::size_t(n_scales) * sizeof *halves);
  auto* o = static_cast<Value*>(out);
  const std::ptrdiff_t unit_at = row_bytes(F, rows.dim) - 2;
  const int n = rows.n, dim = rows.dim;
  for (int t = 0; t < n; t += 2, o += 2 * groups * GROUP) {
    const std::uint8_t* a = rows.base + t * rows.stride;
    const std::uint8_t* b = t + 1 < n ? a + rows.stride : zeros;
    each_group<I, F>(dim, first, last, [&](int g, auto codes_of) {
      const auto ca = codes_of(a), cb = codes_of(b);
      Value* to = o + 2 * (g - first) * GROUP;
      value_words<I, F>(entries, ca, cb, to);
      if (path_of(F) == BLOCK && g % block_groups(F) == 0) {
        std::uint16_t* h = halves + (g - first) / block_groups(F) * TILE + t / 2;
        h[0] = load_u16(a + scale_at(F, g));
        h[TILE / 2] = load_u16(b + scale_at(F, g));
      }
    });
    if constexpr (path_of(F) == ROW) {
      halves[t / 2] = load_u16(a + unit_at);
      halves[TILE / 2 + t / 2] = load_u16(b + unit_at);
    }
  }
  return convert_scales<I, F>(halves, n_scales, scales);
}

template <class I, int F>
inline typename I::F load_real(const std::uint8_t* p) {
  if constexpr (F == F16)
    return I::load_f16(p);
  else if constexpr (F == BF16)
    return I::load_bf16(p);
  else
    return I::load_fp8(p);
}

// Elements of groups [first, last) of a tile.
template <class I, int F>
bool decode_real_values(const Rows& rows, const Table&, int first, int last, void* out, float*) {
  constexpr int L = I::LANES, size = block_bytes(F);
  const int dim = smaller(rows.dim, last * GROUP) - first * GROUP;
  const int whole = dim / L * L, width = padded(dim);
  // 0 * x is NaN exactly where x is not finite; each sum waits for itself only.
  constexpr int CHECKS = 4;
  typename I::F check[CHECKS];
  for (typename I::F& sum : check) sum = I::zero();
  for (int t = 0; t < rows.n; ++t) {
    const std::uint8_t* p = rows.base + t * rows.stride + first * GROUP * size;
    float* o = static_cast<float*>(out) + std::ptrdiff_t(t) * width;
    const auto take = [&](int d, const std::uint8_t* from, typename I::F& sum) {
      const typename I::F x = load_real<I, F>(from);
      sum = I::fma(x, I::zero(), sum);
      I::store(o + d, x);
    };
    int d = 0;
    for (; d + CHECKS * L <= whole; d += CHECKS * L)
#pragma GCC unroll 4
      for (int i = 0; i < CHECKS; ++i) take(d + i * L, p + (d + i * L) * size, check[i]);
    for (; d < whole; d += L) take(d, p + d * size, check[0]);
    if (whole < dim) {
      alignas(64) std::uint8_t tail[L * size] = {};
      std::memcpy(tail, p + whole * size, std::size_t(dim - whole) * size);
      take(whole, tail, check[0]);
    }
    for (d = (dim + L - 1) / L * L; d < width; d += L) I::store(o + d, I::zero());
  }
  // Partners of the last tokens up to a full step: read, multiplied by weight 0, so kept finite.
  const int step = smaller(TILE, (rows.n + 31) / 32 * 32);
  std::memset(static_cast<float*>(out) + std::ptrdiff_t(rows.n) * width, 0,
              std::size_t(step - rows.n) * width * sizeof(float));
  alignas(64) float lanes[L];
  I::store(lanes, I::add(I::add(check[0], check[1]), I::add(check[2], check[3])));
  bool ok = true;
  for (int i = 0; i < L; ++i) ok = ok && lanes[i] == 0;
  return ok;
}

template <class I, int F>
bool decode_real_keys(const Rows& rows, const Table& table, void* out, float* scales) {
  return decode_real_values<I, F>(rows, table, 0, groups_of(rows.dim), out, scales);
}

// ---- scores
// --------------------------------------------------------------------------------------

// MR query rows x NT tokens fill one vector of LANES results. Tokens of a step have one parity.
template <class I, int MR, Path P>
void dot(const void* query, std::ptrdiff_t query_stride, const float* row_scale,
         const std::int32_t* start, const void* keys, const float* scales, int n, int dim,
         float* out, std::ptrdiff_t plane) {
  constexpr int L = I::LANES, NT = L / MR;
  const int width = padded(dim), groups = groups_of(dim);
  const typename I::F rows = I::template repeat<MR>(row_scale);
  for (int t0 = 0; t0 < n; t0 += 2 * NT) {
    for (int parity = 0; parity < 2; ++parity) {
      const std::ptrdiff_t first = std::ptrdiff_t(t0 + parity) * width, next = 2 * width;
      float* o = out + parity * plane + t0 / 2 * MR;
      typename I::F result;
      if constexpr (P == ROW) {
        const auto* q = static_cast<const std::int16_t*>(query);
        const auto* k = static_cast<const std::int16_t*>(keys) + first;
        typename I::W acc[L];
#pragma GCC unroll 16
        for (int i = 0; i < L; ++i) acc[i] = I::zero_words();
#pragma GCC unroll 2
        for (int d = 0; d < width; d += 2 * L) {
          // The smaller side stays in registers, the other is read once.
          if constexpr (MR >= NT) {
            typename I::W kv[NT];
#pragma GCC unroll 4
            for (int j = 0; j < NT; ++j) kv[j] = I::held(I::load_words(k + j * next + d));
#pragma GCC unroll 4
            for (int r = 0; r < MR; ++r) {
              const typename I::W qv = I::held(I::load_words(q + r * query_stride + d));
#pragma GCC unroll 4
              for (int j = 0; j < NT; ++j) acc[j * MR + r] = I::madd(acc[j * MR + r], qv, kv[j]);
            }
          } else {
            typename I::W qv[MR];
#pragma GCC unroll 4
            for (int r = 0; r < MR; ++r) qv[r] = I::held(I::load_words(q + r * query_stride + d));
#pragma GCC unroll 16
            for (int j = 0; j < NT; ++j) {
              const typename I::W kv = I::held(I::load_words(k + j * next + d));
#pragma GCC unroll 4
              for (int r = 0; r < MR; ++r) acc[j * MR + r] = I::madd(acc[j * MR + r], qv[r], kv);
            }
          }
        }
        const typename I::F units = I::template spread<MR>(scales + parity * (TILE / 2) + t0 / 2);
        const typename I::W sums =
            I::add_words(I::reduce(acc), I::template repeat_words<MR>(start));
        result = I::mul(I::mul(I::to_float(sums), units), rows);
      } else if constexpr (P == BLOCK) {
        const auto* q = static_cast<const std::int16_t*>(query);
        const auto* k = static_cast<const std::int16_t*>(keys) + first;
        const float* s = scales + (t0 + parity) * groups;
        typename I::F acc[L];
#pragma GCC unroll 16
        for (int i = 0; i < L; ++i) acc[i] = I::zero();
        for (int g = 0; g < groups; ++g) {
          constexpr int STEPS = GROUP / (2 * L);
#pragma GCC unroll 16
          for (int j = 0; j < NT; ++j) {
            const typename I::F scale = I::set(s[2 * j * groups + g]);
            typename I::W kv[STEPS];
#pragma GCC unroll 4
            for (int i = 0; i < STEPS; ++i)
              kv[i] = I::held(I::load_words(k + j * next + g * GROUP + 2 * L * i));
#pragma GCC unroll 4
            for (int r = 0; r < MR; ++r) {
              const std::int16_t* qr = q + r * query_stride + g * GROUP;
              typename I::W sum = I::multiply(kv[0], I::load_words(qr));
#pragma GCC unroll 4
              for (int i = 1; i < STEPS; ++i)
                sum = I::madd(sum, kv[i], I::load_words(qr + 2 * L * i));
              acc[j * MR + r] = I::fma(I::to_float(sum), scale, acc[j * MR + r]);
            }
          }
        }
        result = I::mul(I::reduce(acc), rows);
      } else {
        const auto* q = static_cast<const float*>(query);
        const auto* k = static_cast<const float*>(keys) + first;
        typename I::F acc[L];
#pragma GCC unroll 16
        for (int i = 0; i < L; ++i) acc[i] = I::zero();
        for (int d = 0; d < width; d += L) {
          if constexpr (MR >= NT) {
            typename I::F kv[NT];
#pragma GCC unroll 4
            for (int j = 0; j < NT; ++j) kv[j] = I::held(I::load(k + j * next + d));
#pragma GCC unroll 4
            for (int r = 0; r < MR; ++r) {
              const typename I::F qv = I::held(I::load(q + r * query_stride + d));
#pragma GCC unroll 4
              for (int j = 0; j < NT; ++j) acc[j * MR + r] = I::fma(qv, kv[j], acc[j * MR + r]);
            }
          } else {
            typename I::F qv[MR];
#pragma GCC unroll 4
            for (int r = 0; r < MR; ++r) qv[r] = I::held(I::load(q + r * query_stride + d));
#pragma GCC unroll 16
            for (int j = 0; j < NT; ++j) {
              const typename I::F kv = I::held(I::load(k + j * next + d));
#pragma GCC unroll 4
              for (int r = 0; r < MR; ++r) acc[j * MR + r] = I::fma(qv[r], kv, acc[j * MR + r]);
            }
          }
        }
        result = I::mul(I::reduce(acc), rows);
      }
      I::store(o, result);
    }
  }
}

// Products of one group of codes per token into sums[token * MR + row].
template <class I, int MR, int F, class CodesOf>
inline void multiply_row_group(const Entries<I, F>& entries, const std::uint8_t* const* row,
                               CodesOf codes_of, const std::int16_t* q, std::ptrdiff_t query_stride,
                               typename I::W* sums) {
  constexpr int NT = I::LANES / MR, STEPS = GROUP / (2 * I::LANES);
  constexpr int SHARED = NT < 4 ? NT : 1;  // tokens that share each load of the query
#pragma GCC unroll 16
  for (int j = 0; j < NT; j += SHARED) {
    typename I::W words[SHARED][STEPS];
#pragma GCC unroll 2
    for (int k = 0; k < SHARED; ++k) key_words<I, F>(entries, codes_of(row[j + k]), words[k]);
#pragma GCC unroll 4
    for (int i = 0; i < STEPS; ++i)
#pragma GCC unroll 4
      for (int r = 0; r < MR; ++r) {
        typename I::W qv = I::load_words(q + r * query_stride + 2 * I::LANES * i);
        if constexpr (SHARED > 1) qv = I::held(qv);
#pragma GCC unroll 2
        for (int k = 0; k < SHARED; ++k) {
          typename I::W& sum = sums[(j + k) * MR + r];
          sum = I::madd(sum, words[k][i], qv);
        }
      }
  }
}

// The same for a block format: the sum of a group is scaled at once.
template <class I, int MR, int F, class CodesOf>
inline void multiply_block_group(const Entries<I, F>& entries, const std::uint8_t* const* row,
                                 CodesOf codes_of, const std::int16_t* q,
                                 std::ptrdiff_t query_stride, const float* const* scale,
                                 typename I::F* acc) {
  constexpr int NT = I::LANES / MR, STEPS = GROUP / (2 * I::LANES);
#pragma GCC unroll 16
  for (int j = 0; j < NT; ++j) {
    typename I::W words[STEPS];
    key_words<I, F>(entries, codes_of(row[j]), words);
    const typename I::F factor = I::set(*scale[j]);
#pragma GCC unroll 4
    for (int r = 0; r < MR; ++r) {
      const std::int16_t* qr = q + r * query_stride;
      typename I::W sum = I::multiply(words[0], I::load_words(qr));
#pragma GCC unroll 4
      for (int i = 1; i < STEPS; ++i)
        sum = I::madd(sum, words[i], I::load_words(qr + 2 * I::LANES * i));
      acc[j * MR + r] = I::fma(I::to_float(sum), factor, acc[j * MR + r]);
    }
  }
}

// decode_keys and dot in one, for a single group of rows: the codes go from the row to the products
// without a store, and the shuffles that unpack them run beside the multiplications.
template <class I, int MR, int F>
bool score(const Rows& rows, const Table& table, const void* query, std::ptrdiff_t query_stride,
           const float* row_scale, const std::int32_t* start, float* scales, float* out,
           std::ptrdiff_t plane) {
  constexpr int L = I::LANES, NT = L / MR;
  constexpr bool BLOCKS = path_of(F) == BLOCK;
  const int n = rows.n, dim = rows.dim, groups = groups_of(dim);
  const std::ptrdiff_t stride = rows.stride;
  alignas(64) std::uint16_t halves[BLOCKS ? MAX_SCALES : TILE];
  if constexpr (BLOCKS) {
    std::memset(halves + n * groups / L * L, 0, L * sizeof *halves);
    for (int t = 0; t < n; ++t)
      for (int g = 0; g < groups; ++g)
        halves[t * groups + g] = load_u16(rows.base + t * stride + scale_at(F, g));
  } else {
    if (n < TILE) std::memset(halves, 0, sizeof halves);
    const std::uint8_t* unit = rows.base + row_bytes(F, dim) - 2;
    for (int t = 0; t < n; ++t, unit += stride)
      halves[(t & 1) * (TILE / 2) + t / 2] = load_u16(unit);
  }
  const std::uint8_t* row_of[TILE];
  for (int t = 0; t < TILE; ++t)  // past the end: the last row again, masked by the caller
    row_of[t] = rows.base + smaller(t, n - 1) * stride;
  const bool ok = convert_scales<I, F>(halves, BLOCKS ? n * groups : TILE, scales);

  const Entries<I, F> entries(table);
  const typename I::F row_factor = I::template repeat<MR>(row_scale);
  const typename I::W starts = I::template repeat_words<MR>(start);
  const auto* q = static_cast<const std::int16_t*>(query);
  for (int t0 = 0; t0 < n; t0 += 2 * NT)
    for (int parity = 0; parity < 2; ++parity) {
      const std::uint8_t* row[NT];
      const float* scale[NT];
      for (int j = 0; j < NT; ++j) {
        const int t = t0 + parity + 2 * j;
        row[j] = row_of[t];
        scale[j] = scales + (t < n ? t : n - 1) * groups;
      }
      typename I::F result;
      if constexpr (BLOCKS) {
        typename I::F acc[L];
#pragma GCC unroll 16
        for (int i = 0; i < L; ++i) acc[i] = I::zero();
        each_group<I, F>(dim, 0, groups, [&](int g, auto codes_of) {
          multiply_block_group<I, MR, F>(entries, row, codes_of, q + g * GROUP, query_stride, scale,
                                         acc);
          for (int j = 0; j < NT; ++j) ++scale[j];
        });
        result = I::reduce(acc);
      } else {
        typename I::W sums[L];
#pragma GCC unroll 16
        for (int i = 0; i < L; ++i) sums[i] = I::zero_words();
        each_group<I, F>(dim, 0, groups, [&](int g, auto codes_of) {
          multiply_row_group<I, MR, F>(entries, row, codes_of, q + g * GROUP, query_stride, sums);
        });
        const typename I::W total = I::add_words(I::reduce(sums), starts);
        result = I::mul(I::to_float(total),
                        I::template spread<MR>(scales + parity * (TILE / 2) + t0 / 2));
      }
      I::store(out + parity * plane + t0 / 2 * MR, I::mul(result, row_factor));
    }
  return ok;
}

// score for 4- and 5-bit codes, with a token in each lane: nothing is left to add up across lanes.
// Per step LANES even and as many odd tokens. With N 128-bit lanes, token j sits in element j / N
// of lane j % N, so that transposing rows within lanes gives tokens in order.
//
// I provides tokens_to_lanes (the groups of LANES tokens -> their 32-bit words 0..3), key_step (two
// codes of each word, as 16-bit entries) and lanes_to_tokens (MR vectors of lanes -> [token][MR]).
constexpr int lane_element(
    int position) {  // step s of word k: codes s / 2 and s / 2 + 2 of the word
  const int step = position / 2 % 4;
  return position / 8 * 4 + step % 2 * 16 + step / 2 + position % 2 * 2;
}

template <class I, int MR, int F, int WORD, int STEP>
inline void multiply_step(const typename I::Lut& lut, const typename I::W* word,
                          const typename I::W* fifth, const std::int16_t* q,
                          std::ptrdiff_t query_stride, typename I::W* sums) {
  typename I::W key[2];
#pragma GCC unroll 2
  for (int p = 0; p < 2; ++p) {
    if constexpr (F == FIVE)
      key[p] = I::template key_step5<WORD, STEP>(lut, word[p], fifth[p]);
    else
      key[p] = I::template key_step<F, STEP>(lut, word[p]);
  }
  q += 8 * WORD + 2 * STEP;
#pragma GCC unroll 4
  for (int r = 0; r < MR; ++r) {
    std::int32_t two;
    std::memcpy(&two, q + r * query_stride, 4);
    const typename I::W qv = I::held(I::set_words(two));
#pragma GCC unroll 2
    for (int p = 0; p < 2; ++p) sums[2 * r + p] = madd_pair<I>(sums[2 * r + p], key[p], qv);
  }
}

template <class I, int MR, int F, int WORD>
inline void multiply_word(const typename I::Lut& lut, const typename I::W* word,
                          const typename I::W* fifth, const std::int16_t* q,
                          std::ptrdiff_t query_stride, typename I::W* sums,
                          typename I::W* other_sums) {
  multiply_step<I, MR, F, WORD, 0>(lut, word, fifth, q, query_stride, sums);
  multiply_step<I, MR, F, WORD, 2>(lut, word, fifth, q, query_stride, other_sums);
  multiply_step<I, MR, F, WORD, 1>(lut, word, fifth, q, query_stride, sums);
  multiply_step<I, MR, F, WORD, 3>(lut, word, fifth, q, query_stride, other_sums);
}

template <class I, int MR, int F>
bool score_lanes(const Rows& rows, const Table& table, const void* query,
                 std::ptrdiff_t query_stride, const float* row_scale, const std::int32_t* start,
                 float* scales, float* out, std::ptrdiff_t plane) {
  constexpr bool BLOCKS = path_of(F) == BLOCK;
  // A multiply-add that is one instruction takes 5 cycles: two sums a row are kept, as far as there
  // are registers for them.
  constexpr int L = I::LANES;
  constexpr int CHAINS = I::FUSED_MADD && !BLOCKS && (L == 16 || MR <= 2) ? 2 : 1;
  const int n = rows.n, dim = rows.dim, groups = groups_of(dim);
  alignas(64) std::uint16_t halves[BLOCKS ? MAX_SCALES : TILE];
  const std::uint8_t* row_of[TILE];
  if (n < TILE) std::memset(halves, 0, std::size_t(BLOCKS ? groups * TILE : TILE) * 2);
  const std::uint8_t* row = rows.base;
  for (int t = 0; t < n; ++t, row += rows.stride) {
    row_of[t] = row;
    if constexpr (BLOCKS) {  // [group][step][parity][lane]
      const int j = t / 2 % L, lane = j % (L / 4) * 4 + j / (L / 4);
      std::uint16_t* const h = halves + t / (2 * L) * (2 * L) + t % 2 * L + lane;
      for (int g = 0; g < groups; ++g) h[g * TILE] = load_u16(row + scale_at(F, g));
    } else {
      halves[(t & 1) * (TILE / 2) + t / 2] = load_u16(row + row_bytes(F, dim) - 2);
    }
  }
  for (int t = n; t < TILE; ++t) row_of[t] = row_of[n - 1];  // masked by the caller
  const bool ok = convert_scales<I, F>(halves, BLOCKS ? groups * TILE : TILE, scales);

  const Entries<I, F> entries(table);
  const typename I::F row_factor = I::template repeat<MR>(row_scale);
  const auto* q = static_cast<const std::int16_t*>(query);
  for (int t0 = 0; t0 < n; t0 += 2 * L) {
    typename I::W sums[CHAINS][2 * MR];
    typename I::F total[2 * MR];
#pragma GCC unroll 8
    for (int i = 0; i < 2 * MR; ++i) {
      total[i] = I::zero();
      for (int c = 0; c < CHAINS; ++c) sums[c][i] = I::zero_words();
    }
    // Fifth bits of four groups at a time: [group][parity].
    alignas(64) typename I::W fifth[F == FIVE ? MAX_DIM / GROUP + 4 : 1][2];
    if constexpr (F == FIVE)
      for (int g = 0; g < groups; g += 4)
        for (int p = 0; p < 2; ++p) {
          typename I::W words[4];
          I::tokens_to_lanes(
              [&](int j) { return I::codes4(row_of[t0 + p + 2 * j] + dim / 2 + 4 * g).bytes; },
              words);
          for (int k = 0; k < 4; ++k) fifth[g + k][p] = words[k];
        }
    each_group<I, F>(dim, 0, groups, [&](int g, auto codes_of) {
      typename I::W word[4][2];
#pragma GCC unroll 2
      for (int p = 0; p < 2; ++p) {
        typename I::W words[4];
        I::tokens_to_lanes([&](int j) { return codes_of(row_of[t0 + p + 2 * j]).bytes; }, words);
        for (int k = 0; k < 4; ++k) word[k][p] = words[k];
      }
      const std::int16_t* qg = q + g * GROUP;
      const typename I::W* const bits = F == FIVE ? fifth[g] : nullptr;
      typename I::W* const other = sums[CHAINS - 1];
      multiply_word<I, MR, F, 0>(entries.lut, word[0], bits, qg, query_stride, sums[0], other);
      multiply_word<I, MR, F, 1>(entries.lut, word[1], bits, qg, query_stride, sums[0], other);
      multiply_word<I, MR, F, 2>(entries.lut, word[2], bits, qg, query_stride, sums[0], other);
      multiply_word<I, MR, F, 3>(entries.lut, word[3], bits, qg, query_stride, sums[0], other);
      if constexpr (BLOCKS)
#pragma GCC unroll 8
        for (int i = 0; i < 2 * MR; ++i) {
          const typename I::F scale = I::load(scales + g * TILE + t0 + i % 2 * L);
          total[i] = I::fma(I::to_float(sums[0][i]), scale, total[i]);
          sums[0][i] = I::zero_words();
        }
    });
    for (int p = 0; p < 2; ++p) {
      typename I::F lanes[MR], token[MR];
#pragma GCC unroll 4
      for (int r = 0; r < MR; ++r) {
        if constexpr (BLOCKS) {
          lanes[r] = total[2 * r + p];
        } else {
          typename I::W sum = I::add_words(sums[0][2 * r + p], I::set_words(start[r]));
          if constexpr (CHAINS == 2) sum = I::add_words(sum, sums[1][2 * r + p]);
          lanes[r] = I::to_float(sum);
        }
      }
      I::template lanes_to_tokens<MR>(lanes, token);
#pragma GCC unroll 4
      for (int i = 0; i < MR; ++i) {
        const int at = t0 / 2 + L / MR * i;
        typename I::F result = I::mul(token[i], row_factor);
        if constexpr (!BLOCKS)
          result = I::mul(result, I::template spread<MR>(scales + p * (TILE / 2) + at));
        I::store(out + p * plane + at * MR, result);
      }
    }
  }
  return ok;
}

// In score_bytes.h.
template <class I, int MR, int F>
bool score_bytes(const Rows&, const Table&, const void* query, std::ptrdiff_t query_stride,
                 const float* row_scale, const std::int32_t* start, float* scales, float* out,
                 std::ptrdiff_t plane);

// ---- softmax and weights
// -------------------------------------------------------------------------

// 2^x for x <= 0, relative error below 2e-7; exactly 0 below -126 (masked scores are -inf).
template <class I>
inline typename I::F exp2(typename I::F x) {
  const typename I::F in = I::max(x, I::set(-126.f));
  const typename I::W n = I::to_words(in);
  const typename I::F f = I::sub(in, I::to_float(n));
  typename I::F p = I::set(1.535336188319500e-4f);
  p = I::fma(p, f, I::set(1.339887440266574e-3f));
  p = I::fma(p, f, I::set(9.618437357674640e-3f));
  p = I::fma(p, f, I::set(5.550332471162809e-2f));
  p = I::fma(p, f, I::set(2.402264791363012e-1f));
  p = I::fma(p, f, I::set(6.931472028550421e-1f));
  p = I::fma(p, f, I::set(1.f));
  return I::above(x, -126.f, I::scale_by_power(p, n));
}

template <class I, int MR>
bool softmax(float* scores, std::ptrdiff_t plane, int n, float* maximum, float* sum, float* alpha) {
  constexpr int L = I::LANES;
  const int count = ((n + 1) / 2 * MR + L - 1) / L * L;
  alignas(64) float lanes[L];
  typename I::F top = I::set(-__builtin_inff());
  for (int p = 0; p < 2; ++p)
    for (int i = 0; i < count; i += L) top = I::max(top, I::load(scores + p * plane + i));
  I::store(lanes, top);
  float shift[MR];
  bool rescale = false;
  for (int r = 0; r < MR; ++r) {
    float m = maximum[r];
    for (int i = r; i < L; i += MR) m = lanes[i] > m ? lanes[i] : m;
    shift[r] = m > -__builtin_inff() ? m : 0;  // a row that saw nothing yet keeps weight 0
    alpha[r] = maximum[r] == m ? 1 : maximum[r] - m;
    maximum[r] = m;
  }
  for (int r = 0; r < MR; ++r) {
    if (alpha[r] == 1) continue;
    I::store(lanes, exp2<I>(I::set(alpha[r])));
    alpha[r] = lanes[0];
    rescale = true;
  }
  const typename I::F shifts = I::template repeat<MR>(shift);
  typename I::F total = I::zero();
  for (int p = 0; p < 2; ++p)
    for (int i = 0; i < count; i += L) {
      const typename I::F e = exp2<I>(I::sub(I::load(scores + p * plane + i), shifts));
      I::store(scores + p * plane + i, e);
      total = I::add(total, e);
    }
  I::store(lanes, total);
  for (int r = 0; r < MR; ++r) {
    float s = 0;
    for (int i = r; i < L; i += MR) s += lanes[i];
    sum[r] = sum[r] * alpha[r] + s;
  }
  return rescale;
}

template <class I, int MR>
void weights(const float* probability, std::ptrdiff_t plane, const float* scales, int n,
             int largest, float* scratch, std::int32_t* words, float* step) {
  constexpr int L = I::LANES, NT = L / MR;
  const int count = ((n + 1) / 2 * MR + L - 1) / L * L;
  alignas(64) float lanes[L];
  typename I::F top = I::zero();
  for (int p = 0; p < 2; ++p)
    for (int i = 0, t = 0; i < count; i += L, t += NT) {
      const typename I::F w = I::mul(I::load(probability + p * plane + i),
                                     I::template spread<MR>(scales + p * (TILE / 2) + t));
      I::store(scratch + p * (TILE / 2) * MR + i, w);
      top = I::max(top, I::abs(w));
    }
  I::store(lanes, top);
  float inverse[MR];
  for (int r = 0; r < MR; ++r) {
    float m = 0;
    for (int i = r; i < L; i += MR) m = lanes[i] > m ? lanes[i] : m;
    // Below 1e-30 the reciprocal would overflow, and the weight is nothing.
    inverse[r] = m > 1e-30f ? float(largest) / m : 0;
    step[r] = m > 1e-30f ? m / float(largest) : 0;
  }
  const typename I::F factor = I::template repeat<MR>(inverse);
  for (int i = 0; i < count; i += L) {
    const typename I::W even = I::to_words(I::mul(I::load(scratch + i), factor));
    const typename I::W odd = I::to_words(I::mul(I::load(scratch + (TILE / 2) * MR + i), factor));
    I::store_words(words + i, I::pair(even, odd));
  }
}

// ---- values
// --------------------------------------------------------------------------------------

// -offset times the sum of the weights of each row: what the sums of shifted values start from.
template <class I, int MR>
inline void offset_start(const std::int32_t* words, int pairs, int offset, std::int32_t* start) {
  std::uint32_t sum[MR] = {};
  if (offset) {
    constexpr int L = I::LANES;
    const typename I::W ones = I::set_words(0x00010001);
    typename I::W total = I::zero_words();
    for (int i = 0; i < pairs * MR; i += L)  // past the end the weights are 0
      total = madd_pair<I>(total, I::load_words(reinterpret_cast<const std::int16_t*>(words + i)),
                           ones);
    alignas(64) std::uint32_t lanes[L];
    I::store_words(lanes, total);
    for (int i = 0; i < L; ++i) sum[i % MR] += lanes[i];
  }
  for (int r = 0; r < MR; ++r) start[r] = std::int32_t(0u - sum[r] * std::uint32_t(offset));
}

// ND vectors of one step of accumulate, for all tokens of a tile.
template <class I, int MR, int ND>
inline void accumulate_real(const float* w, std::ptrdiff_t plane, const float* v, int width,
                            int pairs, float* out, std::ptrdiff_t out_stride) {
  constexpr int L = I::LANES;
  typename I::F acc[MR][ND];
#pragma GCC unroll 4
  for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
    for (int i = 0; i < ND; ++i) acc[r][i] = I::load(out + r * out_stride + i * L);
  for (int t = 0; t < pairs; ++t, v += 2 * width, w += MR) {
#pragma GCC unroll 2
    for (int parity = 0; parity < 2; ++parity) {
      typename I::F vv[ND];
#pragma GCC unroll 4
      for (int i = 0; i < ND; ++i) vv[i] = I::held(I::load(v + parity * width + i * L));
#pragma GCC unroll 4
      for (int r = 0; r < MR; ++r) {
        const typename I::F ww = I::set(w[parity * plane + r]);
#pragma GCC unroll 4
        for (int i = 0; i < ND; ++i) acc[r][i] = I::fma(ww, vv[i], acc[r][i]);
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
    for (int i = 0; i < ND; ++i) I::store(out + r * out_stride + i * L, acc[r][i]);
}

template <class I, int ND>
inline void load_values(const std::int16_t* v, typename I::W* out) {
#pragma GCC unroll 4
  for (int i = 0; i < ND; ++i) out[i] = I::held(I::load_words(v + 2 * I::LANES * i));
}

// Two vectors of words from each vector of bytes.
template <class I, int ND>
inline void load_values(const std::uint8_t* v, typename I::W* out) {
#pragma GCC unroll 2
  for (int i = 0; i < ND; i += 2)
    I::even_odd(I::load_words(reinterpret_cast<const std::int16_t*>(v + 2 * I::LANES * i)),
                out + i);
}

template <class I, int MR, int ND, class Value>
inline void accumulate_coded(const std::int32_t* w, const float* step, const std::int32_t* start,
                             const Value* v, int width, int pairs, float* out,
                             std::ptrdiff_t out_stride) {
  constexpr int L = I::LANES;
  typename I::W acc[MR][ND];
#pragma GCC unroll 4
  for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
    for (int i = 0; i < ND; ++i) acc[r][i] = I::set_words(start[r]);
  const auto add_pair = [&](const Value* values, const std::int32_t* words) {
    typename I::W vv[ND];
    load_values<I, ND>(values, vv);
#pragma GCC unroll 4
    for (int r = 0; r < MR; ++r) {
      const typename I::W ww = I::held(I::set_words(words[r]));
#pragma GCC unroll 4
      for (int i = 0; i < ND; ++i) acc[r][i] = madd_pair<I>(acc[r][i], vv[i], ww);
    }
  };
  for (; pairs > 1; pairs -= 2, v += 4 * width, w += 2 * MR) {
    add_pair(v, w);
    add_pair(v + 2 * width, w + MR);
  }
  if (pairs) add_pair(v, w);
#pragma GCC unroll 4
  for (int r = 0; r < MR; ++r) {
    const typename I::F s = I::set(step[r]);
#pragma GCC unroll 4
    for (int i = 0; i < ND; ++i) {
      float* at = out + r * out_stride + i * L;
      I::store(at, I::fma(I::to_float(acc[r][i]), s, I::load(at)));
    }
  }
}

template <class I, int MR, Path P>
void accumulate(const void* weights, std::ptrdiff_t plane, const float* step, const void* values,
                int n, int dim, int offset, float* out, std::ptrdiff_t out_stride) {
  // Vectors of one step. It never crosses a group, except where all groups have the same weights
  // and there are registers for more.
  constexpr int L = I::LANES, PER_GROUP = GROUP / L;
  constexpr int ND = MR == 4 ? (PER_GROUP < 2 ? 1 : 2) : (PER_GROUP < 4 ? PER_GROUP : 4);
  constexpr int WIDE = P == ROW && L == 16 ? 4 : ND;
  const int width = padded(dim), pairs = (n + 1) / 2;
  if constexpr (P == REAL) {
    const auto* v = static_cast<const float*>(values);
    for (int d = 0; d < width; d += ND * L)
      accumulate_real<I, MR, ND>(static_cast<const float*>(weights), plane, v + d, width, pairs,
                                 out + d, out_stride);
  } else {
    using Value = std::conditional_t<P == ROW, typename I::RowValue, std::int16_t>;
    const auto* v = static_cast<const Value*>(values);
    const auto* w = static_cast<const std::int32_t*>(weights);
    std::int32_t start[MR] = {};
    if constexpr (P == ROW) offset_start<I, MR>(w, pairs, offset, start);
    int d = 0;
    for (; d + WIDE * L <= width; d += WIDE * L) {
      const int column = P == BLOCK && plane ? d / GROUP : 0;
      accumulate_coded<I, MR, WIDE>(w + column * (TILE / 2) * MR, step + column * MR, start,
                                    v + 2 * d, width, pairs, out + d, out_stride);
    }
    if (d < width)
      accumulate_coded<I, MR, ND>(w, step, start, v + 2 * d, width, pairs, out + d, out_stride);
  }
}

// ---- rows
// ----------------------------------------------------------------------------------------

template <class I>
void scale_row(float* x, int n, float factor) {
  for (int i = 0; i < n; ++i) x[i] *= factor;
}

template <class I>
std::uint32_t largest_bits(const float* x, std::ptrdiff_t n) {
  std::int32_t top = 0;
  for (std::ptrdiff_t i = 0; i < n; ++i) {
    std::int32_t bits;
    std::memcpy(&bits, x + i, 4);
    bits &= 0x7fffffff;
    top = bits > top ? bits : top;
  }
  return std::uint32_t(top);
}

template <class I>
bool finite(const float* x, std::ptrdiff_t n) {
  return largest_bits<I>(x, n) < 0x7f800000;
}

// One instruction a vector: no sum of squares of which one reached limit * limit is below that.
template <class I>
bool all_below(const float* x, std::ptrdiff_t n, float limit) {
  constexpr int L = I::LANES, SUMS = 8;
  typename I::F sum[SUMS];
  for (int k = 0; k < SUMS; ++k) sum[k] = I::zero();
  std::ptrdiff_t i = 0;
  for (; i + SUMS * L <= n; i += SUMS * L)
#pragma GCC unroll 8
    for (int k = 0; k < SUMS; ++k) {
      const typename I::F v = I::load(x + i + k * L);
      sum[k] = I::fma(v, v, sum[k]);
    }
  bool below = true;
  for (int k = 0; k < SUMS; ++k) below = below && I::all_below(sum[k], I::set(limit * limit));
  return below && largest_bits<I>(x + i, n - i) < to_bits(limit);
}

template <class I>
inline float largest_magnitude(const float* x, int n) {
  constexpr int L = I::LANES;
  typename I::F top = I::zero();
  int i = 0;
  for (; i + L <= n; i += L) top = I::max(top, I::abs(I::load(x + i)));
  alignas(64) float lanes[L];
  I::store(lanes, top);
  float m = 0;
  for (int j = 0; j < L; ++j) m = lanes[j] > m ? lanes[j] : m;
  for (; i < n; ++i) {
    const float a = x[i] < 0 ? -x[i] : x[i];
    m = a > m ? a : m;
  }
  return m;
}

template <class I>
float quantize(const float* x, int n, int largest, std::int16_t* out) {
  const float m = largest_magnitude<I>(x, n);
  const float inverse = m > 1e-30f ? float(largest) / m : 0;
  constexpr int L = I::LANES;
  alignas(64) std::int32_t lanes[L];
  for (int i = 0; i < n; i += L) {  // n is a multiple of 16
    I::store_words(lanes, I::to_words(I::mul(I::load(x + i), I::set(inverse))));
    for (int j = 0; j < L; ++j) out[i + j] = std::int16_t(lanes[j]);
  }
  return m > 1e-30f ? m / float(largest) : 0;
}

enum Pass { LATER, FIRST, SIGNED };

// The butterflies of length LEN to R * LEN / 2 over each row, R vectors at a time, in the order of
// the reference; of a FIRST pass, those within a vector before, and of a SIGNED one x * signs
// before that. With SCALE the results are multiplied by `factor`.
template <class I, int R, bool SCALE, Pass PASS = LATER>
inline void butterflies(const Rotation& t, const float* signs, int n, int len,
                        typename I::F factor) {
  constexpr int L = I::LANES;
  for (int row = 0; row < t.rows; ++row) {
    const float* const x = t.x + row * t.x_stride;
    float* const y = t.y + row * t.y_stride;
    for (int i = 0; i < n; i += R * len)
      for (int j = i; j < i + len; j += L) {
        typename I::F v[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          v[r] = I::load(x + j + r * len);
          // A choice by `signs` in here would cost GCC half of its registers.
          if constexpr (PASS == SIGNED) v[r] = I::mul(v[r], I::load(signs + j + r * len));
          if constexpr (PASS != LATER) v[r] = I::butterflies(v[r]);
        }
#pragma GCC unroll 3
        for (int half = 1; half < R; half *= 2)
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r)
            if (!(r & half)) {
              const typename I::F a = v[r], b = v[r + half];
              v[r] = I::add(a, b);
              v[r + half] = I::sub(a, b);
            }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) I::store(y + j + r * len, SCALE ? I::mul(v[r], factor) : v[r]);
      }
  }
}

template <class I, int R, bool SCALE, Pass PASS>
inline void first_butterflies(const Rotation& t, const float* signs, int n, float factor) {
  if (SCALE && n == R * I::LANES)
    butterflies<I, R, true, PASS>(t, signs, n, I::LANES, I::set(factor));
  else
    butterflies<I, R, false, PASS>(t, signs, n, I::LANES, I::zero());
}

template <class I, bool SCALE, Pass PASS>
inline void first_pass(const Rotation& t, const float* signs, int n, float factor) {
  switch (n / I::LANES) {
    case 1:
      return first_butterflies<I, 1, SCALE, PASS>(t, signs, n, factor);
    case 2:
      return first_butterflies<I, 2, SCALE, PASS>(t, signs, n, factor);
    case 4:
      return first_butterflies<I, 4, SCALE, PASS>(t, signs, n, factor);
    default:
      return first_butterflies<I, 8, SCALE, PASS>(t, signs, n, factor);
  }
}

// Hadamard transforms of rows * signs (null: of the rows), times `factor` with SCALE; n is a power
// of two, 16 or more.
template <class I, bool SCALE>
inline void hadamard(const Rotation& t, const float* signs, int n, float factor) {
  int len = smaller(n, 8 * I::LANES);
  if (signs)
    first_pass<I, SCALE, SIGNED>(t, signs, n, factor);
  else
    first_pass<I, SCALE, FIRST>(t, nullptr, n, factor);
  const typename I::F scale = I::set(factor);
  const Rotation again{t.y, t.y_stride, t.y, t.y_stride, t.rows};
  for (; n / len > 8; len *= 8) butterflies<I, 8, false>(again, nullptr, n, len, scale);
  if (n / len == 8)
    butterflies<I, 8, SCALE>(again, nullptr, n, len, scale);
  else if (n / len == 4)
    butterflies<I, 4, SCALE>(again, nullptr, n, len, scale);
  else if (n / len == 2)
    butterflies<I, 2, SCALE>(again, nullptr, n, len, scale);
}

template <class I>
void rotate(const Rotation& t, const float* signs, int period, const int* parts, int n_parts) {
  for (int p = 0, d = 0; p < n_parts; d += parts[p], ++p)
    hadamard<I, true>({t.x + d, t.x_stride, t.y + d, t.y_stride, t.rows},
                      signs ? signs + d % period : nullptr, parts[p],
                      float(1 / __builtin_sqrt(double(parts[p]))));
}

// ---- encode
// --------------------------------------------------------------------------------------

inline std::uint16_t store_scale(float scale, Counts& counts) {
  std::uint16_t h = float_to_half(scale);
  if ((h & 0x7fff) == 0x7c00) {
    h = std::uint16_t((h & 0x8000) | 0x7bff);
    ++counts.saturated;
  }
  if ((h & 0x7fff) == 0 && scale != 0) ++counts.flushed;
  return h;
}

inline float reciprocal(float x) {  // 0 where 1 / x is not finite
  const float r = 1 / x;
  return r - r == 0 ? r : 0;
}

// Code bytes of y * inverse; n is a multiple of 16.
template <class I, int COUNT>
inline void nearest(const float* y, int n, float inverse, const Book& book, std::uint8_t* codes) {
  constexpr int L = I::LANES;
  alignas(64) std::int32_t lanes[L];
  for (int i = 0; i < n; i += L) {
    const typename I::F z = I::mul(I::load(y + i), I::set(inverse));
    typename I::W code = I::zero_words();
#pragma GCC unroll 16
    for (int k = 0; k + 1 < COUNT; ++k) code = I::count_above(code, z, I::set(book.cut[k]));
    I::store_words(lanes, code);
    for (int j = 0; j < L; ++j) codes[i + j] = std::uint8_t(lanes[j]);
  }
}

inline double sum_of_squares(const float* y, int n) {  // n is a multiple of 16
  double s[16] = {};
  for (int i = 0; i < n; i += 16)
    for (int j = 0; j < 16; ++j) s[j] += double(y[i + j]) * double(y[i + j]);
  double total = 0;
  for (int j = 0; j < 16; ++j) total += s[j];
  return total;
}

// Sixteen running sums in the order that the reference fixes (formats/row.py, lane_sum), as
// registers of any width.
template <class I>
struct LaneSum {
  static constexpr int PARTS = 16 / I::LANES;
  typename I::F part[PARTS];

  LaneSum() {
    for (int i = 0; i < PARTS; ++i) part[i] = I::zero();
  }
  float total() const { return I::fold(part); }
};

inline void pack4(const std::uint8_t* codes, int n, std::uint8_t* out) {  // n codes -> n / 2 bytes
  const int half = n / 2;
  for (int j = 0; j < half; ++j) out[j] = std::uint8_t(codes[j] | codes[j + half] << 4);
}

// n 2-bit codes -> n / 4 bytes: byte j holds codes j, j + n / 4, j + n / 2 and j + 3n / 4.
inline void pack2(const std::uint8_t* codes, int n, std::uint8_t* out) {
  const int quarter = n / 4;
  for (int j = 0; j < quarter; ++j) {
    const std::uint8_t* c = codes + j;
    out[j] = std::uint8_t((c[0] & 3) | (c[quarter] & 3) << 2 | (c[2 * quarter] & 3) << 4 |
                          (c[3 * quarter] & 3) << 6);
  }
}

// Bit `bit` of n codes -> n / 8 bytes.
inline void pack1(const std::uint8_t* codes, int n, int bit, std::uint8_t* out) {
  for (int i = 0; i < n; i += 8) {
    int bits = 0;
    for (int j = 0; j < 8; ++j) bits |= (codes[i + j] >> bit & 1) << j;
    out[i / 8] = std::uint8_t(bits);
  }
}

// Stores the unit at the end of a row that came from y.
template <class I>
inline void store_unit(float unit, const float* y, int dim, std::uint8_t* end, Counts& counts) {
  const std::uint16_t h = store_scale(unit, counts);
  // Squares of tiny rows vanish, so their unit is 0 before it is stored.
  if (unit == 0 && largest_magnitude<I>(y, dim) != 0) ++counts.flushed;
  std::memcpy(end - 2, &h, 2);
}

// Roots of the mean squares of R rows, in the order of the reference.
template <class I, int R>
inline void root_mean_squares_of(const float* y, std::ptrdiff_t stride, int dim, float* out) {
  LaneSum<I> energy[R];
  for (int i = 0; i < dim; i += 16)
    for (int part = 0; part < LaneSum<I>::PARTS; ++part)
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const typename I::F v = I::load(y + r * stride + i + part * I::LANES);
        energy[r].part[part] = I::add(energy[r].part[part], I::mul(v, v));
      }
  for (int r = 0; r < R; ++r) out[r] = __builtin_sqrtf(energy[r].total() / float(dim));
}

// Rows go together: every term of a row's sum waits for the one before it.
template <class I>
inline void root_mean_squares(const float* y, std::ptrdiff_t stride, int rows, int dim,
                              float* out) {
  int r = 0;
  for (; r + 4 <= rows; r += 4) root_mean_squares_of<I, 4>(y + r * stride, stride, dim, out + r);
  for (; r < rows; ++r) root_mean_squares_of<I, 1>(y + r * stride, stride, dim, out + r);
}

template <class I>
inline float root_mean_square(const float* y, int dim) {
  float size;
  root_mean_squares_of<I, 1>(y, 0, dim, &size);
  return size;
}

// In rows.h.
template <class I, int F>
void encode_row(const float* y, std::ptrdiff_t stride, int rows, int dim, const Book& book,
                std::uint8_t* out, Counts& counts);

// One row after the other.
template <int F, void (*ENCODE)(const float*, int, const Book&, std::uint8_t*, Counts&)>
void encode_each(const float* y, std::ptrdiff_t stride, int rows, int dim, const Book& book,
                 std::uint8_t* out, Counts& counts) {
  for (int r = 0; r < rows; ++r, y += stride, out += row_bytes(F, dim))
    ENCODE(y, dim, book, out, counts);
}

template <class I>
void encode_bytes(const float* y, int dim, const Book&, std::uint8_t* out, Counts& counts) {
  const float unit = largest_magnitude<I>(y, dim) / 127;
  const typename I::F inverse = I::set(reciprocal(unit));
  constexpr int L = I::LANES;
  for (int i = 0; i < dim; i += L) {
    alignas(64) std::int32_t lanes[L];
    I::store_words(lanes, I::to_words(I::mul(I::load(y + i), inverse)));
    for (int j = 0; j < L; ++j) out[i + j] = std::uint8_t(lanes[j]);
  }
  store_unit<I>(unit, y, dim, out + row_bytes(TQ8, dim), counts);
}

template <class I, int F>
void encode_blocks(const float* y, int dim, const Book& book, std::uint8_t* out, Counts& counts) {
  for (int b = 0; b < dim / GROUP; ++b, y += GROUP, out += block_bytes(F)) {
    alignas(64) std::uint8_t codes[GROUP];
    std::uint16_t h;
    if constexpr (F == TBQ4_0 || F == TBQ3_0) {
      const float d = float(__builtin_sqrt(sum_of_squares(y, GROUP) / GROUP));
      const float inverse = reciprocal(d);
      if (inverse == 0)
        std::memset(codes, 0, GROUP);
      else
        nearest<I, F == TBQ4_0 ? 16 : 8>(y, GROUP, inverse, book, codes);
      h = store_scale(d, counts);
      if constexpr (F == TBQ4_0) {
        pack4(codes, GROUP, out + 2);
      } else {
        for (int i = 0; i < 4; ++i) {  // 8 codes are 3 bytes
          std::uint32_t bits = 0;
          for (int j = 0; j < 8; ++j) bits |= std::uint32_t(codes[8 * i + j]) << 3 * j;
          for (int j = 0; j < 3; ++j) out[2 + 3 * i + j] = std::uint8_t(bits >> 8 * j);
        }
      }
    } else if constexpr (F == Q8_0) {
      const float d = largest_magnitude<I>(y, GROUP) / 127;
      const float inverse = reciprocal(d);
      constexpr int L = I::LANES;
      for (int i = 0; i < GROUP; i += L) {
        // Nearest even first; a remainder of exactly one half was a tie that went down: away from
        // zero instead. 0.49999997 is the float before 0.5.
        const typename I::F z = I::mul(I::load(y + i), I::set(inverse)), a = I::abs(z);
        typename I::W n = I::to_words(a);
        n = I::count_above(n, I::sub(a, I::to_float(n)), I::set(0.49999997f));
        alignas(64) std::int32_t lanes[L];
        alignas(64) float zs[L];
        I::store_words(lanes, n);
        I::store(zs, z);
        for (int j = 0; j < L; ++j) out[2 + i + j] = std::uint8_t(zs[j] < 0 ? -lanes[j] : lanes[j]);
      }
      h = store_scale(d, counts);
    } else {  // Q4_0
      const float m = largest_magnitude<I>(y, GROUP);
      float d = -0.f;
      for (int i = 0; i < GROUP && m != 0; ++i)
        if (y[i] == m || y[i] == -m) {
          d = y[i] / -8;
          break;
        }
      const float inverse = reciprocal(d);
      for (int i = 0; i < GROUP; ++i) {
        const float z = y[i] * inverse + 8.5f;  // at least 0.4, so truncation is floor
        codes[i] = std::uint8_t(z > 15 ? 15 : int(z));
      }
      pack4(codes, GROUP, out + 2);
      h = store_scale(d, counts);
    }
    std::memcpy(out, &h, 2);
  }
}

template <class I, int F>
void encode_real(const float* y, int dim, const Book&, std::uint8_t* out, Counts& counts) {
  int done = 0;
  if constexpr (F == F16) {
    // Whole vectors, as far as nothing overflows.
    constexpr int L = I::LANES;
    for (; done + L <= dim; done += L) {
      const typename I::F x = I::load(y + done);
      if (!I::all_below(I::abs(x), I::set(65520.f))) break;
      I::store_f16(out + 2 * done, x);
    }
  }
  for (int i = done; i < dim; ++i) {
    const std::uint32_t bits = to_bits(y[i]), body = bits & 0x7fffffff;
    if constexpr (F == F16) {
      std::uint16_t h = float_to_half(y[i]);
      if ((h & 0x7fff) == 0x7c00) {
        h = std::uint16_t((h & 0x8000) | 0x7bff);
        ++counts.saturated;
      }
      std::memcpy(out + 2 * i, &h, 2);
    } else if constexpr (F == BF16) {
      std::uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
      if ((rounded & 0x7fff) >= 0x7f80) {
        rounded = (rounded & 0x8000) | 0x7f7f;
        ++counts.saturated;
      }
      const auto h = std::uint16_t(rounded);
      std::memcpy(out + 2 * i, &h, 2);
    } else {
      std::uint32_t code;
      if (body >= 0x43e80000) {  // 464, midway between 448 and the value after it
        code = 0x7e;
        ++counts.saturated;
      } else if (body < 0x3c800000) {  // below 2^-6: units of 2^-9, as 2^14 holds no less
        code = to_bits(from_bits(body) + 0x1p14f) - to_bits(0x1p14f);
      } else {
        code = ((body + 0x7ffff + (body >> 20 & 1)) >> 20) - (120 << 3);
        code = code > 0x7e ? 0x7e : code;
      }
      out[i] = std::uint8_t(code | bits >> 31 << 7);
    }
  }
}

// ---- formats with blocks of 128 values: foreign.h
// ---------------------------------------------------------------------------------------

template <class I, int F>
void encode_wide(const float* x, int dim, const Book&, std::uint8_t* out, Counts&);
template <class I, int F>
bool decode_wide(const std::uint8_t* row, int dim, const Book&, float* out);
template <class I>
void project(const float* x, int dim, const float* table, float* out);
template <class I, int MR, int F>
bool score_wide(const Rows&, const Table&, const void* query, std::ptrdiff_t query_stride,
                const float* row_scale, const std::int32_t* start, float* scales, float* out,
                std::ptrdiff_t plane);

// ---- decode one row, stored domain
// ---------------------------------------------------------------

template <class I, int F>
bool decode_row(const std::uint8_t* row, int dim, const Book& book, float* out) {
  bool ok = true;
  if constexpr (path_of(F) == REAL) {
    const Rows rows{row, 0, 1, dim};
    constexpr int L = I::LANES, size = block_bytes(F);
    alignas(64) float lanes[L];
    for (int d = 0; d < rows.dim; d += L) {
      alignas(64) std::uint8_t bytes[L * size] = {};
      const int n = smaller(L, dim - d);
      std::memcpy(bytes, row + d * size, std::size_t(n) * size);
      I::store(lanes, load_real<I, F>(bytes));
      std::memcpy(out + d, lanes, std::size_t(n) * sizeof(float));
    }
    for (int i = 0; i < dim; ++i) ok = ok && out[i] - out[i] == 0;
  } else {
    each_group<I, F>(dim, 0, groups_of(dim), [&](int g, auto codes_of) {
      alignas(64) std::uint8_t codes[GROUP];
      I::store_codes(codes, codes_of(row));
      const std::uint16_t h =
          load_u16(path_of(F) == ROW ? row + row_bytes(F, dim) - 2 : row + scale_at(F, g));
      ok = ok && (h & 0x7c00) != 0x7c00;
      const float d = half_to_float(h);
      const int n = smaller(GROUP, dim - GROUP * g);
      for (int i = 0; i < n; ++i) {
        // A last group of 16 fills the first half of each plane of its bytes.
        const int c = n == GROUP              ? codes[i]
                      : F == TQ8              ? codes[i]
                      : F == TQ4 || F == FIVE ? codes[i % 8 + i / 8 * 16]
                                              : codes[i % 4 + i / 4 * 8];
        const float value = F == Q8_0 || F == TQ8 ? float(std::int8_t(c))
                            : F == Q4_0           ? float(c - 8)
                                                  : book.value[c];
        out[GROUP * g + i] = d == 0 ? 0.f : value * d;
      }
    });
  }
  return ok;
}

// ---- repack
// --------------------------------------------------------------------------------------

// 2-bit fields in the order of tq3's low plane -> nibbles in the order of tq4: those of the even
// fields, then those of the odd ones. `low` and `high` are the two halves of each nibble.
struct NibblePair {
  std::uint64_t even, odd;
};
inline NibblePair nibbles(std::uint64_t low, std::uint64_t high) {
  constexpr std::uint64_t TWO = 0x3333333333333333;
  return {(low & TWO) | (high & TWO) << 2, (low >> 2 & TWO) | (high & ~TWO)};
}

inline std::uint64_t every_second(std::uint32_t bits) {
  std::uint64_t x = bits;
  x = (x | x << 16) & 0x0000ffff0000ffff;
  x = (x | x << 8) & 0x00ff00ff00ff00ff;
  x = (x | x << 4) & 0x0f0f0f0f0f0f0f0f;
  x = (x | x << 2) & 0x3333333333333333;
  return (x | x << 1) & 0x5555555555555555;
}

// Subset bits of a group, in the order of the 2-bit fields of tq3's low plane. `window` holds the
// path's bits of the group in its high half and those before them in its low half.
inline std::uint64_t subset_fields(std::uint64_t window, const Trellis& trellis) {
  std::uint64_t subset[2] = {};
  for (int bit = 0; bit < 2; ++bit)
    for (int j = 0; j < trellis.n_taps[bit]; ++j) subset[bit] ^= window << trellis.tap[bit][j];
  return every_second(std::uint32_t(subset[0] >> 32)) | every_second(std::uint32_t(subset[1] >> 32))
                                                            << 1;
}

// Fifth bits of n values, in natural order or (tcq4) by steps, as FIVE has them.
template <int F>
inline std::uint32_t fifth_bits(std::uint32_t bits, int n) {
  std::uint32_t out = 0;
  for (int i = 0; i < n; ++i) {
    const int half = n / 2, at = F == TQ5 ? i : i % (n / 4) * 4 + i / (n / 4);
    out |= (bits >> at & 1) << fifth_bit(i % half + i / half * 16);
  }
  return out;
}

template <class I, int F>
void repack(const Rows& rows, const Book& book, std::uint8_t* out, std::ptrdiff_t stride) {
  constexpr int BITS = code_bits(F), PATH = has_trellis(F) ? BITS - 1 : 0;  // the plane of the path
  const int dim = rows.dim, done = I::template repack_pairs<F>(rows, book, out, stride);
  const std::uint8_t* row = rows.base;
  for (int t = 0; t < rows.n; ++t, row += rows.stride, out += stride) {
    const std::uint8_t* end = row + dim * BITS / 8;  // of the codes
    std::uint64_t window = 0;
    if constexpr (has_trellis(F)) {
      if (book.trellis->start_bytes) window = std::uint64_t(*end++) << 56;
      if (done) std::memcpy(&window, row + PATH * (dim / 8) + done / 8 - 8, 8);
    }
    for (int s = done; s < dim; s += GROUP) {
      const int n = smaller(GROUP, dim - s);
      NibblePair pair = {};
      std::uint32_t fifth = 0;
      if constexpr (F == TQ5) {
        std::memcpy(&pair.even, row + s / 2, std::size_t(n / 4));
        std::memcpy(&pair.odd, row + s / 2 + n / 4, std::size_t(n / 4));
        std::memcpy(&fifth, row + dim / 2 + s / 8, std::size_t(n / 8));
      } else if constexpr (F == TQ2) {
        std::uint64_t codes = 0;
        std::memcpy(&codes, row + s / 4, std::size_t(n / 4));
        pair = nibbles(codes, 0);
      } else {
        std::uint32_t path = 0;
        std::memcpy(&path, row + PATH * (dim / 8) + s / 8, std::size_t(n / 8));
        window = window >> 32 | std::uint64_t(path) << 32;
        std::uint64_t codes = 0;
        if constexpr (BITS == 2) {
          std::uint32_t bits = 0;
          std::memcpy(&bits, row + s / 8, std::size_t(n / 8));
          codes = every_second(bits);
        } else {
          std::memcpy(&codes, row + s / 4, std::size_t(n / 4));
          if constexpr (BITS == 4) std::memcpy(&fifth, row + dim / 4 + s / 8, std::size_t(n / 8));
        }
        pair = nibbles(subset_fields(window, *book.trellis), codes);
      }
      std::memcpy(out + s / 2, &pair.even, std::size_t(n / 4));
      std::memcpy(out + s / 2 + n / 4, &pair.odd, std::size_t(n / 4));
      if constexpr (layout_of(F) == FIVE) {
        fifth = fifth_bits<F>(fifth, n);
        std::memcpy(out + dim / 2 + s / 8, &fifth, 4);
      }
    }
    const std::uint16_t half = has_trellis(F) ? book.units->half[*end] : load_u16(end);
    std::memcpy(out + row_bytes(layout_of(F), dim) - 2, &half, 2);
  }
}

// In trellis.h.
template <class I, int F>
void encode_trellis(const float* y, int dim, const Book& book, std::uint8_t* out, Counts& counts);

template <class I, int F>
constexpr void add_trellis(Kernels& k) {
  constexpr int MORE_STATES = F + 1;
  static_assert(trellis_of(MORE_STATES) == F);
  k.encode[F] = encode_each<F, encode_trellis<I, F>>;
  k.encode[MORE_STATES] = encode_each<MORE_STATES, encode_trellis<I, F>>;
  k.repack[F] = k.repack[MORE_STATES] = repack<I, F>;
}

}  // namespace
}  // namespace kvproof

#include "panel.h"

namespace kvproof {
namespace {

// ---- the table
// -----------------------------------------------------------------------------------

// Formats that have attention kernels of their own.
using Layouts =
    std::integer_sequence<int, F16, BF16, FP8_E4M3, Q8_0, Q4_0, TBQ4_0, TBQ3_0, Q4_POLAR,
                          Q4_POLAR_RES, TBQ3_TCQ, QJL1_256, TQ4, TQ3, TQ8, FIVE>;

// Sets of 4 lanes have no use for the special ones.
template <class I, int MR, int F>
constexpr auto scorer() {
  if constexpr (I::BYTE_PRODUCTS && byte_entries(F))
    return score_bytes<I, MR, F>;
  else if constexpr (I::TOKENS_IN_LANES && scored_by_lanes(F))
    return score_lanes<I, MR, F>;
  else if constexpr (I::LANES >= 8 && wide(F))
    return score_wide<I, MR, F>;
  else
    return score<I, MR, F>;
}

template <class I, int F>
constexpr void add_layout(Kernels& k) {
  if constexpr (path_of(F) == REAL) {
    k.decode_keys[F] = decode_real_keys<I, F>;
    k.decode_values[F] = k.decode_pairs[F] = decode_real_values<I, F>;
    k.encode[F] = encode_each<F, encode_real<I, F>>;
  } else {
    k.decode_keys[F] = decode_keys_coded<I, F>;
    if constexpr (F != QJL1_256) {
      using Value = std::conditional_t<path_of(F) == ROW, typename I::RowValue, std::int16_t>;
      k.decode_values[F] = decode_values_coded<I, F, Value>;
      k.decode_pairs[F] = decode_values_coded<I, F, std::int16_t>;
    }
    k.score[F][0] = scorer<I, 1, F>();
    k.score[F][1] = scorer<I, 2, F>();
    k.score[F][2] = scorer<I, 4, F>();
    if constexpr (wide(F))
      k.encode[F] = encode_each<F, encode_wide<I, F>>;
    else if constexpr (path_of(F) == BLOCK)
      k.encode[F] = encode_each<F, encode_blocks<I, F>>;
    else if constexpr (F == TQ8)
      k.encode[F] = encode_each<F, encode_bytes<I>>;
    else if constexpr (F != FIVE)
      k.encode[F] = encode_row<I, F>;
  }
  if constexpr (wide(F))
    k.decode[F] = decode_wide<I, F>;
  else
    k.decode[F] = decode_row<I, F>;
}

template <class I, int... F>
constexpr void add_layouts(Kernels& k, std::integer_sequence<int, F...>) {
  (add_layout<I, F>(k), ...);
}

template <class I>
constexpr Kernels make_kernels(const char* name) {
  Kernels k{};
  k.name = name;
  k.unsigned_rows = I::UNSIGNED_ROWS;
  k.key_element = I::key_element;
  k.score_element = [](int format, int position) {
    return I::TOKENS_IN_LANES && scored_by_lanes(format) ? lane_element(position)
                                                         : I::key_element(format, position);
  };
  k.value_element = I::value_element;
  add_layouts<I>(k, Layouts{});
  k.encode[Q4_0_ROT] = k.encode[Q4_0];
  k.encode[TQ5] = encode_row<I, TQ5>;
  k.encode[TQ2] = encode_row<I, TQ2>;
  k.repack[TQ5] = repack<I, TQ5>;
  k.repack[TQ2] = repack<I, TQ2>;
  add_trellis<I, TCQ4>(k);
  add_trellis<I, TCQ3>(k);
  add_trellis<I, TCQ2>(k);
  const auto by_width = [](auto* to, auto one, auto two, auto four) {
    to[0] = one;
    to[1] = two;
    to[2] = four;
  };
  by_width(k.dot[ROW], dot<I, 1, ROW>, dot<I, 2, ROW>, dot<I, 4, ROW>);
  by_width(k.dot[BLOCK], dot<I, 1, BLOCK>, dot<I, 2, BLOCK>, dot<I, 4, BLOCK>);
  by_width(k.dot[REAL], dot<I, 1, REAL>, dot<I, 2, REAL>, dot<I, 4, REAL>);
  by_width(k.softmax, softmax<I, 1>, softmax<I, 2>, softmax<I, 4>);
  by_width(k.weights, weights<I, 1>, weights<I, 2>, weights<I, 4>);
  by_width(k.accumulate[ROW], accumulate<I, 1, ROW>, accumulate<I, 2, ROW>, accumulate<I, 4, ROW>);
  by_width(k.accumulate[BLOCK], accumulate<I, 1, BLOCK>, accumulate<I, 2, BLOCK>,
           accumulate<I, 4, BLOCK>);
  by_width(k.accumulate[REAL], accumulate<I, 1, REAL>, accumulate<I, 2, REAL>,
           accumulate<I, 4, REAL>);
  k.panel = PANEL<I>;
  k.panel_scores = panel_scores<I>;
  k.panel_scores_real = panel_scores_real<I>;
  k.panel_softmax = panel_softmax<I>;
  k.panel_values = panel_values<I>;
  k.panel_values_real = panel_values_real<I>;
  k.panel_scale = panel_scale<I>;
  k.level_keys = level_keys<I>;
  k.value_units = value_units<I>;
  k.level_values = level_values<I>;
  k.centre = centre<I>;
  k.scale_row = scale_row<I>;
  k.quantize = quantize<I>;
  k.rotate = rotate<I>;
  k.project = project<I>;
  k.largest_bits = largest_bits<I>;
  k.finite = finite<I>;
  k.all_below = all_below<I>;
  return k;
}

}  // namespace
}  // namespace kvproof
