// Encode and decode of cached rows; the bytes are those of the formats' NumPy (formats/*.py).
//
// A warp has a row, lane l its values l, l + 32, and so on. So a block of 32 is one value a lane, a
// row's loads lie side by side, and the short strides of a rotation are shuffles, the long ones
// registers. Everything is float32 in the reference's order, compiled without contraction, or
// integers. Bytes are put together in shared memory and leave as words.
//
// Macros:
//   WARPS of a block, and AT_ONCE, the rows of a warp that leave together (in whole words: four)
//   FORM of the codes: FITTED (tq2 to tq5), PEAK8 (tq8), Q8, Q4, NORMED (tbq), HALF, BRAIN, E4M3
//   BITS of a code, DIM values and ROW_BYTES of a row, INPUT (0 float32, 1 fp16, 2 bf16)
//   SPIN, the width of the rotation: 0 none, 32, 1 the whole row
//   TRIES, LEVELS and CUTS: sizes of the tables of FITTED
#include "types.cuh"

namespace kvproof {

constexpr int THREADS = WARPS * WARP;
constexpr int GROUPS = (DIM + 31) / 32;
constexpr float TAME = 0x1p40f;  // as `tamed` of formats/base.py
constexpr u32 INFINITE = 0x7f800000u;

#if FORM != FITTED
#define TRIES 4
#define LEVELS 4
#define CUTS 2
#endif

struct Tables {  // of row.Search, of a try or level each; and of half the codebook
  alignas(16) u8 cost[LEVELS][TRIES];
  u8 entry[TRIES][LEVELS];
  int beyond[TRIES];
  u16 nearest[CUTS];  // of a magnitude in halves of a unit, up: its index, and its entry from bit 8
                      // on
};
constexpr int TABLE_WORDS = FORM == FITTED ? sizeof(Tables) / 4 : 0;

struct Args {
  const void* from;    // encode: [rows][DIM] of INPUT; decode: [rows][ROW_BYTES]
  void* to;            // encode: [rows][ROW_BYTES], at a multiple of 4; decode: float32 [rows][DIM]
  const float* signs;  // [DIM] of the rotation, or null
  const u32* tables;   // FITTED: Tables
  long long* report;   // {first bad row: at first more than any, saturated, flushed}
  long long rows;
  float factor[16];   // of the parts of the rotation, largest first
  float book[32];     // value of every code
  float cut[16];      // NORMED: between them
  float grid, start;  // FITTED
  int top;
};

struct Counts {
  int saturated = 0, flushed = 0;
};

INLINE bool lives(int group, int lane) { return DIM % 32 == 0 || group * 32 + lane < DIM; }
INLINE u32 bits_of(float x) { return __float_as_uint(x); }
INLINE u32 magnitude(float x) { return bits_of(x) & 0x7fffffffu; }
INLINE float reciprocal(float x) {
  const float y = 1.f / x;
  return magnitude(y) < INFINITE ? y : 0.f;
}
INLINE float other(float x, int distance) { return __shfl_xor_sync(ALL_LANES, x, distance); }
INLINE u32 below(u32 x, int distance) { return __shfl_down_sync(ALL_LANES, x, distance); }

// ---- numbers of 16 and 8 bits, in integers
// ---------------------------------------------------------

// A finite x; beyond the largest half, infinity.
INLINE u32 half_of(float x) {
  const u32 bits = bits_of(x), sign = bits >> 16 & 0x8000, body = bits & 0x7fffffff;
  if (body >= 0x477ff000) return sign | 0x7c00;
  if (body < 0x38800000)  // subnormal: adding 0.5 leaves units of 2^-24 in the low bits
    return sign | (bits_of(__uint_as_float(body) + 0.5f) - bits_of(0.5f));
  return sign | ((body - 0x38000000 + 0xfff + (body >> 13 & 1)) >> 13);
}
INLINE float float_of_half(u32 h) {
  const u32 sign = (h & 0x8000) << 16, body = h & 0x7fff;
  if (body >= 0x7c00) return __uint_as_float(sign | INFINITE | (body & 0x3ff) << 13);
  return __uint_as_float(sign | bits_of(__uint_as_float(body << 13) * 0x1p112f));
}
INLINE u32 saturated_half(float x, int& saturated) {
  const u32 h = half_of(x);
  if ((h & 0x7fff) != 0x7c00) return h;
  ++saturated;
  return h - 1;
}
INLINE u32 saturated_brain(float x, int& saturated) {
  const u32 bits = bits_of(x), rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  if ((rounded & 0x7fff) < 0x7f80) return rounded;
  ++saturated;
  return (rounded & 0x8000) | 0x7f7f;
}
INLINE u32 saturated_e4m3(float x, int& saturated) {
  const u32 body = magnitude(x), sign = bits_of(x) >> 24 & 0x80;
  if (__uint_as_float(body) >= 464) ++saturated;  // midway from 448 to a 480 that there is not
  u32 code;
  if (body < 0x3c800000)  // below 2^-6: multiples of 2^-9
    code = u32(__float2int_rn(__uint_as_float(body) * 512));
  else
    code = ((body + 0x7ffff + (body >> 20 & 1)) >> 20) - (120 << 3);
  return sign | (code < 126 ? code : 126);
}
INLINE float float_of_e4m3(u32 code) {  // 127 and 255 become NaN
  const u32 sign = (code & 0x80) << 24, body = code & 0x7f;
  if (body == 0x7f) return __uint_as_float(0x7fc00000u);
  if (body < 8) return __uint_as_float(sign | bits_of(float(body) * 0x1p-9f));
  return __uint_as_float(sign | ((body + (120 << 3)) << 20));
}

// ---- rotation
// --------------------------------------------------------------------------------------

INLINE constexpr int part_at(int d) {  // width of the diagonal block that begins at a dim
  if (SPIN != 1) return SPIN;
  int size = 1;
  while (size * 2 <= DIM - d) size *= 2;
  return size;
}

// Butterflies and factors of a row, block by block.
template <int D = 0, int PART = 0>
INLINE void transform(float (&y)[GROUPS], int lane, const float (&factor)[16]) {
  if constexpr (SPIN && D < DIM) {
    constexpr int SIZE = part_at(D), FIRST = D / 32, COUNT = (SIZE + 31) / 32;
#pragma unroll
    for (int step = 1; step < 32 && step < SIZE; step *= 2) {
      const u32 sign = lane & step ? 0x80000000u : 0;
#pragma unroll
      for (int j = FIRST; j < FIRST + COUNT; ++j)
        y[j] = other(y[j], step) + __uint_as_float(bits_of(y[j]) ^ sign);
    }
#pragma unroll
    for (int step = 1; step < COUNT; step *= 2)
#pragma unroll
      for (int j = 0; j < COUNT; ++j)
        if (!(j & step)) {
          const float a = y[FIRST + j], b = y[FIRST + j + step];
          y[FIRST + j] = a + b;
          y[FIRST + j + step] = a - b;
        }
#pragma unroll
    for (int j = FIRST; j < FIRST + COUNT; ++j) y[j] *= factor[PART];
    transform<D + SIZE, SPIN == 1 ? PART + 1 : PART>(y, lane, factor);
  }
}

// Bit j: whether the sign of a lane's value j is negative.
INLINE u32 negative(const float* signs, int lane) {
  u32 bits = 0;
  if (signs)
    for (int j = 0; j < GROUPS; ++j)
      if (lives(j, lane)) bits |= u32(signs[j * 32 + lane] < 0) << j;
  return bits;
}
INLINE void flip(float (&y)[GROUPS], u32 negative) {
#pragma unroll
  for (int j = 0; j < GROUPS; ++j) y[j] = __uint_as_float(bits_of(y[j]) ^ (negative >> j << 31));
}

// Brings what is beyond 2^40 in a row, or in a block of 32, down to 2^35 to 2^36.
INLINE void tame(float (&y)[GROUPS]) {
  u32 top = 0;
  if constexpr (SPIN == 1 && FORM != Q4) {
    for (int j = 0; j < GROUPS; ++j) top = max(top, magnitude(y[j]));
    top = __reduce_max_sync(ALL_LANES, top);
  }
  for (int j = 0; j < GROUPS; ++j) {
    if constexpr (SPIN != 1 || FORM == Q4) top = __reduce_max_sync(ALL_LANES, magnitude(y[j]));
    if (__uint_as_float(top) > TAME) y[j] *= __uint_as_float((289 - (top >> 23)) << 23);
  }
}

// ---- bytes of codes
// ----------------------------------------------------------------------------------

// Of group j of a row whose plane begins at `plane`. Lanes that hold nothing have code 0.
template <int SIZE>
INLINE void put_nibbles(u8* plane, int j, int lane, u32 code) {
  const u32 byte = code | below(code, SIZE / 2) << 4;
  if (lane < SIZE / 2) plane[j * 16 + lane] = u8(byte);
}
template <int SIZE>
INLINE void put_crumbs(u8* plane, int j, int lane, u32 code) {
  const u32 two = code | below(code, SIZE / 4) << 2, byte = two | below(two, SIZE / 2) << 4;
  if (lane < SIZE / 4) plane[j * 8 + lane] = u8(byte);
}
template <int SIZE>
INLINE void put_bits(u8* plane, int j, int lane, bool bit) {
  const u32 word = __ballot_sync(ALL_LANES, bit);
  if (lane < SIZE / 8) plane[j * 4 + lane] = u8(word >> 8 * lane);
}
INLINE void put_stream3(u8* at, int lane, u32 code) {  // 32 codes
  u32 word = code << 3 * (lane % 8);
#pragma unroll
  for (int step = 1; step < 8; step *= 2) word |= __shfl_xor_sync(ALL_LANES, word, step);
  if (lane % 8 < 3) at[lane / 8 * 3 + lane % 8] = u8(word >> 8 * (lane % 8));
}
INLINE void put_half(u8* at, int lane, u32 half) {
  if (lane < 2) at[lane] = u8(half >> 8 * lane);
}

template <int SIZE>
INLINE void put_group(u8* row, int j, int lane, u32 code) {
  if constexpr (BITS == 4 || BITS == 5) {
    put_nibbles<SIZE>(row, j, lane, code & 15);
    if constexpr (BITS == 5) put_bits<SIZE>(row + DIM / 2, j, lane, code >> 4);
  } else {
    put_crumbs<SIZE>(row, j, lane, code & 3);
    if constexpr (BITS == 3) put_bits<SIZE>(row + DIM / 4, j, lane, code >> 2);
  }
}

// ---- encode
// ------------------------------------------------------------------------------------------

// `lane_sum` of formats/row.py of the squares: sixteen running sums, then folds.
INLINE float sum_of_squares(const float (&y)[GROUPS], int lane) {
  float total = 0;
#pragma unroll
  for (int j = 0; j < GROUPS; ++j) {
    const float square = y[j] * y[j], upper = other(square, 16);
    total = j ? total + square : square;
    if (j * 32 + 16 < DIM) total += upper;
  }
#pragma unroll
  for (int half = 8; half; half /= 2) total += other(total, half);
  return __shfl_sync(ALL_LANES, total, 0);  // the upper lanes added in another order
}

INLINE u32 largest(const float (&y)[GROUPS]) {
  u32 top = 0;
#pragma unroll
  for (int j = 0; j < GROUPS; ++j) top = max(top, magnitude(y[j]));
  return __reduce_max_sync(ALL_LANES, top);
}

INLINE void put_unit(u8* at, float unit, const float (&y)[GROUPS], int lane, Counts& counts) {
  const u32 half = saturated_half(unit, counts.saturated);
  if (half == 0 && largest(y)) ++counts.flushed;
  put_half(at, lane, half);
}

// `fit_unit` of formats/row.py. Sums of costs are two to a word as far as they fit.
INLINE void encode_fitted(const float (&y)[GROUPS], u8* row, int lane, const Args& g,
                          const Tables& tables, Counts& counts) {
  constexpr int LAST = LEVELS - 1, WORDS = TRIES / 4, HALF_BOOK = 1 << (BITS - 1);
  constexpr bool FITS = DIM * 255 < 65536;
  const float size = sqrtf(sum_of_squares(y, lane) / float(DIM));
  const float grid = size * g.grid, inverse = reciprocal(grid);
  int level[GROUPS], beyond = 0;
  u32 sums[2 * WORDS] = {};  // of word w: costs 4 w and 4 w + 2, then 4 w + 1 and 4 w + 3
#pragma unroll
  for (int j = 0; j < GROUPS; ++j) {
    level[j] = 0;
    if (!lives(j, lane)) continue;
    const int position = __float2int_rn(fminf(fabsf(y[j]) * inverse, 32767.f));
    level[j] = min((position + 8) >> 4, LAST);
    beyond += max(position - 16 * LAST, 0);
    const u32* const words = (const u32*)tables.cost[level[j]];
#pragma unroll
    for (int w = 0; w < WORDS; ++w) {
      sums[2 * w] += words[w] & 0x00ff00ff;
      sums[2 * w + 1] += words[w] >> 8 & 0x00ff00ff;
    }
  }
  beyond = __reduce_add_sync(ALL_LANES, beyond);
  int best = 0, least = 0;
#pragma unroll
  for (int w = 0; w < WORDS; ++w) {
    u32 cost[4];
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      const u32 two = sums[2 * w + odd];
      if constexpr (FITS) {
        const u32 total = __reduce_add_sync(ALL_LANES, two);
        cost[odd] = total & 0xffff, cost[odd + 2] = total >> 16;
      } else {
        cost[odd] = __reduce_add_sync(ALL_LANES, two & 0xffff);
        cost[odd + 2] = __reduce_add_sync(ALL_LANES, two >> 16);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int k = 4 * w + i, total = 16 * int(cost[i]) + tables.beyond[k] * beyond;
      if (k == 0 || total < least) best = k, least = total;
    }
  }
  int product = 0, squares = 0;
#pragma unroll
  for (int j = 0; j < GROUPS; ++j) {
    if (!lives(j, lane)) continue;
    const int entry = tables.entry[best][level[j]];
    product += level[j] * entry;
    squares += entry * entry;
  }
  product = 16 * __reduce_add_sync(ALL_LANES, product) + g.top * beyond;
  squares = __reduce_add_sync(ALL_LANES, squares);
  const float eighth = grid * float(product) / float(squares) * 0.125f;
  const float finer = reciprocal(eighth);
  const bool live = inverse != 0 && finer != 0;

  product = squares = 0;
#pragma unroll
  for (int j = 0; j < GROUPS; ++j) {
    u32 code = 0;
    if (lives(j, lane)) {
      const int z = __float2int_rn(fmaxf(fminf(y[j] * finer, 32767.f), -32767.f)), a = abs(z);
      const u32 found = tables.nearest[min((a + 3) >> 2, CUTS - 1)], index = found & 255;
      const int entry = int(found >> 8);
      product += a * entry;
      squares += entry * entry;
      if (live) code = z < 0 ? HALF_BOOK - 1 - index : HALF_BOOK + index;
    }
    if (j * 32 + 16 < DIM)
      put_group<32>(row, j, lane, code);
    else
      put_group<16>(row, j, lane, code);
  }
  product = __reduce_add_sync(ALL_LANES, product);
  squares = __reduce_add_sync(ALL_LANES, squares);
  const float unit = live ? eighth * float(product) / float(squares) : size * g.start;
  put_unit(row + ROW_BYTES - 2, unit, y, lane, counts);
}

INLINE void encode_peak8(const float (&y)[GROUPS], u8* row, int lane, Counts& counts) {
  const float unit = __uint_as_float(largest(y)) / 127.f, inverse = reciprocal(unit);
#pragma unroll
  for (int j = 0; j < GROUPS; ++j)
    if (lives(j, lane)) row[j * 32 + lane] = u8(__float2int_rn(y[j] * inverse));
  put_unit(row + DIM, unit, y, lane, counts);
}

INLINE void put_scale(u8* at, float d, int lane, Counts& counts) {
  const u32 half = saturated_half(d, counts.saturated);
  if ((half & 0x7fff) == 0 && d != 0) ++counts.flushed;
  put_half(at, lane, half);
}

INLINE void encode_q8(float y, u8* block, int lane, Counts& counts) {
  const float d = __uint_as_float(__reduce_max_sync(ALL_LANES, magnitude(y))) / 127.f;
  const float scaled = y * reciprocal(d), whole = truncf(fabsf(scaled));
  const int code = int(whole) + (fabsf(scaled) - whole >= 0.5f);
  block[2 + lane] = u8(scaled < 0 ? -code : code);
  put_scale(block, d, lane, counts);
}

INLINE void encode_q4(float y, u8* block, int lane, Counts& counts) {
  const u32 top = __reduce_max_sync(ALL_LANES, magnitude(y));
  const int first = __ffs(int(__ballot_sync(ALL_LANES, magnitude(y) == top))) - 1;
  const float at_top = __shfl_sync(ALL_LANES, y, first), d = top ? at_top / -8.f : -0.f;
  const float code = floorf(y * reciprocal(d) + 8.5f);
  put_nibbles<32>(block + 2, 0, lane, u32(int(fminf(fmaxf(code, 0.f), 15.f))));
  put_scale(block, d, lane, counts);
}

INLINE void encode_normed(float y, u8* block, int lane, const Args& g, Counts& counts) {
  double sum = double(y) * double(y);
#pragma unroll
  for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, step);
  const float d = float(sqrt(sum / 32)), inverse = reciprocal(d), z = y * inverse;
  u32 code = 0;
#pragma unroll
  for (int k = 0; k + 1 < 1 << BITS; ++k) code += g.cut[k] < z;
  if (inverse == 0) code = 0;
  if constexpr (BITS == 4)
    put_nibbles<32>(block + 2, 0, lane, code);
  else
    put_stream3(block + 2, lane, code);
  put_scale(block, d, lane, counts);
}

// Rounds each value by itself. The lanes' counts are of different values here.
INLINE void encode_each(const float (&y)[GROUPS], u8* row, int lane, Counts& counts) {
#pragma unroll
  for (int j = 0; j < GROUPS; ++j) {
    if (!lives(j, lane)) continue;
    const int at = j * 32 + lane;
    if constexpr (FORM == E4M3)
      row[at] = u8(saturated_e4m3(y[j], counts.saturated));
    else
      ((u16*)row)[at] = u16(FORM == HALF ? saturated_half(y[j], counts.saturated)
                                         : saturated_brain(y[j], counts.saturated));
  }
}
constexpr bool EACH = FORM == HALF || FORM == BRAIN || FORM == E4M3;

INLINE float loaded(const void* x, long long at) {
  if constexpr (INPUT == 0)
    return ((const float*)x)[at];
  else if constexpr (INPUT == 1)
    return float_of_half(((const u16*)x)[at]);
  else
    return __uint_as_float(u32(((const u16*)x)[at]) << 16);
}

extern "C" __global__ void __launch_bounds__(THREADS) encode(const __grid_constant__ Args g) {
  __shared__ Tables tables;
  alignas(16) __shared__ u8 staged[WARPS][(AT_ONCE * ROW_BYTES + 15) / 16 * 16];
  for (int i = threadIdx.x; i < TABLE_WORDS; i += THREADS) ((u32*)&tables)[i] = g.tables[i];
  __syncthreads();
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  const u32 signs = negative(g.signs, lane);
  Counts counts;
  const long long stride = (long long)gridDim.x * WARPS * AT_ONCE;
  for (long long first = ((long long)blockIdx.x * WARPS + warp) * AT_ONCE; first < g.rows;
       first += stride) {
    const int n = int(min((long long)AT_ONCE, g.rows - first));
#pragma unroll 1
    for (int r = 0; r < n; ++r) {
      u8* const row = staged[warp] + r * ROW_BYTES;
      float y[GROUPS];
      u32 top = 0;
#pragma unroll
      for (int j = 0; j < GROUPS; ++j) {
        y[j] = lives(j, lane) ? loaded(g.from, (first + r) * DIM + j * 32 + lane) : 0.f;
        top = max(top, magnitude(y[j]));
      }
      const u32 most = SPIN ? bits_of(TAME) : INFINITE - 1;
      if (__any_sync(ALL_LANES, top > most)) {
        if (__any_sync(ALL_LANES, top >= INFINITE) && lane == 0) atomicMin(g.report, first + r);
        if (SPIN) tame(y);
      }
      flip(y, signs);
      transform(y, lane, g.factor);
      if constexpr (FORM == FITTED)
        encode_fitted(y, row, lane, g, tables, counts);
      else if constexpr (FORM == PEAK8)
        encode_peak8(y, row, lane, counts);
      else if constexpr (EACH)
        encode_each(y, row, lane, counts);
      else
#pragma unroll
        for (int j = 0; j < GROUPS; ++j) {
          u8* const block = row + j * (ROW_BYTES / GROUPS);
          if constexpr (FORM == Q8) encode_q8(y[j], block, lane, counts);
          if constexpr (FORM == Q4) encode_q4(y[j], block, lane, counts);
          if constexpr (FORM == NORMED) encode_normed(y[j], block, lane, g, counts);
        }
    }
    __syncwarp();
    const int bytes = n * ROW_BYTES;
    u8* const out = (u8*)g.to + first * ROW_BYTES;
    for (int i = lane; i < bytes / 4; i += WARP) ((u32*)out)[i] = ((const u32*)staged[warp])[i];
    if (lane < bytes % 4) out[bytes - 1 - lane] = staged[warp][bytes - 1 - lane];
    __syncwarp();
  }
  if (EACH || lane == 0) {
    if (counts.saturated) atomicAdd((u64*)g.report + 1, u64(counts.saturated));
    if (counts.flushed) atomicAdd((u64*)g.report + 2, u64(counts.flushed));
  }
}

// ---- decode
// ------------------------------------------------------------------------------------------

INLINE u32 code_at(const u8* codes, int j, int lane, int size) {  // of the planes of a row
  if constexpr (BITS == 8) {
    return codes[j * 32 + lane];
  } else if constexpr (BITS == 4 || BITS == 5) {
    u32 code = codes[j * 16 + lane % (size / 2)] >> 4 * (lane / (size / 2)) & 15;
    if constexpr (BITS == 5) code |= (codes[DIM / 2 + j * 4 + lane / 8] >> lane % 8 & 1) << 4;
    return code;
  } else {
    u32 code = codes[j * 8 + lane % (size / 4)] >> 2 * (lane / (size / 4)) & 3;
    if constexpr (BITS == 3) code |= (codes[DIM / 4 + j * 4 + lane / 8] >> lane % 8 & 1) << 2;
    return code;
  }
}

INLINE u32 loaded_half(const u8* at) { return at[0] | u32(at[1]) << 8; }

extern "C" __global__ void __launch_bounds__(THREADS) decode(const __grid_constant__ Args g) {
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  const u32 signs = negative(g.signs, lane);
  const float book = g.book[lane];
  const auto value = [&](u32 code) {
    return BITS == 8 ? float((signed char)code) : __shfl_sync(ALL_LANES, book, int(code));
  };
  for (long long r = (long long)blockIdx.x * WARPS + warp; r < g.rows;
       r += (long long)gridDim.x * WARPS) {
    const u8* const row = (const u8*)g.from + r * ROW_BYTES;
    float y[GROUPS];
    bool bad = false;
    if constexpr (EACH) {
#pragma unroll
      for (int j = 0; j < GROUPS; ++j) {
        y[j] = 0;
        if (!lives(j, lane)) continue;
        const int at = j * 32 + lane;
        if constexpr (FORM == E4M3) y[j] = float_of_e4m3(row[at]);
        if constexpr (FORM == HALF) y[j] = float_of_half(loaded_half(row + 2 * at));
        if constexpr (FORM == BRAIN) y[j] = __uint_as_float(loaded_half(row + 2 * at) << 16);
        bad |= magnitude(y[j]) >= INFINITE;
      }
    } else if constexpr (FORM == FITTED || FORM == PEAK8) {
      const u32 half = loaded_half(row + ROW_BYTES - 2);
      const float unit = float_of_half(half);
      bad = magnitude(unit) >= INFINITE;
#pragma unroll
      for (int j = 0; j < GROUPS; ++j) {
        const u32 code = lives(j, lane) ? code_at(row, j, lane, DIM - j * 32 < 32 ? 16 : 32) : 0;
        const float x = value(code) * unit;
        y[j] = unit != 0 && lives(j, lane) ? x : 0.f;
      }
    } else {
#pragma unroll
      for (int j = 0; j < GROUPS; ++j) {
        const u8* const block = row + j * (ROW_BYTES / GROUPS);
        const float d = float_of_half(loaded_half(block));
        bad |= magnitude(d) >= INFINITE;
        u32 code;
        if constexpr (BITS == 3) {
          const u8* const at = block + 2 + lane / 8 * 3;
          code = (at[0] | u32(at[1]) << 8 | u32(at[2]) << 16) >> 3 * (lane % 8) & 7;
        } else {
          code = code_at(block + 2, 0, lane, 32);
        }
        const float x = value(code) * d;
        y[j] = d != 0 ? x : 0.f;
      }
    }
    if (__any_sync(ALL_LANES, bad) && lane == 0) atomicMin(g.report, r);
    transform(y, lane, g.factor);
    flip(y, signs);
#pragma unroll
    for (int j = 0; j < GROUPS; ++j)  // + 0 makes a zero positive
      if (lives(j, lane)) ((float*)g.to)[r * DIM + j * 32 + lane] = SPIN ? y[j] + 0.f : y[j];
  }
}

}  // namespace kvproof
