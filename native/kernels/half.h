// fp16 conversions in plain integers (round to nearest, ties to even), the same on every machine.
#pragma once

#include <cstdint>
#include <cstring>

namespace kvproof {
namespace {

inline float from_bits(std::uint32_t bits) {
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

inline std::uint32_t to_bits(float f) {
  std::uint32_t bits;
  std::memcpy(&bits, &f, 4);
  return bits;
}

inline std::uint16_t load_u16(const std::uint8_t* p) {
  std::uint16_t h;
  std::memcpy(&h, p, 2);
  return h;
}

inline float half_to_float(std::uint16_t h) {
  const std::uint32_t sign = std::uint32_t(h & 0x8000) << 16, body = h & 0x7fff;
  if (body >= 0x7c00) return from_bits(sign | 0x7f800000 | (body & 0x3ff) << 13);
  // 2^112 rebiases the exponent, and makes a subnormal half a normal float.
  return from_bits(sign | to_bits(from_bits(body << 13) * 0x1p112f));
}

// Finite x only; values beyond the largest half become infinity (0x7c00).
inline std::uint16_t float_to_half(float x) {
  const std::uint32_t bits = to_bits(x), sign = bits >> 16 & 0x8000, body = bits & 0x7fffffff;
  if (body >= 0x477ff000) return std::uint16_t(sign | 0x7c00);
  if (body < 0x38800000) {  // subnormal half: adding 0.5 leaves units of 2^-24 in the low bits
    return std::uint16_t(sign | (to_bits(from_bits(body) + 0.5f) - to_bits(0.5f)));
  }
  return std::uint16_t(sign | (body - 0x38000000 + 0xfff + (body >> 13 & 1)) >> 13);
}

}  // namespace
}  // namespace kvproof
