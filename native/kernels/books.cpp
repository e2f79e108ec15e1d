#include "books.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <stdexcept>

#include "half.h"

namespace kvproof {
namespace {

constexpr const char* FORMAT_NAMES[] = {
    "f16",     "bf16",     "fp8_e4m3", "q8_0",     "q4_0",         "tbq4_0",   "tbq3_0",  "tq4",
    "tq3",     "q4_0_rot", "tq8",      "tq5",      "tq2",          "tcq4",     "tcq4_64", "tcq3",
    "tcq3_64", "tcq2",     "tcq2_64",  "q4_polar", "q4_polar_res", "tbq3_tcq", "qjl1_256"};
static_assert(sizeof FORMAT_NAMES / sizeof *FORMAT_NAMES == FORMATS);

// Books of formats that exist with several codebooks or projections, by the identity of the format,
// which names its digest. They are added once and stay: a call holds a reference without a lock.
struct Variant {
  int fmt;
  Book book;
  std::vector<float> projection;
  WideTrellis trellis;
};
std::map<std::string, std::unique_ptr<Variant>> variants;

bool has_variants(int fmt) { return fmt == TBQ3_TCQ || fmt == QJL1_256; }

LevelTable level_table(const std::uint8_t* entries, int n) {  // the last entry is repeated
  LevelTable table{};
  for (int i = 0; i < MAX_LEVELS; ++i) table.at[i] = entries[i < n ? i : n - 1];
  std::copy_n(table.at, MAX_LEVELS, table.change);
  for (int i = 16; i < MAX_LEVELS; ++i) table.change[i] ^= table.at[i - 16];
  return table;
}

template <int F>
void set_tables(float grid, std::span<const std::uint8_t> cost, std::span<const std::uint8_t> entry,
                std::span<const std::int32_t> beyond) {
  constexpr int LEVELS = levels_of(F), TRIES = tries_of(F);
  Book& book = constants.book[F];
  if (cost.size() != TRIES * LEVELS || entry.size() != TRIES * LEVELS || beyond.size() != TRIES ||
      book.count != 2 * HALF<F>)
    throw std::invalid_argument("bad unit search");
  UnitSearch& search = constants.search[F];
  search.grid = grid;
  for (int k = 0; k < TRIES; ++k) {
    search.cost[k] = level_table(cost.data() + k * LEVELS, LEVELS);
    search.entry[k] = level_table(entry.data() + k * LEVELS, LEVELS);
    search.beyond[k] = beyond[std::size_t(k)];
  }
  std::uint8_t half[HALF<F>], below[BUCKETS<F>] = {}, cut[BUCKETS<F>];
  std::fill_n(cut, BUCKETS<F>, std::uint8_t(127));
  for (int i = 0; i < HALF<F>; ++i) half[i] = std::uint8_t(book.value[HALF<F> + i]);
  for (int i = 0; i + 1 < HALF<F>; ++i) {
    const int at = int(8 * book.cut[HALF<F> + i]), bucket = at >> SHIFT<F>;  // exact
    if (bucket < 0 || bucket >= BUCKETS<F> - 1 || cut[bucket] != 127)
      throw std::invalid_argument("codebook entries lie too close or too far");
    cut[bucket] = std::uint8_t(at & ((1 << SHIFT<F>)-1));
    for (int b = 0; b < BUCKETS<F>; ++b) below[b] = std::uint8_t(below[b] + (b > bucket));
  }
  search.half = level_table(half, HALF<F>);
  search.below = level_table(below, BUCKETS<F>);
  search.cut = level_table(cut, BUCKETS<F>);
  book.search = &search;
}

}  // namespace

std::vector<std::string> format_names() { return {FORMAT_NAMES, FORMAT_NAMES + FORMATS}; }

int format_index(const std::string& name) {
  for (int f = 0; f < FORMATS; ++f)
    if (name == FORMAT_NAMES[f]) return f;
  throw std::invalid_argument("no kernel for format " + name);
}

Coded coded_of(const std::string& identity) {
  const auto found = variants.find(identity);
  if (found != variants.end()) return {found->second->fmt, &found->second->book};
  const int fmt = format_index(identity);
  if (has_variants(fmt)) throw std::invalid_argument(identity + " needs a codebook or projection");
  return {fmt, &constants.book[fmt]};
}

void set_book(const std::string& format, std::span<const float> values, std::span<const float> cuts,
              float start) {
  const int fmt = format_index(format);
  if (values.size() > 32 || cuts.size() + 1 != values.size())
    throw std::invalid_argument("bad codebook");
  Book& book = constants.book[fmt];
  book.count = int(values.size());
  std::copy(values.begin(), values.end(), book.value);
  std::copy(cuts.begin(), cuts.end(), book.cut);
  book.start = start;
  finish_book(fmt, book);
}

void set_search(const std::string& format, float grid, std::span<const std::uint8_t> cost,
                std::span<const std::uint8_t> entry, std::span<const std::int32_t> beyond) {
  switch (format_index(format)) {
    case TQ5:
      return set_tables<TQ5>(grid, cost, entry, beyond);
    case TQ4:
      return set_tables<TQ4>(grid, cost, entry, beyond);
    case TQ3:
      return set_tables<TQ3>(grid, cost, entry, beyond);
    case TQ2:
      return set_tables<TQ2>(grid, cost, entry, beyond);
    default:
      throw std::invalid_argument("no unit search for format " + format);
  }
}

void set_trellis(const std::string& format, int states, std::uint32_t taps0, std::uint32_t taps1,
                 std::span<const int> offsets) {
  const int fmt = format_index(format);
  Book& book = constants.book[fmt];
  const std::uint32_t window = std::uint32_t(2 * states - 1);
  if (!has_trellis(fmt) || book.count != 2 << code_bits(fmt) || offsets.empty() ||
      offsets.size() > 16 || (states != 8 && states != MAX_STATES) || ((taps0 | taps1) & ~window) ||
      taps0 == 0 || taps1 == 0 || __builtin_popcount(taps0) > MAX_TAPS[0] ||
      __builtin_popcount(taps1) > MAX_TAPS[1] ||
      (planes_of(fmt).count && (taps0 != taps_of(fmt).zero || taps1 != taps_of(fmt).one)))
    throw std::invalid_argument("bad trellis");
  Trellis& trellis = constants.trellis[fmt];
  trellis = Trellis{};
  trellis.states = states;
  trellis.start_bytes = start_bytes(fmt);
  const std::uint32_t sets[2] = {taps0, taps1};
  for (int bit = 0; bit < 2; ++bit) {
    for (int j = 0; sets[bit] >> j; ++j)
      if (sets[bit] >> j & 1) trellis.tap[bit][trellis.n_taps[bit]++] = j;
  }
  trellis.n_offsets = int(offsets.size());
  std::copy(offsets.begin(), offsets.end(), trellis.offset);
  for (int i = 0; i < book.count; ++i) {  // entries are integers, so midpoints are exact
    trellis.entry[i % 4][i / 4] = book.value[i];
    if (i >= 4) trellis.cut[i % 4][i / 4 - 1] = (book.value[i - 4] + book.value[i]) / 2;
  }
  for (std::uint32_t w = 0; w <= window; ++w)
    trellis.subset_of[w] =
        std::uint8_t(__builtin_parity(w & taps0) | __builtin_parity(w & taps1) << 1);
  book.trellis = &trellis;
  book.units = &constants.units;
}

void set_units(std::span<const float> values, std::span<const float> cuts) {
  if (values.size() != 256 || cuts.size() != 256) throw std::invalid_argument("bad units");
  Units& units = constants.units;
  for (int i = 0; i < 256; ++i) {
    units.value[i] = values[i];
    units.half[i] = float_to_half(units.value[i]);
    units.inverse[i] = i ? 1 / units.value[i] : 0;
    units.cut[i] = cuts[i];
  }
}

void add_variant(const std::string& format, const std::string& identity,
                 std::span<const float> table) {
  const int fmt = format_index(format);
  const std::size_t size = fmt == QJL1_256 ? WIDE * SKETCH : WideTrellis::STATES;
  if (!has_variants(fmt) || table.size() != size) throw std::invalid_argument("bad table");
  auto v = std::make_unique<Variant>();
  v->fmt = fmt;
  if (fmt == QJL1_256) {
    v->projection.assign(table.begin(), table.end());
    v->book.projection = v->projection.data();
  } else {
    finish_trellis(table.data(), v->trellis);
    v->book.wide_trellis = &v->trellis;
    v->book.before = constants.signs128[0];
    v->book.after = constants.signs128[1];
  }
  variants.try_emplace(identity, std::move(v));
}

void set_signs(std::span<const float> signs32, std::span<const float> head,
               std::span<const float> signs128, std::span<const float> polar) {
  if (signs32.size() != GROUP || head.size() != MAX_DIM || signs128.size() != 2 * WIDE ||
      polar.size() != WIDE)
    throw std::invalid_argument("bad signs");
  std::memcpy(constants.signs128, signs128.data(), sizeof constants.signs128);
  std::memcpy(constants.polar_signs, polar.data(), sizeof constants.polar_signs);
  std::memcpy(constants.signs32, signs32.data(), sizeof constants.signs32);
  std::memcpy(constants.head_signs, head.data(), sizeof constants.head_signs);
}

}  // namespace kvproof
