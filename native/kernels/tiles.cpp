// Attention over tiles: tasks, splits, masks and merging around the kernels of tiles_leaf.h.
//
// A task is (KV head, block of query rows, chunk of tokens), as in attention.cpp. A block has up to
// BLOCK_ROWS rows, multiplied eight at a time; sets with a matrix unit decode the tiles of a step
// once for up to SHARED_ROWS of them, multiplied sixteen at a time. Tiles that no row of an octet
// sees are skipped. Chunks depend on the shapes only, and are merged in order: any number of
// threads gives the same bytes.
#include "tiles.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstring>
#include <mutex>
#include <vector>

#include "blocks.h"
#include "pool.h"

namespace kvproof {
namespace {

constexpr int BLOCK_ROWS = 64, SHARED_ROWS = 128;
constexpr int SMALLEST_CHUNK = 1024;
constexpr int TILES = SUPER / TILE;

// Entries by the bits that a lookup sees; a second entry is worth `second` of the first's units.
TileTable make_table(int fmt, const Book& book, int offset, float second) {
  const int kind = tile_kind(fmt), low = low_bits(kind);
  TileTable t;
  t.scale = 1;
  if (low == 8) return t;
  float largest = 0;
  for (int i = 0; i < book.count; ++i) largest = std::max(largest, std::fabs(book.value[i]));
  if (tile_fine(kind)) t.scale = 127 / largest;
  for (int copy = 0; copy < 4; ++copy)
    for (int i = 0; i < 64; ++i) {
      int code = i & ((1 << low) - 1);
      if (top_bit(kind)) code |= (i >> (low + copy) & 1) << low;
      if (tile_trellis(kind))  // entry 4 m + subset
        code = (code & 16) | (code & 3) << 2 | (code >> 1 & 2) | (code >> 3 & 1);
      const float value = book.value[code % book.count] * t.scale, entry = std::nearbyint(value);
      const float rest = std::clamp(std::nearbyint((value - entry) * second), -127.f, 127.f);
      t.entry[copy][i] = std::uint8_t(int(entry) + offset);
      t.fine[copy][i] = std::uint8_t(int(rest) + offset);
    }
  return t;
}
// Of block formats that are decoded to rows: see DECODED. Integer entries have low bytes of zero.
TileTable make_wide_table(int fmt, const Book& book) {
  const int kind = tile_kind(fmt), low = low_bits(kind);
  TileTable t;
  float factor = 256;
  if (low != 8) {
    float largest = 0;
    for (int i = 0; i < book.count; ++i) largest = std::max(largest, std::fabs(book.value[i]));
    if (tile_fine(kind))
      factor = 32767 / largest;
    else
      while (2 * factor * largest <= 32768) factor *= 2;
    for (int copy = 0; copy < 4; ++copy)
      for (int i = 0; i < 64; ++i) {
        int code = i & ((1 << low) - 1);
        if (top_bit(kind)) code |= (i >> (low + copy) & 1) << low;
        const int entry = int(std::nearbyint(book.value[code % book.count] * factor));
        t.entry[copy][i] = std::uint8_t(entry >> 8);
        t.fine[copy][i] = std::uint8_t(entry);
      }
  }
  t.scale = factor * DECODED;
  return t;
}

// The value of a row that each dimension of a tile holds; empty where it is the one at its place.
std::vector<std::uint16_t> order_of(const TileSide& side, bool values) {
  std::vector<std::uint16_t> order;
  if (!has_trellis(side.fmt)) return order;
  order.resize(std::size_t(side.dim));
  each_step(side.dim, values, [&](int t, int d) {  // time order: see formats/tcq.py
    order[std::size_t(d)] = std::uint16_t(t / GROUP * GROUP + t % 4 * 8 + t % GROUP / 4);
  });
  return order;
}

// Made once for each format, side and kind of entries: books of these formats never change.
const TileTable& table_of(const TileSide& side, int offset, bool values, bool wide) {
  static std::array<std::array<TileTable, 5>, FORMATS> tables;
  static std::array<std::array<std::once_flag, 5>, FORMATS> made;
  const std::size_t fmt = std::size_t(side.fmt),
                    at = wide ? 4 : std::size_t(2 * (offset != 0) + values);
  std::call_once(made[fmt][at], [&] {
    tables[fmt][at] = wide ? make_wide_table(side.fmt, *side.book)
                           : make_table(side.fmt, *side.book, offset, values ? 256.f : 128.f);
  });
  return tables[fmt][at];
}

class TileAttention : Blocks {
 public:
  TileAttention(const Kernels& isa, const TileKernels& tiles, const Query& q, const TileSide& keys,
                const TileSide& values, Mask mask, const Offsets& offsets, float scale, float* out,
                float* lse)
      : Blocks(q, keys.heads, keys.n, keys.first, mask, offsets,
               std::min(q.n * (q.heads / keys.heads),
                        tiles.decode_keys[tile_kind(keys.fmt)] ? SHARED_ROWS : BLOCK_ROWS),
               values.dim, values.dim, out, lse),
        isa_(isa),
        tiles_(tiles),
        keys_(keys),
        values_(values),
        factor_(scale * LOG2_E),
        key_kind_(tile_kind(keys.fmt)),
        value_kind_(tile_kind(values.fmt)),
        shared_(block_rows_ > OCTET && tiles.decode_keys[key_kind_]),
        key_table_(table_of(keys, tiles.offset, false, shared_ && tile_blocks(key_kind_))),
        value_table_(table_of(values, tiles.offset, true, shared_ && tile_blocks(value_kind_))),
        key_spin_({keys.fmt, keys.book}, keys.dim),
        value_spin_({values.fmt, values.book}, values.dim),
        key_order_(order_of(keys, false)),
        value_order_(order_of(values, true)),
        width_(block_rows_ > 4   ? 3
               : block_rows_ > 2 ? 2
                                 : block_rows_ - 1),
        at_once_(shared_ ? 2 : 1),
        octets_(up((block_rows_ + OCTET - 1) / OCTET, at_once_)),
        stored_key_scales_(tile_blocks(key_kind_) ? keys.dim / GROUP : 1),
        stored_value_scales_(tile_blocks(value_kind_) ? values.dim / GROUP : 1),
        key_scales_(shared_ ? 1 : stored_key_scales_),
        value_scales_(shared_ ? 1 : stored_value_scales_),
        weights_of_rows_(shared_ || !tile_blocks(value_kind_)),
        halves_(tiles.split_keys && tile_blocks(key_kind_) && !shared_),
        left_blocks_(halves_ ? keys.dim / GROUP : up(keys.dim, BLOCK_DIMS) / BLOCK_DIMS) {
    cut(SMALLEST_CHUNK, SUPER, TILE);
  }

  void run(int threads) {
    Pool& pool = Pool::get();
    std::lock_guard<std::mutex> hold(pool.gate());
    const int heads = keys_.heads, tasks = heads * blocks_ * chunks_;
    threads = worth(threads, keys_.dim + values_.dim);
    Carver measure;
    Worker layout;
    carve(measure, layout);
    const std::size_t bytes = measure.used();
    for (int i = 0; i < std::max(1, threads); ++i) pool.scratch(i).at_least(bytes);
    const auto worker_of = [&](int worker) {
      Worker w;
      Carver c(pool.scratch(worker).at_least(bytes));
      carve(c, w);
      return w;
    };
    if (chunks_ > 1) {  // queries are prepared once for all chunks
      std::vector<Prepared> prepared(std::size_t(heads * blocks_), Prepared{});
      const auto share = [&](Carver c) {
        carve_partials(c);
        for (Prepared& p : prepared) carve(c, p);
        return c.used();
      };
      share(Carver(pool.shared().at_least(share(Carver()))));
      prepared_ = std::move(prepared);
      pool.run(heads * blocks_, threads,
               [&](int i, int) { prepare(i / blocks_, i % blocks_, prepared_[std::size_t(i)]); });
    }
    pool.run(tasks, threads, [&](int task, int worker) {
      Worker w = worker_of(worker);
      // Chunks of a head are neighbours in memory.
      const int chunk = task % chunks_, rest = task / chunks_;
      if (tiles_.begin) tiles_.begin(1 << width_);
      chunk_task(rest / blocks_, rest % blocks_, chunk, w);
      if (tiles_.end) tiles_.end();
    });
    if (chunks_ > 1)
      pool.run(heads * rows_, threads, [&](int task, int worker) {
        Worker w = worker_of(worker);
        merge(task / rows_, task % rows_, w);
      });
  }

 private:
  struct Prepared {       // query rows of a block
    std::int8_t* left;    // [octet or two][block][2 * rows][64]
    std::int32_t* start;  // [octet][scale][OCTET]
    float* step;          // [octet][OCTET]
    float* y;             // scratch: [dim]
    std::int16_t *natural, *ordered;
  };
  struct Worker {
    Prepared query;
    float *key_scales, *value_scales;  // as stored, [scale][SUPER]
    float *key_units, *value_units;    // [SUPER], see `units_of`
    float* scores;                     // [up to two octets][OCTET][SUPER]
    std::int8_t* weights;              // [scale][TILES][2 * rows of an octet, or of two][64]
    std::int32_t* weight_start;        // [those][scale][OCTET]
    float* weight_step;                // [those][OCTET]
    std::uint8_t *ring, *decoded_keys, *decoded_values;
    float *sum_of_values, *maximum, *sum, *alpha, *largest, *y;
  };

  int octet_rows() const { return 1 << width_; }
  std::size_t left_bytes() const { return std::size_t(left_blocks_) * 2 * octet_rows() * LINE; }

  // Where the parts of row r are in its left side, and how many bytes a block of that has.
  struct Parts {
    std::ptrdiff_t high, low, block;
  };
  Parts parts_of(int r) const {
    const int at = r % (shared_ ? PAIR : OCTET), width = octet_rows();
    if (shared_) return {pair_high(at) * LINE, pair_low(at) * LINE, 2 * PAIR * LINE};
    return {at * LINE, (width + at) * LINE, 2 * width * LINE};
  }

  void carve(Carver& c, Prepared& p) const {
    p.left = c.take<std::int8_t>(octets_ * left_bytes());
    p.start = c.take<std::int32_t>(std::size_t(octets_) * key_scales_ * OCTET);
    p.step = c.take<float>(std::size_t(octets_) * OCTET);
    p.y = c.take<float>(std::size_t(keys_.dim));
    p.natural = c.take<std::int16_t>(std::size_t(keys_.dim));
    p.ordered = c.take<std::int16_t>(key_order_.size());
  }
  void carve(Carver& c, Worker& w) const {
    carve(c, w.query);
    w.key_scales = c.take<float>(std::size_t(stored_key_scales_) * SUPER);
    w.value_scales = c.take<float>(std::size_t(stored_value_scales_) * SUPER);
    w.key_units = c.take<float>(SUPER);
    w.value_units = c.take<float>(SUPER);
    const std::size_t at_once = std::size_t(at_once_);
    w.scores = c.take<float>(at_once * OCTET * SUPER);
    w.weights =
        c.take<std::int8_t>(at_once * std::size_t(value_scales_) * TILES * 2 * octet_rows() * LINE);
    w.weight_start = c.take<std::int32_t>(at_once * std::size_t(value_scales_) * OCTET);
    w.weight_step = c.take<float>(at_once * OCTET);
    w.ring = c.take<std::uint8_t>(RING);
    w.decoded_keys = c.take<std::uint8_t>(shared_ ? std::size_t(key_tile_decoded()) * TILES : 0);
    w.decoded_values =
        c.take<std::uint8_t>(shared_ ? std::size_t(value_tile_decoded()) * TILES : 0);
    w.sum_of_values = c.take<float>(std::size_t(octets_) * OCTET * values_.dim);
    for (float** p : {&w.maximum, &w.sum, &w.alpha, &w.largest})
      *p = c.take<float>(std::size_t(octets_) * OCTET);
    w.y = c.take<float>(std::size_t(values_.dim));
  }

  std::ptrdiff_t key_tile_decoded() const {
    return std::ptrdiff_t(up(keys_.dim, BLOCK_DIMS)) * TILE * (decoded_fine(key_kind_) ? 2 : 1);
  }
  std::ptrdiff_t value_tile_decoded() const {
    return std::ptrdiff_t(values_.dim) * TILE * (decoded_fine(value_kind_) ? 2 : 1);
  }

  void prepare(int head, int block, Prepared& p) const {
    const int n = rows_of(block), dim = keys_.dim;
    std::memset(p.left, 0, octets_ * left_bytes());
    for (int r = 0; r < octets_ * OCTET; ++r) {
      p.step[r] = 1;
      for (int b = 0; b < key_scales_; ++b)
        p.start[(r / OCTET * key_scales_ + b) * OCTET + r % OCTET] = 0;
      if (r >= n) continue;
      key_spin_.forward(isa_, query(head, block * block_rows_ + r), factor_, dim, p.y);
      p.step[r] = isa_.quantize(p.y, dim, LARGEST_QUERY, p.natural) / key_table_.scale;
      for (std::size_t d = 0; d < key_order_.size(); ++d) p.ordered[d] = p.natural[key_order_[d]];
      const std::int16_t* const values = key_order_.empty() ? p.natural : p.ordered;
      const int at = r % OCTET;
      std::int8_t* const left =
          p.left + (shared_ ? r / PAIR * 2 : r / OCTET) * std::ptrdiff_t(left_bytes());
      const Parts parts = parts_of(r);
      for (int b = 0; b < dim / GROUP; ++b) {
        // Of the 64 dims of a block, or the 32 of its own with zeros beside them.
        std::int8_t* const of_block = left + (halves_ ? b : b / 2) * parts.block + b % 2 * GROUP;
        std::int8_t *const high = of_block + parts.high, *const low = of_block + parts.low;
        const std::int16_t* const x = values + b * GROUP;
        int sum = 0;
        for (int d = 0; d < GROUP; ++d) {
          const int up = (x[d] + 64) >> 7;
          high[d] = std::int8_t(up);
          low[d] = std::int8_t(x[d] - up * 128);
          sum += x[d] + (tile_fine(key_kind_) ? up : 0);
        }
        p.start[(r / OCTET * key_scales_ + (key_scales_ > 1 ? b : 0)) * OCTET + at] -=
            tiles_.offset * sum;
      }
    }
  }

  void chunk_task(int head, int block, int chunk, Worker& w) const {
    const int n = rows_of(block), dim_v = values_.dim;
    const int from = start_of(block) + chunk * chunk_;
    const int to = std::min(high(last_query(block)), from + chunk_);
    for (int r = 0; r < octets_ * OCTET; ++r) {
      w.maximum[r] = -HUGE_VALF;
      w.sum[r] = 0;
    }
    std::memset(w.sum_of_values, 0, std::size_t(octets_) * OCTET * dim_v * sizeof(float));
    if (from < to) {
      if (chunks_ == 1) prepare(head, block, w.query);
      const Prepared& query =
          chunks_ == 1 ? w.query : prepared_[std::size_t(head * blocks_ + block)];
      for (int t = from; t < to; t += SUPER)
        step(query, head, block, n, t, std::min(to, t + SUPER), w);
    }
    if (chunks_ == 1) {
      for (int r = 0; r < n; ++r)
        finish(head, block * block_rows_ + r, w.sum_of_values + std::ptrdiff_t(r) * dim_v,
               {w.maximum[r], w.sum[r]}, w);
    } else {
      keep(head, block, chunk, w.maximum, w.sum, w.sum_of_values, n);
    }
  }

  // Slots [from, end), from a multiple of TILE.
  void step(const Prepared& query, int head, int block, int n, int from, int end, Worker& w) const {
    const int n_tiles = (end - from + TILE - 1) / TILE;
    const std::uint8_t* const k =
        widen(keys_, head, from, n_tiles, stored_key_scales_, w.key_scales);
    const std::uint8_t* const v =
        widen(values_, head, from, n_tiles, stored_value_scales_, w.value_scales);
    const float* const key_units =
        shared_ ? units_of(key_kind_, w.key_scales, stored_key_scales_, n_tiles, w.key_units)
                : w.key_scales;
    const float* const value_units =
        units_of(value_kind_, w.value_scales, stored_value_scales_, n_tiles, w.value_units);
    TileWork kw{}, vw{};
    kw.dim = keys_.dim;
    kw.table = &key_table_;
    kw.ring = vw.ring = w.ring;
    vw.dim = values_.dim;
    vw.table = &value_table_;
    vw.a = w.weights;
    vw.start = w.weight_start;
    vw.step = w.weight_step;
    kw.stride = keys_.tile_stride();
    vw.stride = values_.tile_stride();
    if (shared_) {
      kw.tiles = k;
      vw.tiles = v;
      kw.n_tiles = vw.n_tiles = n_tiles;
      kw.scales = w.key_scales;
      vw.scales = w.value_scales;
      kw.units = key_units;
      vw.units = value_units;
      tiles_.decode_keys[key_kind_](kw, w.decoded_keys);
      tiles_.decode_values[value_kind_](vw, w.decoded_values);
    }
    // From scores to sums of values before the next rows: their scores stay in L1.
    for (int o = 0; o < octets_; o += at_once_) {
      const int row = block * block_rows_ + o * OCTET;
      const int rows = std::min(at_once_ * OCTET, n - o * OCTET);
      if (rows <= 0) break;
      const int lowest = low(row / group_), highest = high((row + rows - 1) / group_);
      // Tiles that one of the rows sees.
      const int first = std::clamp((lowest - from) / TILE, 0, n_tiles);
      const int last =
          lowest < highest ? std::clamp((highest - from + TILE - 1) / TILE, 0, n_tiles) : 0;
      if (first >= last) continue;
      kw.n_tiles = vw.n_tiles = last - first;
      kw.tiles =
          shared_ ? w.decoded_keys + first * key_tile_decoded() : k + first * keys_.tile_stride();
      kw.a = query.left + o * left_bytes();
      kw.start = query.start + o * key_scales_ * OCTET;
      kw.scales = key_units + first * TILE;
      kw.scores = w.scores + first * TILE;
      const auto multiply_keys =
          shared_ ? tiles_.keys_decoded[decoded_fine(key_kind_)] : tiles_.keys[key_kind_][width_];
      multiply_keys(kw);
      for (int r = 0; r < at_once_ * octet_rows(); ++r)
        softmax(query, head, block, n, o * OCTET + r, from, first, last, value_units, w);
      for (int i = 0; i < at_once_; ++i) weigh(o + i, i, first, last, w);
      vw.tiles = shared_ ? w.decoded_values + first * value_tile_decoded()
                         : v + first * values_.tile_stride();
      vw.alpha = w.alpha + o * OCTET;
      vw.out = w.sum_of_values + std::ptrdiff_t(o) * OCTET * values_.dim;
      const auto multiply_values = shared_ ? tiles_.values_decoded[decoded_fine(value_kind_)]
                                           : tiles_.values[value_kind_][width_];
      multiply_values(vw);
    }
  }

  // The scales of rows, and of block formats the largest magnitude in each row: what a row's unit
  // becomes when it is decoded, and what the largest weight of a token is its probability times.
  static const float* units_of(int kind, const float* scales, int count, int n_tiles,
                               float* units) {
    if (!tile_blocks(kind)) return scales;
    for (int t = 0; t < n_tiles * TILE; ++t) units[t] = std::fabs(scales[t]);
    for (int b = 1; b < count; ++b)
      for (int t = 0; t < n_tiles * TILE; ++t)
        units[t] = std::max(units[t], std::fabs(scales[b * SUPER + t]));
    return units;
  }

  // First tile of a step; its scales as floats, [scale][SUPER].
  const std::uint8_t* widen(const TileSide& side, int head, int from, int n_tiles, int scales,
                            float* out) const {
    const std::uint8_t* const tile =
        side.base + head * side.head_stride + from / TILE * side.tile_stride();
    const std::ptrdiff_t codes = tile_scales(side.fmt, side.dim);
    if (has_trellis(side.fmt)) {
      for (int t = 0; t < n_tiles; ++t)
        for (int i = 0; i < TILE; ++i)
          out[t * TILE + i] = side.book->units->value[tile[t * side.tile_stride() + codes + i]];
      return tile;
    }
    for (int t = 0; t < n_tiles; ++t)
      for (int s = 0; s < scales; ++s)
        tiles_.widen(tile + t * side.tile_stride() + codes + s * 2 * TILE, TILE,
                     out + s * SUPER + t * TILE);
    return tile;
  }

  void softmax(const Prepared& query, int head, int block, int n, int r, int from, int first,
               int last, const float* units, Worker& w) const {
    float* const s = w.scores + r % (at_once_ * OCTET) * SUPER;
    const int begin = first * TILE, end = last * TILE;
    const int row = block * block_rows_ + r, i = row / group_;
    const int seen = r < n ? std::clamp(low(i) - from, begin, end) : end;
    const int to = r < n ? std::clamp(high(i) - from, seen, end) : end;
    for (int t = begin; t < seen; ++t) s[t] = -HUGE_VALF;
    for (int t = to; t < end; ++t) s[t] = -HUGE_VALF;
    float factor = query.step[r];
    if (offsets_.base && r < n) {
      const float* const offsets = offsets_of(head, row);
      for (int t = seen; t < to; ++t)
        s[t] = s[t] * factor +
               offsets[(offsets_.phase + from + t - keys_.first) / offsets_.page] * LOG2_E;
      factor = 1;
    }
    w.largest[r] = tiles_.softmax(s + begin, end - begin, factor, units + begin, weights_of_rows_,
                                  w.maximum + r, w.sum + r, w.alpha + r);
  }

  // The left side of an octet's products with values, to place `at`. All blocks of a row share a
  // step, so that what one of them adds to the output is as exact as what the others do.
  void weigh(int octet, int at, int first, int last, Worker& w) const {
    const int width = octet_rows(), n = (last - first) * TILE;
    for (int r = 0; r < width; ++r) {
      const float largest = w.largest[octet * OCTET + r];
      // Below 1e-30 the reciprocal would overflow, and the weight is nothing.
      const bool any = largest > 1e-30f;
      const float inverse = any ? float(LARGEST_WEIGHT) / largest : 0;
      w.weight_step[at * OCTET + r] =
          any ? largest / float(LARGEST_WEIGHT) / value_table_.scale : 0;
      const Parts parts = parts_of(at * OCTET + r);
      for (int b = 0; b < value_scales_; ++b) {
        std::int8_t* const of_scale = w.weights + b * TILES * parts.block;
        std::int32_t sums[2];
        tiles_.weights(w.scores + (at * OCTET + r) * SUPER + first * TILE,
                       weights_of_rows_ ? nullptr : w.value_scales + b * SUPER + first * TILE, n,
                       inverse, reinterpret_cast<std::uint8_t*>(of_scale + parts.high),
                       reinterpret_cast<std::uint8_t*>(of_scale + parts.low), parts.block, sums);
        w.weight_start[(at * value_scales_ + b) * OCTET + r] =
            -tiles_.offset * (sums[0] + (tile_fine(value_kind_) ? sums[1] : 0));
      }
    }
  }

  void merge(int head, int row, Worker& w) const {
    const int r = row % block_rows_, dim = values_.dim;
    float* const out = w.sum_of_values;
    std::memset(out, 0, std::size_t(dim) * sizeof(float));
    const Softmax s = fold(head, row / block_rows_, r, [&](const float* values, float weight) {
      tiles_.add(values + std::ptrdiff_t(r) * dim, dim, weight, out);
    });
    finish(head, row, out, s, w);
  }

  // Normalises and un-rotates one output row.
  void finish(int head, int row, const float* values, Softmax s, Worker& w) const {
    const int dim = values_.dim;
    const Output o = output(head, row, s);
    if (value_order_.empty())
      for (int d = 0; d < dim; ++d) w.y[d] = values[d] * o.factor;
    else
      for (int d = 0; d < dim; ++d) w.y[value_order_[std::size_t(d)]] = values[d] * o.factor;
    value_spin_.inverse(isa_, w.y, dim, w.y);
    std::memcpy(o.to, w.y, std::size_t(dim) * sizeof(float));
  }

  const Kernels& isa_;
  const TileKernels& tiles_;
  const TileSide keys_, values_;
  const float factor_;
  const int key_kind_, value_kind_;
  const bool shared_;  // tiles are decoded once for all octets, which are multiplied by twos
  const TileTable &key_table_, &value_table_;
  const Spin key_spin_, value_spin_;
  const std::vector<std::uint16_t> key_order_, value_order_;
  const int width_;
  const int at_once_;  // octets
  const int octets_;
  const int stored_key_scales_, stored_value_scales_;  // of a row
  const int key_scales_, value_scales_;                // in its products
  const bool weights_of_rows_;                         // one scale is in all weights of a token
  const bool halves_;                                  // see TileKernels::split_keys
  const int left_blocks_;
  std::vector<Prepared> prepared_;  // [head][block], if there are several chunks
};

}  // namespace

void attention_tiles(const Kernels& isa, const TileKernels& tiles, int threads, const Query& q,
                     const TileSide& keys, const TileSide& values, Mask mask,
                     const Offsets& offsets, float scale, float* out, float* lse) {
  TileAttention(isa, tiles, q, keys, values, mask, offsets, scale, out, lse).run(threads);
}

}  // namespace kvproof
