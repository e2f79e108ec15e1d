// Rows of a format to tiles and back, without loss. backends/tiles.py states the layout byte by
// byte.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels.h"

namespace kvproof {

constexpr int LINE = 64;           // bytes: 16 lanes of 4 items
constexpr int WIDEST_TILE = 1024;  // values of a row: their products fit an int32

// A tile is TILE tokens of one KV head and one side, in exactly the bytes of their rows.
constexpr std::ptrdiff_t tile_bytes(int f, int dim) { return TILE * row_bytes(f, dim); }
// Bits of the planes of a code, lowest first; none for formats without tiles. A code of 8 bits is
// the byte as stored.
struct Planes {
  int count = 0;
  int bits[3] = {};

  constexpr int all() const { return bits[0] + bits[1] + bits[2]; }
};

constexpr Planes planes_of(int f) {
  switch (f) {
    case TQ8:
    case Q8_0:
      return {1, {8}};
    case TQ5:
      return {2, {4, 1}};
    case TQ4:
    case Q4_0:
    case Q4_0_ROT:
    case TBQ4_0:
      return {1, {4}};
    case TQ3:
    case TBQ3_0:
      return {2, {2, 1}};
    case TQ2:
      return {1, {2}};
    case TCQ3:  // m and the path
      return {2, {2, 1}};
    case TCQ4:  // m's low bits, its highest bit, the path
    case TCQ4_64:
      return {3, {2, 1, 1}};
    default:
      return {};
  }
}
// Scales follow the codes: of each row, or of each 32 values, TILE of them; of trellis formats the
// bytes that name the units.
constexpr std::ptrdiff_t tile_scales(int f, int dim) {
  return std::ptrdiff_t(TILE) * dim * planes_of(f).all() / 8;
}
bool has_tiles(int fmt, int dim);

// Calls each(step, dimension of the tile that holds it), for every step of a trellis row.
template <class Each>
inline void each_step(int dim, bool values, Each&& each) {
  if (values) {
    const int groups = dim / 16;
    for (int g = 0; g < groups; ++g)
      for (int i = 0; i < 16; ++i) each(i * groups + g, g * 16 + i);
    return;
  }
  for (int d = 0; d < dim; d += LINE) {
    const int quads = (dim - d < LINE ? dim - d : LINE) / 4;
    for (int j = 0; j < 4; ++j)
      for (int h = 0; h < quads; h += 8)
        for (int k = 0; k < 8; ++k)
          each(d + quads * j + h + k, d + 4 * (h + k % 2 * 4 + k / 2) + j);
  }
}

// Tiles of one side: row t of head h is slot t % TILE of the tile at base + h * head_stride +
// t / TILE * tile_bytes. Slots that no row was written to hold zeros.
struct TileBuffer {
  int fmt, dim;
  bool values;
  std::uint8_t* base;
  std::ptrdiff_t head_stride;
  int heads;
};

// Rows [n][heads][row_bytes] of a format.
template <class Byte>
struct RowBuffer {
  Byte* base;
  std::ptrdiff_t token_stride, head_stride;
};

// Rows to the slots at, at + 1, ... Returns the first row (token * heads + head) whose stored scale
// is not finite, nothing being written then, or -1: tiles never hold such a scale.
std::ptrdiff_t pack(int threads, const RowBuffer<const std::uint8_t>& rows, std::ptrdiff_t n,
                    const TileBuffer& tiles, std::ptrdiff_t at);
// The n rows from slot `first` on, as they were.
void unpack(int threads, const TileBuffer& tiles, std::ptrdiff_t first, std::ptrdiff_t n,
            const RowBuffer<std::uint8_t>& rows);

}  // namespace kvproof
