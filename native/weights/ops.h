// What one instruction set offers to the engine: dequantization and products with bf16 weights.
//
// Every *_<isa>.cpp instantiates the templates of dequantize.h and linear.h for one ISA struct and
// exports one `Ops`; module.cpp picks one by cpuid when it is loaded.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvproof::weights {

// ggml's type ids, as they stand in GGUF files.
enum class Type : int {
  f32 = 0,
  f16 = 1,
  q4_0 = 2,
  q4_1 = 3,
  q5_0 = 6,
  q5_1 = 7,
  q8_0 = 8,
  q4_k = 12,
  q5_k = 13,
  q6_k = 14,
  bf16 = 30,
};

struct BlockShape {
  int values;
  int bytes;
};

// {0, 0} for a type that the engine cannot read.
constexpr BlockShape block_shape(Type type) {
  switch (type) {
    case Type::f32:
      return {1, 4};
    case Type::f16:
      return {1, 2};
    case Type::bf16:
      return {1, 2};
    case Type::q4_0:
      return {32, 18};
    case Type::q4_1:
      return {32, 20};
    case Type::q5_0:
      return {32, 22};
    case Type::q5_1:
      return {32, 24};
    case Type::q8_0:
      return {32, 34};
    case Type::q4_k:
      return {256, 144};
    case Type::q5_k:
      return {256, 176};
    case Type::q6_k:
      return {256, 210};
  }
  return {0, 0};
}

constexpr int kMaxVecRows = 8;  // rows of activations up to which a product is bound by memory

struct Ops {
  const char* name;
  int mr;  // rows of a packed activation panel
  int nr;  // weight rows of a packed weight panel
  // `blocks` blocks of `type` to float32, operation by operation as ggml does it (no contraction).
  void (*dequantize)(Type type, const uint8_t* src, size_t blocks, float* dst);
  void (*to_bf16)(const float* src, size_t n, uint16_t* dst);
  // x of `vec` from x[k]: even and odd lanes apart, as matvec reads them.
  void (*pack_vec)(const float* x, size_t k, float* packed);
  // out[r * ldo + j] = <x_r, w_j> for the weight rows j in [begin, end).
  void (*matvec)(const float* packed, int rows, size_t k, const uint16_t* w, size_t begin,
                 size_t end, float* out, size_t ldo);
  // Panels of `mr` rows, [panel][k][mr], zero padded.
  void (*pack_rows)(const float* x, size_t rows, size_t k, float* packed);
  // out[i * ldo + j] = <x_i, w_j> for all rows and j in [begin, end); scratch: gemm_scratch floats.
  void (*gemm)(const float* packed, size_t rows, size_t k, const uint16_t* w, size_t begin,
               size_t end, float* out, size_t ldo, float* scratch);
  // out = x / rms(x) * weight for rows [rows][n]; eps is added to the mean square.
  void (*rms_norm)(const float* x, const float* weight, size_t rows, size_t n, float eps,
                   float* out);
};

constexpr size_t kDepthBlock = 256;  // depth of a weight panel: 16 KiB at 16 rows, half of L1
constexpr size_t kRowBlock = 128;    // weight rows of one task: 128 KiB of panels, in L2

extern const Ops ops_scalar;
extern const Ops ops_avx2;
extern const Ops ops_avx512;

}  // namespace kvproof::weights
