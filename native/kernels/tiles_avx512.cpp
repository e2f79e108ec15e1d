// Kernels over tiles for AVX-512 with VNNI and VBMI.
//
// vpermb looks at six bits of an index, so that a table in four times takes a nibble as it is
// stored, whatever stands above it: two lookups and a shift for 128 codes of 4 bits.
#if defined(__x86_64__)
#include "tiles_avx512.h"

namespace kvproof {
namespace {

constexpr TileKernels make() {
  TileKernels t{};
  t.name = "avx512";
  t.offset = Avx512Tiles<128>::OFFSET;
  fill_dots<Avx512Tiles<128>>(t, TileKindList{});
  fill_rows<Avx512Tiles<128>>(t);
  return t;
}

}  // namespace

const TileKernels tiles_avx512 = make();

}  // namespace kvproof
#endif
