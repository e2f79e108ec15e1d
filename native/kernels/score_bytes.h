// Scores of codes whose entries are bytes, on sets with dot products of signed bytes: the query as
// two bytes, 128 * high + low, and four products of each in one lane.
//
// I provides Bytes (16 int8), Sums (four int32), Scaled (four floats), key_bytes (the entries of a
// group), split, dot_bytes, joined, scaled and total: see kernels_neon.cpp.
#pragma once

#include "leaf.h"

namespace kvproof {
namespace {

// Products of one group of codes of a row with all query rows.
template <class I, int MR>
inline void dot_group(const typename I::Bytes* key, const std::int8_t (*query)[2][MAX_DIM], int at,
                      typename I::Sums (*sums)[2]) {
#pragma GCC unroll 4
  for (int r = 0; r < MR; ++r)
#pragma GCC unroll 2
    for (int part = 0; part < 2; ++part)
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half)
        sums[r][part] = I::dot_bytes(sums[r][part], key[half],
                                     I::load_bytes(query[r][part] + at + GROUP / 2 * half));
}

template <class I, int MR, int F>
bool score_bytes(const Rows& rows, const Table& table, const void* query,
                 std::ptrdiff_t query_stride, const float* row_scale, const std::int32_t*,
                 float* scales, float* out, std::ptrdiff_t plane) {
  constexpr int L = I::LANES, NT = L / MR;
  constexpr bool BLOCKS = path_of(F) == BLOCK;
  const int n = rows.n, dim = rows.dim, groups = groups_of(dim);
  alignas(64) std::int8_t split[MR][2][MAX_DIM];  // rows are a multiple of 16, read by 32
  const auto* q = static_cast<const std::int16_t*>(query);
  for (int r = 0; r < MR; ++r)
    for (int i = 0; i < padded(dim); i += 16)
      I::split(q + r * query_stride + i, split[r][0] + i, split[r][1] + i);

  alignas(64) std::uint16_t halves[BLOCKS ? MAX_SCALES : TILE];
  if constexpr (BLOCKS) {
    std::memset(halves + n * groups / L * L, 0, L * sizeof *halves);
    for (int t = 0; t < n; ++t)
      for (int g = 0; g < groups; ++g)
        halves[t * groups + g] = load_u16(rows.base + t * rows.stride + scale_at(F, g));
  } else {
    if (n < TILE) std::memset(halves, 0, sizeof halves);
    for (int t = 0; t < n; ++t)
      halves[(t & 1) * (TILE / 2) + t / 2] =
          load_u16(rows.base + t * rows.stride + row_bytes(F, dim) - 2);
  }
  const bool ok = convert_scales<I, F>(halves, BLOCKS ? n * groups : TILE, scales);

  const Entries<I, F> entries(table);
  const typename I::F row_factor = I::template repeat<MR>(row_scale);
  for (int t0 = 0; t0 < n; t0 += 2 * NT)
    for (int parity = 0; parity < 2; ++parity) {
      const std::uint8_t* row[NT];
      const float* scale[NT];
      for (int j = 0; j < NT; ++j) {
        const int t = smaller(t0 + parity + 2 * j, n - 1);  // past the end: masked by the caller
        row[j] = rows.base + t * rows.stride;
        scale[j] = scales + t * groups;
      }
      typename I::Sums sums[L][2];
      typename I::Scaled acc[L] = {};
#pragma GCC unroll 8
      for (int i = 0; i < L; ++i) sums[i][0] = sums[i][1] = I::no_sums();
      each_group<I, F>(dim, 0, groups, [&](int g, auto codes_of) {
#pragma GCC unroll 8
        for (int j = 0; j < NT; ++j) {
          typename I::Bytes key[2];
          if constexpr (F == Q8_0 || F == TQ8)
            I::key_bytes_signed(codes_of(row[j]), key);
          else
            I::key_bytes(entries.lut, codes_of(row[j]), key);
          dot_group<I, MR>(key, split, g * GROUP, sums + j * MR);
          if constexpr (BLOCKS)
#pragma GCC unroll 4
            for (int r = 0; r < MR; ++r) {
              auto& sum = sums[j * MR + r];
              acc[j * MR + r] = I::scaled(I::joined(sum[0], sum[1]), scale[j][g], acc[j * MR + r]);
              sum[0] = sum[1] = I::no_sums();
            }
        }
      });
      typename I::F result;
      if constexpr (BLOCKS) {
        result = I::total(acc);
      } else {
        typename I::Sums both[L];
#pragma GCC unroll 8
        for (int i = 0; i < L; ++i) both[i] = I::joined(sums[i][0], sums[i][1]);
        result = I::mul(I::to_float(I::total(both)),
                        I::template spread<MR>(scales + parity * (TILE / 2) + t0 / 2));
      }
      I::store(out + parity * plane + t0 / 2 * MR, I::mul(result, row_factor));
    }
  return ok;
}

}  // namespace
}  // namespace kvproof
