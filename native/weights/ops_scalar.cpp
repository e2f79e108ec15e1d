#include "weights/linear.h"

namespace kvproof::weights {
namespace {

struct Scalar {
  static constexpr int W = 4, MR = 4, NR = 4;
  struct Vec {
    float v[W];
  };
  static Vec zero() { return {}; }
  static Vec load(const float* p) { return {{p[0], p[1], p[2], p[3]}}; }
  static Vec broadcast(const float* p) { return {{p[0], p[0], p[0], p[0]}}; }
  static void store(float* p, Vec a) {
    for (int l = 0; l < W; ++l) p[l] = a.v[l];
  }
  static Vec add(Vec a, Vec b) {
    for (int l = 0; l < W; ++l) a.v[l] += b.v[l];
    return a;
  }
  static Vec fma(Vec a, Vec b, Vec c) {
    for (int l = 0; l < W; ++l) c.v[l] += a.v[l] * b.v[l];
    return c;
  }
  static float sum(Vec a) { return (a.v[0] + a.v[2]) + (a.v[1] + a.v[3]); }
  static void load_bf16_pairs(const uint16_t* p, Vec& even, Vec& odd) {
    for (int l = 0; l < W; ++l) {
      even.v[l] = bf16_to_float(p[2 * l]);
      odd.v[l] = bf16_to_float(p[2 * l + 1]);
    }
  }
  static void panel(const uint16_t* w, size_t k, size_t cols, size_t depth, float* out) {
    transpose_panel<NR>(w, k, cols, depth, out);
  }
};

}  // namespace

const Ops ops_scalar = make_ops<Scalar>("scalar");

}  // namespace kvproof::weights
