// What every kernel needs: loads by the copy engine, products of int8 matrices, numbers.
#pragma once

#include "types.cuh"

namespace kvproof {

constexpr int TILE = 64;  // tokens

INLINE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// Bulk copies of 16-byte multiples to shared memory, counted by a barrier there.
INLINE void barrier_init(u32 bar) {
  asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(bar) : "memory");
}
#if __CUDA_ARCH__ >= 900
INLINE void barriers_visible() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
INLINE void expect_bytes(u32 bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
               : "memory");
}
INLINE void bulk_copy(u32 to, const void* from, u32 bytes, u32 bar) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
      "l"(from), "r"(bytes), "r"(bar)
      : "memory");
}
INLINE void barrier_wait(u32 bar, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}" ::"r"(bar),
      "r"(parity)
      : "memory");
}
#else  // the same by the calling thread's copies of 16 bytes, whose arrival the barrier counts
INLINE void barriers_visible() { __threadfence_block(); }
INLINE void expect_bytes(u32, u32) {}
INLINE void bulk_copy(u32 to, const void* from, u32 bytes, u32 bar) {
  const u8* const at = (const u8*)from;
#pragma unroll 4
  for (u32 i = 0; i < bytes; i += 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + i), "l"(at + i) : "memory");
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(bar) : "memory");
}
INLINE void barrier_wait(u32 bar, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\n"
      "mbarrier.test_wait.parity.shared.b64 done, [%0], %1;\n"
      "@!done bra again;\n}" ::"r"(bar),
      "r"(parity)
      : "memory");
}
#endif
// Of `threads` threads of a block that use barrier `id`.
INLINE void sync_some(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

INLINE u32 permute(u32 a, u32 b, u32 selector) {
  u32 r;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(selector));
  return r;
}
// sum + lower half of a * byte 0 of b + upper half of a * byte 1; bytes are signed.
INLINE u32 dot_halves(u32 a, u32 b, u32 sum) {
  u32 r;
  asm("dp2a.lo.u32.s32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(sum));
  return r;
}
INLINE float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
INLINE float2 floats_of(u32 two_halves) {
  float2 y;
  asm("{.reg .f16 a, b;\nmov.b32 {a, b}, %2;\ncvt.f32.f16 %0, a;\ncvt.f32.f16 %1, b;}"
      : "=f"(y.x), "=f"(y.y)
      : "r"(two_halves));
  return y;
}

// c += a b, of 16 x 32 int8 (A_SIGNED) or uint8 by 32 x 8 int8.
template <bool A_SIGNED>
INLINE void multiply(int (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  if constexpr (A_SIGNED)
    asm(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm(
        "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace kvproof
