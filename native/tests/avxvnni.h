// The two instructions of AVX-VNNI that the kernels use, by those of AVX2: for tests of the kernels
// of avx2vnni on processors without it. Included before their source.
#pragma once

#include <immintrin.h>

#define _mm256_dpwssd_avx_epi32(sum, a, b) _mm256_add_epi32(sum, _mm256_madd_epi16(a, b))

// Bytes a times signed bytes b, four to a lane: even ones and odd ones as 16-bit numbers.
#define _mm256_dpbusd_avx_epi32(sum, a, b)                                                    \
  _mm256_add_epi32(                                                                           \
      sum, _mm256_add_epi32(_mm256_madd_epi16(_mm256_and_si256(a, _mm256_set1_epi16(0xff)),   \
                                              _mm256_srai_epi16(_mm256_slli_epi16(b, 8), 8)), \
                            _mm256_madd_epi16(_mm256_srli_epi16(a, 8), _mm256_srai_epi16(b, 8))))
