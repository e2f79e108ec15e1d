// AMX and the AVX-512 around it, spelled out, so that the kernels of tiles_amx.cpp run on any
// processor: compiled with -DKVPROOF_EMULATED_AMX.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/tiles_plain.h"

namespace kvproof {
namespace {

template <int SHIFT>
using Avx512Tiles = PlainTiles<SHIFT>;

struct TileRegister {
  std::uint8_t line[16][64];
  int rows, bytes;
};
inline thread_local TileRegister tile[8];

inline void _tile_loadconfig(const void* operand) {
  const auto* const p = static_cast<const std::uint8_t*>(operand);
  for (int i = 0; i < 8; ++i) {
    std::uint16_t bytes;
    std::memcpy(&bytes, p + 16 + 2 * i, 2);
    tile[i] = {{}, p[48 + i], bytes};
  }
}
inline void _tile_release() {}
inline void _tile_zero(int i) { std::memset(tile[i].line, 0, sizeof tile[i].line); }
inline void _tile_loadd(int i, const void* p, long stride) {
  _tile_zero(i);
  for (int r = 0; r < tile[i].rows; ++r)
    std::memcpy(tile[i].line[r], static_cast<const char*>(p) + r * stride,
                std::size_t(tile[i].bytes));
}
inline void _tile_stored(int i, void* p, long stride) {
  for (int r = 0; r < tile[i].rows; ++r)
    std::memcpy(static_cast<char*>(p) + r * stride, tile[i].line[r], std::size_t(tile[i].bytes));
}
inline void _tile_dpbssd(int c, int a, int b) {
  // Shapes that do not fit are a fault of the processor too.
  if (tile[c].rows != tile[a].rows || 4 * tile[b].rows != tile[a].bytes ||
      tile[b].bytes != tile[c].bytes)
    __builtin_trap();
  for (int m = 0; m < tile[c].rows; ++m)
    for (int n = 0; n < tile[c].bytes / 4; ++n) {
      std::int32_t sum;
      std::memcpy(&sum, tile[c].line[m] + 4 * n, 4);
      for (int k = 0; k < tile[a].bytes; ++k)
        sum += int(std::int8_t(tile[a].line[m][k])) *
               int(std::int8_t(tile[b].line[k / 4][4 * n + k % 4]));
      std::memcpy(tile[c].line[m] + 4 * n, &sum, 4);
    }
}

}  // namespace
}  // namespace kvproof
