// Kernels over tiles without instructions of a set, lane by lane: what the operations mean.
#include "half.h"
#include "tiles_leaf.h"

namespace kvproof {
namespace {

struct ScalarTiles {
  static constexpr int OFFSET = 128, ROWS = 8;
  static constexpr bool SIX_BITS = true;
  struct Table {
    std::uint8_t entry[64];
  };
  static Table table(const std::uint8_t* p) {
    Table t;
    std::memcpy(t.entry, p, 64);
    return t;
  }
  template <int K, int COPY>
  static Bytes look_up(const Table& t, Bytes index) {
    Bytes out;
    for (int i = 0; i < 64; ++i) out[i] = t.entry[index[i] & 63];
    return out;
  }
  // Bits of MASK from a, the others from b.
  template <int MASK>
  static Bytes merge(Bytes a, Bytes b) {
    constexpr auto mask = std::uint8_t(MASK), rest = std::uint8_t(~MASK);
    return (a & mask) | (b & rest);
  }
  static Bytes bytes(Bytes x) { return x ^ std::uint8_t(OFFSET); }  // stored int8
  // Adds to each lane the products of its four entries with four int8.
  static Ints dot(Ints sum, Bytes entry, const std::int8_t* a) {
    for (int i = 0; i < 16; ++i)
      for (int j = 0; j < 4; ++j) sum[i] += std::int32_t(entry[4 * i + j]) * a[j];
    return sum;
  }
  static Floats larger(Floats a, Floats b) { return a > b ? a : b; }
  static Floats larger_magnitude(Floats a, Floats b) {
    return larger(Floats(Ints(a) & 0x7fffffff), Floats(Ints(b) & 0x7fffffff));
  }
  static float largest(Floats x) {
    float top = x[0];
    for (int i = 1; i < 16; ++i) top = x[i] > top ? x[i] : top;
    return top;
  }
  template <class V>
  static auto total(V x) {
    auto sum = x[0];
    for (int i = 1; i < 16; ++i) sum += x[i];
    return sum;
  }
  static void widen(const std::uint8_t* halves, int n, float* out) {
    for (int i = 0; i < n; ++i) out[i] = half_to_float(load_u16(halves + 2 * i));
  }
};

constexpr TileKernels make() {
  TileKernels t{};
  t.name = "scalar";
  t.offset = ScalarTiles::OFFSET;
  fill_dots<ScalarTiles>(t, TileKindList{});
  fill_rows<ScalarTiles>(t);
  return t;
}

}  // namespace

const TileKernels tiles_scalar = make();

}  // namespace kvproof
