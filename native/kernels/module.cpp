// Python module kvproof._kernels. Shapes are checked by backends/cpu.py; every array comes with its
// strides, so a transposed or sliced cache is read in place. The GIL is released during the work.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <span>
#include <stdexcept>

#include "books.h"
#include "cpu.h"
#include "ops.h"
#include "pool.h"
#include "step.h"
#include "tiles_store.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvproof {
namespace {

using Floats = nb::ndarray<const float, nb::device::cpu, nb::c_contig>;
using Bytes = nb::ndarray<const std::uint8_t, nb::device::cpu>;
using Heads = nb::ndarray<const float, nb::ndim<3>, nb::device::cpu>;
using LevelBytes = nb::ndarray<const std::uint8_t, nb::ndim<2>, nb::device::cpu, nb::c_contig>;
using OutFloats = nb::ndarray<float, nb::device::cpu, nb::c_contig>;
using OutBytes = nb::ndarray<std::uint8_t, nb::device::cpu, nb::c_contig>;
using Scales = std::optional<Floats>;
using TileBytes = nb::ndarray<std::uint8_t, nb::ndim<3>, nb::device::cpu>;
using RowBytes = nb::ndarray<std::uint8_t, nb::ndim<3>, nb::device::cpu>;
using Buffer = nb::ndarray<std::uint8_t, nb::ndim<3>, nb::device::cpu, nb::c_contig>;

// Every instruction set that there are kernels for, best last; null where this build has none.
struct Isa {
  const char* name;
  const Kernels* kernels;
  const TileKernels* tiles;  // null: the set reads rows only
  std::string missing;       // what it needs that is not here
};

const std::vector<Isa>& known_isas() {
  const Kernels* neon = nullptr;
  const TileKernels* tiles128 = nullptr;
  const Kernels *avx2 = nullptr, *avx2vnni = nullptr, *avx512 = nullptr;
  const TileKernels *tiles256 = nullptr, *tiles512 = nullptr, *amx = nullptr;
#if defined(__x86_64__)
  avx2 = &kernels_avx2;
  avx2vnni = &kernels_avx2vnni;
  avx512 = &kernels_avx512;
  tiles256 = &tiles_avx2vnni;
  tiles512 = &tiles_avx512;
  amx = &tiles_amx;
#elif defined(__aarch64__)
  neon = &kernels_neon;
  tiles128 = &tiles_neon;
#endif
  static const std::vector<Isa> all{{"scalar", &kernels_scalar, &tiles_scalar, ""},
                                    {"neon", neon, tiles128, missing_for_neon()},
                                    {"avx2", avx2, nullptr, missing_for_avx2()},
                                    {"avx2vnni", avx2vnni, tiles256, missing_for_avx2vnni()},
                                    {"avx512", avx512, tiles512, missing_for_avx512()},
                                    // Rows are read as by avx512.
                                    {"amx", avx512, amx, missing_for_amx()}};
  return all;
}

// (name, can run here), best last.
std::vector<std::pair<std::string, bool>> isas() {
  std::vector<std::pair<std::string, bool>> out;
  for (const Isa& isa : known_isas()) out.emplace_back(isa.name, isa.missing.empty());
  return out;
}

// What a set needs that is not here; "" if it can run.
std::string missing_for(const std::string& name) {
  for (const Isa& isa : known_isas())
    if (name == isa.name) return isa.missing;
  throw std::invalid_argument("no instruction set " + name);
}

const Kernels& kernels_of(const std::string& name) {
  for (const Isa& isa : known_isas())
    if (name == isa.name && isa.missing.empty()) return *isa.kernels;
  throw std::invalid_argument("instruction set " + name + " is not available here");
}

const float* head_scales(const Scales& scale, std::size_t heads) {
  if (!scale) return nullptr;
  if (scale->size() != heads) throw std::invalid_argument("one scale per KV head is needed");
  return scale->data();
}

Side side_of(const Coded& format, const Bytes& blocks, int dim, const Scales& scale) {
  const auto [fmt, book] = format;
  if (stored_dim(fmt, dim) > MAX_DIM || blocks.ndim() != 3 || dim < 1 || dim > MAX_DIM ||
      std::ptrdiff_t(blocks.shape(2)) != row_bytes(fmt, dim) ||
      (blocks.stride(2) != 1 && blocks.shape(2) != 1))
    throw std::invalid_argument(std::string("blocks do not match ") +
                                format_names()[std::size_t(fmt)]);
  return {fmt,
          book,
          blocks.data(),
          blocks.stride(0),
          blocks.stride(1),
          int(blocks.shape(0)),
          int(blocks.shape(1)),
          dim,
          head_scales(scale, blocks.shape(1))};
}

Query query_of(const Heads& q, const Side& keys) {
  if (int(q.shape(2)) != keys.dim || q.shape(1) % std::size_t(keys.heads) ||
      (q.stride(2) != 1 && q.shape(2) != 1))
    throw std::invalid_argument("queries do not match the keys");
  return {q.data(), q.stride(0), q.stride(1), int(q.shape(0)), int(q.shape(1)), keys.dim};
}

void check_mask(const Query& q, int n_kv, int first, int end) {
  if (first < -q.n || first > n_kv || end < -q.n || end > n_kv)
    throw std::invalid_argument("no such tokens");
}

Offsets offsets_of(const std::optional<Heads>& offsets, const Query& q, int n_kv, std::int64_t page,
                   std::int64_t phase) {
  if (!offsets) return {};
  if (int(offsets->shape(0)) != q.n || int(offsets->shape(1)) != q.heads || page < 1 || phase < 0 ||
      (offsets->stride(2) != 1 && offsets->shape(2) > 1) ||
      std::int64_t(offsets->shape(2)) * page < phase + n_kv)
    throw std::invalid_argument("offsets do not match");
  return {offsets->data(), offsets->stride(0), offsets->stride(1), page, phase};
}

// Query i sees tokens [first + i, end + i). Returns the row of the first stored scale or element
// that is not finite: (0, row) of the keys, (1, row) of the values, or (-1, -1).
std::pair<int, std::ptrdiff_t> attention_call(
    const std::string& isa, int threads, const Heads& q, const Bytes& k, const Bytes& v,
    const std::string& key, const std::string& value, int dim_v, int first, int end, float scale,
    const Scales& k_scale, const Scales& v_scale, const std::optional<Heads>& offsets,
    std::int64_t page, std::int64_t phase, const OutFloats& out,
    const std::optional<OutFloats>& lse) {
  const Kernels& kernels = kernels_of(isa);
  const Side keys = side_of(coded_of(key), k, int(q.shape(2)), k_scale);
  const Side values = side_of(coded_of(value), v, dim_v, v_scale);
  const Query query = query_of(q, keys);
  if (!kernels.decode_values[layout_of(values.fmt)])
    throw std::invalid_argument(value + " holds keys only");
  const std::size_t rows = std::size_t(query.n) * query.heads;
  if (values.n != keys.n || values.heads != keys.heads || query.n < 1 ||
      out.size() != rows * dim_v || (lse && lse->size() != rows))
    throw std::invalid_argument("shapes do not match");
  check_mask(query, keys.n, first, end);
  const Offsets added = offsets_of(offsets, query, keys.n, page, phase);
  nb::gil_scoped_release free;
  if (attention(kernels, threads, query, keys, values, {first, end}, added, scale, out.data(),
                lse ? lse->data() : nullptr))
    return {-1, -1};
  const std::ptrdiff_t row = first_bad_row(kernels, keys);
  if (row >= 0) return {0, row};
  return {1, first_bad_row(kernels, values)};
}

const TileKernels* tiles_of(const std::string& name) {
  for (const Isa& isa : known_isas())
    if (name == isa.name && isa.missing.empty()) return isa.tiles;
  return nullptr;
}

using Tiles = nb::ndarray<const std::uint8_t, nb::ndim<3>, nb::device::cpu, nb::c_contig>;

// Rows first_row ... first_row + n - 1 of tiles [head][tile][bytes] as cached rows.
TileSide tile_side_of(const Coded& format, const Tiles& tiles, int dim, int first_row, int n) {
  const auto [fmt, book] = format;
  if (!has_tiles(fmt, dim) || std::ptrdiff_t(tiles.shape(2)) != tile_bytes(fmt, dim) ||
      first_row < 0 || n < 1 || std::int64_t(first_row) + n > std::int64_t(tiles.shape(1)) * TILE)
    throw std::invalid_argument(std::string("tiles do not match ") +
                                format_names()[std::size_t(fmt)]);
  const std::ptrdiff_t stride = std::ptrdiff_t(tiles.shape(2));
  return {fmt,
          book,
          tiles.data() + first_row / TILE * stride,
          std::ptrdiff_t(tiles.shape(1)) * stride,
          first_row % TILE,
          n,
          int(tiles.shape(0)),
          dim};
}

std::pair<int, std::ptrdiff_t> attention_tiles_call(
    const std::string& isa, int threads, const Heads& q, const Tiles& k, const Tiles& v,
    const std::string& key, const std::string& value, int dim_k, int dim_v, int first_row,
    int n_rows, int first, int end, float scale, const std::optional<Heads>& offsets,
    std::int64_t page, std::int64_t phase, const OutFloats& out,
    const std::optional<OutFloats>& lse) {
  const Kernels& kernels = kernels_of(isa);
  const TileKernels* const tiles = tiles_of(isa);
  if (!tiles) throw std::invalid_argument("instruction set " + isa + " has no kernels over tiles");
  const TileSide keys = tile_side_of(coded_of(key), k, dim_k, first_row, n_rows);
  const TileSide values = tile_side_of(coded_of(value), v, dim_v, first_row, n_rows);
  if (int(q.shape(2)) != dim_k || q.shape(1) % std::size_t(keys.heads) || q.stride(2) != 1)
    throw std::invalid_argument("queries do not match the keys");
  const Query query{q.data(), q.stride(0), q.stride(1), int(q.shape(0)), int(q.shape(1)), dim_k};
  const std::size_t rows = std::size_t(query.n) * query.heads;
  if (values.heads != keys.heads || query.n < 1 || out.size() != rows * dim_v ||
      (lse && lse->size() != rows))
    throw std::invalid_argument("shapes do not match");
  const Offsets added = offsets_of(offsets, query, keys.n, page, phase);
  check_mask(query, keys.n, first, end);
  nb::gil_scoped_release free;
  attention_tiles(kernels, *tiles, threads, query, keys, values, {first, end}, added, scale,
                  out.data(), lse ? lse->data() : nullptr);
  return {-1, -1};  // as `attention`: but tiles hold no scale that is not finite
}

std::ptrdiff_t scores_call(const std::string& isa, int threads, const Heads& q, const Bytes& k,
                           const std::string& key, const Scales& k_scale, const OutFloats& out) {
  const Kernels& kernels = kernels_of(isa);
  const Side keys = side_of(coded_of(key), k, int(q.shape(2)), k_scale);
  const Query query = query_of(q, keys);
  if (out.size() != std::size_t(query.n) * query.heads * keys.n)
    throw std::invalid_argument("shapes do not match");
  nb::gil_scoped_release free;
  return scores(kernels, threads, query, keys, out.data()) ? -1 : first_bad_row(kernels, keys);
}

std::tuple<std::ptrdiff_t, std::int64_t, std::int64_t> encode_call(
    const std::string& isa, int threads, const std::string& format, const Floats& x,
    const Scales& scale, const OutBytes& out) {
  const Kernels& kernels = kernels_of(isa);
  const Coded coded = coded_of(format);
  const auto rows = std::ptrdiff_t(x.shape(0)), dim = std::ptrdiff_t(x.shape(1));
  if (x.ndim() != 2 || dim > MAX_DIM || out.ndim() != 2 || std::ptrdiff_t(out.shape(0)) != rows ||
      std::ptrdiff_t(out.shape(1)) != row_bytes(coded.fmt, int(dim)))
    throw std::invalid_argument("shapes do not match");
  const float* scales = head_scales(scale, std::size_t(rows));
  nb::gil_scoped_release free;
  Counts counts;
  const std::ptrdiff_t bad =
      encode(kernels, threads, coded, x.data(), rows, int(dim), scales, out.data(), counts);
  return {bad, counts.saturated, counts.flushed};
}

std::ptrdiff_t decode_call(const std::string& isa, int threads, const std::string& format,
                           const Bytes& blocks, int dim, const Scales& scale,
                           const OutFloats& out) {
  const Kernels& kernels = kernels_of(isa);
  const Coded coded = coded_of(format);
  const auto rows = std::ptrdiff_t(blocks.shape(0));
  if (blocks.ndim() != 2 || dim < 1 || dim > MAX_DIM ||
      std::ptrdiff_t(blocks.shape(1)) != row_bytes(coded.fmt, dim) ||
      (blocks.stride(1) != 1 && blocks.shape(1) != 1) ||
      out.size() != std::size_t(rows) * std::size_t(dim))
    throw std::invalid_argument("shapes do not match");
  const float* scales = head_scales(scale, std::size_t(rows));
  nb::gil_scoped_release free;
  return decode(kernels, threads, coded, blocks.data(), blocks.stride(0), rows, dim, scales,
                out.data());
}

// Tiles of one side, uint8 [kv heads][tiles][tile_bytes], of which heads need not be adjacent.
TileBuffer tile_buffer_of(const std::string& format, const std::string& side,
                          const TileBytes& tiles) {
  const int fmt = format_index(format);
  const std::ptrdiff_t bytes = std::ptrdiff_t(tiles.shape(2)) / TILE;
  int dim = GROUP;  // rows grow with it
  while (dim < WIDEST_TILE && row_bytes(fmt, dim) < bytes) dim += GROUP;
  if (!has_tiles(fmt, dim) || tile_bytes(fmt, dim) != std::ptrdiff_t(tiles.shape(2)) ||
      (tiles.size() && (tiles.stride(2) != 1 || tiles.stride(1) != tile_bytes(fmt, dim))) ||
      (side != "key" && side != "value"))
    throw std::invalid_argument("no tiles of " + format);
  return {fmt, dim, side == "value", tiles.data(), tiles.stride(0), int(tiles.shape(0))};
}

template <class Rows>
void check_rows(const Rows& rows, const TileBytes& tiles, const TileBuffer& buffer,
                std::ptrdiff_t at) {
  if (rows.ndim() != 3 || rows.shape(1) != tiles.shape(0) ||
      std::ptrdiff_t(rows.shape(2)) != row_bytes(buffer.fmt, buffer.dim) ||
      (rows.size() && rows.stride(2) != 1) || at < 0 ||
      at + std::ptrdiff_t(rows.shape(0)) > std::ptrdiff_t(tiles.shape(1)) * TILE)
    throw std::invalid_argument("rows do not match the tiles");
}

std::ptrdiff_t pack_call(int threads, const std::string& format, const std::string& side,
                         const Bytes& rows, const TileBytes& tiles, std::ptrdiff_t at) {
  const TileBuffer buffer = tile_buffer_of(format, side, tiles);
  check_rows(rows, tiles, buffer, at);
  const auto n = std::ptrdiff_t(rows.shape(0));
  std::optional<nb::gil_scoped_release> free;
  if (n > 1) free.emplace();
  return pack(threads, {rows.data(), rows.stride(0), rows.stride(1)}, n, buffer, at);
}

void unpack_call(int threads, const std::string& format, const std::string& side,
                 const TileBytes& tiles, std::ptrdiff_t first, const RowBytes& rows) {
  const TileBuffer buffer = tile_buffer_of(format, side, tiles);
  check_rows(rows, tiles, buffer, first);
  nb::gil_scoped_release free;
  unpack(threads, buffer, first, std::ptrdiff_t(rows.shape(0)),
         {rows.data(), rows.stride(0), rows.stride(1)});
}

// Bytes of a tile, 0 where a format or width has none.
std::ptrdiff_t tile_bytes_call(const std::string& format, int dim) {
  const int fmt = format_index(format);
  return has_tiles(fmt, dim) ? tile_bytes(fmt, dim) : 0;
}
// A layer as the calls for one token know it. Each is false where a number is not finite: what was
// written is not to be used, and the separate calls say which it is.
class Step {
 public:
  Step(const std::string& isa, bool tiled, const std::string& key, const std::string& value,
       int heads, int kv_heads, int dim_k, int dim_v, const Scales& scale, const Scales& mean,
       int pairs)
      : kernels_(kernels_of(isa)),
        tiles_(tiled ? tiles_of(isa) : nullptr),
        key_(coded_of(key)),
        value_(coded_of(value)),
        shape_{heads, kv_heads, dim_k, dim_v},
        scale_(scale),
        mean_(mean) {
    const std::size_t size = std::size_t(kv_heads) * std::size_t(dim_k);
    if (kv_heads < 1 || heads % kv_heads || dim_k < 1 || dim_v < 1 || dim_k > MAX_DIM ||
        dim_v > MAX_DIM || !kernels_.decode_values[layout_of(value_.fmt)] ||
        (tiled && (!tiles_ || !has_tiles(key_.fmt, dim_k) || !has_tiles(value_.fmt, dim_v))) ||
        (scale && scale->size() != size) || (mean && mean->size() != size) ||
        (mean ? !scale || pairs < 0 || 2 * pairs > dim_k : pairs != -1))
      throw std::invalid_argument("no such layer");
    condition_ = {scale ? scale->data() : nullptr, mean ? mean->data() : nullptr, pairs};
  }

  bool append(const Heads& k, const Heads& v, const Scales& k_scale, const Scales& v_scale,
              const std::optional<Bytes>& page, const Buffer& keys, const Buffer& values,
              std::size_t at) const {
    const std::uint8_t* mean = nullptr;
    std::ptrdiff_t mean_stride = 0;
    if (bool(page) != bool(scale_)) throw std::invalid_argument("a page goes with a condition");
    if (page) {  // [kv heads or 1][2 * dim]
      if (page->ndim() != 2 || int(page->shape(1)) != 2 * shape_.dim_k || page->stride(1) != 1 ||
          int(page->shape(0)) != (mean_ ? 1 : shape_.kv_heads))
        throw std::invalid_argument("the page does not match");
      mean = page->data();
      mean_stride = mean_ ? 0 : page->stride(0);
    }
    const TokenRows new_key = rows_of(k, shape_.dim_k), new_value = rows_of(v, shape_.dim_v);
    TileBuffer key_tiles, value_tiles;
    const Slot key_slot = slot_of(keys, key_, shape_.dim_k, at, false, key_tiles);
    const Slot value_slot = slot_of(values, value_, shape_.dim_v, at, true, value_tiles);
    const float* const k_factor = head_scales(k_scale, std::size_t(shape_.kv_heads));
    const float* const v_factor = head_scales(v_scale, std::size_t(shape_.kv_heads));
    nb::gil_scoped_release free;
    return append_token(kernels_, key_, value_, shape_, new_key, new_value, k_factor, v_factor,
                        scale_ ? &condition_ : nullptr, mean, mean_stride, key_slot, value_slot);
  }

  // Rows at, at + 1, ... at + n - 1 of the buffers, of which the query sees those from `first` on.
  bool attend(int threads, const Heads& q, const Tiles& keys, const Tiles& values, int at, int n,
              int first, float scale, const Scales& k_scale, const Scales& v_scale,
              const std::optional<Tiles>& sink_k, const std::optional<Tiles>& sink_v,
              int sinks_from, const std::optional<Bytes>& pages, std::int64_t page,
              std::int64_t phase, const OutFloats& out) const {
    const std::size_t kv_heads = std::size_t(shape_.kv_heads);
    Held held{{}, {}, tiles_, {}, {}, n, shape_.kv_heads, shape_.dim_v};
    if (tiles_) {
      held.key_tiles = tile_side_of(key_, keys, shape_.dim_k, at, n);
      held.value_tiles = tile_side_of(value_, values, shape_.dim_v, at, n);
    } else {
      held.keys = side_in(keys, key_, shape_.dim_k, at, n, k_scale);
      held.values = side_in(values, value_, shape_.dim_v, at, n, v_scale);
    }
    if (q.shape(0) != 1 || int(q.shape(1)) != shape_.heads || int(q.shape(2)) != shape_.dim_k ||
        (q.stride(2) != 1 && shape_.dim_k != 1) || keys.shape(0) != kv_heads ||
        values.shape(0) != kv_heads || first < -1 || first > n ||
        out.size() != std::size_t(shape_.heads) * std::size_t(shape_.dim_v))
      throw std::invalid_argument("shapes do not match");
    const Query query{q.data(), q.stride(0), q.stride(1), 1, shape_.heads, shape_.dim_k};
    Sinks sinks{};
    const Coded f16{F16, &constants.book[F16]};
    if (bool(sink_k) != bool(sink_v)) throw std::invalid_argument("sinks are keys and values");
    if (sink_k) {
      const int held_there = int(sink_k->shape(1));
      sinks = {side_in(*sink_k, f16, shape_.dim_k, 0, held_there, {}),
               side_in(*sink_v, f16, shape_.dim_v, 0, held_there, {}),
               {sinks_from, held_there}};
      if (sinks_from < -1 || sinks_from > held_there)
        throw std::invalid_argument("sinks do not match");
    }
    Pages of_rows{};
    if (bool(pages) != bool(scale_)) throw std::invalid_argument("pages go with a condition");
    if (pages) {
      of_rows = {side_of(f16, *pages, shape_.dim_k, {}), page, phase};
      if (of_rows.means.heads != (mean_ ? 1 : shape_.kv_heads) || of_rows.means.n < 1 || page < 0 ||
          phase < 0 || (page && of_rows.means.n * page < phase + n))
        throw std::invalid_argument("pages do not match");
    }
    nb::gil_scoped_release free;
    return attend_token(kernels_, threads, query, held, {first, n}, scale,
                        sink_k ? &sinks : nullptr, scale_ ? &condition_ : nullptr, of_rows,
                        out.data());
  }

 private:
  TokenRows rows_of(const Heads& x, int dim) const {
    if (x.shape(0) != 1 || int(x.shape(1)) != shape_.kv_heads || int(x.shape(2)) != dim ||
        (x.stride(2) != 1 && dim != 1))
      throw std::invalid_argument("rows do not match");
    return {x.data(), x.stride(1)};
  }

  Slot slot_of(const Buffer& buffer, const Coded& format, int dim, std::size_t at, bool values,
               TileBuffer& tiles) const {
    const std::ptrdiff_t bytes = row_bytes(format.fmt, dim) * (tiles_ ? TILE : 1);
    if (int(buffer.shape(0)) != shape_.kv_heads || at >= buffer.shape(1) * (tiles_ ? TILE : 1) ||
        std::ptrdiff_t(buffer.shape(2)) != bytes)
      throw std::invalid_argument("buffers do not match");
    const std::ptrdiff_t stride = std::ptrdiff_t(buffer.shape(1)) * bytes;
    if (!tiles_) return {buffer.data() + std::ptrdiff_t(at) * bytes, stride, nullptr, 0};
    tiles = {format.fmt, dim, values, buffer.data(), stride, shape_.kv_heads};
    return {nullptr, 0, &tiles, std::ptrdiff_t(at)};
  }

  // Rows of a buffer [head][row][bytes].
  Side side_in(const Tiles& buffer, const Coded& format, int dim, int at, int n,
               const Scales& scale) const {
    const std::ptrdiff_t bytes = row_bytes(format.fmt, dim);
    if (int(buffer.shape(0)) != shape_.kv_heads || std::ptrdiff_t(buffer.shape(2)) != bytes ||
        at < 0 || n < 1 || std::int64_t(at) + n > std::int64_t(buffer.shape(1)))
      throw std::invalid_argument("buffers do not match");
    return {format.fmt,
            format.book,
            buffer.data() + at * bytes,
            bytes,
            std::ptrdiff_t(buffer.shape(1)) * bytes,
            n,
            shape_.kv_heads,
            dim,
            head_scales(scale, std::size_t(shape_.kv_heads))};
  }

  const Kernels& kernels_;
  const TileKernels* const tiles_;  // null: the layer holds rows
  const Coded key_, value_;
  const Shape shape_;
  const Scales scale_, mean_;  // whose memory the condition reads
  Condition condition_;
};

std::span<const float> span(const Floats& x) { return {x.data(), x.size()}; }

}  // namespace
}  // namespace kvproof

NB_MODULE(_kernels, m) {
  using namespace kvproof;
  m.attr("MAX_DIM") = MAX_DIM;
  m.attr("FORMATS") = format_names();
  m.def("isas", &isas);
  m.def("missing_for", &missing_for, "isa"_a);
  m.def(
      "set_book",
      [](const std::string& format, const std::vector<float>& values,
         const std::vector<float>& cuts, float start) { set_book(format, values, cuts, start); },
      "format"_a, "values"_a, "cuts"_a, "start"_a);
  m.def(
      "set_search",
      [](const std::string& format, float grid, const LevelBytes& cost, const LevelBytes& entry,
         const std::vector<std::int32_t>& beyond) {
        set_search(format, grid, {cost.data(), cost.size()}, {entry.data(), entry.size()}, beyond);
      },
      "format"_a, "grid"_a, "cost"_a, "entry"_a, "beyond"_a);
  m.def(
      "set_trellis",
      [](const std::string& format, int states, std::uint32_t taps0, std::uint32_t taps1,
         const std::vector<int>& offsets) { set_trellis(format, states, taps0, taps1, offsets); },
      "format"_a, "states"_a, "taps0"_a, "taps1"_a, "offsets"_a);
  m.def(
      "set_units",
      [](const Floats& values, const Floats& cuts) { set_units(span(values), span(cuts)); },
      "values"_a, "cuts"_a);
  m.def(
      "set_signs",
      [](const Floats& signs32, const Floats& head, const Floats& signs128, const Floats& polar) {
        set_signs(span(signs32), span(head), span(signs128), span(polar));
      },
      "signs32"_a, "head"_a, "signs128"_a, "polar"_a);
  m.def(
      "add_variant",
      [](const std::string& format, const std::string& identity, const Floats& table) {
        add_variant(format, identity, span(table));
      },
      "format"_a, "identity"_a, "table"_a);
  m.def("row_bytes", [](const std::string& f, int dim) { return row_bytes(format_index(f), dim); });
  m.def("scratch_bytes", [] {
    Pool& pool = Pool::get();
    std::lock_guard<std::mutex> hold(pool.gate());
    return pool.scratch_bytes();
  });
  m.def("attention", &attention_call, "isa"_a, "threads"_a, "q"_a, "k"_a, "v"_a, "key"_a, "value"_a,
        "dim_v"_a, "first"_a, "end"_a, "scale"_a, "k_scale"_a.none(), "v_scale"_a.none(),
        "offsets"_a.none(), "page"_a, "phase"_a, "out"_a, "lse"_a.none());
  m.def("tiled_isas", [] {  // the sets that have kernels over tiles
    std::vector<std::string> out;
    for (const Isa& isa : known_isas())
      if (isa.tiles) out.push_back(isa.name);
    return out;
  });
  m.def("attention_tiles", &attention_tiles_call, "isa"_a, "threads"_a, "q"_a, "k"_a, "v"_a,
        "key"_a, "value"_a, "dim_k"_a, "dim_v"_a, "first_row"_a, "n_rows"_a, "first"_a, "end"_a,
        "scale"_a, "offsets"_a.none(), "page"_a, "phase"_a, "out"_a, "lse"_a.none());
  m.def("scores", &scores_call, "isa"_a, "threads"_a, "q"_a, "k"_a, "key"_a, "k_scale"_a.none(),
        "out"_a);
  m.def("encode", &encode_call, "isa"_a, "threads"_a, "format"_a, "x"_a, "scale"_a.none(), "out"_a);
  m.def("decode", &decode_call, "isa"_a, "threads"_a, "format"_a, "blocks"_a, "dim"_a,
        "scale"_a.none(), "out"_a);
  // An array that has to be converted would be written to as a copy.
  m.def("pack", &pack_call, "threads"_a, "format"_a, "side"_a, "rows"_a, "tiles"_a.noconvert(),
        "at"_a);
  m.def("unpack", &unpack_call, "threads"_a, "format"_a, "side"_a, "tiles"_a.noconvert(), "first"_a,
        "rows"_a.noconvert());
  m.def("tile_bytes", &tile_bytes_call, "format"_a, "dim"_a);
  nb::class_<Step>(m, "Step")
      .def(nb::init<const std::string&, bool, const std::string&, const std::string&, int, int, int,
                    int, const Scales&, const Scales&, int>(),
           "isa"_a, "tiled"_a, "key"_a, "value"_a, "heads"_a, "kv_heads"_a, "dim_k"_a, "dim_v"_a,
           "scale"_a.none(), "mean"_a.none(), "pairs"_a)
      .def("append", &Step::append, "k"_a, "v"_a, "k_scale"_a.none(), "v_scale"_a.none(),
           "page"_a.none(), "keys"_a.noconvert(), "values"_a.noconvert(), "at"_a)
      .def("attend", &Step::attend, "threads"_a, "q"_a, "keys"_a.noconvert(),
           "values"_a.noconvert(), "at"_a, "n"_a, "first"_a, "scale"_a, "k_scale"_a.none(),
           "v_scale"_a.none(), "sink_k"_a.none(), "sink_v"_a.none(), "sinks_from"_a,
           "pages"_a.none(), "page"_a, "phase"_a, "out"_a.noconvert());
}
