// Operations on whole arrays: what the Python module calls.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels.h"
#include "tiles.h"

namespace kvproof {

// Codebooks and sign vectors, handed over by Python at import so that they exist once.
struct Constants {
  Book book[FORMATS];
  Trellis trellis[FORMATS];
  Units units;
  UnitSearch search[FORMATS];
  float signs32[GROUP];
  float head_signs[MAX_DIM];
  float signs128[2][WIDE];  // of R128, before and after the transform
  float polar_signs[WIDE];  // of the residual of q4_polar_res
};

extern Constants constants;

// A format as a call names it: several books of one format can exist at once.
struct Coded {
  int fmt;
  const Book* book;
};

// Fills the integer tables of a book whose values are set.
void finish_book(int fmt, Book& book);
// Fills a trellis from the values of its 512 states.
void finish_trellis(const float* values, WideTrellis& trellis);

// How a row of a format is rotated: signs, Hadamard blocks, signs; or projected.
struct Spin {
  const float *signs = nullptr, *after = nullptr;  // null: all +1
  int period = 1;                                  // signs repeat after this many values
  int parts[MAX_DIM / GROUP];
  int n_parts = 0;  // 0: not rotated
  const float* projection = nullptr;

  Spin(Coded format, int dim);
  // x [dim] -> y [stored_dim], both in natural order; they may be the same unless projected.
  void forward(const Kernels& isa, const float* x, float factor, int dim, float* y) const;
  void inverse(const Kernels& isa, const float* y, int dim, float* x) const;
};

struct Side {  // encoded rows [token][kv head][bytes]
  int fmt;
  const Book* book;
  const std::uint8_t* base;
  std::ptrdiff_t token_stride, head_stride;
  int n, heads, dim;
  const float* head_scale;  // fp8_e4m3: one per KV head, otherwise null

  int stored() const { return stored_dim(fmt, dim); }
};

struct Query {  // float32 [n_q][heads][dim], dim contiguous
  const float* base;
  std::ptrdiff_t row_stride, head_stride;
  int n, heads, dim;
};

struct Mask {  // query i sees tokens [first + i, end + i), as far as they exist
  int first, end;
};

// Added to the scaled score of token t: base[query][head][(phase + t) / page]; base null: nothing.
struct Offsets {
  const float* base;
  std::ptrdiff_t row_stride, head_stride;
  std::int64_t page, phase;
};

// out [n_q][heads][dim of values]; lse [n_q][heads], natural log of the softmax sum (-inf where
// nothing is seen), or null. False if a stored scale or element is not finite.
bool attention(const Kernels& isa, int threads, const Query& q, const Side& keys,
               const Side& values, Mask mask, const Offsets& offsets, float scale, float* out,
               float* lse);
// out [n_q][heads][n_kv]
bool scores(const Kernels& isa, int threads, const Query& q, const Side& keys, float* out);

// x [rows][dim] -> out [rows][row_bytes]; scale null or one per row. Returns the first row with a
// NaN or infinity (nothing is written then), or -1.
std::ptrdiff_t encode(const Kernels& isa, int threads, Coded format, const float* x,
                      std::ptrdiff_t rows, int dim, const float* scale, std::uint8_t* out,
                      Counts& counts);
// Plain basis. Returns the first row whose stored scale or element is not finite, or -1.
std::ptrdiff_t decode(const Kernels& isa, int threads, Coded format, const std::uint8_t* blocks,
                      std::ptrdiff_t stride, std::ptrdiff_t rows, int dim, const float* scale,
                      float* out);
// The same as `attention` over tiles, which hold finite scales only. Both sides begin in the same
// slot of their first tile. has_tiles holds for both.
void attention_tiles(const Kernels& isa, const TileKernels& tiles, int threads, const Query& q,
                     const TileSide& keys, const TileSide& values, Mask mask,
                     const Offsets& offsets, float scale, float* out, float* lse);
// First such row of a side, in token-major order.
std::ptrdiff_t first_bad_row(const Kernels& isa, const Side& side);

}  // namespace kvproof
