// Encode and decode of many rows: rotation here, codes in the leaf kernels.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>

#include "ops.h"
#include "pool.h"

namespace kvproof {
namespace {

constexpr std::ptrdiff_t ROWS_PER_TASK = 64;
// As in Format.encode: a block beyond 2^40 is brought to 2^35..2^36, so that no sum overflows.
float tamed(float top) {
  int exponent;
  std::frexp(top, &exponent);
  return top > 0x1p40f ? std::ldexp(1.f, 36 - exponent) : 1.f;
}

int tasks_for(std::ptrdiff_t rows) { return int((rows + ROWS_PER_TASK - 1) / ROWS_PER_TASK); }

// Integer table of a real codebook: the factor up to `largest` whose rounding error is least.
Table integer_table(const Book& book, float largest) {
  const float top = book.value[book.count - 1];
  double best = HUGE_VAL;
  float factor = 1;
  for (int peak = int(largest) / 2; peak <= int(largest); ++peak) {
    const double f = double(peak) / top;
    double error = 0;
    for (int i = 0; i < book.count; ++i) {
      const double miss = std::nearbyint(book.value[i] * f) / f - book.value[i];
      error += miss * miss;
    }
    if (error < best) {
      best = error;
      factor = float(f);
    }
  }
  Table table{};
  table.scale = factor;
  for (int i = 0; i < 16; ++i) {
    const float v = book.value[i % book.count];
    table.entry[i] = std::int16_t(std::nearbyint(v * factor));
    table.largest = std::max(table.largest, std::abs(int(table.entry[i])));
  }
  return table;
}

Table exact_table(const Book& book) {
  Table table{};
  table.scale = 1;
  for (int i = 0; i < 16; ++i) {
    table.entry[i] = std::int16_t(book.value[i % book.count]);
    table.largest = std::max(table.largest, std::abs(int(table.entry[i])));
  }
  return table;
}

}  // namespace

Constants constants;

void finish_book(int fmt, Book& book) {
  if (fmt == TBQ4_0 || fmt == TBQ3_0) {
    // Keys: at most 8 products of 16383 x 16383 meet in one int32 lane before the flush.
    // Values: 64 tokens of weight x entry share an int32; 12 bits of entry leave 13 for the weight,
    // whose rounding matters more (NMSE 2e-7 with one bit moved from the weight to the entry).
    book.key = integer_table(book, 16383);
    book.value_side = integer_table(book, 4095);
    return;
  }
  book.key = book.value_side = exact_table(book);
  for (int i = 0; i < book.count; ++i) book.byte[i] = std::int8_t(book.value[i]);
}

Spin::Spin(int fmt, int dim) {
  if (fmt == TBQ4_0 || fmt == TBQ3_0) {
    signs = constants.signs32;
    period = GROUP;
    for (int d = 0; d < dim; d += GROUP) parts[n_parts++] = GROUP;
  } else if (path_of(fmt) == ROW || fmt == Q4_0_ROT) {
    signs = fmt == Q4_0_ROT ? constants.no_signs : constants.head_signs;
    period = fmt == Q4_0_ROT ? GROUP : MAX_DIM;
    for (int bit = MAX_DIM; bit; bit /= 2)
      if (dim & bit) parts[n_parts++] = bit;
  }
}

std::ptrdiff_t encode(const Kernels& isa, int threads, int fmt, const float* x, std::ptrdiff_t rows,
                      int dim, const float* scale, std::uint8_t* out, Counts& counts) {
  Pool& pool = Pool::get();
  std::lock_guard<std::mutex> hold(pool.gate());
  const int tasks = tasks_for(rows);
  std::atomic<std::ptrdiff_t> bad{rows};
  pool.run(tasks, threads, [&](int task, int) {
    const std::ptrdiff_t first = task * ROWS_PER_TASK, last = std::min(rows, first + ROWS_PER_TASK);
    if (isa.finite(x + first * dim, (last - first) * dim)) return;
    std::ptrdiff_t row = first;
    while (isa.finite(x + row * dim, dim)) ++row;
    std::ptrdiff_t seen = bad.load();
    while (row < seen && !bad.compare_exchange_weak(seen, row)) {
    }
  });
  if (bad < rows) return bad;

  const Spin spin(fmt, dim);
  const Book& book = constants.book[fmt];
  const std::ptrdiff_t bytes = row_bytes(fmt, dim);
  std::atomic<std::int64_t> saturated{0}, flushed{0};
  pool.run(tasks, threads, [&](int task, int) {
    const std::ptrdiff_t last = std::min(rows, (task + 1) * ROWS_PER_TASK);
    alignas(64) float y[MAX_DIM];
    Counts mine;
    for (std::ptrdiff_t row = task * ROWS_PER_TASK; row < last; ++row) {
      const float* from = x + row * dim;
      if (scale) {
        for (int i = 0; i < dim; ++i) y[i] = from[i] / scale[row];
      } else if (spin.signs) {
        for (int d = 0; d < dim; d += spin.period) {
          const int end = std::min(d + spin.period, dim);
          float top = 0;
          for (int i = d; i < end; ++i) top = std::max(top, std::fabs(from[i]));
          const float factor = tamed(top);
          for (int i = d; i < end; ++i) y[i] = from[i] * factor * spin.signs[i - d];
        }
        isa.rotate(y, dim, spin.parts, spin.n_parts);
      } else {
        std::memcpy(y, from, std::size_t(dim) * sizeof(float));
      }
      isa.encode[fmt](y, dim, book, out + row * bytes, mine);
    }
    saturated += mine.saturated;
    flushed += mine.flushed;
  });
  counts.saturated = saturated;
  counts.flushed = flushed;
  return -1;
}

// One row, stored domain. False if a stored scale or element is not finite.
static bool decode_row(const Kernels& isa, int fmt, const std::uint8_t* row, int dim, float* out) {
  const Book& book = constants.book[fmt];
  std::uint8_t repacked[MAX_DIM + 2];
  if (isa.repack[fmt]) {
    isa.repack[fmt]({row, 0, 1, dim}, book, repacked, 0);
    row = repacked;
  }
  return isa.decode[layout_of(fmt)](row, dim, book, out);
}

std::ptrdiff_t decode(const Kernels& isa, int threads, int fmt, const std::uint8_t* blocks,
                      std::ptrdiff_t stride, std::ptrdiff_t rows, int dim, const float* scale,
                      float* out) {
  Pool& pool = Pool::get();
  std::lock_guard<std::mutex> hold(pool.gate());
  const Spin spin(fmt, dim);
  std::atomic<std::ptrdiff_t> bad{rows};
  pool.run(tasks_for(rows), threads, [&](int task, int) {
    const std::ptrdiff_t last = std::min(rows, (task + 1) * ROWS_PER_TASK);
    for (std::ptrdiff_t row = task * ROWS_PER_TASK; row < last; ++row) {
      float* y = out + row * dim;
      if (!decode_row(isa, fmt, blocks + row * stride, dim, y)) {
        std::ptrdiff_t seen = bad.load();
        while (row < seen && !bad.compare_exchange_weak(seen, row)) {
        }
      }
      if (spin.signs) {
        isa.rotate(y, dim, spin.parts, spin.n_parts);
        // + 0 turns the -0.0 of a zero row into +0.0
        for (int i = 0; i < dim; ++i) y[i] = y[i] * spin.sign(i) + 0.f;
      }
      if (scale)
        for (int i = 0; i < dim; ++i) y[i] *= scale[row];
    }
  });
  return bad < rows ? bad.load() : -1;
}

std::ptrdiff_t first_bad_row(const Kernels& isa, const Side& side) {
  const std::unique_ptr<float[]> row(new float[std::size_t(side.dim)]);
  for (int t = 0; t < side.n; ++t)
    for (int h = 0; h < side.heads; ++h)
      if (!decode_row(isa, side.fmt, side.base + t * side.token_stride + h * side.head_stride,
                      side.dim, row.get()))
        return std::ptrdiff_t(t) * side.heads + h;
  return -1;
}

}  // namespace kvproof
