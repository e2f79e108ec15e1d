// Encoding of tq5, tq4, tq3 and tq2 (src/kvproof/formats/row.py is the reference).
//
// A row's magnitudes become levels of one byte, tables of bytes say what each level costs in each
// try of the unit, and the codes follow from the best try. All sums after the root mean square are
// sums of integers, so their order is free. Rows go through each stage together: tables and
// constants are then read once, the sums of all rows are folded at once, and divisions overlap.
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

// Rows of the stored domain: n values of each are read, the row's dim and zeros.
struct Batch {
  const float* y;
  std::ptrdiff_t stride;
  int rows, n, dim;
  const float* row(int r) const { return y + r * stride; }
};

// Positions in a row are sixteenths of a level, those of `codes` eighths of a codebook unit.
struct PlainRows {
  static constexpr int STEP = 16;

  // Levels of y * inverse, and the sum of the positions beyond the last level.
  template <int LEVELS>
  static void levels(const Batch& b, const float* inverse, std::uint8_t* level,
                     std::int32_t* beyond) {
    for (int r = 0; r < b.rows; ++r) {
      beyond[r] = 0;
      for (int i = 0; i < b.n; ++i, ++level) {
        const float x = __builtin_fabsf(b.row(r)[i]) * inverse[r];
        const auto position = int(__builtin_lrintf(x > 32767 ? 32767 : x));
        const int at = (position + 8) >> 4, last = LEVELS - 1;
        *level = std::uint8_t(at < last ? at : last);
        beyond[r] += position > 16 * last ? position - 16 * last : 0;
      }
    }
  }

  template <int LEVELS, int TRIES>
  static void costs(const Batch& b, const std::uint8_t* level, const UnitSearch& search,
                    std::int32_t (*cost)[TRIES]) {
    for (int r = 0; r < b.rows; ++r, level += b.n)
      for (int k = 0; k < TRIES; ++k) {
        cost[r][k] = 0;
        for (int i = 0; i < b.n; ++i) cost[r][k] += search.cost[k].at[level[i]];
      }
  }

  // The first try of least cost.
  template <int TRIES>
  static int cheapest(const std::int32_t* cost) {
    int k = 0;
    for (int other = 1; other < TRIES; ++other) k = cost[other] < cost[k] ? other : k;
    return k;
  }

  // Sums of level * entry and of entry * entry, of each row's best try.
  template <int LEVELS>
  static void products(const Batch& b, const std::uint8_t* level, const UnitSearch& search,
                       const int* best, std::int32_t (*sums)[2]) {
    for (int r = 0; r < b.rows; ++r, level += b.n) {
      sums[r][0] = sums[r][1] = 0;
      for (int i = 0; i < b.n; ++i) {
        const int e = search.entry[best[r]].at[level[i]];
        sums[r][0] += level[i] * e;
        sums[r][1] += e * e;
      }
    }
  }

  // Stores the codes nearest to y * inverse, and the sums of |y * inverse| * entry and entry *
  // entry.
  template <int F>
  static void codes(const Batch& b, const float* inverse, const UnitSearch& search,
                    std::uint8_t* out, std::int32_t (*sums)[2]) {
    for (int r = 0; r < b.rows; ++r, out += row_bytes(F, b.dim)) {
      sums[r][0] = sums[r][1] = 0;
      for (int s = 0; s < b.dim; s += GROUP) {
        std::uint8_t code[GROUP];
        const int size = smaller(GROUP, b.n - s);
        for (int i = 0; i < size; ++i) {
          const float x = b.row(r)[s + i] * inverse[r];
          const auto z = int(__builtin_lrintf(x > 32767 ? 32767 : x < -32767 ? -32767 : x));
          const int a = z < 0 ? -z : z, bucket = smaller(a >> SHIFT<F>, BUCKETS<F> - 1);
          const int index =
              search.below.at[bucket] + ((a & ((1 << SHIFT<F>)-1)) > search.cut.at[bucket]);
          const int e = search.half.at[index];
          sums[r][0] += a * e;
          sums[r][1] += e * e;
          code[i] = std::uint8_t(z < 0 ? HALF<F> - 1 - index : HALF<F> + index);
        }
        pack_group<F>(code, s, size, b.dim, out);
      }
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
  const Batch batch{y, stride, rows, n, dim};
  // A set may keep a level as up to LEVELS / 16 bytes.
  alignas(64) std::uint8_t level[LEVELS / 16 * MAX_BATCH];
  alignas(64) std::int32_t cost[MAX_ROWS][TRIES];
  float size[MAX_ROWS], grid[MAX_ROWS], inverse[MAX_ROWS], unit[MAX_ROWS];
  std::int32_t beyond[MAX_ROWS], sums[MAX_ROWS][2];
  int best[MAX_ROWS];

  root_mean_squares<I>(y, stride, rows, dim, size);
  for (int r = 0; r < rows; ++r) {
    grid[r] = size[r] * search.grid;
    inverse[r] = reciprocal(grid[r]);
  }
  Stages::template levels<LEVELS>(batch, inverse, level, beyond);
  Stages::template costs<LEVELS, TRIES>(batch, level, search, cost);
  for (int r = 0; r < rows; ++r) {
    if (padding)
      for (int k = 0; k < TRIES; ++k) cost[r][k] -= padding * search.cost[k].at[0];
    for (int k = 0; k < TRIES; ++k) cost[r][k] = 16 * cost[r][k] + search.beyond[k] * beyond[r];
    best[r] = Stages::template cheapest<TRIES>(cost[r]);
  }
  Stages::template products<LEVELS>(batch, level, search, best, sums);
  const int top = search.half.at[HALF<F> - 1], smallest = search.half.at[0];
  for (int r = 0; r < rows; ++r) {
    const int least = search.entry[best[r]].at[0];
    unit[r] = grid[r] * float(16 * sums[r][0] + top * beyond[r]) /
              float(sums[r][1] - padding * least * least) * 0.125f;
    inverse[r] = inverse[r] != 0 ? reciprocal(unit[r]) : 0;
  }
  Stages::template codes<F>(batch, inverse, search, out, sums);
  const std::ptrdiff_t bytes = row_bytes(F, dim);
  for (int r = 0; r < rows; ++r, out += bytes) {
    unit[r] = unit[r] * float(sums[r][0]) / float(sums[r][1] - padding * smallest * smallest);
    if (inverse[r] == 0) {
      unit[r] = size[r] * book.start;
      std::memset(out, 0, std::size_t(bytes));
    }
    store_unit<I>(unit[r], y + r * stride, dim, out + bytes, counts);
  }
}

}  // namespace
}  // namespace kvproof
