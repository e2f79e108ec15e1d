// Kernels over tiles without instructions of a set.
#include "tiles_plain.h"

namespace kvproof {

const TileKernels tiles_scalar = kernels_by_dots<PlainTiles<128>>();

}  // namespace kvproof
