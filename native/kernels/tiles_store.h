// Rows of a format to tiles and back, without loss. backends/tiles.py states the layout byte by
// byte.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels.h"

namespace kvproof {

constexpr int WIDEST_TILE = 1024;  // values of a row: their products fit an int32

// A tile is TILE tokens of one KV head and one side, in exactly the bytes of their rows.
constexpr std::ptrdiff_t tile_bytes(int f, int dim) { return TILE * row_bytes(f, dim); }
bool has_tiles(int fmt, int dim);

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
