// Scores and attention of float32 rows, for formats and shapes that attention.cu does not know.
#include "common.cuh"

namespace kvproof {

constexpr int WARPS = 8, THREADS = WARPS * WARP;
constexpr int STEP = THREADS;  // tokens between two looks at the largest score
constexpr int WIDEST = 8;      // values of a thread: rows of up to 2048

struct Args {
  const float *q, *k, *v;  // [n_q][heads][dim_k], [n_kv][kv_heads][dim_k], [n_kv][kv_heads][dim_v]
  float *out, *lse;        // [n_q][heads][dim_v or, of scores, n_kv]; [n_q][heads] or null
  const float* offsets;    // [n_q][heads][n_pages] added to scores, or null
  const int *first, *end;  // [n_q] rows that a query sees
  int n_q, n_kv, heads, kv_heads, dim_k, dim_v;
  float scale;
  int page, phase, n_pages;
};

// By a warp; every lane has the sum.
INLINE float dot(const float* a, const float* b, int n, int lane) {
  float sum = 0;
  for (int i = lane; i < n; i += WARP) sum = fmaf(a[i], b[i], sum);
#pragma unroll
  for (int o = WARP / 2; o; o /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, o);
  return sum;
}

// A warp per score.
extern "C" __global__ void scores(const __grid_constant__ Args g) {
  const long long i = (long long)blockIdx.x * WARPS + threadIdx.x / WARP;
  if (i >= (long long)g.n_q * g.heads * g.n_kv) return;
  const long long query = i / g.n_kv, token = i % g.n_kv;
  const int kv_head = int(query % g.heads) / (g.heads / g.kv_heads), lane = threadIdx.x % WARP;
  const float x =
      dot(g.q + query * g.dim_k, g.k + (token * g.kv_heads + kv_head) * g.dim_k, g.dim_k, lane);
  if (lane == 0) g.out[i] = x;
}

// A block per query and head.
extern "C" __global__ void __launch_bounds__(THREADS) attend(const __grid_constant__ Args g) {
  __shared__ float weights[STEP], tops[WARPS], totals[WARPS];
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  const long long row = blockIdx.x;
  const int query = int(row / g.heads), kv_head = int(row % g.heads) / (g.heads / g.kv_heads);
  const float* const q = g.q + row * g.dim_k;
  float top = -__int_as_float(0x7f800000), total = 0, out[WIDEST] = {};
  const int end = g.end[query];
  for (int start = g.first[query]; start < end; start += STEP) {
    const int n = min(STEP, end - start);
    float most = -__int_as_float(0x7f800000);
    for (int i = warp; i < n; i += WARPS) {
      const long long token = start + i;
      float x = dot(q, g.k + (token * g.kv_heads + kv_head) * g.dim_k, g.dim_k, lane) * g.scale;
      if (g.offsets)
        x += g.offsets[row * g.n_pages + min((g.phase + int(token)) / g.page, g.n_pages - 1)];
      if (lane == 0) weights[i] = x;
      most = fmaxf(most, x);
    }
    if (lane == 0) tops[warp] = most;
    __syncthreads();
    float now = top;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) now = fmaxf(now, tops[w]);
    const float shrink = expf(top - now);
    top = now;
    float sum = 0;
    if (threadIdx.x < n) weights[threadIdx.x] = sum = expf(weights[threadIdx.x] - top);
#pragma unroll
    for (int o = WARP / 2; o; o /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, o);
    if (lane == 0) totals[warp] = sum;
    __syncthreads();
    sum = 0;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) sum += totals[w];
    total = fmaf(total, shrink, sum);
#pragma unroll
    for (int d = 0; d < WIDEST; ++d) {
      const int at = d * THREADS + threadIdx.x;
      if (at >= g.dim_v) break;
      const float* const v = g.v + ((long long)start * g.kv_heads + kv_head) * g.dim_v + at;
      float x = 0;
      for (int i = 0; i < n; ++i) x = fmaf(weights[i], v[(long long)i * g.kv_heads * g.dim_v], x);
      out[d] = fmaf(out[d], shrink, x);
    }
    __syncthreads();
  }
  const float inverse = total > 0 ? 1 / total : 0.f;
#pragma unroll
  for (int d = 0; d < WIDEST; ++d) {
    const int at = d * THREADS + threadIdx.x;
    if (at < g.dim_v) g.out[row * g.dim_v + at] = out[d] * inverse;
  }
  if (g.lse && threadIdx.x == 0) g.lse[row] = top + logf(total);
}

}  // namespace kvproof
