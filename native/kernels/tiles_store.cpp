// Rows of a format to slots of tiles and back. Words of four codes are masked and shifted together,
// which takes a little-endian machine.
#include "tiles_store.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <mutex>

#include "pool.h"

namespace kvproof {
namespace {

static_assert(std::endian::native == std::endian::little);

constexpr int QUAD = 16;       // tokens (keys) or dimensions (values) side by side in a line
constexpr int KEY_BLOCK = 64;  // dimensions of keys whose codes lie together
// Fewer bytes than this are not worth a second thread.
constexpr std::ptrdiff_t SERIAL_BYTES = 1 << 16;

template <class T>
T load(const std::uint8_t* p) {
  T x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
template <class T>
void store(std::uint8_t* p, T x) {
  std::memcpy(p, &x, sizeof x);
}

constexpr std::uint32_t EACH32 = 0x01010101;
constexpr std::uint64_t EACH64 = 0x0101010101010101;

// ---- codes of a row, a byte each, and back ------------------------------------------------------

// Bits, least significant first: eight to the bit `at` of eight bytes.
std::uint64_t spread_bits(std::uint8_t bits) {
  const std::uint64_t each = bits * EACH64 & 0x8040201008040201;
  return (each + 0x7f * EACH64) >> 7 & EACH64;
}
std::uint8_t gather_bits(std::uint64_t bytes) {
  return std::uint8_t(bytes * 0x0102040810204080 >> 56);
}

// A stream of 3-bit codes: eight of them are three bytes.
std::uint64_t spread_threes(std::uint32_t x) {
  std::uint64_t y = (x & 0xfff) | std::uint64_t(x & 0xfff000) << 20;
  y = (y & 0x0000003f0000003f) | (y & 0x00000fc000000fc0) << 10;
  return (y & 0x0007000700070007) | (y & 0x0038003800380038) << 5;
}
std::uint32_t gather_threes(std::uint64_t y) {
  y = (y & 0x0007000700070007) | (y >> 5 & 0x0038003800380038);
  y = (y & 0x0000003f0000003f) | (y >> 10 & 0x00000fc000000fc0);
  return std::uint32_t((y & 0xfff) | (y >> 20 & 0xfff000));
}

// Groups of 32 codes are 16 bytes of nibbles or 8 of pairs: byte j holds codes j, j + 16, or j,
// j + 8, j + 16, j + 24.
void nibbles_to_codes(const std::uint8_t* from, int n, std::uint8_t* code) {
  for (int g = 0; g < n; g += GROUP, from += 16)
    for (int j = 0; j < 16; ++j) {
      code[g + j] = from[j] & 15;
      code[g + 16 + j] = from[j] >> 4;
    }
}
void codes_to_nibbles(const std::uint8_t* code, int n, std::uint8_t* to) {
  for (int g = 0; g < n; g += GROUP, to += 16)
    for (int j = 0; j < 16; ++j) to[j] = std::uint8_t((code[g + j] & 15) | code[g + 16 + j] << 4);
}
void pairs_to_codes(const std::uint8_t* from, int n, std::uint8_t* code) {
  for (int g = 0; g < n; g += GROUP, from += 8) {
    const auto x = load<std::uint64_t>(from);
    for (int p = 0; p < 4; ++p) store(code + g + 8 * p, x >> 2 * p & 3 * EACH64);
  }
}
void codes_to_pairs(const std::uint8_t* code, int n, std::uint8_t* to) {
  for (int g = 0; g < n; g += GROUP, to += 8) {
    std::uint64_t x = 0;
    for (int p = 0; p < 4; ++p) x |= (load<std::uint64_t>(code + g + 8 * p) & 3 * EACH64) << 2 * p;
    store(to, x);
  }
}
void add_bits(const std::uint8_t* from, int n, int at, std::uint8_t* code) {
  for (int i = 0; i < n; i += 8)
    store(code + i, load<std::uint64_t>(code + i) | spread_bits(from[i / 8]) << at);
}
void codes_to_bits(const std::uint8_t* code, int n, int at, std::uint8_t* to) {
  for (int i = 0; i < n; i += 8)
    to[i / 8] = gather_bits(load<std::uint64_t>(code + i) >> at & EACH64);
}

// Values of trellis formats. Rows have m's low bits, four steps a byte; its highest bit, if it has
// three, and the path, eight a byte. A code has them in that order.
std::uint64_t spread_pairs(std::uint64_t x) {
  x = (x | x << 24) & 0x000000ff000000ff;
  x = (x | x << 12) & 0x000f000f000f000f;
  return (x | x << 6) & 3 * EACH64;
}
std::uint16_t gather_pairs(std::uint64_t x) {
  x = (x | x >> 6) & 0x000f000f000f000f;
  x = (x | x >> 12) & 0x000000ff000000ff;
  return std::uint16_t(x | x >> 24);
}
void trellis_to_codes(int bits, const std::uint8_t* row, int dim, std::uint8_t* code) {
  const std::uint8_t *const second = row + dim / 4, *const third = second + dim / 8;
  alignas(8) std::uint8_t step[WIDEST_TILE];
  for (int t = 0; t < dim; t += 8) {
    std::uint64_t x = spread_pairs(load<std::uint16_t>(row + t / 4)) | spread_bits(second[t / 8])
                                                                           << 2;
    if (bits == 4) x |= spread_bits(third[t / 8]) << 3;
    store(step + t, x);
  }
  each_step(dim, true, [&](int t, int d) { code[d] = step[t]; });
}
void codes_to_trellis(int bits, const std::uint8_t* code, int dim, std::uint8_t* row) {
  std::uint8_t *const second = row + dim / 4, *const third = second + dim / 8;
  alignas(8) std::uint8_t step[WIDEST_TILE];
  each_step(dim, true, [&](int t, int d) { step[t] = code[d]; });
  for (int t = 0; t < dim; t += 8) {
    const auto x = load<std::uint64_t>(step + t);
    store(row + t / 4, gather_pairs(x & 3 * EACH64));
    second[t / 8] = gather_bits(x >> 2 & EACH64);
    if (bits == 4) third[t / 8] = gather_bits(x >> 3 & EACH64);
  }
}

void codes_of(int fmt, const std::uint8_t* row, int dim, std::uint8_t* code) {
  switch (fmt) {
    case TCQ4:
    case TCQ4_64:
    case TCQ3:
      trellis_to_codes(code_bits(fmt), row, dim, code);
      return;
    case TQ8:
      std::memcpy(code, row, std::size_t(dim));
      return;
    case TQ5:
      nibbles_to_codes(row, dim, code);
      add_bits(row + dim / 2, dim, 4, code);
      return;
    case TQ4:
      nibbles_to_codes(row, dim, code);
      return;
    case TQ3:
      pairs_to_codes(row, dim, code);
      add_bits(row + dim / 4, dim, 2, code);
      return;
    case TQ2:
      pairs_to_codes(row, dim, code);
      return;
    default:
      break;
  }
  for (int d = 0; d < dim; d += GROUP, code += GROUP, row += block_bytes(fmt)) {
    const std::uint8_t* const from = row + 2;
    if (fmt == Q8_0) {
      std::memcpy(code, from, GROUP);
    } else if (fmt == TBQ3_0) {
      for (int i = 0; i < GROUP / 8; ++i) {
        const std::uint8_t* const b = from + 3 * i;
        store(code + 8 * i, spread_threes(std::uint32_t(b[0] | b[1] << 8 | b[2] << 16)));
      }
    } else {
      nibbles_to_codes(from, GROUP, code);
    }
  }
}

void row_of(int fmt, const std::uint8_t* code, int dim, std::uint8_t* row) {
  switch (fmt) {
    case TCQ4:
    case TCQ4_64:
    case TCQ3:
      codes_to_trellis(code_bits(fmt), code, dim, row);
      return;
    case TQ8:
      std::memcpy(row, code, std::size_t(dim));
      return;
    case TQ5:
      codes_to_nibbles(code, dim, row);
      codes_to_bits(code, dim, 4, row + dim / 2);
      return;
    case TQ4:
      codes_to_nibbles(code, dim, row);
      return;
    case TQ3:
      codes_to_pairs(code, dim, row);
      codes_to_bits(code, dim, 2, row + dim / 4);
      return;
    case TQ2:
      codes_to_pairs(code, dim, row);
      return;
    default:
      break;
  }
  for (int d = 0; d < dim; d += GROUP, code += GROUP, row += block_bytes(fmt)) {
    std::uint8_t* const to = row + 2;
    if (fmt == Q8_0) {
      std::memcpy(to, code, GROUP);
    } else if (fmt == TBQ3_0) {
      for (int i = 0; i < GROUP / 8; ++i) {
        const std::uint32_t x = gather_threes(load<std::uint64_t>(code + 8 * i));
        for (int b = 0; b < 3; ++b) to[3 * i + b] = std::uint8_t(x >> 8 * b);
      }
    } else {
      codes_to_nibbles(code, GROUP, to);
    }
  }
}

bool row_scaled(int fmt) { return path_of(fmt) == ROW; }
// Where a row's scale of 32 values, or of all, is: unit_bytes of it.
std::ptrdiff_t scale_of_group(int fmt, int dim, int g) {
  return row_scaled(fmt) ? row_bytes(fmt, dim) - unit_bytes(fmt)
                         : std::ptrdiff_t(g) * block_bytes(fmt);
}
int scales_of(int fmt, int dim) { return row_scaled(fmt) ? 1 : dim / GROUP; }

// ---- codes of a row in its tile -----------------------------------------------------------------

// Of the 8 / B quad rows of a line: which B bits are theirs. Trellis formats have an order of their
// own for the path and for m's highest bit.
constexpr int IN_ORDER[] = {0, 1, 2, 3, 4, 5, 6, 7};
constexpr int OF_PATH[] = {0, 2, 4, 6, 1, 3, 5, 7}, OF_HIGHEST[] = {0, 2, 1, 3, 4, 6, 5, 7};
const int* places_of(int fmt, int plane) {
  if (!has_trellis(fmt) || plane == 0) return IN_ORDER;
  return plane + 1 == planes_of(fmt).count ? OF_PATH : OF_HIGHEST;
}

// B bits of each code from bit `low` on. Keys: a line holds 8 / B words of four dimensions of a
// token, so that its 4 bytes there are its own.
template <int B>
void put_key(const std::uint8_t* code, int low, int n, std::uint8_t* at) {
  constexpr int M = 8 / B;
  constexpr std::uint32_t MASK = EACH32 * ((1 << B) - 1);
  for (int l = 0; l < n / 4 / M; ++l, at += LINE) {
    std::uint32_t word = 0;
    for (int k = 0; k < M; ++k)
      word |= (load<std::uint32_t>(code + 4 * (l * M + k)) >> low & MASK) << B * k;
    store(at, word);
  }
}
template <int B>
void take_key(const std::uint8_t* at, int low, int n, std::uint8_t* code) {
  constexpr int M = 8 / B;
  constexpr std::uint32_t MASK = EACH32 * ((1 << B) - 1);
  for (int l = 0; l < n / 4 / M; ++l, at += LINE)
    for (int k = 0; k < M; ++k) {
      std::uint8_t* const to = code + 4 * (l * M + k);
      store(to, load<std::uint32_t>(to) | (load<std::uint32_t>(at) >> B * k & MASK) << low);
    }
}

// Keys of trellis formats, a plane from where it is in the row: eight steps that follow each other
// lie in one byte of a line, those of a plane of two bits in two, even and odd ones.
std::uint32_t part_pairs(std::uint32_t x) {
  x = (x & 0x3333) | (x & 0xcccc) << 14;
  x = (x | x >> 2) & 0x0f0f0f0f;
  return (x | x >> 4) & 0x00ff00ff;
}
std::uint32_t join_pairs(std::uint32_t x) {
  x = (x | x << 4) & 0x0f0f0f0f;
  x = (x | x << 2) & 0x33333333;
  return (x & 0x3333) | (x >> 14 & 0xcccc);
}
// From the order OF_PATH to OF_HIGHEST, and back.
std::uint32_t exchange_bits(std::uint32_t x) {
  const std::uint32_t both = (x ^ x >> 3) & 0x0a * EACH32;
  return x ^ both ^ both << 3;
}
void put_trellis_key(const std::uint8_t* from, int n, int bits, const int* places,
                     std::uint8_t* at) {
  const int halves = n / 32;
  for (int h = 0; h < halves; ++h) {
    std::uint32_t word[2] = {};
    for (int j = 0; j < 4; ++j) {
      const std::uint8_t* const eight = from + bits * (halves * j + h);
      if (bits == 2) {
        const std::uint32_t x = part_pairs(load<std::uint16_t>(eight));
        word[0] |= (x & 0xff) << 8 * j;
        word[1] |= x >> 16 << 8 * j;
      } else {
        word[0] |= std::uint32_t(*eight) << 8 * j;
      }
    }
    if (places == OF_HIGHEST) word[0] = exchange_bits(word[0]);
    for (int l = 0; l < bits; ++l) store(at + (bits * h + l) * LINE, word[l]);
  }
}
void take_trellis_key(const std::uint8_t* at, int n, int bits, const int* places,
                      std::uint8_t* to) {
  const int halves = n / 32;
  for (int h = 0; h < halves; ++h) {
    std::uint32_t word[2] = {};
    for (int l = 0; l < bits; ++l) word[l] = load<std::uint32_t>(at + (bits * h + l) * LINE);
    if (places == OF_HIGHEST) word[0] = exchange_bits(word[0]);
    for (int j = 0; j < 4; ++j) {
      std::uint8_t* const eight = to + bits * (halves * j + h);
      const std::uint32_t low = word[0] >> 8 * j & 0xff;
      if (bits == 2)
        store(eight, std::uint16_t(join_pairs(low | (word[1] >> 8 * j & 0xff) << 16)));
      else
        *eight = std::uint8_t(low);
    }
  }
}
// Where in a row the bytes of a plane begin, for the steps from d on.
std::ptrdiff_t plane_at(int dim, int d, int bits, int low) { return (dim * low + d * bits) / 8; }

// Values: a line holds the codes of 4 * 8 / B tokens in 16 dimensions, four bytes each; those of
// one token are B bits of each of the 16 words, `shift` bits up.
void put_value(const std::uint8_t* code, int low, int bits, int shift, std::uint8_t* at) {
  const std::uint32_t mask = (1u << bits) - 1, keep = ~(mask << shift);
  std::uint32_t word[QUAD];
  std::memcpy(word, at, LINE);
  for (int i = 0; i < QUAD; ++i)
    word[i] = (word[i] & keep) | (std::uint32_t(code[i]) >> low & mask) << shift;
  std::memcpy(at, word, LINE);
}
void take_value(const std::uint8_t* at, int low, int bits, int shift, std::uint8_t* code) {
  const std::uint32_t mask = (1u << bits) - 1;
  std::uint32_t word[QUAD];
  std::memcpy(word, at, LINE);
  for (int i = 0; i < QUAD; ++i) code[i] |= std::uint8_t((word[i] >> shift & mask) << low);
}

// Calls line(first dimension, dimensions, plane, low, where in the tile) for every plane of every
// block that holds codes of slot t of a tile of keys.
template <class F>
void key_planes(int fmt, int dim, int t, const F& line) {
  const Planes planes = planes_of(fmt);
  const int bits = planes.all();
  for (int d = 0; d < dim; d += KEY_BLOCK) {
    const int n = std::min(KEY_BLOCK, dim - d);
    const std::ptrdiff_t at =
        std::ptrdiff_t(TILE / 8) * d * bits + t / QUAD * (QUAD / 8) * n * bits + t % QUAD * 4;
    for (int p = 0, low = 0; p < planes.count; low += planes.bits[p++])
      line(d, n, p, low, at + QUAD / 8 * n * low);
  }
}
// The same of a tile of values, with the shift of the slot's codes in words.
template <class F>
void value_planes(int fmt, int dim, int t, const F& line) {
  constexpr int BYTE_OF[] = {0, 2, 1, 3};  // of the tokens r, r + 16, r + 32, r + 48 in a word
  const Planes planes = planes_of(fmt);
  const int bits = planes.all(), r = t % QUAD;
  for (int p = 0, low = 0; p < planes.count; low += planes.bits[p++]) {
    const int b = planes.bits[p], a_line = 8 / b;
    const int shift = 8 * BYTE_OF[t / QUAD] + places_of(fmt, p)[r % a_line] * b;
    const std::ptrdiff_t at = TILE / 8 * QUAD * low + r / a_line * LINE;
    for (int d = 0; d < dim; d += QUAD)
      line(d, b, low, shift, at + std::ptrdiff_t(TILE / 8) * d * bits);
  }
}

void put_row(const TileBuffer& tiles, const std::uint8_t* row, int t, std::uint8_t* tile) {
  const int fmt = tiles.fmt, dim = tiles.dim;
  if (has_trellis(fmt) && !tiles.values) {
    key_planes(fmt, dim, t, [&](int d, int n, int plane, int low, std::ptrdiff_t at) {
      const int b = planes_of(fmt).bits[plane];
      put_trellis_key(row + plane_at(dim, d, b, low), n, b, places_of(fmt, plane), tile + at);
    });
  } else {
    alignas(64) std::uint8_t code[WIDEST_TILE];
    codes_of(fmt, row, dim, code);
    if (tiles.values)
      value_planes(fmt, dim, t, [&](int d, int b, int low, int shift, std::ptrdiff_t at) {
        put_value(code + d, low, b, shift, tile + at);
      });
    else
      key_planes(fmt, dim, t, [&](int d, int n, int plane, int low, std::ptrdiff_t at) {
        const int b = planes_of(fmt).bits[plane];
        const auto put = b == 8   ? put_key<8>
                         : b == 4 ? put_key<4>
                         : b == 2 ? put_key<2>
                                  : put_key<1>;
        put(code + d, low, n, tile + at);
      });
  }
  const int size = unit_bytes(fmt);
  std::uint8_t* scale = tile + tile_scales(fmt, dim) + size * t;
  for (int g = 0; g < scales_of(fmt, dim); ++g, scale += size * TILE)
    std::memcpy(scale, row + scale_of_group(fmt, dim, g), std::size_t(size));
}

void take_row(const TileBuffer& tiles, const std::uint8_t* tile, int t, std::uint8_t* row) {
  const int fmt = tiles.fmt, dim = tiles.dim;
  if (has_trellis(fmt) && !tiles.values) {
    key_planes(fmt, dim, t, [&](int d, int n, int plane, int low, std::ptrdiff_t at) {
      const int b = planes_of(fmt).bits[plane];
      take_trellis_key(tile + at, n, b, places_of(fmt, plane), row + plane_at(dim, d, b, low));
    });
  } else {
    alignas(64) std::uint8_t code[WIDEST_TILE];
    std::memset(code, 0, std::size_t(dim));
    if (tiles.values)
      value_planes(fmt, dim, t, [&](int d, int b, int low, int shift, std::ptrdiff_t at) {
        take_value(tile + at, low, b, shift, code + d);
      });
    else
      key_planes(fmt, dim, t, [&](int d, int n, int plane, int low, std::ptrdiff_t at) {
        const int b = planes_of(fmt).bits[plane];
        const auto take = b == 8   ? take_key<8>
                          : b == 4 ? take_key<4>
                          : b == 2 ? take_key<2>
                                   : take_key<1>;
        take(tile + at, low, n, code + d);
      });
    row_of(fmt, code, dim, row);
  }
  const int size = unit_bytes(fmt);
  const std::uint8_t* scale = tile + tile_scales(fmt, dim) + size * t;
  for (int g = 0; g < scales_of(fmt, dim); ++g, scale += size * TILE)
    std::memcpy(row + scale_of_group(fmt, dim, g), scale, std::size_t(size));
}

// Calls each(row, tile, slot) for n rows from slot `at` on, tile by tile, on `threads` threads.
template <class Byte, class F>
void each_row(int threads, const RowBuffer<Byte>& rows, std::ptrdiff_t n, const TileBuffer& tiles,
              std::ptrdiff_t at, const F& each) {
  const std::ptrdiff_t bytes = tile_bytes(tiles.fmt, tiles.dim);
  const std::ptrdiff_t first = at / TILE, last = (at + n + TILE - 1) / TILE;
  const auto work = [&](std::ptrdiff_t tile, int head) {
    std::uint8_t* const where = tiles.base + head * tiles.head_stride + tile * bytes;
    const std::ptrdiff_t begin = std::max(at, tile * TILE),
                         end = std::min(at + n, (tile + 1) * TILE);
    for (std::ptrdiff_t t = begin; t < end; ++t)
      each(rows.base + (t - at) * rows.token_stride + head * rows.head_stride, where,
           int(t - tile * TILE));
  };
  if (threads <= 1 || n * tiles.heads * bytes / TILE < SERIAL_BYTES) {
    for (std::ptrdiff_t tile = first; tile < last; ++tile)
      for (int head = 0; head < tiles.heads; ++head) work(tile, head);
    return;
  }
  Pool& pool = Pool::get();
  std::lock_guard<std::mutex> hold(pool.gate());
  pool.run(int(last - first) * tiles.heads, threads,
           [&](int task, int) { work(first + task / tiles.heads, task % tiles.heads); });
}

}  // namespace

bool has_tiles(int fmt, int dim) {
  return planes_of(fmt).count && dim > 0 && dim % GROUP == 0 && dim <= WIDEST_TILE;
}

std::ptrdiff_t pack(int threads, const RowBuffer<const std::uint8_t>& rows, std::ptrdiff_t n,
                    const TileBuffer& tiles, std::ptrdiff_t at) {
  const int fmt = tiles.fmt, dim = tiles.dim;
  for (std::ptrdiff_t t = 0; t < n && !has_trellis(fmt); ++t)  // all their units are finite
    for (int head = 0; head < tiles.heads; ++head) {
      const std::uint8_t* const row = rows.base + t * rows.token_stride + head * rows.head_stride;
      for (int g = 0; g < scales_of(fmt, dim); ++g)
        if ((~load<std::uint16_t>(row + scale_of_group(fmt, dim, g)) & 0x7c00) == 0)
          return t * tiles.heads + head;
    }
  each_row(threads, rows, n, tiles, at, [&](const std::uint8_t* row, std::uint8_t* tile, int t) {
    put_row(tiles, row, t, tile);
  });
  return -1;
}

void unpack(int threads, const TileBuffer& tiles, std::ptrdiff_t first, std::ptrdiff_t n,
            const RowBuffer<std::uint8_t>& rows) {
  each_row(threads, rows, n, tiles, first, [&](std::uint8_t* row, const std::uint8_t* tile, int t) {
    take_row(tiles, tile, t, row);
  });
}

}  // namespace kvproof
