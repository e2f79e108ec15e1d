// Names of integers, and the size of a warp.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
#define INLINE __device__ __forceinline__

namespace kvproof {

constexpr int WARP = 32;
constexpr u32 ALL_LANES = 0xffffffffu;

}  // namespace kvproof
