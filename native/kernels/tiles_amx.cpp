// Kernels over tiles for AMX (int8), with AVX-512 around it.
//
// The left side (queries or weights, high parts above low ones) and the products are tiles of 2 *
// rows lines; the right side is 64 dims or tokens by 16 lanes, decoded to a small ring in L1 just
// before it is multiplied, or once for all octets of a block of query rows.
//
// Registers: 0-3 hold products, 4 and 5 (3 to 5 with fine entries of two octets) left sides, 6 and
// 7 right sides.
#if defined(__x86_64__)
#ifdef KVPROOF_EMULATED_AMX
#include "tests/amx.h"
#else
#include "tiles_avx512.h"
#endif

namespace kvproof {
namespace {

using I = Avx512Tiles<0>;
constexpr int RIGHT = QUADS * LINE;  // bytes of a right side
// And of one with its second table.
constexpr int right_bytes(int kind) { return tile_fine(kind) ? 2 * RIGHT : RIGHT; }
constexpr int decoded_bytes(int kind) { return decoded_fine(kind) ? 2 * RIGHT : RIGHT; }
static_assert(4 * RIGHT <= int(RING) && 2 * right_bytes(T_TBQ4) <= int(RING));

struct Shapes {  // operand of ldtilecfg
  std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
  std::uint16_t row_bytes[16] = {};
  std::uint8_t rows[16] = {};
};

void begin(int rows) {
  alignas(64) Shapes s;
  for (int i = 0; i < 8; ++i) {
    s.row_bytes[i] = LINE;
    s.rows[i] = std::uint8_t(i < 6 ? 2 * rows : QUADS);
  }
  _tile_loadconfig(&s);
}
void end() { _tile_release(); }

// What comes before the groups of values, by group: those from REACH on are alike.
template <int K>
struct ValuePasts {
  static constexpr int REACH = ValuePast<I, K>::REACH;
  ValuePast<I, K> past[REACH + 1];

  KVPROOF_INLINE explicit ValuePasts(int dim) {
    if constexpr (tile_trellis(K))
      for (int g = 0; g < REACH; ++g) past[g] = ValuePast<I, K>(dim, g, 0);
  }
  KVPROOF_INLINE const ValuePast<I, K>& of(int g) const { return past[g < REACH ? g : REACH]; }
};

// Quad rows of 16 lanes (8 or 16) to a right side at `out`, its second table after it.
template <int K, class Past>
KVPROOF_INLINE void decode_right(const std::uint8_t* src, int n, const Past& past,
                                 const Tables<I, K>& table, std::uint8_t* out) {
  const auto half = [&](int h) KVPROOF_LAMBDA {
    visit8<I, K>(src, n, h, past, table, [&](auto quad, Bytes entry, Bytes fine) KVPROOF_LAMBDA {
      store(out + (8 * h + quad) * LINE, entry);
      if constexpr (tile_fine(K)) store(out + RIGHT + (8 * h + quad) * LINE, fine);
    });
  };
  half(0);
  if (n == QUADS) half(1);
}
// The right sides of a block of keys, and of `count` groups of values from g on.
template <int K>
KVPROOF_INLINE void decode_keys_of(const std::uint8_t* tile, int dim, int kb,
                                   const Tables<I, K>& table, std::uint8_t* out) {
  const int n = quads_of_block(dim, kb);
  for (int cg = 0; cg < 4; ++cg)
    decode_right<K>(key_block<K>(tile, kb, n, cg), n, KeyPast<I, K>(tile, kb, cg, 0), table,
                    out + cg * right_bytes(K));
}
template <int K>
KVPROOF_INLINE void decode_values_of(const std::uint8_t* tile, int g, int count,
                                     const ValuePasts<K>& past, const Tables<I, K>& table,
                                     std::uint8_t* out) {
  for (int i = 0; i < count; ++i)
    decode_right<K>(tile + (g + i) * block_codes(K, QUADS), QUADS, past.of(g + i), table,
                    out + i * right_bytes(K));
}

// Block formats to rows of one unit: entries of 16 bits, those of even bytes and those of odd ones,
// times a 2^15th of their share, are the entries of the row. The share is what their scale is of
// the unit, of 127 * 128 (keys) or 127 * 256 (values): the high part is worth 128 or 256.
template <int K, bool KEYS>
KVPROOF_INLINE void store_of_row(std::uint8_t* out, Bytes entry, Bytes fine, Ints even, Ints odd) {
  Bytes a = left<8>(entry), b;
  if constexpr (tile_fine(K)) {
    a = I::even_odd(fine, a);
    b = I::even_odd(right<8>(fine), entry);
  } else {
    b = I::even_odd(Bytes{}, entry);
  }
  const Shorts x = I::scaled(Shorts(a), Shorts(even)), y = I::scaled(Shorts(b), Shorts(odd));
  // The high part is rounded, so that the fine one is as small as can be.
  constexpr std::uint16_t half = KEYS ? 64 : 128;
  const Bytes up_x = Bytes(x + half), up_y = Bytes(y + half);
  if constexpr (KEYS) {
    store(out, I::even_odd(right<7>(up_x), left<1>(up_y)));
    store(out + RIGHT, (I::even_odd(up_x, left<8>(up_y)) & std::uint8_t(127)) - std::uint8_t(64));
  } else {
    store(out, I::even_odd(right<8>(up_x), up_y));
    store(out + RIGHT, I::even_odd(Bytes(x), left<8>(Bytes(y))));
  }
}
// What scales are of their units, times `most`, in the low 16 bits of each lane.
KVPROOF_INLINE Ints shares(const float* scales, Floats inverse) {
  constexpr float round = 12582912.f;  // the low bits of a sum with it are the rounded number
  return Ints(load<Floats>(scales) * inverse + round);
}
KVPROOF_INLINE Floats inverse_of(const float* units, int most) {
  const Floats unit = load<Floats>(units);
  return unit > 0.f ? float(most) / unit : all(0.f);
}
KVPROOF_INLINE Ints both(Ints low, Ints high) { return (low & 0xffff) | high << 16; }

// [tile][block][4 lanes of 16], and [tile][group]; fine entries follow each right side.
template <int K>
void decode_keys(const TileWork& given, std::uint8_t* out) {
  const TileWork w = given;
  const Tables<I, K> table(*w.table);
  const int blocks = (w.dim + BLOCK_DIMS - 1) / BLOCK_DIMS;
  for (int t = 0; t < w.n_tiles; ++t, out += blocks * 4 * decoded_bytes(K)) {
    const std::uint8_t* const tile = w.tiles + t * w.stride;
    if constexpr (!tile_blocks(K)) {
      for (int kb = 0; kb < blocks; ++kb)
        decode_keys_of<K>(tile, w.dim, kb, table, out + kb * 4 * decoded_bytes(K));
    } else {
      Floats inverse[4];
      for (int cg = 0; cg < 4; ++cg)
        inverse[cg] = inverse_of(w.units + t * TILE + 16 * cg, LARGEST_QUERY);
      for (int kb = 0; kb < blocks; ++kb) {
        const int n = quads_of_block(w.dim, kb);
        for (int cg = 0; cg < 4; ++cg) {
          const std::uint8_t* const src = key_block<K>(tile, kb, n, cg);
          std::uint8_t* const to = out + (kb * 4 + cg) * decoded_bytes(K);
          const KeyPast<I, K> past(tile, kb, cg, 0);
          for (int h = 0; h < n / 8; ++h) {
            const float* const scales = w.scales + (2 * kb + h) * SUPER + t * TILE + 16 * cg;
            const Ints x = shares(scales, inverse[cg]), share = both(x, x);
            visit8<I, K>(
                src, n, h, past, table, [&](auto quad, Bytes entry, Bytes fine) KVPROOF_LAMBDA {
                  store_of_row<K, true>(to + (8 * h + quad) * LINE, entry, fine, share, share);
                });
          }
        }
      }
    }
  }
}
template <int K>
void decode_values(const TileWork& given, std::uint8_t* out) {
  const TileWork w = given;
  const Tables<I, K> table(*w.table);
  const ValuePasts<K> past(w.dim);
  for (int t = 0; t < w.n_tiles; ++t, out += w.dim / 16 * decoded_bytes(K)) {
    const std::uint8_t* const tile = w.tiles + t * w.stride;
    if constexpr (!tile_blocks(K)) {
      decode_values_of<K>(tile, 0, w.dim / 16, past, table, out);
    } else {
      Floats inverse[4];
      for (int i = 0; i < 4; ++i)
        inverse[i] = inverse_of(w.units + t * TILE + 16 * i, LARGEST_WEIGHT);
      for (int g = 0; g < w.dim / 16; g += 2) {
        Ints x[4];
        for (int i = 0; i < 4; ++i)
          x[i] = shares(w.scales + g / 2 * SUPER + t * TILE + 16 * i, inverse[i]);
        // Tokens r, r + 32, r + 16, r + 48 of quad row r.
        alignas(64) std::int32_t even[QUADS], odd[QUADS];
        store(even, both(x[0], x[1]));
        store(odd, both(x[2], x[3]));
        for (int i = 0; i < 2; ++i)
          for (int h = 0; h < 2; ++h)
            visit8<I, K>(tile + (g + i) * block_codes(K, QUADS), QUADS, h, past.of(g + i), table,
                         [&](auto quad, Bytes entry, Bytes fine) KVPROOF_LAMBDA {
                           const int q = 8 * h + quad;
                           store_of_row<K, false>(out + (g + i) * decoded_bytes(K) + q * LINE,
                                                  entry, fine, all(even[q]), all(odd[q]));
                         });
      }
    }
  }
}

// Row r of products: MR high parts, then MR low ones.
KVPROOF_INLINE Ints product(const std::uint8_t* products, int r) {
  return load<Ints>(products + r * LINE);
}

// The four products, each of `size` bytes.
KVPROOF_INLINE void clear_products() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}
KVPROOF_INLINE void store_products(std::uint8_t* to, int size) {
  _tile_stored(0, to, LINE);
  _tile_stored(1, to + size, LINE);
  _tile_stored(2, to + 2 * size, LINE);
  _tile_stored(3, to + 3 * size, LINE);
}
// Adds the products of a left side and the four right sides of the ring; ahead(i) follows the one
// with the i-th.
template <class Ahead>
KVPROOF_INLINE void multiply_ring(const std::int8_t* left, const std::uint8_t* ring,
                                  Ahead&& ahead) {
  _tile_loadd(4, left, LINE);
  _tile_loadd(6, ring, LINE);
  _tile_dpbssd(0, 4, 6);
  ahead(0);
  _tile_loadd(7, ring + RIGHT, LINE);
  _tile_dpbssd(1, 4, 7);
  ahead(1);
  _tile_loadd(6, ring + 2 * RIGHT, LINE);
  _tile_dpbssd(2, 4, 6);
  ahead(2);
  _tile_loadd(7, ring + 3 * RIGHT, LINE);
  _tile_dpbssd(3, 4, 7);
  ahead(3);
}

// Scores of MR rows and 16 tokens, in units of the rows' steps.
template <int MR>
KVPROOF_INLINE void store_scores(const std::uint8_t* products, const float* scales, float* scores) {
  const Floats scale = load<Floats>(scales);
  for (int r = 0; r < MR; ++r)
    store(scores + r * SUPER,
          to_floats((product(products, r) << 7) + product(products, MR + r)) * scale);
}

// Row formats. Each right side of the next block is decoded to where that of this one has just been
// read: a ring of one page, since loads wait for stores whose addresses differ by a page. Scores
// are made of a tile's products while the next tile is multiplied.
template <int K, int MR>
void keys_of_rows(const TileWork& given) {
  const TileWork w = given;  // a copy, which no store can change
  constexpr int PRODUCTS = 2 * MR * LINE;
  alignas(64) std::uint8_t products[2][4 * PRODUCTS];
  const Tables<I, K> table(*w.table);
  const int blocks = (w.dim + BLOCK_DIMS - 1) / BLOCK_DIMS, steps = w.n_tiles * blocks;
  decode_keys_of<K>(w.tiles, w.dim, 0, table, w.ring);
  const auto finish = [&](int t) KVPROOF_LAMBDA {
    for (int cg = 0; cg < 4; ++cg)
      store_scores<MR>(products[t % 2] + cg * PRODUCTS, w.scales + t * TILE + cg * 16,
                       w.scores + t * TILE + cg * 16);
  };
  int next_tile = 0, next_block = 0;
  for (int t = 0, step = 0; t < w.n_tiles; ++t) {
    clear_products();
    for (int kb = 0; kb < blocks; ++kb, ++step) {
      const bool more = step + 1 < steps;
      if (++next_block == blocks) next_block = 0, ++next_tile;
      const int n = quads_of_block(w.dim, next_block);
      const std::uint8_t* const next =
          key_block<K>(w.tiles + next_tile * w.stride, next_block, n, 0);
      const auto ahead = [&](int cg) KVPROOF_LAMBDA {
        const std::uint8_t* const src = next + cg * block_codes(K, n);
        const KeyPast<I, K> past(w.tiles + next_tile * w.stride, next_block, cg, 0);
        if (more) decode_right<K>(src, n, past, table, w.ring + cg * RIGHT);
      };
      multiply_ring(w.a + std::ptrdiff_t(kb) * PRODUCTS, w.ring, ahead);
    }
    std::uint8_t* const p = products[t % 2];
    store_products(p, PRODUCTS);
    if (t > 0) finish(t - 1);
  }
  finish(w.n_tiles - 1);
}

// Block formats: products leave the unit every 32 dims. Two lanes of 16 tokens at a time, whose
// scores stay in registers. Products are used when the next ones have been asked for: those of both
// halves of a block at once, or with fine entries one half after the other.
template <int K, int MR>
void keys_of_blocks(const TileWork& given) {
  const TileWork w = given;
  constexpr int PRODUCTS = 2 * MR * LINE, WIDE = right_bytes(K);
  alignas(64) std::uint8_t products[2][4 * PRODUCTS];
  const Tables<I, K> table(*w.table);
  const int blocks = (w.dim + BLOCK_DIMS - 1) / BLOCK_DIMS, halves = w.dim / GROUP;
  const auto decode = [&](int t, int pair, int kb) KVPROOF_LAMBDA {
    const std::uint8_t* const tile = w.tiles + t * w.stride;
    const int n = quads_of_block(w.dim, kb);
    for (int i = 0; i < 2; ++i) {
      const int cg = 2 * pair + i;
      decode_right<K>(key_block<K>(tile, kb, n, cg), n, KeyPast<I, K>(tile, kb, cg, 0), table,
                      w.ring + i * WIDE);
    }
  };
  for (int t = 0; t < w.n_tiles; ++t)
    for (int pair = 0; pair < 2; ++pair) {
      const int at = t * TILE + pair * 32;
      Floats sum[2][MR];
      for (int i = 0; i < 2; ++i)
        for (int r = 0; r < MR; ++r) sum[i][r] = all(0.f);
      // Products of both lanes with half b, and with its fine entries.
      const auto add = [&](int b, const std::uint8_t* p, const std::uint8_t* fine) KVPROOF_LAMBDA {
        for (int i = 0; i < 2; ++i, p += PRODUCTS, fine += PRODUCTS) {
          const Floats scale = load<Floats>(w.scales + b * SUPER + at + 16 * i);
          for (int r = 0; r < MR; ++r) {
            Ints low = product(p, MR + r);
            if constexpr (tile_fine(K)) low += product(fine, r);
            sum[i][r] += to_floats((product(p, r) << 7) + low) * scale;
          }
        }
      };
      decode(t, pair, 0);
      for (int kb = 0; kb < blocks; ++kb) {
        const std::uint8_t* const right = w.ring;
        const std::int8_t* const a = w.a + std::ptrdiff_t(kb) * 2 * PRODUCTS;
        const bool two = 2 * kb + 1 < halves;
        if constexpr (tile_fine(K)) {
          for (int h = 0; h < 1 + two; ++h) {
            std::uint8_t* const p = products[h];
            clear_products();
            _tile_loadd(4, a + h * PRODUCTS, LINE);
            _tile_loadd(6, right, LINE);
            _tile_dpbssd(0, 4, 6);
            _tile_loadd(7, right + WIDE, LINE);
            _tile_dpbssd(1, 4, 7);
            _tile_loadd(6, right + RIGHT, LINE);
            _tile_dpbssd(2, 4, 6);
            _tile_loadd(7, right + WIDE + RIGHT, LINE);
            _tile_dpbssd(3, 4, 7);
            store_products(p, PRODUCTS);
            if (h == 1) add(2 * kb, products[0], products[0] + 2 * PRODUCTS);
          }
          if (kb + 1 < blocks) decode(t, pair, kb + 1);
          add(2 * kb + two, products[two], products[two] + 2 * PRODUCTS);
        } else {
          std::uint8_t* const p = products[kb % 2];
          const std::uint8_t* const before = products[(kb + 1) % 2];
          _tile_zero(0);
          _tile_zero(1);
          _tile_loadd(4, a, LINE);
          _tile_loadd(6, right, LINE);
          _tile_dpbssd(0, 4, 6);
          _tile_loadd(7, right + WIDE, LINE);
          _tile_dpbssd(1, 4, 7);
          if (two) {
            _tile_zero(2);
            _tile_zero(3);
            _tile_loadd(5, a + PRODUCTS, LINE);
            _tile_dpbssd(2, 5, 6);
            _tile_dpbssd(3, 5, 7);
          }
          if (kb + 1 < blocks) decode(t, pair, kb + 1);
          _tile_stored(0, p, LINE);
          _tile_stored(1, p + PRODUCTS, LINE);
          if (two) {
            _tile_stored(2, p + 2 * PRODUCTS, LINE);
            _tile_stored(3, p + 3 * PRODUCTS, LINE);
          }
          if (kb > 0) {
            add(2 * kb - 2, before, before);
            add(2 * kb - 1, before + 2 * PRODUCTS, before);
          }
          if (kb + 1 == blocks) {
            add(2 * kb, p, p);
            if (two) add(2 * kb + 1, p + 2 * PRODUCTS, p);
          }
        }
      }
      for (int i = 0; i < 2; ++i)
        for (int r = 0; r < MR; ++r) store(w.scores + r * SUPER + at + 16 * i, sum[i][r]);
    }
}

// Two groups of values (the second two products are those of fine entries) over the tiles of a
// step.
template <int K, int MR>
KVPROOF_INLINE void values_by_twos(const TileWork& w, const ValuePasts<K>& past,
                                   const Tables<I, K>& table, int g) {
  constexpr int LEFT = 2 * MR * LINE, WIDE = right_bytes(K);
  alignas(64) std::uint8_t products[4 * LEFT];
  const int b = tile_blocks(K) ? g / 2 : 0;
  const std::int8_t* const a = w.a + std::ptrdiff_t(b) * (SUPER / TILE) * LEFT;
  decode_values_of<K>(w.tiles, g, 2, past, table, w.ring);
  clear_products();
  for (int t = 0; t < w.n_tiles; ++t) {
    const std::uint8_t* const right = w.ring;
    const auto ahead = [&](int i) KVPROOF_LAMBDA {
      const std::uint8_t* const src =
          w.tiles + (t + 1) * w.stride + (g + i) * block_codes(K, QUADS);
      if (t + 1 < w.n_tiles) decode_right<K>(src, QUADS, past.of(g + i), table, w.ring + i * WIDE);
    };
    _tile_loadd(4, a + t * LEFT, LINE);
    _tile_loadd(6, right, LINE);
    _tile_dpbssd(0, 4, 6);
    if constexpr (tile_fine(K)) {
      _tile_loadd(6, right + RIGHT, LINE);
      _tile_dpbssd(2, 4, 6);
    }
    ahead(0);
    _tile_loadd(7, right + WIDE, LINE);
    _tile_dpbssd(1, 4, 7);
    if constexpr (tile_fine(K)) {
      _tile_loadd(7, right + WIDE + RIGHT, LINE);
      _tile_dpbssd(3, 4, 7);
    }
    ahead(1);
  }
  _tile_stored(0, products, LINE);
  _tile_stored(1, products + LEFT, LINE);
  if constexpr (tile_fine(K)) {
    _tile_stored(2, products + 2 * LEFT, LINE);
    _tile_stored(3, products + 3 * LEFT, LINE);
  }
  for (int i = 0; i < 2; ++i)
    for (int r = 0; r < MR; ++r) {
      Ints low = product(products + i * LEFT, MR + r);
      if constexpr (tile_fine(K)) low += product(products + (2 + i) * LEFT, r);
      add_values(w, r, (g + i) * 16, b, product(products + i * LEFT, r), low);
    }
}

// Row formats, four groups at once, in one pipeline as keys_of_rows.
template <int K, int MR>
KVPROOF_INLINE void values_by_fours(const TileWork& w, const ValuePasts<K>& past,
                                    const Tables<I, K>& table, int groups) {
  constexpr int LEFT = 2 * MR * LINE;
  alignas(64) std::uint8_t products[2][4 * LEFT];
  decode_values_of<K>(w.tiles, 0, 4, past, table, w.ring);
  const auto finish = [&](int g) KVPROOF_LAMBDA {
    const std::uint8_t* const p = products[g / 4 % 2];
    for (int i = 0; i < 4; ++i)
      for (int r = 0; r < MR; ++r)
        add_values(w, r, (g + i) * 16, 0, product(p + i * LEFT, r), product(p + i * LEFT, MR + r));
  };
  int next_group = 0, next_tile = 0;
  for (int g = 0; g < groups; g += 4) {
    clear_products();
    for (int t = 0; t < w.n_tiles; ++t) {
      if (++next_tile == w.n_tiles) next_tile = 0, next_group += 4;
      const bool more = next_group < groups;
      const std::uint8_t* const next =
          w.tiles + next_tile * w.stride + next_group * block_codes(K, QUADS);
      const auto ahead = [&](int i) KVPROOF_LAMBDA {
        const std::uint8_t* const src = next + i * block_codes(K, QUADS);
        if (more) decode_right<K>(src, QUADS, past.of(next_group + i), table, w.ring + i * RIGHT);
      };
      multiply_ring(w.a + t * LEFT, w.ring, ahead);
    }
    std::uint8_t* const p = products[g / 4 % 2];
    store_products(p, LEFT);
    if (g > 0) finish(g - 4);
  }
  if (groups > 0) finish(groups - 4);
}

template <int K, int MR>
void values(const TileWork& given) {
  const TileWork w = given;
  const Tables<I, K> table(*w.table);
  const ValuePasts<K> past(w.dim);
  int g = 0;
  if constexpr (!tile_blocks(K)) {
    g = w.dim / BLOCK_DIMS * 4;
    if (g > 0) values_by_fours<K, MR>(w, past, table, g);
  }
  for (; g < w.dim / 16; g += 2) values_by_twos<K, MR>(w, past, table, g);
}

// ---- two octets over decoded tiles --------------------------------------------------------------
//
// A left side is three tiles of 16 lines: those of each octet, and the high parts of both between
// them (see pair_high), which multiply fine entries. Products are in the same order, those of fine
// entries follow. So a right side with fine entries takes three products for two octets.

constexpr int HALF = PAIR * LINE;  // bytes of a tile of left sides or products

// Products with one right side: 0 and 1, with fine entries 2.
KVPROOF_INLINE void multiply_fine(const std::int8_t* left, const std::uint8_t* right) {
  _tile_loadd(3, left, LINE);
  _tile_loadd(6, right, LINE);
  _tile_dpbssd(0, 3, 6);
  _tile_loadd(4, left + HALF, LINE);
  _tile_dpbssd(1, 4, 6);
  _tile_loadd(5, left + HALF / 2, LINE);
  _tile_loadd(7, right + RIGHT, LINE);
  _tile_dpbssd(2, 5, 7);
}
// Products with two right sides: 0 and 1, 2 and 3.
KVPROOF_INLINE void multiply_twos(const std::int8_t* left, const std::uint8_t* right) {
  _tile_loadd(4, left, LINE);
  _tile_loadd(6, right, LINE);
  _tile_dpbssd(0, 4, 6);
  _tile_loadd(5, left + HALF, LINE);
  _tile_dpbssd(1, 5, 6);
  _tile_loadd(7, right + RIGHT, LINE);
  _tile_dpbssd(2, 4, 7);
  _tile_dpbssd(3, 5, 7);
}
// What multiplies right sides by ones (FINE) or twos.
template <bool FINE>
struct Pairs {
  static constexpr int SIDES = FINE ? 1 : 2;  // with products of 3 HALFs, or 2
  static constexpr int SIDE = FINE ? 2 * RIGHT : RIGHT, PRODUCTS = FINE ? 3 * HALF : 2 * HALF;

  static KVPROOF_INLINE void clear() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    if constexpr (!FINE) _tile_zero(3);
  }
  static KVPROOF_INLINE void multiply(const std::int8_t* left, const std::uint8_t* right) {
    if constexpr (FINE)
      multiply_fine(left, right);
    else
      multiply_twos(left, right);
  }
  static KVPROOF_INLINE void keep(std::uint8_t* products) {
    _tile_stored(0, products, LINE);
    _tile_stored(1, products + HALF, LINE);
    _tile_stored(2, products + 2 * HALF, LINE);
    if constexpr (!FINE) _tile_stored(3, products + 3 * HALF, LINE);
  }
  static KVPROOF_INLINE Ints low(const std::uint8_t* products, int r) {
    Ints x = product(products, pair_low(r));
    if constexpr (FINE) x += product(products, 2 * PAIR + r);
    return x;
  }
};

// Products are used while the next are made, and before those are stored: a load waits for a store
// at the same offset of another page, and this one for the matrix unit.
template <bool FINE>
void keys_decoded(const TileWork& given) {
  using P = Pairs<FINE>;
  const TileWork w = given;
  alignas(64) std::uint8_t products[2][P::SIDES * P::PRODUCTS];
  const int blocks = (w.dim + BLOCK_DIMS - 1) / BLOCK_DIMS, steps = w.n_tiles * 4 / P::SIDES;
  const auto finish = [&](int step) KVPROOF_LAMBDA {
    for (int i = 0; i < P::SIDES; ++i) {
      const int at = (step * P::SIDES + i) * 16;
      const std::uint8_t* const p = products[step % 2] + i * P::PRODUCTS;
      const Floats scale = load<Floats>(w.scales + at);
      for (int r = 0; r < PAIR; ++r)
        store(w.scores + r * SUPER + at,
              to_floats((product(p, pair_high(r)) << 7) + P::low(p, r)) * scale);
    }
  };
  for (int step = 0; step < steps; ++step) {
    const int lane = step * P::SIDES;
    const std::uint8_t* right =
        w.tiles + (std::ptrdiff_t(lane / 4) * blocks * 4 + lane % 4) * P::SIDE;
    P::clear();
    for (int kb = 0; kb < blocks; ++kb, right += 4 * P::SIDE)
      P::multiply(w.a + std::ptrdiff_t(kb) * 2 * HALF, right);
    if (step > 0) finish(step - 1);
    P::keep(products[step % 2]);
  }
  finish(steps - 1);
}

template <bool FINE>
void values_decoded(const TileWork& given) {
  using P = Pairs<FINE>;
  const TileWork w = given;
  alignas(64) std::uint8_t products[2][P::SIDES * P::PRODUCTS];
  const int steps = w.dim / 16 / P::SIDES;
  const auto finish = [&](int step) KVPROOF_LAMBDA {
    for (int i = 0; i < P::SIDES; ++i) {
      const std::uint8_t* const p = products[step % 2] + i * P::PRODUCTS;
      for (int r = 0; r < PAIR; ++r) {
        float* const o = w.out + std::ptrdiff_t(r) * w.dim + (step * P::SIDES + i) * 16;
        const Floats x = to_floats((product(p, pair_high(r)) << 8) + P::low(p, r));
        store(o, load<Floats>(o) * w.alpha[r] + x * w.step[r]);
      }
    }
  };
  for (int step = 0; step < steps; ++step) {
    const std::uint8_t* right = w.tiles + std::ptrdiff_t(step) * P::SIDES * P::SIDE;
    P::clear();
    for (int t = 0; t < w.n_tiles; ++t, right += std::ptrdiff_t(w.dim / 16) * P::SIDE)
      P::multiply(w.a + t * 2 * HALF, right);
    if (step > 0) finish(step - 1);
    P::keep(products[step % 2]);
  }
  finish(steps - 1);
}

template <int K, int MR, int AT>
constexpr void fill_width(TileKernels& t) {
  if constexpr (tile_blocks(K))
    t.keys[K][AT] = keys_of_blocks<K, MR>;
  else
    t.keys[K][AT] = keys_of_rows<K, MR>;
  t.values[K][AT] = values<K, MR>;
}
template <int K>
constexpr void fill_kind_amx(TileKernels& t) {
  fill_width<K, 1, 0>(t);
  fill_width<K, 2, 1>(t);
  fill_width<K, 4, 2>(t);
  fill_width<K, 8, 3>(t);
  t.decode_keys[K] = decode_keys<K>;
  t.decode_values[K] = decode_values<K>;
}
template <int... K>
constexpr void fill(TileKernels& t, std::integer_sequence<int, K...>) {
  (fill_kind_amx<K>(t), ...);
}

constexpr TileKernels make() {
  TileKernels t{};
  t.offset = I::OFFSET;
  t.split_keys = true;
  fill(t, TileKindList{});
  t.keys_decoded[0] = keys_decoded<false>;
  t.keys_decoded[1] = keys_decoded<true>;
  t.values_decoded[0] = values_decoded<false>;
  t.values_decoded[1] = values_decoded<true>;
  fill_rows<I>(t);
  t.begin = begin;
  t.end = end;
  return t;
}

}  // namespace

const TileKernels tiles_amx = make();

}  // namespace kvproof
#endif
