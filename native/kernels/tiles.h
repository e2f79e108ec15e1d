// Cached rows in tiles, and attention over them.
//
// A tile is 64 tokens of one KV head and one side, in exactly the bytes of its rows: code planes in
// the order in which dot products of bytes want them, then the scales. docs/architecture.md gives
// the layout; backends/tiles.py states it in NumPy.
//
// Products are 8 bits by 8 bits. A query row is 128 * high + low, a weight (probability times
// stored scale) 256 * high + low, both parts int8; the entries of a codebook are int8, or where
// they are not integers, int8 and a second int8 worth a 128th (keys) or 256th (values) of it. The
// product of the second and a low part is left out. So a query row counts as two rows of bytes.
//
// Where tiles are decoded once for many query rows, block formats become row formats on the way: a
// row has one unit, the largest magnitude of its scales, and its entries times what their scale is
// of that unit are int8 and fine int8.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels.h"
#include "tiles_store.h"

namespace kvproof {

constexpr int QUADS = 16;       // quad rows (4 dims, or 4 tokens, by 16 lanes) of a tile block
constexpr int BLOCK_DIMS = 64;  // dims of a block of keys
constexpr int OCTET = 8;        // query rows multiplied at once, at most
constexpr int LARGEST_QUERY = 16256;   // 128 * 127
constexpr int LARGEST_WEIGHT = 32512;  // 256 * 127
constexpr int TILE_WIDTHS = 4;         // 1, 2, 4 and 8 rows

// Formats that the kernels tell apart.
enum TileKind : int {
  T_TQ8,
  T_TQ5,
  T_TQ4,
  T_TQ3,
  T_TQ2,
  T_TCQ4,
  T_TCQ4_64,
  T_TCQ3,
  T_Q8_0,
  T_Q4_0,
  T_TBQ4,
  T_TBQ3,
  TILE_KINDS
};

constexpr int KIND_FORMATS[] = {TQ8,     TQ5,  TQ4,  TQ3,  TQ2,    TCQ4,
                                TCQ4_64, TCQ3, Q8_0, Q4_0, TBQ4_0, TBQ3_0};
constexpr int tile_kind(int f) {
  int kind = 0;
  while (KIND_FORMATS[kind] != (f == Q4_0_ROT ? int(Q4_0) : f)) ++kind;
  return kind;
}
constexpr bool tile_blocks(int kind) { return path_of(KIND_FORMATS[kind]) == BLOCK; }
constexpr bool tile_fine(int kind) { return kind >= T_TBQ4; }  // entries have a second table
// Once decoded for many query rows, entries have a fine part.
constexpr bool decoded_fine(int kind) { return tile_blocks(kind) || tile_fine(kind); }
constexpr bool tile_trellis(int kind) { return has_trellis(KIND_FORMATS[kind]); }
constexpr int kind_bits(int kind) { return planes_of(KIND_FORMATS[kind]).all(); }
// Of an index into a table: the bits that come together, and whether a plane of its own brings one
// more above them. An index of trellis formats has m's low bits, bit 1 and bit 0 of the subset, and
// m's highest bit.
constexpr int low_bits(int kind) {
  return tile_trellis(kind) ? 4 : planes_of(KIND_FORMATS[kind]).bits[0];
}
constexpr bool top_bit(int kind) {
  return tile_trellis(kind) ? code_bits(KIND_FORMATS[kind]) == 4
                            : planes_of(KIND_FORMATS[kind]).bits[1] == 1;
}

// Steps back, as bits, to those of the path whose XOR is bit 1 and bit 0 of a subset: what
// set_trellis is given.
struct Taps {
  unsigned one, zero;

  constexpr int reach() const { return 31 - __builtin_clz(one | zero); }
};
constexpr Taps taps_of(int f) { return f == TCQ4_64 ? Taps{0127, 042} : Taps{013, 04}; }

// Entries by index. Bits above those of the index are anything (0..63), so short books repeat; the
// top bit is looked for at another place in each of the copies: see tiles_leaf.h.
struct TileTable {
  alignas(64) std::uint8_t entry[4][64], fine[4][64];  // int8, or 128 more: TileKernels::offset
  float scale;                                         // value = entry / scale
};
// For block formats that are decoded to rows, `entry` and `fine` are the high and low bytes of
// entries of 16 bits. A decoded entry is one of those, times what its scale is of the row's unit,
// times this.
constexpr float DECODED = 127.f / 32768;

// Tiles of one side of one sequence: [head][tile][tile bytes].
struct TileSide {
  int fmt;
  const Book* book;
  const std::uint8_t* base;
  std::ptrdiff_t head_stride;
  int first, n;  // row 0 of the cache is in slot `first`
  int heads, dim;

  std::ptrdiff_t tile_stride() const { return tile_bytes(fmt, dim); }
};

// Decoded tiles are multiplied with two octets of eight rows at once. Their left side has these
// lines for row r of both: so the high parts of all 16 rows are neighbours, as fine entries want.
constexpr int PAIR = 2 * OCTET;
constexpr int pair_high(int r) { return OCTET + r; }
constexpr int pair_low(int r) { return r < OCTET ? r : PAIR + r; }

// An octet's query rows against up to SUPER tokens, or its weights against their values. The arrays
// of two octets follow each other.
struct TileWork {
  const std::uint8_t* tiles;  // first tile, or its decoded form
  std::ptrdiff_t stride;      // to the next
  int n_tiles, dim;
  const TileTable* table;
  const std::int8_t* a;  // left side: see tiles_leaf.h
  // What the sums of shifted entries start from: [row] of row formats, [block of 32][OCTET] of
  // block formats.
  const std::int32_t* start;
  const float* scales;        // keys: row formats [SUPER], block formats [dim / 32][SUPER]
  const float* units;         // of rows that block formats are decoded to, [SUPER]
  float* scores;              // keys: [row][SUPER], in units of the rows' steps
  const float *alpha, *step;  // values: factor of what is there, and step of the weights, [row]
  float* out;                 // values: [row][dim]
  std::uint8_t* ring;         // scratch of RING bytes
};

struct TileKernels {
  int offset;  // 128: entries are unsigned
  // The left side of keys of block formats has a block for each 32 dims, zero elsewhere, unless
  // they are decoded to rows: what a matrix unit multiplies is always 64 wide.
  bool split_keys;
  // Decoded bytes of up to SUPER tokens, block formats as rows of `units`; null: every octet
  // decodes for itself.
  void (*decode_keys[TILE_KINDS])(const TileWork&, std::uint8_t* out);
  void (*decode_values[TILE_KINDS])(const TileWork&, std::uint8_t* out);
  // Two octets against decoded tiles, without and with fine entries.
  void (*keys_decoded[2])(const TileWork&);
  void (*values_decoded[2])(const TileWork&);
  void (*keys[TILE_KINDS][TILE_WIDTHS])(const TileWork&);
  void (*values[TILE_KINDS][TILE_WIDTHS])(const TileWork&);
  // n (a multiple of 64, up to SUPER) scores of a row times `factor` to probabilities, in base 2
  // relative to the new maximum. Returns the largest magnitude of their products with `units`;
  // those replace the probabilities where `store_products`.
  float (*softmax)(float* scores, int n, float factor, const float* units, bool store_products,
                   float* maximum, float* sum, float* alpha);
  // Products p times inverse (times scales if there are any), rounded, as bytes in the order of
  // quad rows: high parts to `high`, low ones to `low`, 64 a tile, `stride` apart. sums: of
  // weights and of high parts.
  void (*weights)(const float* p, const float* scales, int n, float inverse, std::uint8_t* high,
                  std::uint8_t* low, std::ptrdiff_t stride, std::int32_t* sums);
  void (*add)(const float* x, int n, float factor, float* sum);  // n a multiple of 16
  void (*widen)(const std::uint8_t* halves, int n, float* out);  // fp16, n a multiple of 16
  // Around a task whose octets have this many rows (1, 2, 4 or 8); may be null.
  void (*begin)(int rows);
  void (*end)();
};

constexpr std::size_t RING = 4096;

extern const TileKernels tiles_scalar;
#if defined(__x86_64__)
extern const TileKernels tiles_avx2vnni;
extern const TileKernels tiles_avx512;
extern const TileKernels tiles_amx;
#elif defined(__aarch64__)
extern const TileKernels tiles_neon;
#endif

}  // namespace kvproof
