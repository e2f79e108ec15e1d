// Rows to tiles and back, by tables of where the bits lie (layout.py).
#include "common.cuh"

namespace kvproof {

constexpr int NONE = 0x7fffffff;  // no bad row

struct Args {
  const u32* table;  // pack: [32][words of a tile], slot << 16 | bit of the row;
                     // unpack: [64 slots][8][row_bytes], bit of the tile
  u8* rows;          // [n][heads][row_bytes] with strides in bytes
  long long of_token, of_head;
  u8* buffer;  // [heads][tiles][64 * row_bytes], head from head `of_heads` bytes
  long long of_heads;
  const int* scales;  // where the scales of a row lie
  int* bad;           // first row with one that is not finite, or NONE
  int at, n, heads, row_bytes, n_scales;
};

// The first row, in tokens times heads, of which a scale is not finite.
extern "C" __global__ void check(const __grid_constant__ Args g) {
  const long long row = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= (long long)g.n * g.heads) return;
  const u8* const from = g.rows + row / g.heads * g.of_token + row % g.heads * g.of_head;
  bool bad = false;
  for (int i = 0; i < g.n_scales; ++i) bad |= (from[g.scales[i] + 1] & 0x7c) == 0x7c;
  if (bad) atomicMin(g.bad, int(row));
}

// A thread per word of a tile; blockIdx.y counts tiles from that of slot `at` on.
extern "C" __global__ void pack(const __grid_constant__ Args g) {
  const int words = TILE * g.row_bytes / 4, w = blockIdx.x * blockDim.x + threadIdx.x;
  if (w >= words || *g.bad != NONE) return;
  const int tile = g.at / TILE + blockIdx.y, head = blockIdx.z, first = g.at - tile * TILE;
  u32 set = 0, given = 0;
#pragma unroll 8
  for (int i = 0; i < 32; ++i) {
    const u32 entry = g.table[i * words + w];
    const int row = int(entry >> 16) - first;
    if (row < 0 || row >= g.n) continue;
    const int bit = entry & 0xffff;
    const u8 byte = g.rows[row * g.of_token + head * g.of_head + bit / 8];
    given |= 1u << i, set |= u32(byte >> bit % 8 & 1) << i;
  }
  u32* const word = (u32*)(g.buffer + head * g.of_heads + (long long)tile * TILE * g.row_bytes) + w;
  if (given) *word = (*word & ~given) | set;
}

// A thread per byte of a row, of rows without gaps.
extern "C" __global__ void unpack(const __grid_constant__ Args g) {
  const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= (long long)g.n * g.heads * g.row_bytes) return;
  const int byte = int(i % g.row_bytes), head = int(i / g.row_bytes % g.heads);
  const long long slot = g.at + i / g.row_bytes / g.heads;
  const u8* const tile = g.buffer + head * g.of_heads + slot / TILE * TILE * g.row_bytes;
  u32 out = 0;
#pragma unroll
  for (int b = 0; b < 8; ++b) {
    const u32 bit = g.table[(slot % TILE * 8 + b) * g.row_bytes + byte];
    out |= u32(tile[bit / 8] >> bit % 8 & 1) << b;
  }
  g.rows[i] = u8(out);
}

}  // namespace kvproof
