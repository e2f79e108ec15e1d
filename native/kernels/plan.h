// What the drivers over rows share: tables, the order of decoded values, rows as the kernels read
// them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "blocks.h"

namespace kvproof {

// What attention() does with more than a few query rows.
bool prompt_attention(const Kernels& isa, int threads, const Query& q, const Side& keys,
                      const Side& values, Mask mask, const Offsets& offsets, float scale,
                      float* out, float* lse);

// Where code c of a group lands in the row, for full groups and for a last group of 16; -1:
// nowhere.
inline int element_of(int fmt, int dim, int group, int c) {
  const int at = group * GROUP;
  c = value_of_code(fmt, c);
  if (dim - at >= GROUP || path_of(fmt) != ROW) return at + c < dim ? at + c : -1;
  const int plane = fmt == TQ8 ? GROUP : fmt == TQ4 || fmt == FIVE ? 16 : 8, half = plane / 2;
  return c % plane < half ? at + c / plane * half + c % half : -1;
}

// Element of the row at each position of decoded scratch.
inline void order(int fmt, int dim, int (*element)(int, int), int* out) {
  for (int p = 0; p < padded(dim); ++p) {
    const int c = path_of(fmt) == REAL ? p % GROUP : element(fmt, p % GROUP);
    out[p] = element_of(fmt, dim, p / GROUP, c);
  }
}

inline Table signed_table(int largest) {  // codes that are their own values
  Table t{};
  t.scale = 1;
  t.largest = largest;
  return t;
}

inline bool is_signed(int fmt) { return layout_of(fmt) == Q8_0 || layout_of(fmt) == TQ8; }

inline Table shifted(const Kernels& isa, int fmt, Table t) {
  if (isa.unsigned_rows && layout_of(fmt) == TQ8) {
    t.offset = 128;
  } else if (isa.unsigned_rows && path_of(fmt) == ROW) {
    t.offset = -*std::min_element(t.entry, t.entry + 32);
    for (std::int16_t& entry : t.entry) entry = std::int16_t(entry + t.offset);
  }
  return t;
}

// Entries that a residual adds to the 128 values of a block, by its bit: [bit][position], where
// element[position] is the value decoded there.
inline void fill_residual(const Table& table, const float* signs, const int* element,
                          std::int16_t* out) {
  const auto step = std::int16_t(std::nearbyint(RESIDUAL / ROOT * table.scale));
  for (int p = 0; p < WIDE; ++p) {
    out[WIDE + p] = signs[element[p]] > 0 ? step : std::int16_t(-step);
    out[p] = std::int16_t(-out[WIDE + p]);
  }
}

// Of a side, from its book's table for keys or for values.
inline Table side_table(const Kernels& isa, const Side& side, const Table& of_book) {
  const int fmt = side.fmt;
  Table t = shifted(isa, fmt, is_signed(fmt) ? signed_table(128) : of_book);
  if (const WideTrellis* trellis = side.book->wide_trellis) {
    t.scale = trellis->scale;
    t.largest = trellis->largest;
    t.pairs = trellis->pairs;
  }
  return t;
}
inline Table key_table(const Kernels& isa, const Side& side) {
  Table t = side_table(isa, side, side.book->key);
  if (side.fmt == QJL1_256) {
    t.scale = float(1 / SKETCH_FACTOR);
    t.largest = 1;
  }
  return t;
}

// A side's tables for its decoded tiles, and the element at each of their positions; -1: none.
struct DecodedKeys {
  Table table;
  int element[MAX_DIM + GROUP];
  std::int16_t residual[2 * WIDE];

  DecodedKeys(const Kernels& isa, const Side& side) : table(key_table(isa, side)) {
    order(layout_of(side.fmt), side.stored(), isa.key_element, element);
    if (side.fmt == Q4_POLAR_RES) {
      fill_residual(table, side.book->residual, element, residual);
      table.residual = residual;
    }
  }
  DecodedKeys(const DecodedKeys&) = delete;
};

struct DecodedValues {
  Table table;
  int element[MAX_DIM + GROUP];
  std::int16_t residual[8 * WIDE];  // of pairs of tokens

  DecodedValues(const Kernels& isa, const Side& side)
      : table(side_table(isa, side, side.book->value_side)) {
    order(layout_of(side.fmt), side.dim, isa.value_element, element);
    if (side.fmt == Q4_POLAR_RES) {
      std::int16_t one[2 * WIDE];
      fill_residual(table, side.book->residual, element, one);
      for (int both = 0; both < 4; ++both)
        for (int p = 0; p < WIDE; ++p) {
          residual[(both * WIDE + p) * 2] = one[both % 2 * WIDE + p];
          residual[(both * WIDE + p) * 2 + 1] = one[both / 2 * WIDE + p];
        }
      table.residual = residual;
    }
  }
  DecodedValues(const DecodedValues&) = delete;
};

// Rows as the kernels of their layout read them: n tokens of a KV head from `first` on, in place or
// repacked to `space`.
inline std::ptrdiff_t repacked_stride(const Side& side) {
  return up(int(row_bytes(layout_of(side.fmt), side.dim)), 32);
}
inline std::size_t repacked_bytes(const Kernels& isa, const Side& side) {
  // Fifth bits are read by 16 bytes.
  return isa.repack[side.fmt] ? std::size_t(TILE) * repacked_stride(side) + 16 : 0;
}
inline Rows laid_out(const Kernels& isa, const Side& side, int head, int first, int n,
                     std::uint8_t* space) {
  Rows rows{side.base + first * side.token_stride + head * side.head_stride, side.token_stride, n,
            side.stored()};
  if (isa.repack[side.fmt]) {
    const std::ptrdiff_t stride = repacked_stride(side);
    isa.repack[side.fmt](rows, *side.book, space, stride);
    rows.base = space;
    rows.stride = stride;
  }
  return rows;
}

}  // namespace kvproof
