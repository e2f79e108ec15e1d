// Kernels over tiles for Arm NEON with dot products.
#if defined(__aarch64__)
#define KVPROOF_LANES 4
#include <arm_neon.h>

#include "tiles_leaf.h"

namespace kvproof {
namespace {

struct NeonTiles {
  static constexpr int OFFSET = 0, ROWS = 8;  // sdot takes signed bytes; 32 registers
  static constexpr bool SIX_BITS = false;
  struct Table {  // entries of codes 0-15 and 16-31
    uint8x16_t low, high;
  };
  static KVPROOF_INLINE Table table(const std::uint8_t* p) {
    return {vld1q_u8(p), vld1q_u8(p + 16)};
  }
  template <int K, int COPY>
  static KVPROOF_INLINE Bytes look_up(const Table& t, Bytes index) {
    constexpr int bits = low_bits(K);
    const Bytes first = index & std::uint8_t((1 << bits) - 1);
    if constexpr (!top_bit(K)) {
      return Bytes(vqtbl1q_u8(t.low, uint8x16_t(first)));
    } else if constexpr (bits == 2) {
      const Bytes third = right<COPY>(index) & std::uint8_t(4);
      return Bytes(vqtbl1q_u8(t.low, uint8x16_t(first | third)));
    } else {
      const uint8x16x2_t both = {{t.low, t.high}};
      const Bytes fifth = right<COPY>(index) & std::uint8_t(16);
      return Bytes(vqtbl2q_u8(both, uint8x16_t(first | fifth)));
    }
  }
  template <int MASK>
  static KVPROOF_INLINE Bytes merge(Bytes a, Bytes b) {  // mask ? a : b
    return Bytes(vbslq_u8(vdupq_n_u8(MASK), uint8x16_t(a), uint8x16_t(b)));
  }
  static KVPROOF_INLINE Bytes bytes(Bytes x) { return x; }
  static KVPROOF_INLINE Ints dot(Ints sum, Bytes entry, const std::int8_t* a) {
    std::int32_t four;
    std::memcpy(&four, a, 4);
    return Ints(
        vdotq_s32(int32x4_t(sum), int8x16_t(entry), vreinterpretq_s8_s32(vdupq_n_s32(four))));
  }
  static KVPROOF_INLINE Floats larger(Floats a, Floats b) {
    return Floats(vmaxq_f32(float32x4_t(a), float32x4_t(b)));
  }
  static KVPROOF_INLINE Floats larger_magnitude(Floats a, Floats b) {
    return Floats(vmaxq_f32(vabsq_f32(float32x4_t(a)), vabsq_f32(float32x4_t(b))));
  }
  static KVPROOF_INLINE float largest(Floats x) { return vmaxvq_f32(float32x4_t(x)); }
  static KVPROOF_INLINE float total(Floats x) { return vaddvq_f32(float32x4_t(x)); }
  static KVPROOF_INLINE std::int32_t total(Ints x) { return vaddvq_s32(int32x4_t(x)); }
  static void widen(const std::uint8_t* halves, int n, float* out) {
    for (int i = 0; i < n; i += 4) {
      float16x4_t x;
      std::memcpy(&x, halves + 2 * i, sizeof x);
      vst1q_f32(out + i, vcvt_f32_f16(x));
    }
  }
};

}  // namespace

const TileKernels tiles_neon = kernels_by_dots<NeonTiles>();

}  // namespace kvproof
#endif
