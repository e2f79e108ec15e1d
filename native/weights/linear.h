// Products of float32 activations with bf16 weights, y[i, j] = sum_k x[i, k] w[j, k].
//
// Weights stay bf16 in memory and become float32 in registers (a shift or a mask). Two kernels:
//   matvec  up to 8 rows of x: bound by the read of w. 2 * W weights are loaded at once and split
//           into even and odd lanes (one shift, one mask); x is stored split the same way.
//   gemm    more rows: weight panels [kDepthBlock][NR] are converted and transposed once per task
//           into L2, activations lie packed as [k][MR], and a MR x NR tile of sums stays in
//           registers.
// Measured here (Zen 3, 2 threads, 262144 x 640): torch bf16 one token 18.7 ms, 64 tokens 1209 ms;
// torch float32 45 ms and 337 ms. docs/performance.md has the figures of these kernels.
#pragma once

#include <cmath>
#include <cstring>

#include "weights/dequantize.h"

namespace kvproof::weights {
namespace {

// Rows are too short for the hardware's own streams: without this a product reads 17 GB/s.
constexpr size_t kPrefetch = 2048;

inline float bf16_to_float(uint16_t h) { return std::bit_cast<float>(uint32_t(h) << 16); }

// x as matvec reads it: groups of 2 * W values, even ones first; the rest (k % (2 W)) in order.
template <class I>
void pack_vec(const float* x, size_t k, float* packed) {
  size_t i = 0;
  for (; i + 2 * I::W <= k; i += 2 * I::W) {
    for (int l = 0; l < I::W; ++l) {
      packed[i + l] = x[i + 2 * l];
      packed[i + I::W + l] = x[i + 2 * l + 1];
    }
  }
  for (; i < k; ++i) packed[i] = x[i];
}

// One weight row at a time (one stream of memory, which the prefetchers follow) against M rows of
// x; U steps of 2 * W weights at once, so that enough independent sums hide the latency of fma.
template <class I, int M, int U>
void matvec_rows(const float* packed, size_t k, const uint16_t* w, size_t begin, size_t end,
                 float* out, size_t ldo) {
  constexpr size_t step = 2 * I::W;
  const size_t body = k / step * step, unrolled = k / (U * step) * (U * step);
  for (size_t j = begin; j < end; ++j) {
    const uint16_t* row = w + j * k;
    typename I::Vec even[U][M], odd[U][M];
    for (int u = 0; u < U; ++u) {
      for (int m = 0; m < M; ++m) even[u][m] = odd[u][m] = I::zero();
    }
    const auto add_step = [&](int u, size_t i) {
      typename I::Vec we, wo;
      I::load_bf16_pairs(row + i, we, wo);
      __builtin_prefetch(row + i + kPrefetch);
      for (int m = 0; m < M; ++m) {
        even[u][m] = I::fma(I::load(packed + m * k + i), we, even[u][m]);
        odd[u][m] = I::fma(I::load(packed + m * k + i + I::W), wo, odd[u][m]);
      }
    };
    size_t i = 0;
    for (; i < unrolled; i += U * step) {
      for (int u = 0; u < U; ++u) add_step(u, i + u * step);
    }
    for (; i < body; i += step) add_step(0, i);
    for (int m = 0; m < M; ++m) {
      typename I::Vec total = I::add(even[0][m], odd[0][m]);
      for (int u = 1; u < U; ++u) total = I::add(total, I::add(even[u][m], odd[u][m]));
      float sum = I::sum(total);
      for (size_t t = body; t < k; ++t) sum += packed[m * k + t] * bf16_to_float(row[t]);
      out[m * ldo + j] = sum;
    }
  }
}

template <class I>
void matvec(const float* packed, int rows, size_t k, const uint16_t* w, size_t begin, size_t end,
            float* out, size_t ldo) {
  switch (rows) {
    case 1:
      return matvec_rows<I, 1, 4>(packed, k, w, begin, end, out, ldo);
    case 2:
      return matvec_rows<I, 2, 2>(packed, k, w, begin, end, out, ldo);
    case 3:
      return matvec_rows<I, 3, 1>(packed, k, w, begin, end, out, ldo);
    case 4:
      return matvec_rows<I, 4, 1>(packed, k, w, begin, end, out, ldo);
    default: {
      // A row of w is still in L1 when the second half of x reads it again.
      for (size_t j = begin; j < end; ++j) {
        matvec_rows<I, 4, 1>(packed, k, w, j, j + 1, out, ldo);
        matvec<I>(packed + 4 * k, rows - 4, k, w, j, j + 1, out + 4 * ldo, ldo);
      }
    }
  }
}

template <class I>
void pack_rows(const float* x, size_t rows, size_t k, float* packed) {
  for (size_t p = 0; p < rows; p += I::MR) {
    for (size_t i = 0; i < k; ++i) {
      for (size_t r = 0; r < size_t(I::MR); ++r) {
        packed[p * k + i * I::MR + r] = p + r < rows ? x[(p + r) * k + i] : 0.0f;
      }
    }
  }
}

// One tile of sums: a [depth][MR], b [depth][NR]; added to `out` unless `first`.
template <class I>
void tile(size_t depth, const float* a, const float* b, bool first, size_t rows, size_t cols,
          float* out, size_t ldo) {
  constexpr int V = I::NR / I::W;
  typename I::Vec acc[I::MR][V];
  for (int r = 0; r < I::MR; ++r) {
    for (int v = 0; v < V; ++v) acc[r][v] = I::zero();
  }
  for (size_t i = 0; i < depth; ++i) {
    typename I::Vec bv[V];
    for (int v = 0; v < V; ++v) bv[v] = I::load(b + i * I::NR + v * I::W);
    for (int r = 0; r < I::MR; ++r) {
      const typename I::Vec av = I::broadcast(a + i * I::MR + r);
      for (int v = 0; v < V; ++v) acc[r][v] = I::fma(av, bv[v], acc[r][v]);
    }
  }
  if (cols == size_t(I::NR)) {
    for (size_t r = 0; r < size_t(I::MR); ++r) {  // constant bound: the sums stay in registers
      if (r >= rows) break;
      for (int v = 0; v < V; ++v) {
        float* o = out + r * ldo + v * I::W;
        I::store(o, first ? acc[r][v] : I::add(acc[r][v], I::load(o)));
      }
    }
    return;
  }
  float edge[I::MR][I::NR];
  for (int r = 0; r < I::MR; ++r) {
    for (int v = 0; v < V; ++v) I::store(&edge[r][v * I::W], acc[r][v]);
  }
  for (size_t r = 0; r < rows; ++r) {
    for (size_t c = 0; c < cols; ++c) {
      out[r * ldo + c] = first ? edge[r][c] : edge[r][c] + out[r * ldo + c];
    }
  }
}

template <class I>
void gemm(const float* packed, size_t rows, size_t k, const uint16_t* w, size_t begin, size_t end,
          float* out, size_t ldo, float* scratch) {
  for (size_t k0 = 0; k0 < k; k0 += kDepthBlock) {
    const size_t depth = k - k0 < kDepthBlock ? k - k0 : kDepthBlock;
    for (size_t j = begin; j < end; j += I::NR) {
      const size_t cols = end - j < size_t(I::NR) ? end - j : size_t(I::NR);
      float* panel = scratch + (j - begin) * kDepthBlock;
      if (cols < size_t(I::NR)) std::memset(panel, 0, sizeof(float) * depth * I::NR);
      I::panel(w + j * k + k0, k, cols, depth, panel);
    }
    for (size_t p = 0; p < rows; p += I::MR) {
      const float* a = packed + p * k + k0 * I::MR;
      const size_t live = rows - p < size_t(I::MR) ? rows - p : size_t(I::MR);
      for (size_t j = begin; j < end; j += I::NR) {
        const size_t cols = end - j < size_t(I::NR) ? end - j : size_t(I::NR);
        tile<I>(depth, a, scratch + (j - begin) * kDepthBlock, k0 == 0, live, cols,
                out + p * ldo + j, ldo);
      }
    }
  }
}

// Rows [cols][depth] of bf16 to a float32 panel [depth][NR]; the plain form.
template <int NR>
void transpose_panel(const uint16_t* w, size_t k, size_t cols, size_t depth, float* panel) {
  for (size_t c = 0; c < cols; ++c) {
    for (size_t i = 0; i < depth; ++i) panel[i * NR + c] = bf16_to_float(w[c * k + i]);
  }
}

// torch.rms_norm is five operations, about 40 us for one token; a Gemma step has 109 of them.
template <class I>
void rms_norm(const float* x, const float* weight, size_t rows, size_t n, float eps, float* out) {
  const size_t body = n / I::W * I::W;
  for (size_t r = 0; r < rows; ++r, x += n, out += n) {
    typename I::Vec squares = I::zero();
    for (size_t i = 0; i < body; i += I::W) {
      const typename I::Vec v = I::load(x + i);
      squares = I::fma(v, v, squares);
    }
    float sum = I::sum(squares);
    for (size_t i = body; i < n; ++i) sum += x[i] * x[i];
    const float factor = 1.0f / std::sqrt(sum / float(n) + eps);
    for (size_t i = 0; i < n; ++i) out[i] = x[i] * factor * weight[i];
  }
}

template <class I>
constexpr Ops make_ops(const char* name) {
  return {name,        I::MR,     I::NR,        dequantize, to_bf16,
          pack_vec<I>, matvec<I>, pack_rows<I>, gemm<I>,    rms_norm<I>};
}

}  // namespace
}  // namespace kvproof::weights
