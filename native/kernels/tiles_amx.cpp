// Kernels over tiles for AMX (int8), with AVX-512 around it.
//
// The left side (queries or weights, high parts above low ones) and the products are tiles of 2 *
// rows lines; the right side is 64 dims or tokens by 16 lanes, decoded to a small ring in L1 just
// before it is multiplied, or once for all octets of a block of query rows.
//
// Registers: 0-5 have the shape of left sides and products, 6 and 7 that of right sides.
#if defined(__x86_64__)
#include "tiles_avx512.h"

#ifdef KVPROOF_EMULATED_AMX
#include "emulated_amx.h"
#endif

namespace kvproof {
namespace {

using I = Avx512Tiles<0>;
constexpr int RIGHT = QUADS * LINE;  // bytes of a right side
constexpr int RIGHTS = 4 * RIGHT;    // of the four of a block of keys, or of a group of values

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

// n quad rows of 16 lanes to a right side at `out`, its second table RIGHTS after it.
template <int K>
KVPROOF_INLINE void decode_right(const std::uint8_t* src, int n, const Tables<I, K>& table,
                                 std::uint8_t* out) {
  for (int h = 0; h < n / 8; ++h)
    visit8<I, K>(src, n, h, table, [&](auto quad, Bytes64 entry, Bytes64 fine) {
      store64(out + (8 * h + quad) * LINE, entry);
      if constexpr (tile_fine(K)) store64(out + RIGHTS + (8 * h + quad) * LINE, fine);
    });
}
// The right sides of a block of keys, and of a group of values over up to four tiles.
template <int K>
KVPROOF_INLINE void decode_keys_of(const TileWork& w, int t, int kb, const Tables<I, K>& table,
                                   std::uint8_t* out) {
  const int n = quads_of_block(w.dim, kb);
  for (int cg = 0; cg < 4; ++cg)
    decode_right<K>(key_block<K>(w.tiles + t * w.stride, kb, n, cg), n, table, out + cg * RIGHT);
}
template <int K>
KVPROOF_INLINE void decode_values_of(const TileWork& w, int g, const Tables<I, K>& table,
                                     std::uint8_t* out) {
  for (int t = 0; t < w.n_tiles; ++t)
    decode_right<K>(w.tiles + t * w.stride + g * block_codes(K, QUADS), QUADS, table,
                    out + t * RIGHT);
}
// Bytes of such a set of right sides.
constexpr int set_bytes(int kind) { return tile_fine(kind) ? 2 * RIGHTS : RIGHTS; }
static_assert(2 * set_bytes(T_TBQ4) <= int(RING));

template <int K>
void decode_keys(const TileWork& w, std::uint8_t* out) {
  const Tables<I, K> table(*w.table);
  for (int t = 0; t < w.n_tiles; ++t)
    for (int kb = 0; kb * BLOCK_DIMS < w.dim; ++kb, out += set_bytes(K))
      decode_keys_of<K>(w, t, kb, table, out);
}
template <int K>
void decode_values(const TileWork& w, std::uint8_t* out) {
  const Tables<I, K> table(*w.table);
  for (int g = 0; g < w.dim / 16; ++g) decode_values_of<K>(w, g, table, out + g * set_bytes(K));
}

template <int MR>
KVPROOF_INLINE Ints16 high_of(const std::uint8_t* products, int r) {
  return load64<Ints16>(products + r * LINE);
}
template <int MR>
KVPROOF_INLINE Ints16 low_of(const std::uint8_t* products, int r) {
  return load64<Ints16>(products + (MR + r) * LINE);
}

template <int K, int MR, bool DECODED>
void keys(const TileWork& w) {
  constexpr int PRODUCTS = 2 * MR * LINE;
  alignas(64) std::uint8_t products[8 * PRODUCTS];
  const Tables<I, K> table(*w.table);
  const int blocks = (w.dim + BLOCK_DIMS - 1) / BLOCK_DIMS;
  for (int t = 0; t < w.n_tiles; ++t) {
    if constexpr (!tile_blocks(K)) {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    }
    for (int kb = 0; kb < blocks; ++kb) {
      const std::uint8_t* right = w.tiles + (std::ptrdiff_t(t) * blocks + kb) * set_bytes(K);
      if constexpr (!DECODED) {
        std::uint8_t* const slot = w.ring + (kb + t) % 2 * set_bytes(K);
        decode_keys_of<K>(w, t, kb, table, slot);
        right = slot;
      }
      if constexpr (!tile_blocks(K)) {
        _tile_loadd(4, w.a + std::ptrdiff_t(kb) * PRODUCTS, LINE);
        _tile_loadd(6, right, LINE);
        _tile_dpbssd(0, 4, 6);
        _tile_loadd(7, right + RIGHT, LINE);
        _tile_dpbssd(1, 4, 7);
        _tile_loadd(6, right + 2 * RIGHT, LINE);
        _tile_dpbssd(2, 4, 6);
        _tile_loadd(7, right + 3 * RIGHT, LINE);
        _tile_dpbssd(3, 4, 7);
        continue;
      }
      for (int h = 0; h < quads_of_block(w.dim, kb) / 8; ++h) {
        const int b = 2 * kb + h;
        _tile_loadd(4, w.a + std::ptrdiff_t(b) * PRODUCTS, LINE);
        for (int pair = 0; pair < 2; ++pair) {
          const std::uint8_t* const one = right + 2 * pair * RIGHT;
          _tile_zero(0);
          _tile_zero(1);
          _tile_loadd(6, one, LINE);
          _tile_dpbssd(0, 4, 6);
          _tile_loadd(7, one + RIGHT, LINE);
          _tile_dpbssd(1, 4, 7);
          _tile_stored(0, products + 2 * pair * PRODUCTS, LINE);
          _tile_stored(1, products + (2 * pair + 1) * PRODUCTS, LINE);
          if constexpr (tile_fine(K)) {
            _tile_zero(2);
            _tile_zero(3);
            _tile_loadd(6, one + RIGHTS, LINE);
            _tile_dpbssd(2, 4, 6);
            _tile_loadd(7, one + RIGHTS + RIGHT, LINE);
            _tile_dpbssd(3, 4, 7);
            _tile_stored(2, products + (4 + 2 * pair) * PRODUCTS, LINE);
            _tile_stored(3, products + (5 + 2 * pair) * PRODUCTS, LINE);
          }
        }
        for (int cg = 0; cg < 4; ++cg) {
          const int at = t * TILE + cg * 16;
          const std::uint8_t* const p = products + cg * PRODUCTS;
          const Floats16 scale = load64<Floats16>(w.scales + b * SUPER + at);
          for (int r = 0; r < MR; ++r) {
            Ints16 low = low_of<MR>(p, r);
            if constexpr (tile_fine(K)) low += high_of<MR>(p + 4 * PRODUCTS, r);
            float* const to = w.scores + r * SUPER + at;
            const Floats16 x = to_floats((high_of<MR>(p, r) << 7) + low) * scale;
            store64(to, b == 0 ? x : load64<Floats16>(to) + x);
          }
        }
      }
    }
    if constexpr (!tile_blocks(K)) {
      _tile_stored(0, products, LINE);
      _tile_stored(1, products + PRODUCTS, LINE);
      _tile_stored(2, products + 2 * PRODUCTS, LINE);
      _tile_stored(3, products + 3 * PRODUCTS, LINE);
      for (int cg = 0; cg < 4; ++cg) {
        const int at = t * TILE + cg * 16;
        const std::uint8_t* const p = products + cg * PRODUCTS;
        const Floats16 scale = load64<Floats16>(w.scales + at);
        for (int r = 0; r < MR; ++r)
          store64(w.scores + r * SUPER + at,
                  to_floats((high_of<MR>(p, r) << 7) + low_of<MR>(p, r)) * scale);
      }
    }
  }
}

template <int K, int MR, bool DECODED>
void values(const TileWork& w) {
  constexpr int LEFT = 2 * MR * LINE;
  alignas(64) std::uint8_t products[2][2 * LEFT];
  const Tables<I, K> table(*w.table);
  const int n = w.n_tiles;
  for (int g = 0; g < w.dim / 16; ++g) {
    const int b = tile_blocks(K) ? g / 2 : 0;
    if (g == 0 || (tile_blocks(K) && g % 2 == 0)) {
      const std::int8_t* const a = w.a + std::ptrdiff_t(b) * (SUPER / TILE) * LEFT;
      _tile_loadd(0, a, LINE);
      if (n > 1) _tile_loadd(1, a + LEFT, LINE);
      if (n > 2) _tile_loadd(2, a + 2 * LEFT, LINE);
      if (n > 3) _tile_loadd(3, a + 3 * LEFT, LINE);
    }
    const std::uint8_t* right = w.tiles + std::ptrdiff_t(g) * set_bytes(K);
    if constexpr (!DECODED) {
      std::uint8_t* const slot = w.ring + g % 2 * set_bytes(K);
      decode_values_of<K>(w, g, table, slot);
      right = slot;
    }
    _tile_zero(4);
    _tile_loadd(6, right, LINE);
    _tile_dpbssd(4, 0, 6);
    if (n > 1) {
      _tile_loadd(7, right + RIGHT, LINE);
      _tile_dpbssd(4, 1, 7);
    }
    if (n > 2) {
      _tile_loadd(6, right + 2 * RIGHT, LINE);
      _tile_dpbssd(4, 2, 6);
    }
    if (n > 3) {
      _tile_loadd(7, right + 3 * RIGHT, LINE);
      _tile_dpbssd(4, 3, 7);
    }
    std::uint8_t* const p = products[g % 2];
    _tile_stored(4, p, LINE);
    if constexpr (tile_fine(K)) {
      const std::uint8_t* const fine = right + RIGHTS;
      _tile_zero(5);
      _tile_loadd(6, fine, LINE);
      _tile_dpbssd(5, 0, 6);
      if (n > 1) {
        _tile_loadd(7, fine + RIGHT, LINE);
        _tile_dpbssd(5, 1, 7);
      }
      if (n > 2) {
        _tile_loadd(6, fine + 2 * RIGHT, LINE);
        _tile_dpbssd(5, 2, 6);
      }
      if (n > 3) {
        _tile_loadd(7, fine + 3 * RIGHT, LINE);
        _tile_dpbssd(5, 3, 7);
      }
      _tile_stored(5, p + LEFT, LINE);
    }
    for (int r = 0; r < MR; ++r) {
      Ints16 low = low_of<MR>(p, r);
      if constexpr (tile_fine(K)) low += high_of<MR>(p + LEFT, r);
      add_values(w, r, g, b, high_of<MR>(p, r), low);
    }
  }
}

template <int K, int MR, int AT>
constexpr void fill_width(TileKernels& t) {
  t.keys[K][AT] = keys<K, MR, false>;
  t.keys_decoded[K][AT] = keys<K, MR, true>;
  t.values[K][AT] = values<K, MR, false>;
  t.values_decoded[K][AT] = values<K, MR, true>;
}
template <int... K>
constexpr void fill(TileKernels& t, std::integer_sequence<int, K...>) {
  ((fill_width<K, 1, 0>(t), fill_width<K, 2, 1>(t), fill_width<K, 4, 2>(t), fill_width<K, 8, 3>(t),
    t.decode_keys[K] = decode_keys<K>, t.decode_values[K] = decode_values<K>),
   ...);
}

constexpr TileKernels make() {
  TileKernels t{};
  t.name = "amx";
  t.offset = I::OFFSET;
  t.split_keys = true;
  fill(t, TileKindList{});
  fill_rows<I>(t);
  t.begin = begin;
  t.end = end;
  return t;
}

}  // namespace

const TileKernels tiles_amx = make();

}  // namespace kvproof
#endif
