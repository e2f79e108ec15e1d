// Encode and decode of many rows: rotation here, codes in the leaf kernels.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>

#include "half.h"
#include "ops.h"
#include "pool.h"

namespace kvproof {
namespace {

constexpr std::ptrdiff_t ROWS_PER_TASK = 64;
// As in Format.encode: a block beyond 2^40 is brought to 2^35..2^36, so that no sum overflows.
constexpr float TAME = 0x1p40f;
constexpr std::uint32_t INFINITE = 0x7f800000;
float tamed(float top) {
  int exponent;
  std::frexp(top, &exponent);
  return top > TAME ? std::ldexp(1.f, 36 - exponent) : 1.f;
}

int tasks_for(std::ptrdiff_t rows) { return int((rows + ROWS_PER_TASK - 1) / ROWS_PER_TASK); }

// Keys: at most 8 products of 16383 x 16383 meet in one int32 lane before the flush.
// Values: 64 tokens of weight x entry share an int32; 12 bits of entry leave 13 for the weight,
// whose rounding matters more (NMSE 2e-7 with one bit moved from the weight to the entry).
constexpr int LARGEST_KEY_ENTRY = 16383, LARGEST_VALUE_ENTRY = 4095;
// Keys in blocks of 128: see score_wide.
constexpr int LARGEST_WIDE_ENTRY = 8191;

// Integer table of a real codebook: the factor up to `largest` whose rounding error is least, that
// of a residual added to each entry included.
Table integer_table(const Book& book, float largest, double residual = 0) {
  const float top = book.value[book.count - 1];
  double best = HUGE_VAL;
  float factor = 1;
  for (int peak = int(largest) / 2; peak <= int(largest); ++peak) {
    const double f = double(peak) / top;
    const auto miss = [f](double value) { return std::nearbyint(value * f) / f - value; };
    double error = book.count * miss(residual) * miss(residual);
    for (int i = 0; i < book.count; ++i) error += miss(book.value[i]) * miss(book.value[i]);
    if (error < best) {
      best = error;
      factor = float(f);
    }
  }
  Table table{};
  table.scale = factor;
  for (int i = 0; i < 32; ++i) {
    const float v = book.value[i % book.count];
    table.entry[i] = std::int16_t(std::nearbyint(v * factor));
    table.largest = std::max(table.largest, std::abs(int(table.entry[i])));
  }
  return table;
}

Table exact_table(const Book& book) {
  Table table{};
  table.scale = 1;
  for (int i = 0; i < 32; ++i) {
    table.entry[i] = std::int16_t(book.value[i % book.count]);
    table.largest = std::max(table.largest, std::abs(int(table.entry[i])));
  }
  return table;
}

}  // namespace

Constants constants;

void finish_trellis(const float* values, WideTrellis& trellis) {
  float top = 0;
  for (int s = 0; s < WideTrellis::STATES; ++s) {
    trellis.value[s] = values[s];
    trellis.of_predecessor[s % 8][s / 8] = values[s];
    top = std::max(top, std::fabs(values[s]));
  }
  trellis.largest = LARGEST_WIDE_ENTRY;
  trellis.scale = float(LARGEST_WIDE_ENTRY) / top;
  for (int bits = 0; bits < WideTrellis::PAIRS; ++bits) {
    const auto entry = [&](int state) {
      return std::int32_t(
          std::nearbyint(double(values[state % WideTrellis::STATES]) * trellis.scale));
    };
    trellis.pairs[bits] =
        std::int32_t(std::uint32_t(entry(bits >> 3)) << 16 | (std::uint32_t(entry(bits)) & 0xffff));
  }
}

void finish_book(int fmt, Book& book) {
  if (fmt == TBQ4_0 || fmt == TBQ3_0) {
    book.key = integer_table(book, LARGEST_KEY_ENTRY);
    book.value_side = integer_table(book, LARGEST_VALUE_ENTRY);
    return;
  }
  if (fmt == Q4_POLAR || fmt == Q4_POLAR_RES) {
    // Room for the residual, 0.016 of the largest centroid. The norm of a block is sqrt(128) of its
    // unit.
    const auto table = [&](int largest) {
      Table t =
          integer_table(book, float(largest - largest / 50), fmt == Q4_POLAR_RES ? RESIDUAL : 0);
      t.largest = largest;
      t.scale *= float(ROOT);
      return t;
    };
    book.key = table(fmt == Q4_POLAR ? LARGEST_KEY_ENTRY : LARGEST_WIDE_ENTRY);
    book.value_side = table(LARGEST_VALUE_ENTRY);
    book.residual = constants.polar_signs;
    return;
  }
  book.key = book.value_side = exact_table(book);
}

Spin::Spin(Coded format, int dim) {
  const int fmt = format.fmt;
  if (fmt == QJL1_256) {
    projection = format.book->projection;
  } else if (fmt == Q4_POLAR || fmt == Q4_POLAR_RES || fmt == TBQ3_TCQ) {
    period = WIDE;
    if (fmt == TBQ3_TCQ) {
      signs = constants.signs128[0];
      after = constants.signs128[1];
    }
    for (int d = 0; d < dim; d += WIDE) parts[n_parts++] = WIDE;
  } else if (fmt == TBQ4_0 || fmt == TBQ3_0) {
    signs = constants.signs32;
    period = GROUP;
    for (int d = 0; d < dim; d += GROUP) parts[n_parts++] = GROUP;
  } else if (path_of(fmt) == ROW || fmt == Q4_0_ROT) {
    if (fmt != Q4_0_ROT) signs = constants.head_signs;
    period = fmt == Q4_0_ROT ? GROUP : MAX_DIM;
    for (int bit = MAX_DIM; bit; bit /= 2)
      if (dim & bit) parts[n_parts++] = bit;
  }
}

void Spin::forward(const Kernels& isa, const float* x, float factor, int dim, float* y) const {
  if (projection) {
    float scaled[MAX_DIM];
    for (int i = 0; i < dim; ++i) scaled[i] = x[i] * factor;
    isa.project(scaled, dim, projection, y);
    return;
  }
  if (factor != 1 || !n_parts) {
    for (int i = 0; i < dim; ++i) y[i] = x[i] * factor;
    x = y;
  }
  if (n_parts) isa.rotate({x, 0, y, 0, 1}, signs, period, parts, n_parts);
  if (after)
    for (int i = 0; i < dim; ++i) y[i] *= after[i % period];
}

// x times signs that repeat. Without a division a value, which costs more than the rotation.
static void times_signs(const float* x, const float* signs, int period, int dim, float* out) {
  for (int d = 0; d < dim; d += period)
    for (int i = d; i < std::min(dim, d + period); ++i) out[i] = x[i] * signs[i - d];
}

void Spin::inverse(const Kernels& isa, const float* y, int dim, float* x) const {
  if (projection) {
    for (int d = 0; d < dim; ++d) {
      const float* const of_group = y + d / WIDE * SKETCH;
      double sum = 0;
      for (int j = 0; j < SKETCH; ++j)
        sum += double(of_group[j]) * double(projection[d % WIDE * SKETCH + j]);
      constexpr double TOP = 0x1.fffffep127;
      x[d] = float(std::clamp(sum, -TOP, TOP));
    }
    return;
  }
  if (after)
    times_signs(y, after, period, dim, x);
  else if (x != y)
    std::memcpy(x, y, std::size_t(dim) * sizeof(float));
  if (n_parts) isa.rotate({x, 0, x, 0, 1}, nullptr, period, parts, n_parts);
  if (signs) times_signs(x, signs, period, dim, x);
}

std::ptrdiff_t encode(const Kernels& isa, int threads, Coded format, const float* x,
                      std::ptrdiff_t rows, int dim, const float* scale, std::uint8_t* out,
                      Counts& counts) {
  const int fmt = format.fmt;
  Pool& pool = Pool::get();
  std::lock_guard<std::mutex> hold(pool.gate());
  const int tasks = tasks_for(rows);
  std::atomic<std::ptrdiff_t> bad{rows};
  std::atomic<bool> tame{false};
  pool.run(tasks, threads, [&](int task, int) {
    const std::ptrdiff_t first = task * ROWS_PER_TASK, last = std::min(rows, first + ROWS_PER_TASK);
    if (isa.all_below(x + first * dim, (last - first) * dim, TAME)) return;
    const std::uint32_t top = isa.largest_bits(x + first * dim, (last - first) * dim);
    if (top > to_bits(TAME)) tame.store(true, std::memory_order_relaxed);
    if (top < INFINITE) return;
    std::ptrdiff_t row = first;
    while (isa.largest_bits(x + row * dim, dim) < INFINITE) ++row;
    std::ptrdiff_t seen = bad.load();
    while (row < seen && !bad.compare_exchange_weak(seen, row)) {
    }
  });
  if (bad < rows) return bad;

  const Spin spin(format, dim);
  const std::ptrdiff_t bytes = row_bytes(fmt, dim);
  // Rows that need no preparation are encoded where they are.
  const bool rotated = spin.n_parts && !wide(fmt),
             plain = !rotated && !scale && !(tame && spin.n_parts),
             at_once = rotated && !scale && !tame && !spin.after;
  const std::ptrdiff_t stride = plain ? dim : (dim + 63) / 64 * 64;
  const std::ptrdiff_t together = std::clamp<std::ptrdiff_t>(MAX_BATCH / stride, 1, MAX_ROWS);
  std::atomic<std::int64_t> saturated{0}, flushed{0};
  pool.run(tasks, threads, [&](int task, int) {
    const std::ptrdiff_t last = std::min(rows, (task + 1) * ROWS_PER_TASK);
    alignas(64) float y[MAX_BATCH];
    if (stride != dim) std::memset(y, 0, sizeof y);
    Counts mine;
    for (std::ptrdiff_t row = task * ROWS_PER_TASK; row < last; row += together) {
      const auto n = int(std::min(together, last - row));
      if (at_once)
        isa.rotate({x + row * dim, dim, y, stride, n}, spin.signs, spin.period, spin.parts,
                   spin.n_parts);
      for (int r = 0; r < n && !plain && !at_once; ++r) {
        const float* const from = x + (row + r) * dim;
        float* const to = y + r * stride;
        if (scale) {
          for (int i = 0; i < dim; ++i) to[i] = from[i] / scale[row + r];
        } else if (tame) {
          for (int d = 0; d < dim; d += spin.period) {
            const int end = std::min(d + spin.period, dim);
            float top = 0;
            for (int i = d; i < end; ++i) top = std::max(top, std::fabs(from[i]));
            const float factor = tamed(top);
            for (int i = d; i < end; ++i) to[i] = from[i] * factor;
          }
          if (rotated) spin.forward(isa, to, 1, dim, to);
        } else {
          spin.forward(isa, from, 1, dim, to);
        }
      }
      isa.encode[fmt](plain ? x + row * dim : y, stride, n, dim, *format.book, out + row * bytes,
                      mine);
    }
    saturated += mine.saturated;
    flushed += mine.flushed;
  });
  counts.saturated = saturated;
  counts.flushed = flushed;
  return -1;
}

// One row, stored domain. False if a stored scale or element is not finite.
static bool decode_row(const Kernels& isa, Coded format, const std::uint8_t* row, int dim,
                       float* out) {
  const auto [fmt, book] = format;
  std::uint8_t repacked[row_bytes(FIVE, MAX_DIM) + 16];
  if (isa.repack[fmt]) {
    isa.repack[fmt]({row, 0, 1, dim}, *book, repacked, 0);
    row = repacked;
  }
  return isa.decode[layout_of(fmt)](row, dim, *book, out);
}

std::ptrdiff_t decode(const Kernels& isa, int threads, Coded format, const std::uint8_t* blocks,
                      std::ptrdiff_t stride, std::ptrdiff_t rows, int dim, const float* scale,
                      float* out) {
  Pool& pool = Pool::get();
  std::lock_guard<std::mutex> hold(pool.gate());
  const Spin spin(format, dim);
  std::atomic<std::ptrdiff_t> bad{rows};
  pool.run(tasks_for(rows), threads, [&](int task, int) {
    const std::ptrdiff_t last = std::min(rows, (task + 1) * ROWS_PER_TASK);
    alignas(64) float stored[2 * MAX_DIM];
    for (std::ptrdiff_t row = task * ROWS_PER_TASK; row < last; ++row) {
      float* y = out + row * dim;
      if (!decode_row(isa, format, blocks + row * stride, dim, stored)) {
        std::ptrdiff_t seen = bad.load();
        while (row < seen && !bad.compare_exchange_weak(seen, row)) {
        }
      }
      spin.inverse(isa, stored, dim, y);
      if (spin.n_parts)  // + 0 turns the -0.0 of a zero row into +0.0
        for (int i = 0; i < dim; ++i) y[i] += 0.f;
      if (scale)
        for (int i = 0; i < dim; ++i) y[i] *= scale[row];
    }
  });
  return bad < rows ? bad.load() : -1;
}

std::ptrdiff_t first_bad_row(const Kernels& isa, const Side& side) {
  const std::unique_ptr<float[]> row(new float[std::size_t(side.stored())]);
  for (int t = 0; t < side.n; ++t)
    for (int h = 0; h < side.heads; ++h)
      if (!decode_row(isa, {side.fmt, side.book},
                      side.base + t * side.token_stride + h * side.head_stride, side.dim,
                      row.get()))
        return std::ptrdiff_t(t) * side.heads + h;
  return -1;
}

}  // namespace kvproof
