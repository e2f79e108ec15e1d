// The one instruction of AVX-VNNI that the kernels use, by two of AVX2: for tests of the kernels of
// avx2vnni on processors without it. Included before their source.
#pragma once

#include <immintrin.h>

#define _mm256_dpwssd_avx_epi32(sum, a, b) _mm256_add_epi32(sum, _mm256_madd_epi16(a, b))
