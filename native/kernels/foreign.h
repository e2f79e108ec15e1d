// Formats of other projects with blocks of 128 values: q4_polar, tbq3_tcq and qjl1_256, as
// templates over an instruction set I (see leaf.h).
//
// Their norm is taken before the rotation, so encoding starts from the plain basis. Sums are
// float64, rotations and the trellis search float32 in the order of the reference.
#pragma once

#include "leaf.h"

namespace kvproof {
namespace {

// ---- trellis: the cheapest path through 512 states
// -----------------------------------------------------------------------------------------

// State s is reached from 8 * (s % 64) + p, p = 0..7, so the best predecessor depends on s % 64
// only: best[t][j] is the least cost before value t among the states 8 j + p, and all that the
// search has to keep. The choices are not stored; the way back finds them by the same sums.
//
// `path` takes the state at each of the 128 values, in order; returns the initial state >> 3.
template <class I>
int cheapest_path(const float* y, const WideTrellis& trellis, std::uint16_t* path) {
  constexpr int L = I::LANES, HALF = WideTrellis::STATES / 8;
  alignas(64) float best[WIDE + 1][HALF];
  alignas(64) float turned[HALF];  // [p][j / 8]: best[t][j] of j % 8 = p
  for (int j = 0; j < HALF; ++j) best[0][j] = 0;
  for (int t = 0; t < WIDE; ++t) {
    I::turn8x8(best[t], turned);
    const typename I::F value = I::set(y[t]);
    for (int j = 0; j < HALF; j += L) {
      typename I::F least = I::set(__builtin_inff());
#pragma GCC unroll 8
      for (int p = 0; p < 8; ++p) {
        const typename I::F miss = I::sub(value, I::load(trellis.of_predecessor[p] + j));
        least = I::min(least, I::add(I::eight(turned + 8 * p, j), I::mul(miss, miss)));
      }
      I::store(best[t + 1] + j, least);
    }
  }
  int j = 0;
  for (int k = 1; k < HALF; ++k)
    if (best[WIDE][k] < best[WIDE][j]) j = k;
  for (int t = WIDE - 1; t >= 0; --t) {
    const int p =
        I::first_of_eight(best[t + 1][j], best[t] + j % 8 * 8, y[t], trellis.value + 8 * j);
    path[t] = std::uint16_t(8 * j + p);
    j = path[t] % HALF;
  }
  return j;
}

inline void put_bits(std::uint8_t* stream, int at, unsigned bits) {  // up to 9; stream starts as 0
  stream[at / 8] = std::uint8_t(stream[at / 8] | bits << at % 8);
  if (bits << at % 8 >> 8)
    stream[at / 8 + 1] = std::uint8_t(stream[at / 8 + 1] | bits << at % 8 >> 8);
}

// ---- rotations
// -----------------------------------------------------------------------------------------

// R128 with its signs, of one block.
template <class I>
inline void rotate_wide(float* x, const float* before, const float* after) {
  constexpr int L = I::LANES, parts[1] = {WIDE};
  rotate<I>({x, 0, x, 0, 1}, before, WIDE, parts, 1);
  for (int i = 0; i < WIDE; i += L) I::store(x + i, I::mul(I::load(x + i), I::load(after + i)));
}

template <class I>
void project(const float* x, int dim, const float* table, float* out) {
  constexpr int L = I::LANES, ND = 8;
  for (int g = 0; g < dim / WIDE; ++g, x += WIDE, out += SKETCH)
    for (int j = 0; j < SKETCH; j += ND * L) {
      typename I::F sum[ND];
#pragma GCC unroll 8
      for (int k = 0; k < ND; ++k) sum[k] = I::zero();
      for (int i = 0; i < WIDE; ++i) {
        const typename I::F value = I::set(x[i]);
#pragma GCC unroll 8
        for (int k = 0; k < ND; ++k)
          sum[k] = I::fma(value, I::load(table + i * SKETCH + j + k * L), sum[k]);
      }
#pragma GCC unroll 8
      for (int k = 0; k < ND; ++k) I::store(out + j + k * L, sum[k]);
    }
}

// ---- scores
// -----------------------------------------------------------------------------------------

// score for blocks of 128 on sets of 8 lanes and more: the int32 sums of a token last for the
// block, and are scaled once. 16 products of 14 and 13 bits meet in a lane.
template <class I, int MR, int F>
bool score_wide(const Rows& rows, const Table& table, const void* query,
                std::ptrdiff_t query_stride, const float* row_scale, const std::int32_t*,
                float* scales, float* out, std::ptrdiff_t plane) {
  constexpr int L = I::LANES, NT = L / MR, STEPS = GROUP / (2 * L), N = block_groups(F);
  static_assert(L >= 8);
  const int n = rows.n, blocks = groups_of(rows.dim) / N;
  alignas(64) std::uint16_t halves[MAX_SCALES];
  std::memset(halves + n * blocks / L * L, 0, L * sizeof *halves);
  const std::uint8_t* scale_of = rows.base + scale_at(F, 0);
  for (int t = 0; t < n; ++t, scale_of += rows.stride) {
    halves[t * blocks] = load_u16(scale_of);
    for (int b = 1; b < blocks; ++b)
      halves[t * blocks + b] = load_u16(scale_of + b * block_bytes(F));
  }
  const bool ok = convert_scales<I, F>(halves, n * blocks, scales);

  const Entries<I, F> entries(table);
  const typename I::F row_factor = I::template repeat<MR>(row_scale);
  const auto* q = static_cast<const std::int16_t*>(query);
  for (int t0 = 0; t0 < n; t0 += 2 * NT)
    for (int parity = 0; parity < 2; ++parity) {
      typename I::F acc[L];
#pragma GCC unroll 16
      for (int j = 0; j < NT; ++j) {
        const int t = smaller(t0 + parity + 2 * j, n - 1);  // past the end: masked by the caller
        const std::uint8_t* const row = rows.base + t * rows.stride;
#pragma GCC unroll 4
        for (int r = 0; r < MR; ++r) acc[j * MR + r] = I::zero();
        for (int b = 0; b < blocks; ++b) {
          const std::int16_t* const qb = q + b * N * GROUP;
          typename I::W sum[MR];
#pragma GCC unroll 4
          for (int r = 0; r < MR; ++r) sum[r] = I::zero_words();
#pragma GCC unroll 8
          for (int g = 0; g < N; ++g) {
            typename I::W words[STEPS];
            key_words<I, F>(entries, whole_group<I, F>(row, b * N + g, rows.dim), words);
#pragma GCC unroll 4
            for (int r = 0; r < MR; ++r)
#pragma GCC unroll 2
              for (int i = 0; i < STEPS; ++i)
                sum[r] = I::madd(sum[r], words[i],
                                 I::load_words(qb + r * query_stride + g * GROUP + 2 * L * i));
          }
          const typename I::F scale = I::set(scales[t * blocks + b]);
#pragma GCC unroll 4
          for (int r = 0; r < MR; ++r)
            acc[j * MR + r] = I::fma(I::to_float(sum[r]), scale, acc[j * MR + r]);
        }
      }
      I::store(out + parity * plane + t0 / 2 * MR, I::mul(I::reduce(acc), row_factor));
    }
  return ok;
}

// ---- encode
// -----------------------------------------------------------------------------------------

inline std::uint16_t store_bf16(float x, Counts& counts) {  // not negative, finite
  std::uint32_t h = (to_bits(x) + 0x7fff + (to_bits(x) >> 16 & 1)) >> 16;
  if (h >= 0x7f80) {
    h = 0x7f7f;
    ++counts.saturated;
  }
  if (h == 0 && x != 0) ++counts.flushed;
  return std::uint16_t(h);
}

// Signs of the sketch of a block: bit j is 1 where sum_i x_i table[i][j] > 0.
inline void sketch_signs(const float* x, const float* table, std::uint8_t* out) {
  constexpr int N = 32;
  for (int first = 0; first < SKETCH; first += N) {
    double sum[N] = {};
    for (int i = 0; i < WIDE; ++i) {
      const double value = double(x[i]);
      for (int j = 0; j < N; ++j) sum[j] += value * double(table[i * SKETCH + first + j]);
    }
    for (int j = 0; j < N; j += 8) {
      unsigned bits = 0;
      for (int k = 0; k < 8; ++k) bits |= unsigned(sum[j + k] > 0) << k;
      out[(first + j) / 8] = std::uint8_t(bits);
    }
  }
}

template <class I, int F>
void encode_wide(const float* row, int dim, const Book& book, std::uint8_t* out, Counts& counts) {
  alignas(64) float x[WIDE];
  for (int b = 0; b < dim / WIDE; ++b, row += WIDE, out += block_bytes(F)) {
    std::memcpy(x, row, sizeof x);
    std::memset(out, 0, std::size_t(block_bytes(F)));
    const double length = __builtin_sqrt(sum_of_squares(x, WIDE));
    float norm = float(length);
    const float inverse = reciprocal(norm);
    if constexpr (F == QJL1_256) {
      sketch_signs(x, book.projection, out);
      constexpr double TOP = 0x1.fffffep127;  // beyond it the stored norm saturates in any case
      const std::uint16_t h = store_bf16(float(length < TOP ? length : TOP), counts);
      std::memcpy(out + SKETCH / 8, &h, 2);
      continue;
    }
    if (inverse != 0) {
      for (int i = 0; i < WIDE; ++i) x[i] *= inverse;
      if constexpr (F == TBQ3_TCQ) {
        std::uint16_t path[WIDE];
        alignas(64) float value[WIDE];
        rotate_wide<I>(x, book.before, book.after);
        put_bits(out + 2, 0, unsigned(cheapest_path<I>(x, *book.wide_trellis, path)));
        for (int t = 0; t < WIDE; ++t) {
          put_bits(out + 2, 6 + 3 * t, path[t] >> 6);
          value[t] = book.wide_trellis->value[path[t]];
        }
        norm /= float(__builtin_sqrt(sum_of_squares(value, WIDE)));
      } else {
        alignas(64) std::uint8_t codes[WIDE];
        hadamard<I, false>({x, 0, x, 0, 1}, nullptr, WIDE, 1);
        nearest<I, 16>(x, WIDE, 1, book, codes);
        for (int j = 0; j < WIDE / 2; ++j)
          out[2 + j] = std::uint8_t(codes[2 * j] | codes[2 * j + 1] << 4);
        if constexpr (F == Q4_POLAR_RES) {
          double sum = 0;
          for (int i = 0; i < WIDE; ++i)
            sum += (double(x[i]) - double(book.value[codes[i]])) * double(book.residual[i]);
          out[2 + WIDE / 2] = sum > 0;
        }
      }
    }
    const std::uint16_t h = store_scale(norm, counts);
    std::memcpy(out, &h, 2);
  }
}

// ---- decode one row, stored domain
// -----------------------------------------------------------------------------------------

template <class I, int F>
bool decode_wide(const std::uint8_t* row, int dim, const Book& book, float* out) {
  bool ok = true;
  for (int b = 0; b < dim / WIDE; ++b, row += block_bytes(F)) {
    const std::uint16_t h = load_u16(row + scale_at(F, 0));
    constexpr int EXPONENT = F == QJL1_256 ? 0x7f80 : 0x7c00;
    ok = ok && (h & EXPONENT) != EXPONENT;
    const double norm = F == QJL1_256 ? from_bits(std::uint32_t(h) << 16) : half_to_float(h);
    const int n = stored_dim(F, WIDE);
    for (int i = 0; i < n; ++i, ++out) {
      double value;
      if constexpr (F == QJL1_256) {
        value = (row[i / 8] >> i % 8 & 1 ? 1 : -1) * (norm * SKETCH_FACTOR);
      } else if constexpr (F == TBQ3_TCQ) {
        const int bits = load_u16(row + 2 + 3 * i / 8) >> 3 * i % 8;
        value = norm * double(book.wide_trellis->value[bits % WideTrellis::STATES]);
      } else {
        value = double(book.value[row[2 + i / 2] >> i % 2 * 4 & 15]);
        if (F == Q4_POLAR_RES)
          value += (row[2 + WIDE / 2] & 1 ? RESIDUAL : -RESIDUAL) * double(book.residual[i]);
        value = value * norm / ROOT;
      }
      *out = norm == 0 ? 0.f : float(value);
    }
  }
  return ok;
}

}  // namespace
}  // namespace kvproof
