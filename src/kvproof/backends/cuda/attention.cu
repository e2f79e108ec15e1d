// Attention of one token of each sequence over a packed cache: split over tokens, joined in the
// same launch. Macros (see CudaBackend): DIM_K, DIM_V, HEADS (query heads of a KV head), K_BITS,
// V_BITS, K_BLOCKS, V_BLOCKS (a scale per 32 values), ROTATE_K, ROTATE_V (0: no; 1: the head;
// 32: blocks of 32), TEAM (warps that share tiles: DIM_V / TEAM values each), TEAMS, K_SLOTS, V_SLOTS, CTAS.
//
// Rows of the matrix unit are query heads: eight with the high parts of queries (later of weights)
// and the same eight with the low parts. With up to four heads the eight rows are two classes of
// tokens, the first and the second half of a tile.
//
// A query is 128 high + low (15 bits). A weight, 2^(score - reference) times the value's scale, is
// an integer below 65536, 256 high + low; the reference of a row is a whole number that only grows:
// it moves when a weight would not fit, and the sums so far are then divided by a power of two.
#include "codes.cuh"

namespace kvproof {

constexpr int ROWS = 8;
constexpr bool CLASSES = HEADS <= 4;
constexpr int WARPS = TEAM * TEAMS;
constexpr int K_SCALES = K_BLOCKS ? DIM_K / 32 : 1, V_SCALES = V_BLOCKS ? DIM_V / 32 : 1;
constexpr int K_CODES = TILE * DIM_K * K_BITS / 8, V_CODES = TILE * DIM_V * V_BITS / 8;
constexpr int K_TILE = K_CODES + K_SCALES * 2 * TILE, V_TILE = V_CODES + V_SCALES * 2 * TILE;
constexpr int STEPS = DIM_K / 32;         // products of 32 dims
constexpr int V_WARP = DIM_V / TEAM;      // values of a warp
constexpr int V_SETS = V_WARP / 8;        // of eight values
constexpr int COLUMNS = CLASSES ? 4 / TEAM : TEAM == 4 ? 2 : 4;  // of eight tokens, or two times eight
constexpr int AT_ONCE = COLUMNS < (CLASSES ? 1 : 4) ? COLUMNS : CLASSES ? 1 : 4;
constexpr int PASSES = !CLASSES && TEAM == 1 ? 2 : 1;
constexpr int HALVES = CLASSES ? 1 : 2;   // of a tile, whose weights are a left side each
constexpr int LINE_V = DIM_V + 4;         // floats of a row when warps are joined
// Of a weight: blocks have scales of both signs.
constexpr u32 LARGEST_WEIGHT = V_BLOCKS ? 32512 : 65535;
constexpr float HEADROOM = V_BLOCKS ? 14.f : 15.f;  // a new reference makes 2^HEADROOM the largest
constexpr int PARTS = TEAMS * (CLASSES ? 2 : 1);
static_assert(PARTS <= WARP);
static_assert(TEAM == 1 || V_SLOTS >= 2);  // values are asked for one tile late
static_assert(V_WARP % 32 == 0 && V_WARP <= 256 && DIM_K % 32 == 0);

struct Side {
  const u8* base;
  long long of_batch, of_head;  // bytes
  Table table, fine;
  float scale;         // of the entries
  const float* signs;  // of the rotation
};
struct Args {
  const float* q;        // [batch][heads][DIM_K]
  float *out, *lse;      // [batch][heads][DIM_V]; [batch][heads] or null
  Side k, v;
  const int* pages;      // [batch][of_pages]: tile of a page table, or null
  int of_pages;
  const int *first, *end;  // [batch] tokens that are seen, or null: from `start` to `length`
  int start, length;
  int kv_heads, group, splits;
  float factor;          // scale * log2 e
  const float* offsets;  // [batch][heads][n_pages] added to scores, or null
  int page, phase, n_pages;  // token t is of page (phase + t) / page
  float* parts;          // [batch * kv_heads * blocks of heads][splits][HEADS][DIM_V + 2]
  u32* arrived;          // [batch * kv_heads * blocks of heads], zero between launches
};

// Rotations of a row by a warp: no signs, and orthonormal. In registers, where value i of a lane is
// number lane * N + i of the row, or in shared memory, for rows that are no power of two.
template <int ROTATE, int DIM>
constexpr bool IN_REGISTERS = ROTATE == 0 ? DIM % WARP == 0 : (DIM & (DIM - 1)) == 0 && DIM >= WARP;

template <int ROTATE, int DIM>
INLINE void rotate_registers(float (&x)[DIM / WARP], int lane) {
  constexpr int N = DIM / WARP, BLOCK = ROTATE == 0 ? 1 : ROTATE == 1 ? DIM : ROTATE;
#pragma unroll
  for (int h = 1; h < BLOCK; h *= 2) {
    if (h < N) {
#pragma unroll
      for (int i = 0; i < N; ++i)
        if (!(i & h)) {
          const float a = x[i], b = x[i + h];
          x[i] = a + b, x[i + h] = a - b;
        }
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const float other = __shfl_xor_sync(ALL_LANES, x[i], h / N);
        x[i] = lane & (h / N) ? other - x[i] : x[i] + other;
      }
    }
  }
#pragma unroll
  for (int i = 0; i < N; ++i) x[i] *= rsqrtf(float(BLOCK));
}

// n values at x, a power of two.
INLINE void hadamard(float* x, int n, int lane) {
  for (int h = 1; h < n; h *= 2) {
    __syncwarp();
    for (int i = lane; i < n / 2; i += WARP) {
      const int at = (i & -h) * 2 | (i & (h - 1));
      const float a = x[at], b = x[at + h];
      x[at] = a + b, x[at + h] = a - b;
    }
  }
  __syncwarp();
}
template <int ROTATE, int DIM>
INLINE void rotate_shared(float* x, int lane) {
  if constexpr (ROTATE == 32) {
    for (int d = 0; d < DIM; d += 32) hadamard(x + d, 32, lane);
    for (int i = lane; i < DIM; i += WARP) x[i] *= 0.1767766952966369f;
  } else if constexpr (ROTATE == 1) {
    int at = 0;
    for (int n = 1024; n; n /= 2)
      if (DIM & n) {
        hadamard(x + at, n, lane);
        for (int i = lane; i < n; i += WARP) x[at + i] *= rsqrtf(float(n));
        at += n;
      }
  }
  __syncwarp();
}

INLINE float scores_of(int high, int low) {
  constexpr float MAGIC = 12582912.f;  // sums start there: an integer in the mantissa
  return fmaf(__int_as_float(high) - MAGIC, 128.f, __int_as_float(low) - MAGIC);
}

// Scores of N columns (eight tokens each) in units of the row's step and, of row formats, the scale
// of the token. Several at once, since a product waits for the one before it.
template <int N>
INLINE void columns(const u8* tile, const int (&nt)[N], const u32 (&q)[STEPS][4], const Side& side,
                    int lane, float (&out)[N][2]) {
  constexpr int FLUSH = K_BLOCKS ? 1 : 8;
  int x[N][4];
  Group<K_BITS> codes[N];
#pragma unroll
  for (int i = 0; i < N; ++i) out[i][0] = out[i][1] = 0;
#pragma unroll
  for (int j = 0; j < STEPS; ++j)
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (j % FLUSH == 0) x[i][0] = x[i][1] = x[i][2] = x[i][3] = 0x4b400000;
      const int unit = nt[i] * STEPS + j;  // only j % 4 has to be known to the compiler
      if (STEPS % 4 || j % 4 == 0) codes[i].load(tile + unit / 4 * GROUP_BYTES<K_BITS>, lane);
      const int u = STEPS % 4 ? unit % 4 : j % 4;
      u32 b0, b1;
      codes[i].entries(side.table, u, b0, b1);
      multiply<true>(x[i], q[j], b0, b1);
      if constexpr (K_FINE) {  // worth a 128th: the high parts, to the sums of the low ones
        codes[i].entries_of_any_sign(side.fine, u, b0, b1);
        const u32 high[4] = {0, q[j][0], 0, q[j][2]};
        multiply<true>(x[i], high, b0, b1);
      }
      if ((j + 1) % FLUSH == 0 || j + 1 == STEPS) {
        float2 s = {1.f, 1.f};
        if constexpr (K_BLOCKS)
          s = floats_of(*(const u32*)(tile + K_CODES + (j * TILE + nt[i] * 8 + lane % 4 * 2) * 2));
        out[i][0] = fmaf(scores_of(x[i][0], x[i][2]), s.x, out[i][0]);
        out[i][1] = fmaf(scores_of(x[i][1], x[i][3]), s.y, out[i][1]);
      }
    }
}

struct Weights {  // of the tokens of a warp's columns, as floats whose low 16 bits are the number
  u32 word[2 * COLUMNS];
};
// A left side of 32 tokens (two times 32): high and low parts, of numbers of both signs where a
// scale can be negative.
INLINE void left_side(const u32* w, u32 (&p)[4]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const u32 x = permute(w[4 * h], w[4 * h + 1], 0x5410), y = permute(w[4 * h + 2], w[4 * h + 3], 0x5410);
    p[2 * h] = permute(x, y, 0x7531);
    p[2 * h + 1] = permute(x, y, 0x6420) ^ (V_BLOCKS ? 0x80808080u : 0);
  }
}

extern "C" __global__ void __launch_bounds__(WARPS * WARP, CTAS)
    attend(const __grid_constant__ Args g) {
  extern __shared__ __align__(128) u8 shared[];
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, r = lane / 4, c = lane % 4;
  const int team = warp / TEAM, member = warp % TEAM;
  const int blocks = (g.group + HEADS - 1) / HEADS;
  const int split = blockIdx.x, task = blockIdx.y, block = task % blocks;
  const int pair = task / blocks, batch = pair / g.kv_heads, kv_head = pair % g.kv_heads;
  const int heads = g.kv_heads * g.group, first_head = kv_head * g.group + block * HEADS;
  const int n_heads = min(HEADS, g.group - block * HEADS);

  u8* const rings = shared + team * (K_SLOTS * K_TILE + V_SLOTS * V_TILE);
  constexpr int RINGS = TEAMS * (K_SLOTS * K_TILE + V_SLOTS * V_TILE);
  constexpr int SLOTS = K_SLOTS + V_SLOTS;
  u64* const bars = (u64*)(shared + RINGS) + team * SLOTS;
  u8* const exchange = shared + RINGS + TEAMS * SLOTS * 8;
  // [team][2][HALVES][8][WARP] words of weights, then flags and tops.
  constexpr int EXCHANGED = TEAM > 1 ? TEAMS * (2 * HALVES * 8 * WARP * 4 + 2 * TEAM * 4 + TEAM * WARP * 4) : 0;
  u8* const q_bytes = exchange + EXCHANGED;             // [2][ROWS][DIM_K]
  float* const steps = (float*)(q_bytes + 2 * ROWS * DIM_K);
  float* const scratch = steps + ROWS;                  // [WARPS][max(DIM_K)] for the rotation

  const int first = g.first ? g.first[batch] : g.start, end = g.end ? g.end[batch] : g.length;
  const int first_tile = first / TILE, n_tiles = max(0, (end + TILE - 1) / TILE - first_tile);
  const int from = first_tile + int((long long)n_tiles * split / g.splits);
  const int to = first_tile + int((long long)n_tiles * (split + 1) / g.splits);
  const int mine = from + team < to ? (to - from - team + TEAMS - 1) / TEAMS : 0;
  const u32 k_bar = shared_address(bars), v_bar = k_bar + 8 * K_SLOTS;
  const u32 k_ring = shared_address(rings), v_ring = k_ring + K_SLOTS * K_TILE;
  const bool loads = member == 0 && lane == 0;
  const auto tile_at = [&](const Side& s, int i, int bytes) {
    const int t = from + team + i * TEAMS;
    const long long at = g.pages ? g.pages[(long long)batch * g.of_pages + t] : t;
    return s.base + batch * s.of_batch + kv_head * s.of_head + at * bytes;
  };
  const auto ask_keys = [&](int i) {
    const int slot = i % K_SLOTS;
    expect_bytes(k_bar + 8 * slot, K_TILE);
    bulk_copy(k_ring + slot * K_TILE, tile_at(g.k, i, K_TILE), K_TILE, k_bar + 8 * slot);
  };
  const auto ask_values = [&](int i) {
    const int slot = i % V_SLOTS;
    expect_bytes(v_bar + 8 * slot, V_TILE);
    bulk_copy(v_ring + slot * V_TILE, tile_at(g.v, i, V_TILE), V_TILE, v_bar + 8 * slot);
  };
  if (loads) {
    for (int i = 0; i < SLOTS; ++i) barrier_init(k_bar + 8 * i);
    barriers_visible();
    for (int i = 0; i < max(K_SLOTS, V_SLOTS) && i < mine; ++i) {
      if (i < K_SLOTS) ask_keys(i);
      if (i < V_SLOTS) ask_values(i);
    }
  }

  // Queries: rotated, 15 bits. Row r of the eight is head r, or r % 4.
  for (int h = warp; h < (CLASSES ? 4 : ROWS); h += WARPS) {
    constexpr int N = DIM_K / WARP;
    float x[N];
    float largest = 0;
    const float* const from_q = g.q + ((long long)batch * heads + first_head + min(h, n_heads - 1)) * DIM_K;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const int at = lane * N + i;
      x[i] = from_q[at] * (ROTATE_K ? g.k.signs[at] : 1.f);
    }
    if constexpr (IN_REGISTERS<ROTATE_K, DIM_K>) {
      rotate_registers<ROTATE_K, DIM_K>(x, lane);
    } else {
      float* const row = scratch + warp * DIM_K;
#pragma unroll
      for (int i = 0; i < N; ++i) row[lane * N + i] = x[i];
      rotate_shared<ROTATE_K, DIM_K>(row, lane);
#pragma unroll
      for (int i = 0; i < N; ++i) x[i] = row[lane * N + i];
    }
#pragma unroll
    for (int i = 0; i < N; ++i) largest = fmaxf(largest, fabsf(x[i]));
#pragma unroll
    for (int o = 16; o; o /= 2) largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, o));
    const float inverse = h < n_heads && largest > 0 ? 16256.f / largest : 0.f;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const int n = __float2int_rn(x[i] * inverse), high = (n + 64) >> 7;
#pragma unroll
      for (int copy = 0; copy < (CLASSES ? 2 : 1); ++copy) {
        u8* const to = q_bytes + (h + 4 * copy) * DIM_K + lane * N + i;
        to[0] = u8(high), to[ROWS * DIM_K] = u8(n - high * 128);
      }
    }
    if (lane == 0)
      for (int copy = 0; copy < (CLASSES ? 2 : 1); ++copy)
        steps[h + 4 * copy] = largest / 16256.f * g.factor * g.k.scale;
  }
  __syncthreads();
  u32 q[STEPS][4];
#pragma unroll
  for (int j = 0; j < STEPS; ++j) {
    const u8* const at = q_bytes + r * DIM_K + 32 * j + 4 * c;
    q[j][0] = *(const u32*)at;
    q[j][1] = *(const u32*)(at + ROWS * DIM_K);
    q[j][2] = *(const u32*)(at + 16);
    q[j][3] = *(const u32*)(at + ROWS * DIM_K + 16);
  }
  const float step = steps[r];
  const float* offsets = nullptr;
  if (OFFSETS) {
    const int head = CLASSES ? r % 4 : r;
    offsets = g.offsets + ((long long)batch * heads + first_head + min(head, n_heads - 1)) * g.n_pages;
  }

  const Table& v_table = SAME_TABLE ? g.k.table : g.v.table;
  int o[V_SETS][4];
#pragma unroll
  for (int i = 0; i < V_SETS; ++i) o[i][0] = o[i][1] = o[i][2] = o[i][3] = 0;
  float reference = -1e30f, total = 0;
  const bool second = CLASSES && lane >= 16;  // this lane's class

  for (int i = 0; i < mine; ++i) {
    const int tile = from + team + i * TEAMS;
    const int k_slot = i % K_SLOTS, v_slot = i % V_SLOTS;
    const u8* const keys = rings + k_slot * K_TILE;
    const u8* const values = rings + K_SLOTS * K_TILE + v_slot * V_TILE;
    barrier_wait(k_bar + 8 * k_slot, i / K_SLOTS & 1);
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
      // Columns of this warp, and the first token of this lane in each: base + 8 j.
      const int column0 = pass * 4 + member * COLUMNS;
      const int base = column0 * 8 + (second ? TILE / 2 : 0) + 2 * c;
      float t[2 * COLUMNS];
#pragma unroll
      for (int j0 = 0; j0 < COLUMNS; j0 += AT_ONCE) {
        constexpr int N = AT_ONCE * (CLASSES ? 2 : 1);
        int nt[N];
        float x[N][2];
#pragma unroll
        for (int j = 0; j < N; ++j) nt[j] = column0 + j0 + j % AT_ONCE + j / AT_ONCE * 4;
        columns<N>(keys, nt, q, g.k, lane, x);
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j) {
          const bool other = CLASSES && second;
          const float y0 = other ? x[j + N - AT_ONCE][0] : x[j][0], y1 = other ? x[j + N - AT_ONCE][1] : x[j][1];
          float2 s = {1.f, 1.f};
          if constexpr (!K_BLOCKS) s = floats_of(*(const u32*)(keys + K_CODES + (base + 8 * (j0 + j)) * 2));
          t[2 * (j0 + j)] = y0 * (s.x * step), t[2 * (j0 + j) + 1] = y1 * (s.y * step);
        }
      }
      if (OFFSETS)
#pragma unroll
        for (int e = 0; e < 2 * COLUMNS; ++e) {
          const int token = tile * TILE + base + e / 2 * 8 + e % 2;
          const int page = max(0, g.phase + token) / g.page;  // tokens that are not seen have none
          t[e] += offsets[min(page, g.n_pages - 1)] * 1.4426950408889634f;
        }
      if (tile * TILE < first || tile * TILE + TILE > end)
#pragma unroll
        for (int e = 0; e < 2 * COLUMNS; ++e) {
          const int token = tile * TILE + base + e / 2 * 8 + e % 2;
          if (token < first || token >= end) t[e] = -1e38f;
        }
      if (TEAM == 1 && pass == PASSES - 1) {
        __syncwarp();
        if (loads && i + K_SLOTS < mine) ask_keys(i + K_SLOTS);
      }
      if (pass == 0) barrier_wait(v_bar + 8 * v_slot, i / V_SLOTS & 1);

      // Scales of values: of the token, or the largest of its blocks.
      float vs[2 * COLUMNS];
#pragma unroll
      for (int j = 0; j < COLUMNS; ++j) {
        float2 s = floats_of(*(const u32*)(values + V_CODES + (base + 8 * j) * 2));
        if constexpr (V_BLOCKS) {
          s.x = fabsf(s.x), s.y = fabsf(s.y);
#pragma unroll
          for (int b = 1; b < V_SCALES; ++b) {
            const float2 x = floats_of(*(const u32*)(values + V_CODES + (b * TILE + base + 8 * j) * 2));
            s.x = fmaxf(s.x, fabsf(x.x)), s.y = fmaxf(s.y, fabsf(x.y));
          }
        }
        vs[2 * j] = s.x, vs[2 * j + 1] = s.y;
      }
      float p[2 * COLUMNS];
      Weights w;
      float sum;
      const auto weigh = [&] {
        u32 most = 0;
        sum = 0;
#pragma unroll
        for (int e = 0; e < 2 * COLUMNS; ++e) {
          p[e] = exp2_fast(t[e] - reference);
          sum += p[e];
          w.word[e] = __float_as_uint(fmaf(p[e], vs[e], 8388608.f));
          most = max(most, w.word[e]);
        }
        return most > 0x4b000000u + LARGEST_WEIGHT;
      };
      const auto needed = [&] {  // the reference that fits this lane's row
        float top = -1e38f;
#pragma unroll
        for (int e = 0; e < 2 * COLUMNS; ++e)
          if (t[e] > -1e37f) top = fmaxf(top, t[e] + __log2f(fmaxf(vs[e], 6e-8f)));
        top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, 1));
        return ceilf(fmaxf(top, __shfl_xor_sync(ALL_LANES, top, 2))) - HEADROOM;
      };
      const auto move = [&](float now) {
        if (now > reference) {
          const float shrink = exp2f(fmaxf(reference - now, -120.f));
          total *= shrink;
#pragma unroll
          for (int n = 0; n < V_SETS; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              const float both = (float(o[n][e]) * 256.f + float(o[n][e + 2])) * shrink;
              const int high = __float2int_rn(both * (1.f / 256.f));
              o[n][e] = high, o[n][e + 2] = __float2int_rn(both - 256.f * float(high));
            }
          reference = now;
        }
      };
      bool over = __any_sync(ALL_LANES, weigh());
      u32 left[HALVES][4];
      if constexpr (TEAM == 1) {
        if (over) {
          move(needed());
          weigh();
        }
        if constexpr (!V_BLOCKS) left_side(w.word, left[0]);
      } else {
        // Weights of the team: written with a flag; where one is set all move their references.
        u8* const of_team = exchange + team * (2 * HALVES * 8 * WARP * 4 + 2 * TEAM * 4 + TEAM * WARP * 4);
        u32* const words = (u32*)of_team + (i & 1) * HALVES * 8 * WARP;
        u32* const flags = (u32*)of_team + 2 * HALVES * 8 * WARP + (i & 1) * TEAM;
        float* const tops = (float*)((u32*)of_team + 2 * HALVES * 8 * WARP + 2 * TEAM);
        const auto give = [&] {
#pragma unroll
          for (int j = 0; j < COLUMNS; ++j) {
            const int at = CLASSES ? column0 + j : (column0 + j) % 4, half = CLASSES ? 0 : (column0 + j) / 4;
#pragma unroll
            for (int e = 0; e < 2; ++e)
              words[(half * 8 + 2 * at + e) * WARP + lane] = V_BLOCKS ? __float_as_uint(p[2 * j + e]) : w.word[2 * j + e];
          }
          if (lane == 0) flags[member] = over;
        };
        give();
        sync_some(1 + team, TEAM * WARP);
        bool any = false;
#pragma unroll
        for (int m = 0; m < TEAM; ++m) any |= flags[m];
        if (any) {
          tops[member * WARP + lane] = needed();
          sync_some(1 + team, TEAM * WARP);
          float now = tops[lane];
#pragma unroll
          for (int m = 1; m < TEAM; ++m) now = fmaxf(now, tops[m * WARP + lane]);
          move(now);
          weigh();
          over = false;
          give();
          sync_some(1 + team, TEAM * WARP);
        }
        if (loads) {  // all have done with the keys of this tile and the values of the last one
          if (i + K_SLOTS < mine) ask_keys(i + K_SLOTS);
          if (i > 0 && i - 1 + V_SLOTS < mine) ask_values(i - 1 + V_SLOTS);
        }
        if constexpr (!V_BLOCKS)
#pragma unroll
          for (int half = 0; half < HALVES; ++half) {
            u32 all[8];
#pragma unroll
            for (int e = 0; e < 8; ++e) all[e] = words[(half * 8 + e) * WARP + lane];
            left_side(all, left[half]);
          }
      }
      total += sum;

      // Products with values: sets of eight of this warp's dims, from set0 on.
      constexpr int SIDES = PASSES == 2 ? 1 : HALVES;
      const u32* const shared_p = TEAM > 1 ? (const u32*)(exchange + team * (2 * HALVES * 8 * WARP * 4 + 2 * TEAM * 4 + TEAM * WARP * 4)) + (i & 1) * HALVES * 8 * WARP : nullptr;
#pragma unroll
      for (int side = 0; side < SIDES; ++side) {
        const int half = PASSES == 2 ? pass : side;  // of the tile, without classes
#pragma unroll
        for (int n = 0; n < V_SETS / 4; ++n) {
          const int set = member * V_SETS + 4 * n;
          u32 a[4];
          if constexpr (V_BLOCKS) {  // weights of this block of 32 dims
            u32 words[8];
#pragma unroll
            for (int e = 0; e < 8; e += 2) {
              const int token = (CLASSES ? (second ? TILE / 2 : 0) : half * 32) + 8 * (e / 2) + 2 * c;
              const float2 s = floats_of(*(const u32*)(values + V_CODES + (set / 4 * TILE + token) * 2));
              const float p0 = TEAM > 1 ? __uint_as_float(shared_p[(side * 8 + e) * WARP + lane]) : p[e % (2 * COLUMNS)];
              const float p1 = TEAM > 1 ? __uint_as_float(shared_p[(side * 8 + e + 1) * WARP + lane]) : p[(e + 1) % (2 * COLUMNS)];
              words[e] = __float_as_uint(fmaf(p0, s.x, 12582912.f + 128.f));
              words[e + 1] = __float_as_uint(fmaf(p1, s.y, 12582912.f + 128.f));
            }
            left_side(words, a);
          } else {
#pragma unroll
            for (int e = 0; e < 4; ++e) a[e] = left[TEAM == 1 ? 0 : side][e];
          }
          Group<V_BITS> x;
          if constexpr (CLASSES) {
            Group<V_BITS> y;
            x.load(values + set / 4 * GROUP_BYTES<V_BITS>, lane);
            y.load(values + (DIM_V / 32 + set / 4) * GROUP_BYTES<V_BITS>, lane);
            u32 one[4], other[4];
#pragma unroll
            for (int e = 0; e < 4; ++e) one[e] = second ? 0 : a[e], other[e] = second ? a[e] : 0;
#pragma unroll
            for (int u = 0; u < 4; ++u) {
              u32 b0, b1;
              x.entries(v_table, u, b0, b1);
              multiply<V_BLOCKS>(o[4 * n + u], one, b0, b1);
            }
#pragma unroll
            for (int u = 0; u < 4; ++u) {
              u32 b0, b1;
              y.entries(v_table, u, b0, b1);
              multiply<V_BLOCKS>(o[4 * n + u], other, b0, b1);
              if constexpr (V_FINE) {
                const u32 high[4] = {0, one[0], 0, one[2]}, high2[4] = {0, other[0], 0, other[2]};
                x.entries_of_any_sign(g.v.fine, u, b0, b1);
                multiply<V_BLOCKS>(o[4 * n + u], high, b0, b1);
                y.entries_of_any_sign(g.v.fine, u, b0, b1);
                multiply<V_BLOCKS>(o[4 * n + u], high2, b0, b1);
              }
            }
          } else {
            x.load(values + (half * (DIM_V / 32) + set / 4) * GROUP_BYTES<V_BITS>, lane);
#pragma unroll
            for (int u = 0; u < 4; ++u) {
              u32 b0, b1;
              x.entries(v_table, u, b0, b1);
              multiply<V_BLOCKS>(o[4 * n + u], a, b0, b1);
              if constexpr (V_FINE) {  // worth a 256th
                const u32 high[4] = {0, a[0], 0, a[2]};
                x.entries_of_any_sign(g.v.fine, u, b0, b1);
                multiply<V_BLOCKS>(o[4 * n + u], high, b0, b1);
              }
            }
          }
        }
      }
    }
    if (TEAM == 1) {
      __syncwarp();
      if (loads && i + V_SLOTS < mine) ask_values(i + V_SLOTS);
    }
  }

  // Rows of all teams in shared memory, [part][HEADS or ROWS][LINE_V]; joined there.
  total += __shfl_xor_sync(ALL_LANES, total, 1);
  total += __shfl_xor_sync(ALL_LANES, total, 2);
  __syncthreads();
  constexpr int OF_TEAM = ROWS;
  float* const rows = (float*)shared;                       // [TEAMS][ROWS][LINE_V]
  float* const refs = rows + TEAMS * ROWS * LINE_V;         // [TEAMS][TEAM][ROWS] totals; [TEAMS][ROWS] references
  float* const share = refs + TEAMS * ROWS * (TEAM + 1);    // [HEADS][PARTS]
  float* const sums = share + HEADS * PARTS;                // [HEADS]
  {
    float* const row = rows + (team * OF_TEAM + r) * LINE_V + member * V_WARP;
#pragma unroll
    for (int n = 0; n < V_SETS; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        row[8 * n + 2 * c + e] = float(o[n][e]) * 256.f + float(o[n][e + 2]);
    if (c == 0) {
      refs[(team * (TEAM + 1) + member) * ROWS + r] = total;
      if (member == 0) refs[(team * (TEAM + 1) + TEAM) * ROWS + r] = reference;
    }
  }
  __syncthreads();
  const auto row_of = [&](int part, int h) {  // row of a head in a part
    return CLASSES ? part / 2 * ROWS + part % 2 * 4 + h : part * ROWS + h;
  };
  for (int h = warp; h < HEADS; h += WARPS) {  // a part in each lane
    const int part = min(lane, PARTS - 1), row = row_of(part, h);
    const float* const of_team = refs + row / ROWS * (TEAM + 1) * ROWS + row % ROWS;
    float top = of_team[TEAM * ROWS], sum = 0;
    for (int m = 0; m < TEAM; ++m) sum += of_team[m * ROWS];
    const float own = top;
#pragma unroll
    for (int n = 16; n; n /= 2) top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, n));
    const float f = exp2_fast(own - top);
    sum = lane < PARTS ? sum * f : 0.f;
#pragma unroll
    for (int n = 16; n; n /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, n);
    if (lane < PARTS) share[h * PARTS + lane] = f;
    if (lane == 0) sums[2 * h] = top, sums[2 * h + 1] = sum;
  }
  __syncthreads();
  float* const parts = g.parts + (long long)task * g.splits * HEADS * (DIM_V + 2);
  float* const joined = sums + 2 * HEADS;  // [HEADS][DIM_V]: what is to be un-rotated
  for (int i = threadIdx.x; i < HEADS * DIM_V; i += WARPS * WARP) {
    const int h = i / DIM_V, d = i % DIM_V;
    float x = 0;
#pragma unroll
    for (int p = 0; p < PARTS; ++p) x += share[h * PARTS + p] * rows[row_of(p, h) * LINE_V + d];
    if (g.splits > 1)
      parts[(split * HEADS + h) * (DIM_V + 2) + d] = x;
    else
      joined[i] = x;
  }
  if (g.splits > 1) {
    if (threadIdx.x < 2 * HEADS)
      parts[(split * HEADS + threadIdx.x / 2) * (DIM_V + 2) + DIM_V + threadIdx.x % 2] = sums[threadIdx.x];
    __threadfence();
    __shared__ u32 before;
    __syncthreads();
    if (threadIdx.x == 0) before = atomicAdd(g.arrived + task, 1);
    __syncthreads();
    if (before != u32(g.splits) - 1) return;
    __threadfence();
    if (threadIdx.x == 0) g.arrived[task] = 0;
    // The last one joins the splits: shares by warp and head, then values.
    float* const weight = joined + HEADS * DIM_V;  // [HEADS][splits]
    for (int h = warp; h < HEADS; h += WARPS) {
      const float* const x = parts + h * (DIM_V + 2) + DIM_V;
      float top = -1e30f, sum = 0;
      for (int s = lane; s < g.splits; s += WARP) top = fmaxf(top, __ldcg(x + s * HEADS * (DIM_V + 2)));
#pragma unroll
      for (int n = 16; n; n /= 2) top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, n));
      for (int s = lane; s < g.splits; s += WARP) {
        const float f = exp2_fast(__ldcg(x + s * HEADS * (DIM_V + 2)) - top);
        weight[h * g.splits + s] = f;
        sum += f * __ldcg(x + s * HEADS * (DIM_V + 2) + 1);
      }
#pragma unroll
      for (int n = 16; n; n /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, n);
      if (lane == 0) sums[2 * h] = top, sums[2 * h + 1] = sum;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < HEADS * DIM_V; i += WARPS * WARP) {
      const int h = i / DIM_V, d = i % DIM_V;
      float x = 0;
#pragma unroll 8
      for (int s = 0; s < g.splits; ++s)
        x += weight[h * g.splits + s] * __ldcg(parts + (s * HEADS + h) * (DIM_V + 2) + d);
      joined[i] = x;
    }
  }
  __syncthreads();
  for (int h = warp; h < n_heads; h += WARPS) {
    constexpr int N = DIM_V / WARP;
    float* const row = joined + h * DIM_V;
    float x[N];
    if constexpr (!IN_REGISTERS<ROTATE_V, DIM_V>) rotate_shared<ROTATE_V, DIM_V>(row, lane);
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = row[lane * N + i];
    if constexpr (IN_REGISTERS<ROTATE_V, DIM_V>) rotate_registers<ROTATE_V, DIM_V>(x, lane);
    const float sum = sums[2 * h + 1], f = sum > 0 ? g.v.scale / sum : 0.f;
    float* const to = g.out + ((long long)batch * heads + first_head + h) * DIM_V;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const int at = lane * N + i;
      to[at] = x[i] * f * (ROTATE_V ? g.v.signs[at] : 1.f);
    }
    if (g.lse && lane == 0)
      g.lse[(long long)batch * heads + first_head + h] =
          sum > 0 ? (sums[2 * h] + log2f(sum)) * 0.6931471805599453f : -__int_as_float(0x7f800000);
  }
}

}  // namespace kvproof
