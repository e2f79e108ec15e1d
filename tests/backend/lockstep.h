// Enough of CUDA to compile kernels as C++ and to run them without a device: the 32 lanes of a
// block of one warp are coroutines, and every operation across lanes hands over to the next one.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#define __device__
#define __global__
#define __shared__ static
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)

struct Index {
  unsigned x, y, z;
};
inline Index blockIdx, gridDim;

namespace lockstep {

constexpr int LANES = 32;
struct Lane {
  ucontext_t start;
  jmp_buf at;
  bool begun, done;
  unsigned crossings;
};
inline Lane lanes[LANES];
inline ucontext_t outside;
inline int now;
inline void (*body)();
inline unsigned long long slots[2][LANES];

inline void go_on(int lane) {
  now = lane;
  if (lanes[lane].begun) _longjmp(lanes[lane].at, 1);
  lanes[lane].begun = true;
  setcontext(&lanes[lane].start);
}
[[noreturn]] inline void lost() {
  std::fprintf(stderr, "lane %d is at a crossing that others do not come to\n", now);
  std::abort();
}
inline void hand_over() {
  if (lanes[(now + 1) % LANES].done) lost();
  if (_setjmp(lanes[now].at) == 0) go_on((now + 1) % LANES);
}
inline void enter() {
  body();
  lanes[now].done = true;
  if (now + 1 < LANES) go_on(now + 1);  // the others are at their ends too
  setcontext(&outside);
}

// What every lane has given when all of them are at the same crossing.
template <class T>
const unsigned long long* cross(T value) {
  const unsigned turn = lanes[now].crossings++;
  unsigned long long bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  slots[turn % 2][now] = bits;
  hand_over();
  if (lanes[(now + 1) % LANES].crossings <= turn) lost();
  return slots[turn % 2];
}
template <class T>
T given(unsigned long long bits) {
  T value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Runs `kernel` for every block of the grid.
inline void run(unsigned grid, void (*kernel)()) {
  static std::vector<char> stacks(LANES << 16);
  body = kernel;
  gridDim = {grid, 1, 1};
  for (blockIdx = {0, 0, 0}; blockIdx.x < grid; ++blockIdx.x) {
    for (int l = 0; l < LANES; ++l) {
      Lane& lane = lanes[l];
      getcontext(&lane.start);
      lane.start.uc_stack.ss_sp = stacks.data() + (l << 16);
      lane.start.uc_stack.ss_size = 1 << 16;
      lane.start.uc_link = nullptr;
      makecontext(&lane.start, enter, 0);
      lane.begun = lane.done = false;
      lane.crossings = 0;
    }
    lanes[0].begun = true;
    now = 0;
    swapcontext(&outside, &lanes[0].start);
  }
}

}  // namespace lockstep

struct ThreadIndex {
  struct X {
    operator unsigned() const { return unsigned(lockstep::now); }
  } x;
};
inline ThreadIndex threadIdx;

template <class T>
T __shfl_xor_sync(unsigned, T x, int distance) {
  const int from = lockstep::now ^ distance;
  return lockstep::given<T>(lockstep::cross(x)[from]);
}
template <class T>
T __shfl_down_sync(unsigned, T x, int distance) {
  const int from = lockstep::now + distance;
  const unsigned long long bits = lockstep::cross(x)[from < 32 ? from : lockstep::now];
  return lockstep::given<T>(bits);
}
template <class T>
T __shfl_sync(unsigned, T x, int from) {
  return lockstep::given<T>(lockstep::cross(x)[from % 32]);
}
inline unsigned __ballot_sync(unsigned, bool x) {
  const unsigned long long* const all = lockstep::cross(unsigned(x));
  unsigned out = 0;
  for (int l = 0; l < 32; ++l) out |= unsigned(all[l] != 0) << l;
  return out;
}
inline bool __any_sync(unsigned mask, bool x) { return __ballot_sync(mask, x) != 0; }
template <class T>
T __reduce_add_sync(unsigned, T x) {
  const unsigned long long* const all = lockstep::cross(x);
  T out = 0;
  for (int l = 0; l < 32; ++l) out += lockstep::given<T>(all[l]);
  return out;
}
inline unsigned __reduce_max_sync(unsigned, unsigned x) {
  const unsigned long long* const all = lockstep::cross(x);
  unsigned out = 0;
  for (int l = 0; l < 32; ++l) out = std::max(out, unsigned(all[l]));
  return out;
}
inline void __syncwarp() { lockstep::cross(0); }
inline void __syncthreads() { lockstep::cross(0); }

template <class T>
T atomicMin(T* at, T x) {
  const T old = *at;
  *at = std::min(old, x);
  return old;
}
template <class T>
T atomicAdd(T* at, T x) {
  const T old = *at;
  *at += x;
  return old;
}
inline unsigned __float_as_uint(float x) {
  unsigned bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
inline float __uint_as_float(unsigned x) { return lockstep::given<float>(x); }
inline int __float2int_rn(float x) { return int(std::lrintf(x)); }
inline int __ffs(int x) { return __builtin_ffs(x); }
using std::abs;
using std::max;
using std::min;
