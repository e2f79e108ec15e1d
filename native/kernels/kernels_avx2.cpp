// AVX2 + FMA + F16C kernels.
#if defined(__x86_64__)
#include "isa_avx2.h"

namespace kvproof {

constinit const Kernels kernels_avx2 = make_kernels<Avx2>("avx2");

}  // namespace kvproof
#endif
