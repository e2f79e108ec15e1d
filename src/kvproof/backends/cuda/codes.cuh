// Packed codes to int8 entries, eight a lane at a time, in the order in which int8 matrix products
// take them (backends/cuda/layout.py states it).
//
// A unit is eight codes of a lane; four units of 32 lanes are a group. By bits of a code, a group is
//   8: [2][lane] uint4: unit u is the words 2u, 2u + 1 of the eight (the entries themselves)
//   4: [lane] uint4: unit u is word u, a code a nibble
//   5: as 4, then [lane] words: bit 4 i + u is the fifth bit of code i of unit u
//   3: [3][lane] words: unit u < 3 is the low three bits of word u's nibbles; bit j of the codes of
//      unit 3 is the top bit of the nibbles of word j
//   2: [lane] uint2: unit u is bits 2 (u % 2), + 1 of the nibbles of word u / 2
// Nibbles are rotated: a code of 4 bits is stored as code >> 1 | (code & 1) << 3. The permute
// instruction takes three index bits and copies the entry's sign where the fourth bit is set: so
// entries of even codes come from one table and those of odd codes from another, whose negative
// entries are complemented and which is in reverse (its index is that of ~w), and the XOR of both
// look-ups is the entry.
#pragma once

#include "common.cuh"

namespace kvproof {

struct Table {  // entries of a codebook; 5 bits: [upper half of the codes][...]
  u32 even[2][2], odd[2][2];
  u32 minus_one;  // from outside: a constant that the compiler does not know
};

template <int BITS>
struct Group {
  u32 word[BITS == 8 ? 8 : BITS == 2 ? 2 : 4];
  u32 fifth;

  INLINE void load(const u8* p, int lane) {
    if constexpr (BITS == 8) {
      const uint4 x = *(const uint4*)(p + lane * 16), y = *(const uint4*)(p + 512 + lane * 16);
      word[0] = x.x, word[1] = x.y, word[2] = x.z, word[3] = x.w;
      word[4] = y.x, word[5] = y.y, word[6] = y.z, word[7] = y.w;
    } else if constexpr (BITS == 4 || BITS == 5) {
      const uint4 x = *(const uint4*)(p + lane * 16);
      word[0] = x.x, word[1] = x.y, word[2] = x.z, word[3] = x.w;
      if constexpr (BITS == 5) fifth = *(const u32*)(p + 512 + lane * 4);
    } else if constexpr (BITS == 3) {
      const u32* const at = (const u32*)p + lane;
      const u32 a = at[0], b = at[32], c = at[64];
      word[0] = a & 0x77777777u, word[1] = b & 0x77777777u, word[2] = c & 0x77777777u;
      word[3] = ((a >> 3) & 0x11111111u) | ((b >> 2) & 0x22222222u) | ((c >> 1) & 0x44444444u);
    } else {
      const uint2 x = *(const uint2*)(p + lane * 8);
      word[0] = x.x, word[1] = x.y;
    }
  }

  INLINE void entries(const Table& t, int u, u32& b0, u32& b1) const {
    if constexpr (BITS == 8) {
      b0 = word[2 * u], b1 = word[2 * u + 1];
    } else if constexpr (BITS == 4) {
      nibbles(t, 0, word[u], u % 2, b0, b1);
    } else if constexpr (BITS == 5) {
      u32 c0, c1;
      nibbles(t, 0, word[u], false, b0, b1);
      nibbles(t, 1, word[u], false, c0, c1);
      const u32 bits = (fifth >> u) & 0x11111111u;
      const u32 m0 = permute(0x0000ff00u, 0, bits), m1 = permute(0x0000ff00u, 0, bits >> 16);
      b0 = (b0 & ~m0) | (c0 & m0), b1 = (b1 & ~m1) | (c1 & m1);
    } else {
      const u32 w = BITS == 3 ? word[u] : (word[u / 2] >> (u % 2 * 2)) & 0x33333333u;
      b0 = permute(t.even[0][0], t.even[0][1], w);
      b1 = permute(t.even[0][0], t.even[0][1], dot_halves(w, 0x0100u, 0));
    }
  }

  // The same from a table whose entries have any signs (nothing is complemented in it).
  INLINE void entries_of_any_sign(const Table& t, int u, u32& b0, u32& b1) const {
    if constexpr (BITS != 4) {
      entries(t, u, b0, b1);
    } else {
      const u32 w = word[u] & 0x77777777u, odd = (word[u] >> 3) & 0x11111111u;
      const u32 m0 = permute(0x0000ff00u, 0, odd), m1 = permute(0x0000ff00u, 0, odd >> 16);
      b0 = (permute(t.even[0][0], t.even[0][1], w) & ~m0) | (permute(t.odd[0][0], t.odd[0][1], w) & m0);
      b1 = (permute(t.even[0][0], t.even[0][1], w >> 16) & ~m1) |
           (permute(t.odd[0][0], t.odd[0][1], w >> 16) & m1);
    }
  }

 private:
  // The multiplier makes the complements and, `by_dot`, takes the upper half down: shifts, permutes
  // and XORs share another unit, the one that the kernel waits for. Half of all shifts go to each.
  static INLINE void nibbles(const Table& t, int half, u32 w, bool by_dot, u32& b0, u32& b1) {
    const u32 x = w * t.minus_one + t.minus_one, upper = by_dot ? dot_halves(w, 0x0100u, 0) : w >> 16,
              upper_x = upper * t.minus_one + t.minus_one;
    b0 = permute(t.even[half][0], t.even[half][1], w) ^ permute(t.odd[half][0], t.odd[half][1], x);
    b1 = permute(t.even[half][0], t.even[half][1], upper) ^
         permute(t.odd[half][0], t.odd[half][1], upper_x);
  }
};

template <int BITS>
constexpr int GROUP_BYTES = 128 * BITS;

}  // namespace kvproof
