// Attention over the same tiles by the kernels of one set (-DKVPROOF_TILES=tiles_neon) and by the
// scalar ones, which the gate holds to float64. All formats that the set has, one to 148 query
// rows, windows, page offsets, a cache that begins inside a tile. Prints the number of cases and
// the largest NMSE; exit code 1 if a result is not finite, empty, or further off than rounding
// explains.
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

#include "kernels/ops.h"
#include "kernels/tiles.h"

using namespace kvproof;

namespace {

constexpr int FORMATS_HERE[] = {TQ8,     TQ5,  TQ4,  TQ3,  TQ2,    TCQ4,
                                TCQ4_64, TCQ3, Q8_0, Q4_0, TBQ4_0, TBQ3_0};
// Products are exact, but exp2 and sums of floats differ, and sets cut a call into other steps, of
// which each rounds its weights. Entries of blocks that are decoded to rows are rounded too.
constexpr double LIMIT = 3e-8;

std::mt19937 random_bits(1);

// Entries from -115 to 115, integers except those of the formats with a second table.
void fill_book(int f, int count) {
  Book& book = constants.book[f];
  book.count = count;
  for (int i = 0; i < count; ++i) {
    const float x = float(230.0 * (i + 0.3 * i * i / count) / (1.3 * count) - 115);
    book.value[i] = f == TBQ4_0 || f == TBQ3_0 ? x / 43 : std::round(x);
  }
}

std::vector<std::uint8_t> random_tiles(int f, int dim, int count) {
  std::vector<std::uint8_t> tiles(std::size_t(count * tile_bytes(f, dim)));
  for (auto& byte : tiles) byte = std::uint8_t(random_bits());
  for (int t = 0; t < count; ++t) {  // scales: halves of both signs, from 2^-14 to 2^-3
    if (has_trellis(f)) break;       // every byte names a unit
    std::uint8_t* p = tiles.data() + t * tile_bytes(f, dim) + tile_scales(f, dim);
    for (std::uint8_t* const end = tiles.data() + (t + 1) * tile_bytes(f, dim); p < end; p += 2) {
      p[1] = std::uint8_t((random_bits() & 0x80) | (0x04 + random_bits() % 44));
      if ((end - p) / 2 % TILE == 9) p[0] = p[1] = 0;  // a row of zeros
    }
  }
  return tiles;
}

}  // namespace

int main() {
  for (const auto& [f, count] : {std::pair{TQ5, 32},
                                 {TQ4, 16},
                                 {TQ3, 8},
                                 {TQ2, 4},
                                 {TCQ4, 32},
                                 {TCQ4_64, 32},
                                 {TCQ3, 16},
                                 {Q4_0, 16},
                                 {TBQ4_0, 16},
                                 {TBQ3_0, 8}})
    fill_book(f, count);
  for (int i = 0; i < GROUP; ++i) constants.signs32[i] = i % 3 ? 1 : -1;
  for (int i = 0; i < MAX_DIM; ++i) constants.head_signs[i] = i % 5 ? 1 : -1;
  std::normal_distribution<float> normal;
  for (float& unit : constants.units.value) unit = std::exp2(normal(random_bits) - 5);
  for (const int f : {TCQ4, TCQ4_64, TCQ3}) constants.book[f].units = &constants.units;
  double worst = 0;
  int cases = 0, bad = 0;
  for (const int key : FORMATS_HERE)
    for (const int n_q : {1, 2, 3, 37})
      for (const int dim : {64, 96, 128}) {
        const int value = n_q == 2 ? FORMATS_HERE[cases % 12] : key;
        // Broken sets are compiled with some of the formats only.
        if (!KVPROOF_TILES.keys[tile_kind(key)][0] || !KVPROOF_TILES.keys[tile_kind(value)][0])
          continue;
        const int heads = 4, kv_heads = n_q == 3 ? 4 : n_q == 2 ? 2 : 1, n = 390, first_row = 7;
        const int count = (first_row + n + TILE - 1) / TILE, page = 50;
        const auto k = random_tiles(key, dim, count * kv_heads);
        const auto v = random_tiles(value, dim, count * kv_heads);
        const auto side = [&](int f, const std::vector<std::uint8_t>& tiles) {
          return TileSide{
              f, &constants.book[f], tiles.data(), count * tile_bytes(f, dim), first_row,
              n, kv_heads,           dim};
        };
        std::vector<float> q(std::size_t(n_q) * heads * dim), pages(std::size_t(n_q) * heads * 8);
        for (float& x : q) x = normal(random_bits);
        for (float& x : pages) x = normal(random_bits);
        const Query query{q.data(), heads * dim, dim, n_q, heads, dim};
        const Mask mask{dim == 96 ? n - n_q - 99 : 0, n - n_q + 1};
        Offsets offsets{};
        if (dim == 64) offsets = {pages.data(), heads * 8, 8, page, 3};
        const std::size_t rows = std::size_t(n_q) * heads;
        std::vector<float> want(rows * dim), got(rows * dim, NAN), lse(rows), lse_got(rows, NAN);
        attention_tiles(kernels_scalar, tiles_scalar, 1, query, side(key, k), side(value, v), mask,
                        offsets, 0.01f, want.data(), lse.data());
        attention_tiles(kernels_scalar, KVPROOF_TILES, 2, query, side(key, k), side(value, v), mask,
                        offsets, 0.01f, got.data(), lse_got.data());
        double wrong = 0, power = 0, apart = 0;
        for (std::size_t i = 0; i < got.size(); ++i) {
          wrong += (double(got[i]) - want[i]) * (double(got[i]) - want[i]);
          power += double(want[i]) * want[i];
        }
        for (std::size_t i = 0; i < rows; ++i) apart += std::fabs(double(lse[i]) - lse_got[i]);
        const double nmse = wrong / power;
        ++cases;
        if (!(power > 0 && nmse <= LIMIT && apart / double(rows) < 1e-4)) {
          std::printf("keys %d values %d queries %d dim %d: NMSE %g, lse off by %g\n", key, value,
                      n_q, dim, nmse, apart / double(rows));
          ++bad;
        } else if (nmse > worst) {
          worst = nmse;
        }
      }
  std::printf("cases %d bad %d worst %g\n", cases, bad, worst);
  return bad != 0;
}
