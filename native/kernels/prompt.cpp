// Attention of many query rows: prompts. See panel.h for the arithmetic.
//
// A task is (KV head, block of query rows, chunk of tokens). Each tile of K and V is decoded once
// for all rows of the block, and every panel of rows skips the tokens that none of its queries
// sees. Chunks depend on the shapes only, and their partial results are merged in order: any
// number of threads gives the same bytes.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <mutex>

#include "ops.h"
#include "plan.h"
#include "pool.h"

namespace kvproof {
namespace {

// Values of a block's queries: with its sums and tiles they stay in a 512 KiB L2.
constexpr int BLOCK_VALUES = 32768;
constexpr int LEAST_BLOCK = 64, MOST_BLOCK = 128;  // rows
constexpr int SMALLEST_CHUNK = 512;
constexpr int SLICE_VALUES = SLICE * GROUP;
// Elements take twice the room of entries: half a slice stays in L1 beside sums that are added to.
constexpr int REAL_SLICE = SLICE_VALUES / 2;
// Lengths of query and key rows whose product is below 2^31, rounding included.
constexpr float LONGEST = 46200;
constexpr int LARGEST_VALUE = 16384;  // entry of block formats, their scale folded in

class Prompt : Blocks {
 public:
  Prompt(const Kernels& isa, const Query& q, const Side& keys, const Side& values, Mask mask,
         const Offsets& offsets, float scale, float* out, float* lse)
      : Blocks(q, keys.heads, keys.n, 0, mask, offsets, block_for(isa, q, keys, values),
               padded(values.dim), values.dim, out, lse),
        isa_(isa),
        keys_(keys),
        values_(values),
        factor_(scale * LOG2_E),
        key_path_(path_of(keys.fmt)),
        value_path_(path_of(values.fmt)),
        decoded_keys_(isa, keys_),
        decoded_values_(isa, values_),
        key_spin_({keys.fmt, keys.book}, keys.dim),
        value_spin_({values.fmt, values.book}, values.dim),
        key_width_(padded(keys.stored())),
        value_width_(padded(values.dim)),
        panel_(isa.panel) {
    // Positions without an element go with one behind the last.
    for (int i = 0; i < key_width_; ++i)
      key_from_[i] = decoded_keys_.element[i] < 0 ? key_width_ : decoded_keys_.element[i];
    for (int i = 0; i < value_width_; ++i)
      value_to_[i] = decoded_values_.element[i] < 0 ? value_width_ : decoded_values_.element[i];
    while (value_path_ == BLOCK &&
           decoded_values_.table.largest << (value_shift_ + 1) <= LARGEST_VALUE)
      ++value_shift_;
    if (value_path_ != REAL)
      room_ =
          2147483647.f / float(std::max(1, decoded_values_.table.largest) << value_shift_) - TILE;
    cut(SMALLEST_CHUNK, TILE, 1);
  }

  bool run(int threads) {
    Pool& pool = Pool::get();
    std::lock_guard<std::mutex> hold(pool.gate());
    const int pieces = keys_.heads * blocks_, tasks = pieces * chunks_;
    Carver measure;
    Worker layout;
    carve(measure, layout);
    const std::size_t bytes = measure.used();
    for (int i = 0; i < std::max(1, threads); ++i) pool.scratch(i).at_least(bytes);
    const auto with_scratch = [&](int worker, auto fn) {
      Worker w;
      Carver c(pool.scratch(worker).at_least(bytes));
      carve(c, w);
      fn(w);
    };
    if (chunks_ > 1) {  // queries are prepared once for all chunks
      const auto share = [&](Carver c) {
        carve_partials(c);
        queries_ = c.take<float>(std::size_t(pieces) * block_rows_ * key_width_);
        factors_ = c.take<float>(std::size_t(pieces) * block_rows_);
        return c.used();
      };
      share(Carver(pool.shared().at_least(share(Carver()))));
      pool.run(pieces, threads, [&](int task, int worker) {
        with_scratch(worker, [&](Worker& w) {
          use_shared(task / blocks_, task % blocks_, w);
          prepare(task / blocks_, task % blocks_, w);
        });
      });
    }
    std::atomic<bool> ok{true};
    pool.run(tasks, threads, [&](int task, int worker) {
      with_scratch(worker, [&](Worker& w) {
        // Last blocks first: they see most. Heads change fastest: neighbours share cache lines of a
        // token-major cache.
        const int rest = task / keys_.heads, block = blocks_ - 1 - rest / chunks_;
        if (!chunk_task(task % keys_.heads, block, rest % chunks_, w)) ok = false;
      });
    });
    if (chunks_ > 1)
      pool.run(pieces, threads, [&](int task, int worker) {
        with_scratch(worker, [&](Worker& w) { merge(task / blocks_, task % blocks_, w); });
      });
    return ok;
  }

 private:
  struct Worker {
    std::int16_t* natural;
    void *queries, *keys, *values;
    std::uint8_t* space;
    float *y, *scales, *key_unit, *value_unit, *scores, *sum_of_values, *step, *alpha;
    float *factor, *maximum, *sum;  // of each row
    std::int32_t* words;
  };

  static int block_for(const Kernels& isa, const Query& q, const Side& keys, const Side& values) {
    // Elements cost more to decode than codes do beside their slower products.
    const bool real = path_of(keys.fmt) == REAL || path_of(values.fmt) == REAL;
    const int width = std::max(padded(keys.stored()), padded(values.dim));
    const int rows = (real ? 2 : 1) * BLOCK_VALUES / width;
    return std::min(up(q.n * (q.heads / keys.heads), isa.panel),
                    std::clamp(rows / LEAST_BLOCK * LEAST_BLOCK, LEAST_BLOCK, MOST_BLOCK));
  }

  void carve(Carver& c, Worker& w) const {
    const std::size_t rows = std::size_t(block_rows_);
    w.natural = c.take<std::int16_t>(std::size_t(key_width_) + 1);
    w.queries = c.take<float>(rows * key_width_);
    w.keys = c.take<float>(std::size_t(TILE) * std::max(key_width_, SLICE_VALUES));
    w.values = c.take<float>(std::size_t(TILE) * std::max(value_width_, SLICE_VALUES));
    w.space =
        c.take<std::uint8_t>(std::max(repacked_bytes(isa_, keys_), repacked_bytes(isa_, values_)));
    w.y = c.take<float>(std::size_t(std::max(key_width_, value_width_)) + 1);
    w.scales = c.take<float>(std::size_t(TILE) * std::max(key_width_, value_width_) / GROUP +
                             SLICE * TILE);
    w.key_unit = c.take<float>(TILE + 1);
    w.value_unit = c.take<float>(TILE + 1);
    w.scores = c.take<float>(rows * TILE);
    w.sum_of_values = c.take<float>(rows * value_width_);
    w.step = c.take<float>(rows);
    w.alpha = c.take<float>(std::size_t(panel_));
    w.factor = c.take<float>(rows);
    w.maximum = c.take<float>(rows);
    w.sum = c.take<float>(rows);
    w.words = c.take<std::int32_t>(rows * TILE / 2);
  }

  // Of row r of a block; rows that only fill a panel go with the last one.
  int query_of(int block, int r) const {
    return (block * block_rows_ + std::min(r, rows_of(block) - 1)) / group_;
  }

  void use_shared(int head, int block, Worker& w) const {
    const std::ptrdiff_t row = std::ptrdiff_t(head * blocks_ + block) * block_rows_;
    w.queries = queries_ + row * key_width_;
    w.factor = factors_ + row;
  }

  void prepare(int head, int block, Worker& w) const {
    const int n = rows_of(block), rows = up(n, panel_);
    const float factor = factor_ * (keys_.head_scale ? keys_.head_scale[head] : 1.f);
    for (int r = 0; r < rows; ++r)
      prepare_row(r < n ? query(head, block * block_rows_ + r) : nullptr, factor, r, w);
  }

  // Rotates and stores one query row of a block; null fills a panel with a row that scores 0.
  void prepare_row(const float* q, float factor, int r, Worker& w) const {
    const std::ptrdiff_t at = std::ptrdiff_t(r / panel_) * panel_ * key_width_;
    const int lane = r % panel_, dim = keys_.dim, stored = keys_.stored();
    if (key_path_ == REAL) {
      float* const to = static_cast<float*>(w.queries) + at + lane;
      w.factor[r] = 1;
      for (int i = 0; i < key_width_; ++i) to[i * panel_] = q && i < dim ? q[i] * factor : 0;
      return;
    }
    std::int16_t* to = static_cast<std::int16_t*>(w.queries) + at + 2 * lane;
    const Table& table = decoded_keys_.table;
    float step = 0;
    if (q) {
      key_spin_.forward(isa_, q, factor, dim, w.y);
      step = isa_.quantize(w.y, stored, largest_query(w.y, stored), w.natural);
    } else {
      std::memset(w.natural, 0, std::size_t(stored) * sizeof *w.natural);
    }
    // Below the least, scores are 0 for every purpose, and offsets can still be divided by it.
    w.factor[r] = std::max(step / table.scale, 1e-25f);
    w.natural[key_width_] = 0;
    const int* const from = key_from_;
    for (int i = 0; i < key_width_; i += 2, to += 2 * panel_) {
      to[0] = w.natural[from[i]];
      to[1] = w.natural[from[i + 1]];
    }
  }

  // Largest entry of a query row with which no sum of products leaves an int32.
  int largest_query(const float* y, int n) const {
    if (key_path_ == ROW) {
      const double room = 2147483647.0 / (double(decoded_keys_.table.largest) * n);
      return room < QMAX ? int(room) : QMAX;
    }
    double part[8] = {}, square = 0;
    float top = 0;
    for (int i = 0; i < n; i += 8)
      for (int j = 0; j < 8; ++j) part[j] += double(y[i + j]) * y[i + j];
    for (int i = 0; i < n; ++i) top = std::max(top, std::abs(y[i]));
    for (const double x : part) square += x;
    return square > 0 ? int(std::min(double(QMAX), LONGEST * top / std::sqrt(square))) : QMAX;
  }

  bool chunk_task(int head, int block, int chunk, Worker& w) const {
    const int n = rows_of(block), rows = up(n, panel_);
    const int from = start_of(block) + chunk * chunk_;
    const int to = std::min(high(last_query(block)), from + chunk_);
    std::fill(w.maximum, w.maximum + rows, -HUGE_VALF);
    std::memset(w.sum, 0, std::size_t(rows) * sizeof(float));
    std::memset(w.sum_of_values, 0, std::size_t(rows) * value_width_ * sizeof(float));
    bool ok = true;
    if (from < to) {
      if (chunks_ > 1)
        use_shared(head, block, w);
      else
        prepare(head, block, w);
      for (int t = from; t < to; t += TILE)
        ok &= tile_task(head, block, rows, t, std::min(TILE, to - t), w);
    }
    if (chunks_ == 1) {
      for (int r = 0; r < n; ++r)
        finish(head, block * block_rows_ + r, row_of(w.sum_of_values, r), panel_,
               {w.maximum[r], w.sum[r]}, w);
    } else {
      keep(head, block, chunk, w.maximum, w.sum, w.sum_of_values, rows);
    }
    return ok;
  }

  // First value of row r in panels of sums; the next ones follow at steps of a panel.
  const float* row_of(const float* sums, int r) const {
    return sums + std::ptrdiff_t(r / panel_) * panel_ * value_width_ + r % panel_;
  }

  // Tokens of a tile that some query of a panel sees, from an even one to an even number.
  struct Seen {
    int first, last;
    bool all;  // every query sees all of them
  };
  Seen seen(int block, int row, int t, int n) const {
    const int i = query_of(block, row), j = query_of(block, row + panel_ - 1);
    const int first = std::clamp(low(i) - t, 0, n) & ~1, last = std::clamp(high(j) - t, 0, n);
    return {first, up(last, 2), low(j) - t <= first && high(i) - t >= last && last % 2 == 0};
  }

  bool tile_task(int head, int block, int rows, int t, int n, Worker& w) const {
    const Rows tile = laid_out(isa_, values_, head, t, n, w.space);
    bool ok = value_path_ == REAL || decode_values(tile, w);
    ok &= score(head, block, rows, t, n, w);
    const int slice = value_path_ == REAL ? REAL_SLICE : SLICE_VALUES;
    for (int d = 0; d < value_width_; d += slice) {
      const int width = std::min(slice, value_width_ - d);
      if (value_path_ == REAL)
        ok &= isa_.decode_pairs[values_.fmt](tile, decoded_values_.table, d / GROUP,
                                             (d + width) / GROUP, w.values, nullptr);
      for (int r = 0; r < rows; r += panel_) {
        const Seen s = seen(block, r, t, n);
        if (s.first >= s.last) continue;
        float* const sums =
            w.sum_of_values + std::ptrdiff_t(r) * value_width_ + std::ptrdiff_t(d) * panel_;
        if (value_path_ == REAL)
          isa_.panel_values_real(
              scores_of(r, w) + s.first * panel_,
              static_cast<const float*>(w.values) + std::ptrdiff_t(s.first) * width, width,
              s.last - s.first, sums);
        else
          isa_.panel_values(w.words + r * (TILE / 2) + s.first / 2 * panel_,
                            static_cast<const std::int16_t*>(w.values) + std::ptrdiff_t(d) * TILE +
                                std::ptrdiff_t(s.first) * width,
                            width, (s.last - s.first) / 2, w.step + r, sums);
      }
    }
    return ok;
  }

  // Scores of a panel. They stay in L1 where nothing has to be kept of them but the weights.
  float* scores_of(int row, const Worker& w) const {
    return w.scores + (key_path_ != REAL && value_path_ != REAL ? 0 : row * TILE);
  }

  // Scores of a tile, and their softmax.
  bool score(int head, int block, int rows, int t, int n, Worker& w) const {
    const Rows tile = laid_out(isa_, keys_, head, t, n, w.space);
    const int layout = layout_of(keys_.fmt), groups = key_width_ / GROUP;
    const auto each_panel = [&](bool last_slice, auto fn) {
      for (int r = 0; r < rows; r += panel_) {
        const Seen s = seen(block, r, t, n);
        if (s.first >= s.last) continue;
        fn(r, s, scores_of(r, w) + s.first * panel_);
        if (last_slice) softmax(head, block, r, t, s, w);
      }
    };
    bool ok = true;
    if (key_path_ == REAL) {
      for (int d = 0; d < key_width_; d += SLICE_VALUES) {
        const int width = std::min(SLICE_VALUES, key_width_ - d);
        ok &= isa_.decode_pairs[layout](tile, decoded_keys_.table, d / GROUP, (d + width) / GROUP,
                                        w.keys, nullptr);
        each_panel(d + width == key_width_, [&](int r, Seen s, float* scores) {
          isa_.panel_scores_real(
              static_cast<const float*>(w.queries) + std::ptrdiff_t(r) * key_width_ + d * panel_,
              static_cast<const float*>(w.keys) + std::ptrdiff_t(s.first) * width, width,
              s.last - s.first, d == 0, scores);
        });
      }
      return ok;
    }
    auto* const entries = static_cast<std::int16_t*>(w.keys);
    ok &= isa_.decode_keys[layout](tile, decoded_keys_.table, entries, w.scales);
    if (key_path_ == BLOCK) {
      isa_.level_keys(entries, n, groups, decoded_keys_.table.largest, w.scales, LONGEST,
                      w.key_unit);
    } else {
      if (decoded_keys_.table.offset)
        isa_.centre(entries, n * key_width_, decoded_keys_.table.offset);
      by_token(w.scales, n, w.key_unit);
    }
    w.key_unit[n] = 0;  // of a partner that completes a pair
    each_panel(true, [&](int r, Seen s, float* scores) {
      isa_.panel_scores(
          static_cast<const std::int32_t*>(w.queries) + std::ptrdiff_t(r) * key_width_ / 2,
          entries + std::ptrdiff_t(s.first) * key_width_, key_width_, w.key_unit + s.first,
          s.last - s.first, scores);
    });
    return ok;
  }

  // Scales of row formats: by parity -> by token.
  static void by_token(const float* planes, int n, float* unit) {
    for (int t = 0; t < n; ++t) unit[t] = planes[(t & 1) * (TILE / 2) + t / 2];
  }

  // All slices of a tile of coded values [slice][token / 2][width][2], and the unit of each token.
  bool decode_values(const Rows& tile, Worker& w) const {
    const int layout = layout_of(values_.fmt), per_block = block_groups_of_values();
    const auto slice = [&](int d) {
      return static_cast<std::int16_t*>(w.values) + std::ptrdiff_t(d) * TILE;
    };
    const auto scales = [&](int d) { return w.scales + d / GROUP / per_block * TILE; };
    bool ok = true;
    for (int d = 0; d < value_width_; d += SLICE_VALUES)
      ok &= isa_.decode_pairs[layout](tile, decoded_values_.table, d / GROUP,
                                      std::min(d + SLICE_VALUES, value_width_) / GROUP, slice(d),
                                      value_path_ == ROW ? w.scales : scales(d));
    if (value_path_ == ROW) {
      if (decoded_values_.table.offset)
        for (int d = 0; d < value_width_; d += SLICE_VALUES)
          isa_.centre(slice(d), up(tile.n, 2) * std::min(SLICE_VALUES, value_width_ - d),
                      decoded_values_.table.offset);
      by_token(w.scales, tile.n, w.value_unit);
    } else {
      alignas(64) float planes[TILE];
      isa_.value_units(w.scales, value_width_ / GROUP / per_block, planes);
      for (int d = 0; d < value_width_; d += SLICE_VALUES)
        isa_.level_values(slice(d), tile.n, std::min(SLICE_VALUES, value_width_ - d) / GROUP,
                          per_block, value_shift_, scales(d), planes);
      by_token(planes, tile.n, w.value_unit);
    }
    w.value_unit[tile.n] = 0;
    return ok;
  }
  int block_groups_of_values() const {
    return value_path_ == BLOCK ? block_groups(values_.fmt) : 1;
  }

  // Scores of a panel to weights of the values; `row` is its first in the block.
  void softmax(int head, int block, int row, int t, Seen s, Worker& w) const {
    float* const scores = scores_of(row, w);
    if (offsets_.base) add_offsets(head, block, row, t, s, w);
    if (!s.all)
      for (int j = 0; j < panel_; ++j) {
        const int i = query_of(block, row + j);
        const int first = std::clamp(low(i) - t, s.first, s.last);
        const int last = std::clamp(high(i) - t, s.first, s.last);
        for (int k = s.first; k < first; ++k) scores[k * panel_ + j] = -HUGE_VALF;
        for (int k = std::max(first, last); k < s.last; ++k) scores[k * panel_ + j] = -HUGE_VALF;
      }
    const bool coded = value_path_ != REAL;
    float* const step = w.step + row;
    if (isa_.panel_softmax(scores + s.first * panel_, s.last - s.first, !s.all, w.factor + row,
                           coded ? w.value_unit + s.first : nullptr, room_, w.maximum + row,
                           w.sum + row, w.alpha, w.words + row * (TILE / 2) + s.first / 2 * panel_,
                           step))
      isa_.panel_scale(w.sum_of_values + std::ptrdiff_t(row) * value_width_, value_width_, w.alpha);
    if (coded) {
      const float by = 1 / (decoded_values_.table.scale * float(1 << value_shift_));
      for (int j = 0; j < panel_; ++j) step[j] *= by;
    }
  }

  // Adds the offsets of the pages to the scores of a panel, which are yet to be multiplied by
  // factor.
  void add_offsets(int head, int block, int row, int t, Seen s, Worker& w) const {
    for (int k = s.first; k < s.last; ++k) {
      const int token = std::min(t + k, keys_.n - 1);
      const std::int64_t page = (offsets_.phase + token) / offsets_.page;
      float* const scores = scores_of(row, w) + k * panel_;
      for (int j = 0; j < panel_; ++j) {
        const int at = block * block_rows_ + std::min(row + j, rows_of(block) - 1);
        scores[j] += offsets_of(head, at)[page] * LOG2_E / w.factor[row + j];
      }
    }
  }

  void merge(int head, int block, Worker& w) const {
    float* const out = w.sum_of_values;
    for (int r = 0; r < rows_of(block); ++r) {
      std::memset(out, 0, std::size_t(value_width_) * sizeof(float));
      const Softmax s = fold(head, block, r, [&](const float* values, float weight) {
        const float* const v = row_of(values, r);
        for (int i = 0; i < value_width_; ++i) out[i] += weight * v[i * panel_];
      });
      finish(head, block * block_rows_ + r, out, 1, s, w);
    }
  }

  // Normalises, reorders and un-rotates one output row, whose values are `apart`.
  void finish(int head, int row, const float* values, int apart, Softmax s, Worker& w) const {
    const int dim = values_.dim;
    const Output o = output(head, row, s);
    const float factor = o.factor * (values_.head_scale ? values_.head_scale[head] : 1.f);
    for (int p = 0; p < value_width_; ++p, values += apart) w.y[value_to_[p]] = *values * factor;
    value_spin_.inverse(isa_, w.y, dim, w.y);
    std::memcpy(o.to, w.y, std::size_t(dim) * sizeof(float));
  }

  const Kernels& isa_;
  const Side keys_, values_;
  const float factor_;
  const Path key_path_, value_path_;
  const DecodedKeys decoded_keys_;
  const DecodedValues decoded_values_;
  const Spin key_spin_, value_spin_;
  const int key_width_, value_width_, panel_;
  int key_from_[MAX_DIM + GROUP], value_to_[MAX_DIM + GROUP];
  int value_shift_ = 0;
  float room_ = 0;  // of the weights of a tile
  float *queries_ = nullptr, *factors_ = nullptr;
};

}  // namespace

bool prompt_attention(const Kernels& isa, int threads, const Query& q, const Side& keys,
                      const Side& values, Mask mask, const Offsets& offsets, float scale,
                      float* out, float* lse) {
  return Prompt(isa, q, keys, values, mask, offsets, scale, out, lse).run(threads);
}

}  // namespace kvproof
