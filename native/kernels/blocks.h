// How a call of attention is cut and put together again, by every driver.
//
// A task is (KV head, block of query rows, chunk of tokens). The rows of a KV head are its queries
// times its group of query heads. Chunks depend on the shapes only, never on the number of threads,
// and their partial results are folded in order: any thread count gives the same bytes.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>

#include "carver.h"
#include "ops.h"

namespace kvproof {

constexpr float LOG2_E = 1.44269504088896340736f;  // the softmax works in powers of two
constexpr double LN_2 = 0.69314718055994530942;

inline int up(int n, int to) { return (n + to - 1) / to * to; }

inline const float* query_row(const Query& q, int group, int kv_head, int row) {
  return q.base + row / group * q.row_stride + (kv_head * group + row % group) * q.head_stride;
}

class Blocks {
 protected:
  // n cached tokens, the first in slot `first`; `width` values of a row are held while they are
  // summed, `dim` come out.
  Blocks(const Query& q, int kv_heads, int n, int first, Mask mask, const Offsets& offsets,
         int block_rows, int width, int dim, float* out, float* lse)
      : q_(q),
        heads_(kv_heads),
        group_(q.heads / kv_heads),
        rows_(q.n * group_),
        block_rows_(block_rows),
        blocks_((rows_ + block_rows - 1) / block_rows),
        offsets_(offsets),
        n_(n),
        first_(first),
        mask_(mask),
        sum_width_(width),
        dim_(dim),
        out_(out),
        lse_(lse) {}

  // Cuts the tokens of a block into chunks of whole steps.
  void cut(int smallest_chunk, int step, int align) {
    constexpr int TARGET_TASKS = 64;  // enough for the threads of a large machine to even out
    align_ = align;
    int span = 0;
    for (int b = 0; b < blocks_; ++b) span = std::max(span, high(last_query(b)) - start_of(b));
    const int wanted = std::max(1, TARGET_TASKS / (heads_ * blocks_));
    const int most = std::max(1, (span + smallest_chunk - 1) / smallest_chunk);
    const int chunks = std::min(wanted, most);
    chunk_ = std::max(step, up((span + chunks - 1) / chunks, step));
    chunks_ = std::max(1, (span + chunk_ - 1) / chunk_);
  }

  // Threads for a call whose rows have this many values, keys and values together.
  int worth(int threads, int values) const {
    // Below this many multiply-adds a second thread costs more than it brings.
    constexpr double SERIAL_WORK = 1 << 18;
    return double(rows_) * heads_ * n_ * values < SERIAL_WORK ? 1 : threads;
  }

  // Slots [low, high) that query i sees; a slot is `first` and a token.
  int high(int i) const { return first_ + std::clamp(mask_.end + i, 0, n_); }
  int low(int i) const { return first_ + std::clamp(mask_.first + i, 0, n_); }
  int rows_of(int block) const { return std::min(block_rows_, rows_ - block * block_rows_); }
  int first_query(int block) const { return block * block_rows_ / group_; }
  int last_query(int block) const { return (block * block_rows_ + rows_of(block) - 1) / group_; }
  int start_of(int block) const { return low(first_query(block)) / align_ * align_; }
  const float* query(int head, int row) const { return query_row(q_, group_, head, row); }
  // What pages add to the scores of a row; there are offsets.
  const float* offsets_of(int head, int row) const {
    return offsets_.base + row / group_ * offsets_.row_stride +
           (head * group_ + row % group_) * offsets_.head_stride;
  }

  // Partial results of a chunk: maxima, sums, sums of values.
  std::size_t partial_size() const { return std::size_t(block_rows_) * (sum_width_ + 2); }
  void carve_partials(Carver& c) {
    partial_ = c.take<float>(std::size_t(heads_) * blocks_ * chunks_ * partial_size());
  }
  void keep(int head, int block, int chunk, const float* maximum, const float* sum,
            const float* values, int rows_of_values) const {
    const std::size_t n = std::size_t(rows_of(block)) * sizeof(float);
    float* const p = partial(head, block, chunk);
    std::memcpy(p, maximum, n);
    std::memcpy(p + block_rows_, sum, n);
    std::memcpy(p + 2 * block_rows_, values,
                std::size_t(rows_of_values) * sum_width_ * sizeof(float));
  }
  struct Softmax {
    float maximum, sum;
  };
  // Folds the partial results of a row, in order: add(sums of values of the block, weight).
  template <class Add>
  Softmax fold(int head, int block, int r, Add&& add) const {
    Softmax s{-HUGE_VALF, 0};
    for (int c = 0; c < chunks_; ++c) s.maximum = std::max(s.maximum, partial(head, block, c)[r]);
    for (int c = 0; c < chunks_; ++c) {
      const float* const p = partial(head, block, c);
      if (p[block_rows_ + r] == 0) continue;
      const float weight = std::exp2(p[r] - s.maximum);
      s.sum += weight * p[block_rows_ + r];
      add(p + 2 * block_rows_, weight);
    }
    return s;
  }

  // Where a row's output goes. Its log-sum-exp is written; its values are to be multiplied by
  // `factor`.
  struct Output {
    float *to, factor;
  };
  Output output(int head, int row, Softmax s) const {
    const std::ptrdiff_t at =
        std::ptrdiff_t(row / group_) * q_.heads + head * group_ + row % group_;
    if (lse_)
      lse_[at] = s.sum > 0 ? float((s.maximum + std::log2(double(s.sum))) * LN_2) : -HUGE_VALF;
    return {out_ + at * dim_, s.sum > 0 ? 1 / s.sum : 0};
  }

  const Query q_;
  const int heads_, group_, rows_, block_rows_, blocks_;
  const Offsets offsets_;
  int chunk_ = 0, chunks_ = 0;

 private:
  float* partial(int head, int block, int chunk) const {
    return partial_ + (std::size_t(head * blocks_ + block) * chunks_ + chunk) * partial_size();
  }

  const int n_, first_;
  const Mask mask_;
  const int sum_width_, dim_;
  float *const out_, *const lse_;
  int align_ = 1;
  float* partial_ = nullptr;
};

}  // namespace kvproof
