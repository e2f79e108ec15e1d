// Encoding of tq5, tq4, tq3 and tq2 (src/kvproof/formats/row.py is the reference).
//
// A row's magnitudes become levels of one byte, tables of bytes say what each level costs in each
// try of the unit, and the codes follow from the best try. All sums after the root mean square are
// sums of integers, so their order is free. Rows go through each stage together: the end of one
// row's stage, a sum across lanes and a division, then overlaps with the next row.
//
// The stages are PlainRows' functions, or those of I::RowStages: n is a multiple of STEP.
#pragma once

#include "leaf.h"

namespace kvproof {
namespace {

// Codes of the group at s, one a byte -> its part of a row. `size` is 32, or 16 at the end.
template <int F>
inline void pack_group(std::uint8_t* code, int s, int size, int dim, std::uint8_t* row) {
  if constexpr (F == TQ4 || F == TQ5) {
    if constexpr (F == TQ5) {
      pack1(code, size, 4, row + dim / 2 + s / 8);
      for (int i = 0; i < size; ++i) code[i] &= 15;
    }
    pack4(code, size, row + s / 2);
  } else {
    if constexpr (F == TQ3) pack1(code, size, 2, row + dim / 4 + s / 8);
    pack2(code, size, row + s / 4);
  }
}

// Positions in a row are sixteenths of a level, those of `codes` eighths of a codebook unit.
struct PlainRows {
  static constexpr int STEP = 16;

  // Levels of y * inverse, and the sum of the positions beyond the last level.
  template <int LEVELS>
  static std::int32_t levels(const float* y, int n, float inverse, std::uint8_t* level) {
    std::int32_t beyond = 0;
    for (int i = 0; i < n; ++i) {
      const float x = __builtin_fabsf(y[i]) * inverse;
      const auto position = int(__builtin_lrintf(x > 32767 ? 32767 : x));
      const int at = (position + 8) >> 4, last = LEVELS - 1;
      level[i] = std::uint8_t(at < last ? at : last);
      beyond += position > 16 * last ? position - 16 * last : 0;
    }
    return beyond;
  }

  template <int LEVELS, int TRIES>
  static void costs(const std::uint8_t* level, int n, const UnitSearch& search,
                    std::int32_t* cost) {
    for (int k = 0; k < TRIES; ++k) {
      cost[k] = 0;
      for (int i = 0; i < n; ++i) cost[k] += search.cost[k].at[level[i]];
    }
  }

  // Sums of level * entry and of entry * entry.
  template <int LEVELS>
  static void products(const std::uint8_t* level, int n, const LevelTable& entry,
                       std::int32_t* sums) {
    sums[0] = sums[1] = 0;
    for (int i = 0; i < n; ++i) {
      const int e = entry.at[level[i]];
      sums[0] += level[i] * e;
      sums[1] += e * e;
    }
  }

  // Stores the codes nearest to y * inverse, and the sums of |y * inverse| * entry and entry *
  // entry. y reaches to n, the row's values to dim.
  template <int F>
  static void codes(const float* y, int n, int dim, float inverse, const UnitSearch& search,
                    std::uint8_t* out, std::int32_t* sums) {
    sums[0] = sums[1] = 0;
    for (int s = 0; s < dim; s += GROUP) {
      std::uint8_t code[GROUP];
      const int size = smaller(GROUP, n - s);
      for (int i = 0; i < size; ++i) {
        const float x = y[s + i] * inverse;
        const auto z = int(__builtin_lrintf(x > 32767 ? 32767 : x < -32767 ? -32767 : x));
        const int a = z < 0 ? -z : z, bucket = smaller(a >> SHIFT<F>, BUCKETS<F> - 1);
        const int index =
            search.below.at[bucket] + ((a & ((1 << SHIFT<F>)-1)) > search.cut.at[bucket]);
        const int e = search.half.at[index];
        sums[0] += a * e;
        sums[1] += e * e;
        code[i] = std::uint8_t(z < 0 ? HALF<F> - 1 - index : HALF<F> + index);
      }
      pack_group<F>(code, s, size, dim, out);
    }
  }
};

template <class I>
constexpr auto row_stages() {
  if constexpr (requires { typename I::RowStages; })
    return typename I::RowStages{};
  else
    return PlainRows{};
}

template <class I, int F>
void encode_row(const float* y, std::ptrdiff_t stride, int rows, int dim, const Book& book,
                std::uint8_t* out, Counts& counts) {
  using Stages = decltype(row_stages<I>());
  constexpr int LEVELS = levels_of(F), TRIES = tries_of(F);
  const UnitSearch& search = *book.search;
  const int n = (dim + Stages::STEP - 1) / Stages::STEP * Stages::STEP, padding = n - dim;
  const std::ptrdiff_t bytes = row_bytes(F, dim);
  // A set may keep a level as up to LEVELS / 16 bytes.
  alignas(64) std::uint8_t level[LEVELS / 16 * MAX_BATCH];
  float size[MAX_ROWS], grid[MAX_ROWS], inverse[MAX_ROWS], unit[MAX_ROWS];
  std::int32_t beyond[MAX_ROWS];
  int best[MAX_ROWS];

  for (int r = 0; r < rows; ++r) size[r] = root_mean_square<I>(y + r * stride, dim);
  for (int r = 0; r < rows; ++r) {
    grid[r] = size[r] * search.grid;
    inverse[r] = reciprocal(grid[r]);
  }
  const auto level_of = [&](int r) { return level + r * n * (LEVELS / 16); };
  for (int r = 0; r < rows; ++r)
    beyond[r] = Stages::template levels<LEVELS>(y + r * stride, n, inverse[r], level_of(r));
  for (int r = 0; r < rows; ++r) {
    alignas(64) std::int32_t cost[TRIES];
    Stages::template costs<LEVELS, TRIES>(level_of(r), n, search, cost);
    for (int k = 0; k < TRIES; ++k)
      cost[k] = 16 * (cost[k] - padding * search.cost[k].at[0]) + search.beyond[k] * beyond[r];
    int k = 0;
    for (int other = 1; other < TRIES; ++other) k = cost[other] < cost[k] ? other : k;
    best[r] = k;
  }
  for (int r = 0; r < rows; ++r) {
    const LevelTable& entry = search.entry[best[r]];
    std::int32_t sums[2];
    Stages::template products<LEVELS>(level_of(r), n, entry, sums);
    const int least = entry.at[0], top = search.half.at[HALF<F> - 1];
    const float eighth = grid[r] * float(16 * sums[0] + top * beyond[r]) /
                         float(sums[1] - padding * least * least) * 0.125f;
    const bool live = inverse[r] != 0;
    inverse[r] = live ? reciprocal(eighth) : 0;
    unit[r] = eighth;
  }
  for (int r = 0; r < rows; ++r) {
    std::uint8_t* const row = out + r * bytes;
    std::int32_t sums[2];
    Stages::template codes<F>(y + r * stride, n, dim, inverse[r], search, row, sums);
    const int least = search.half.at[0];
    unit[r] = unit[r] * float(sums[0]) / float(sums[1] - padding * least * least);
    if (inverse[r] == 0) {
      unit[r] = size[r] * book.start;
      std::memset(row, 0, std::size_t(bytes));
    }
    store_unit<I>(unit[r], y + r * stride, dim, row + bytes, counts);
  }
}

}  // namespace
}  // namespace kvproof
