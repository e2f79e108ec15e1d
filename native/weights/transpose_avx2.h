// bf16 rows to float32 panels with 8 x 8 transposes; for files compiled with AVX2 or more.
#pragma once

#include <immintrin.h>

#include "weights/linear.h"

namespace kvproof::weights {
namespace {

// 8 rows x 8 columns of bf16 at w (row stride k) to out[column * NR + row].
template <int NR>
void transpose_8x8(const uint16_t* w, size_t k, float* out) {
  __m256 r[8], t[8];
  for (int c = 0; c < 8; ++c) {
    const __m128i h = _mm_loadu_si128(reinterpret_cast<const __m128i*>(w + c * k));
    r[c] = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
  }
  for (int c = 0; c < 8; c += 2) {
    t[c] = _mm256_unpacklo_ps(r[c], r[c + 1]);
    t[c + 1] = _mm256_unpackhi_ps(r[c], r[c + 1]);
  }
  for (int c = 0; c < 8; c += 4) {
    r[c] = _mm256_shuffle_ps(t[c], t[c + 2], 0x44);
    r[c + 1] = _mm256_shuffle_ps(t[c], t[c + 2], 0xee);
    r[c + 2] = _mm256_shuffle_ps(t[c + 1], t[c + 3], 0x44);
    r[c + 3] = _mm256_shuffle_ps(t[c + 1], t[c + 3], 0xee);
  }
  for (int c = 0; c < 4; ++c) {
    _mm256_storeu_ps(out + c * NR, _mm256_permute2f128_ps(r[c], r[c + 4], 0x20));
    _mm256_storeu_ps(out + (c + 4) * NR, _mm256_permute2f128_ps(r[c], r[c + 4], 0x31));
  }
}

template <int NR>
void transpose_panel_avx2(const uint16_t* w, size_t k, size_t cols, size_t depth, float* panel) {
  if (cols < size_t(NR)) return transpose_panel<NR>(w, k, cols, depth, panel);
  const size_t body = depth / 8 * 8;
  for (size_t c = 0; c < size_t(NR); c += 8) {
    for (size_t i = 0; i < body; i += 8) transpose_8x8<NR>(w + c * k + i, k, panel + i * NR + c);
  }
  for (size_t c = 0; c < cols; ++c) {
    for (size_t i = body; i < depth; ++i) panel[i * NR + c] = bf16_to_float(w[c * k + i]);
  }
}

}  // namespace
}  // namespace kvproof::weights
