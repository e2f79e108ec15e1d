// Kernels over tiles for AVX-512 with VNNI and VBMI.
//
// vpermb looks at six bits of an index, so that a table in four times takes a nibble as it is
// stored, whatever stands above it: two lookups and a shift for 128 codes of 4 bits.
#if defined(__x86_64__)
#include "tiles_avx512.h"

namespace kvproof {

const TileKernels tiles_avx512 = kernels_by_dots<Avx512Tiles<128>>();

}  // namespace kvproof
#endif
