// GGUF tensor blocks to float32.
//
// Layouts are ggml's (block_q*_*): scales first except in q6_k, low nibbles are the first half of a
// block. Each value is computed with the same float32 operations in the same order as ggml's
// reference, so the result is equal bit for bit (this file must be compiled without contraction).
// Plain loops: the compiler vectorises them for the instruction set of the including file, and
// 268 M values take 0.2 s on two cores, against seconds for the read of a cold file.
#pragma once

#include <bit>
#include <cstring>

#include "weights/ops.h"

namespace kvproof::weights {
namespace {

inline float half_to_float(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000) << 16;
  const uint32_t magnitude = uint32_t(h & 0x7fff) << 13;
  // Shifting the exponent by a product with 2^112 is exact, and handles subnormals.
  float value = std::bit_cast<float>(magnitude) * 0x1p112f;
  if ((h & 0x7c00) == 0x7c00) value = std::bit_cast<float>(magnitude | 0x7f800000);
  return std::bit_cast<float>(std::bit_cast<uint32_t>(value) | sign);
}

inline float read_half(const uint8_t* p) {
  uint16_t h;
  std::memcpy(&h, p, 2);
  return half_to_float(h);
}

inline uint32_t read_u32(const uint8_t* p) {
  uint32_t v;
  std::memcpy(&v, p, 4);
  return v;
}

// Round to nearest even, as torch does; NaN stays NaN.
inline uint16_t float_to_bf16(float f) {
  const uint32_t u = std::bit_cast<uint32_t>(f);
  const uint32_t rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  return uint16_t((u & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}

inline void to_bf16(const float* src, size_t n, uint16_t* dst) {
  for (size_t i = 0; i < n; ++i) dst[i] = float_to_bf16(src[i]);
}

inline void block_q4_0(const uint8_t* b, float* y) {
  const float d = read_half(b);
  for (int j = 0; j < 16; ++j) {
    y[j] = d * float(int(b[2 + j] & 15) - 8);
    y[j + 16] = d * float(int(b[2 + j] >> 4) - 8);
  }
}

inline void block_q4_1(const uint8_t* b, float* y) {
  const float d = read_half(b), m = read_half(b + 2);
  for (int j = 0; j < 16; ++j) {
    y[j] = d * float(b[4 + j] & 15) + m;
    y[j + 16] = d * float(b[4 + j] >> 4) + m;
  }
}

inline void block_q5_0(const uint8_t* b, float* y) {
  const float d = read_half(b);
  const uint32_t high = read_u32(b + 2);
  for (int j = 0; j < 16; ++j) {
    const int h0 = int((high >> j) & 1) << 4, h1 = int((high >> (j + 16)) & 1) << 4;
    y[j] = d * float((int(b[6 + j] & 15) | h0) - 16);
    y[j + 16] = d * float((int(b[6 + j] >> 4) | h1) - 16);
  }
}

inline void block_q5_1(const uint8_t* b, float* y) {
  const float d = read_half(b), m = read_half(b + 2);
  const uint32_t high = read_u32(b + 4);
  for (int j = 0; j < 16; ++j) {
    const int h0 = int((high >> j) & 1) << 4, h1 = int((high >> (j + 16)) & 1) << 4;
    y[j] = d * float(int(b[8 + j] & 15) | h0) + m;
    y[j + 16] = d * float(int(b[8 + j] >> 4) | h1) + m;
  }
}

inline void block_q8_0(const uint8_t* b, float* y) {
  const float d = read_half(b);
  for (int j = 0; j < 32; ++j) y[j] = d * float(int8_t(b[2 + j]));
}

// Six-bit scale and minimum of sub-block j out of the 12 packed bytes of q4_k and q5_k.
inline void scale_min_k(const uint8_t* s, int j, int& scale, int& minimum) {
  if (j < 4) {
    scale = s[j] & 63;
    minimum = s[j + 4] & 63;
  } else {
    scale = (s[j + 4] & 15) | ((s[j - 4] >> 6) << 4);
    minimum = (s[j + 4] >> 4) | ((s[j] >> 6) << 4);
  }
}

inline void block_q4_k(const uint8_t* b, float* y) {
  const float d = read_half(b), dmin = read_half(b + 2);
  const uint8_t *scales = b + 4, *q = b + 16;
  for (int j = 0; j < 8; ++j) {
    int scale, minimum;
    scale_min_k(scales, j, scale, minimum);
    const float dl = d * float(scale), ml = dmin * float(minimum);
    const uint8_t* codes = q + 32 * (j / 2);
    const int shift = 4 * (j % 2);
    for (int l = 0; l < 32; ++l) y[32 * j + l] = dl * float((codes[l] >> shift) & 15) - ml;
  }
}

inline void block_q5_k(const uint8_t* b, float* y) {
  const float d = read_half(b), dmin = read_half(b + 2);
  const uint8_t *scales = b + 4, *high = b + 16, *q = b + 48;
  for (int j = 0; j < 8; ++j) {
    int scale, minimum;
    scale_min_k(scales, j, scale, minimum);
    const float dl = d * float(scale), ml = dmin * float(minimum);
    const uint8_t* codes = q + 32 * (j / 2);
    const int shift = 4 * (j % 2);
    for (int l = 0; l < 32; ++l) {
      const int code = ((codes[l] >> shift) & 15) | (((high[l] >> j) & 1) << 4);
      y[32 * j + l] = dl * float(code) - ml;
    }
  }
}

inline void block_q6_k(const uint8_t* b, float* y) {
  const uint8_t *low = b, *high = b + 128;
  const int8_t* scales = reinterpret_cast<const int8_t*>(b + 192);
  const float d = read_half(b + 208);
  for (int half = 0; half < 2; ++half, low += 64, high += 32) {
    for (int part = 0; part < 4; ++part) {
      const uint8_t* codes = low + 32 * (part % 2);
      const int shift = 4 * (part / 2);
      for (int sub = 0; sub < 2; ++sub) {
        const float dl = d * float(scales[8 * half + 2 * part + sub]);
        for (int l = 16 * sub; l < 16 * sub + 16; ++l) {
          const int code = ((codes[l] >> shift) & 15) | (((high[l] >> (2 * part)) & 3) << 4);
          y[128 * half + 32 * part + l] = dl * float(code - 32);
        }
      }
    }
  }
}

template <void (*Block)(const uint8_t*, float*)>
void each_block(Type type, const uint8_t* src, size_t blocks, float* dst) {
  const BlockShape shape = block_shape(type);
  for (size_t i = 0; i < blocks; ++i) Block(src + i * shape.bytes, dst + i * shape.values);
}

inline void dequantize(Type type, const uint8_t* src, size_t blocks, float* dst) {
  switch (type) {
    case Type::f32:
      std::memcpy(dst, src, 4 * blocks);
      return;
    case Type::f16:
      for (size_t i = 0; i < blocks; ++i) dst[i] = read_half(src + 2 * i);
      return;
    case Type::bf16:
      for (size_t i = 0; i < blocks; ++i) {
        uint16_t h;
        std::memcpy(&h, src + 2 * i, 2);
        dst[i] = std::bit_cast<float>(uint32_t(h) << 16);
      }
      return;
    case Type::q4_0:
      return each_block<block_q4_0>(type, src, blocks, dst);
    case Type::q4_1:
      return each_block<block_q4_1>(type, src, blocks, dst);
    case Type::q5_0:
      return each_block<block_q5_0>(type, src, blocks, dst);
    case Type::q5_1:
      return each_block<block_q5_1>(type, src, blocks, dst);
    case Type::q8_0:
      return each_block<block_q8_0>(type, src, blocks, dst);
    case Type::q4_k:
      return each_block<block_q4_k>(type, src, blocks, dst);
    case Type::q5_k:
      return each_block<block_q5_k>(type, src, blocks, dst);
    case Type::q6_k:
      return each_block<block_q6_k>(type, src, blocks, dst);
  }
}

}  // namespace
}  // namespace kvproof::weights
