// Kernels over tiles for AVX2 with AVX-VNNI.
#if defined(__x86_64__)
#include "tiles_avx2.h"

namespace kvproof {
namespace {

struct Vnni {
  static KVPROOF_INLINE __m256i add(__m256i sum, __m256i entry, __m256i four) {
    return _mm256_dpbusd_avx_epi32(sum, entry, four);
  }
};
}  // namespace

const TileKernels tiles_avx2vnni = kernels_by_dots<Avx2Tiles<Vnni>>();

}  // namespace kvproof
#endif
