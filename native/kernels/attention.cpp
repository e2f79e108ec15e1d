// Attention over encoded rows: threads, splits, masks and merging around the leaf kernels.
//
// A task is (KV head, block of query rows, chunk of tokens). The rows of a KV head are its queries
// times its group of query heads, so each tile of K and V is decoded once for all of them. Queries
// are rotated and quantised once, the softmax is online over SUPER tokens, and the value sum stays
// in the stored domain until the end. Chunks depend on the shapes only, never on the number of
// threads, and their partial results are merged in order: any thread count gives the same bytes.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <mutex>
#include <utility>
#include <vector>

#include "ops.h"
#include "plan.h"
#include "pool.h"

namespace kvproof {
namespace {

constexpr int BLOCK_ROWS = 32;  // query rows per task: 32 x 256 scores are half of an L2 way
constexpr int SMALLEST_CHUNK = 512;
// Up to this many row groups each decode the keys for themselves: a tile costs more to store.
constexpr int MOST_FUSED = 2;

int width_index(int width) { return width == 4 ? 2 : width - 1; }

// Query rows of one KV head, prepared for the key path.
struct Prepared {
  float *y, *scale;
  std::int32_t* start;  // of the sum of each row, see Kernels::dot
  std::int16_t* natural;
  void* rows;

  void carve(Carver& c, int dim) {
    y = c.take<float>(std::size_t(padded(dim)));
    natural = c.take<std::int16_t>(std::size_t(padded(dim)));
    scale = c.take<float>(BLOCK_ROWS);
    start = c.take<std::int32_t>(BLOCK_ROWS);
    rows = c.take<float>(std::size_t(BLOCK_ROWS) * padded(dim));
  }
};

struct KeyPlan {
  const Kernels& isa;
  const Side& side;
  Path path;
  int layout;
  DecodedKeys decoded;
  const Table& table;
  Spin spin;
  int stored, width, largest;
  int score_element[MAX_DIM + GROUP];

  KeyPlan(const Kernels& k, const Side& s)
      : isa(k),
        side(s),
        path(path_of(s.fmt)),
        layout(layout_of(s.fmt)),
        decoded(k, s),
        table(decoded.table),
        spin({s.fmt, s.book}, s.dim),
        stored(s.stored()),
        width(padded(stored)) {
    order(layout, stored, k.score_element, score_element);
    // A whole row of products has to fit an int32; blocks are flushed long before.
    const double room = 2147483647.0 / (double(table.largest) * s.dim);
    largest = path == ROW && room < QMAX ? int(room) : QMAX;
  }

  bool fused(int n_groups) const { return n_groups <= MOST_FUSED && path != REAL; }

  // Rotates and stores one query row of a block of n_groups groups; null gives a padding row that
  // scores 0.
  void prepare(const float* q, float factor, int r, int n_groups, Prepared& p) const {
    const int dim = side.dim;
    auto* real = static_cast<float*>(p.rows) + std::ptrdiff_t(r) * width;
    auto* coded = static_cast<std::int16_t*>(p.rows) + std::ptrdiff_t(r) * width;
    p.start[r] = 0;
    if (!q) {
      p.scale[r] = 0;
      std::memset(path == REAL ? static_cast<void*>(real) : coded, 0,
                  std::size_t(width) * (path == REAL ? sizeof(float) : sizeof(std::int16_t)));
      return;
    }
    if (path == REAL) {
      p.scale[r] = 1;
      for (int i = 0; i < dim; ++i) real[i] = q[i] * factor;
      for (int i = dim; i < width; ++i) real[i] = 0;
      return;
    }
    spin.forward(isa, q, factor, dim, p.y);
    p.scale[r] = isa.quantize(p.y, stored, largest, p.natural) / table.scale;
    const int* const element = fused(n_groups) ? score_element : decoded.element;
    std::uint32_t sum = 0;
    for (int i = 0; i < width; ++i) {
      coded[i] = element[i] < 0 ? std::int16_t(0) : p.natural[element[i]];
      sum += std::uint32_t(std::int32_t(coded[i]));
    }
    p.start[r] = std::int32_t(0u - sum * std::uint32_t(table.offset));
  }

  const void* row(const Prepared& p, int r) const {
    return path == REAL ? static_cast<const void*>(static_cast<const float*>(p.rows) +
                                                   std::ptrdiff_t(r) * width)
                        : static_cast<const std::int16_t*>(p.rows) + std::ptrdiff_t(r) * width;
  }

  // Scores of all row groups against tokens [first, last) of KV head h, at most SUPER of them.
  bool score(const Prepared& p, const RowGroup* groups, int n_groups, int h, int first, int last,
             std::uint8_t* space, void* tile, float* scales, float* out) const {
    bool ok = true;
    for (int t = first; t < last; t += TILE) {
      const Rows rows = laid_out(isa, side, h, t, std::min(TILE, last - t), space);
      const auto to = [&](const RowGroup& g) {
        return out + g.first * SUPER + (t - first) / 2 * g.width;
      };
      if (fused(n_groups)) {
        for (int i = 0; i < n_groups; ++i) {
          const RowGroup& g = groups[i];
          ok &= isa.score[layout][width_index(g.width)](rows, table, row(p, g.first), width,
                                                        p.scale + g.first, p.start + g.first,
                                                        scales, to(g), SUPER / 2 * g.width);
        }
        continue;
      }
      ok &= isa.decode_keys[layout](rows, table, tile, scales);
      for (int i = 0; i < n_groups; ++i) {
        const RowGroup& g = groups[i];
        isa.dot[path][width_index(g.width)](row(p, g.first), width, p.scale + g.first,
                                            p.start + g.first, tile, scales, rows.n, stored, to(g),
                                            SUPER / 2 * g.width);
      }
    }
    return ok;
  }
};

int split_rows(int n, RowGroup* groups) {
  int count = 0;
  for (int r = 0; r < n;) {
    const int left = n - r, width = left >= 3 ? 4 : left;
    groups[count++] = {r, width};
    r += width;
  }
  return count;
}

std::size_t tile_bytes(const Side& side) { return std::size_t(TILE) * padded(side.stored()) * 4; }
std::size_t scale_count(const Side& side) { return std::size_t(TILE) * groups_of(side.stored()); }

class Attention : Blocks {
 public:
  Attention(const Kernels& isa, const Query& q, const Side& keys, const Side& values, Mask mask,
            const Offsets& offsets, float scale, float* out, float* lse)
      : Blocks(q, keys.heads, keys.n, 0, mask, offsets, BLOCK_ROWS, padded(values.dim), values.dim,
               out, lse),
        isa_(isa),
        keys_(keys),
        values_(values),
        factor_(scale * LOG2_E),
        plan_(isa, keys_),
        value_path_(path_of(values.fmt)),
        decoded_(isa, values),
        value_table_(decoded_.table),
        value_spin_({values.fmt, values.book}, values.dim),
        value_width_(padded(values.dim)) {
    // 64 tokens of weight x entry meet in one int32.
    const double room = 2147483647.0 / (double(TILE) * std::max(1, value_table_.largest));
    largest_weight_ = room < 32767 ? int(room) : 32767;
    cut(SMALLEST_CHUNK, SUPER, 1);
  }

  bool run(int threads) {
    Pool& pool = Pool::get();
    std::lock_guard<std::mutex> hold(pool.gate());
    const int heads = keys_.heads, tasks = heads * blocks_ * chunks_;
    threads = worth(threads, keys_.dim + values_.dim);
    Carver measure;
    Worker layout;
    carve(measure, layout);
    const std::size_t bytes = measure.used();
    for (int i = 0; i < std::max(1, threads); ++i) pool.scratch(i).at_least(bytes);
    if (chunks_ > 1) {  // queries are prepared once for all chunks
      const int blocks = heads * blocks_;
      std::vector<Prepared> prepared(std::size_t(blocks), Prepared{});
      const auto share = [&](Carver c) {
        carve_partials(c);
        for (Prepared& p : prepared) p.carve(c, keys_.stored());
        return c.used();
      };
      share(Carver(pool.shared().at_least(share(Carver()))));
      prepared_ = std::move(prepared);
      pool.run(blocks, threads, [&](int task, int) {
        prepare(task / blocks_, task % blocks_, prepared_[std::size_t(task)]);
      });
    }
    std::atomic<bool> ok{true};
    pool.run(tasks, threads, [&](int task, int worker) {
      Worker w;
      Carver c(pool.scratch(worker).at_least(bytes));
      carve(c, w);
      // Chunk-major: neighbouring tasks share the cache lines of a token-major cache.
      const int chunk = task / (heads * blocks_), rest = task % (heads * blocks_);
      if (!chunk_task(rest / blocks_, rest % blocks_, chunk, w)) ok = false;
    });
    if (chunks_ > 1)
      pool.run(heads * blocks_, threads, [&](int task, int worker) {
        Worker w;
        Carver c(pool.scratch(worker).at_least(bytes));
        carve(c, w);
        merge(task / blocks_, task % blocks_, w);
      });
    return ok;
  }

 private:
  struct Worker {
    Prepared query;
    std::uint8_t* space;
    void* tile;
    float *scales, *scores, *products, *step, *sum_of_values, *maximum, *sum, *y;
    std::int32_t* words;
  };

  void carve(Carver& c, Worker& w) const {
    w.query.carve(c, keys_.stored());
    w.space =
        c.take<std::uint8_t>(std::max(repacked_bytes(isa_, keys_), repacked_bytes(isa_, values_)));
    w.tile = c.take<char>(std::max(tile_bytes(keys_), tile_bytes(values_)));
    w.scales = c.take<float>(std::max(scale_count(keys_), scale_count(values_)));
    w.scores = c.take<float>(std::size_t(BLOCK_ROWS) * SUPER);
    w.products = c.take<float>(TILE * 4);
    w.step = c.take<float>(BLOCK_ROWS * SLICE);
    w.words = c.take<std::int32_t>(std::size_t(BLOCK_ROWS) * SLICE * TILE / 2);
    w.sum_of_values = c.take<float>(std::size_t(BLOCK_ROWS) * value_width_);
    w.maximum = c.take<float>(BLOCK_ROWS);
    w.sum = c.take<float>(BLOCK_ROWS);
    w.y = c.take<float>(std::size_t(value_width_));
  }

  void prepare(int head, int block, Prepared& to) const {
    const int n = rows_of(block);
    RowGroup groups[BLOCK_ROWS];
    const int n_groups = split_rows(n, groups);
    const float factor = factor_ * (keys_.head_scale ? keys_.head_scale[head] : 1.f);
    for (int r = 0; r < groups[n_groups - 1].first + groups[n_groups - 1].width; ++r)
      plan_.prepare(r < n ? query(head, block * BLOCK_ROWS + r) : nullptr, factor, r, n_groups, to);
  }

  bool chunk_task(int head, int block, int chunk, Worker& w) const {
    const int n = rows_of(block);
    RowGroup groups[BLOCK_ROWS];
    const int n_groups = split_rows(n, groups);
    const int all = groups[n_groups - 1].first + groups[n_groups - 1].width;
    const int from = start_of(block) + chunk * chunk_;
    const int to = std::min(high(last_query(block)), from + chunk_);
    for (int r = 0; r < all; ++r) {
      w.maximum[r] = -HUGE_VALF;
      w.sum[r] = 0;
    }
    std::memset(w.sum_of_values, 0, std::size_t(all) * value_width_ * sizeof(float));
    bool ok = true;
    if (from < to) {
      if (chunks_ == 1) prepare(head, block, w.query);
      const Prepared& query =
          chunks_ == 1 ? w.query : prepared_[std::size_t(head * blocks_ + block)];
      for (int t = from; t < to; t += SUPER) {
        const int end = std::min(to, t + SUPER);
        ok &=
            plan_.score(query, groups, n_groups, head, t, end, w.space, w.tile, w.scales, w.scores);
        for (int g = 0; g < n_groups; ++g) softmax(groups[g], head, block, n, t, end, w);
        ok &= add_values(groups, n_groups, head, t, end, w);
      }
    }
    if (chunks_ == 1) {
      for (int r = 0; r < n; ++r)
        finish(head, block * BLOCK_ROWS + r, w.sum_of_values + std::ptrdiff_t(r) * value_width_,
               {w.maximum[r], w.sum[r]}, w);
    } else {
      keep(head, block, chunk, w.maximum, w.sum, w.sum_of_values, n);
    }
    return ok;
  }

  // Adds the offsets of the pages that tokens [t, end) lie in to their scores.
  template <int WIDTH>
  void add_offsets(const RowGroup& group, int head, int block, int n, int t, int end,
                   Worker& w) const {
    float* const s = w.scores + group.first * SUPER;
    for (int from = t; from < end;) {
      const std::int64_t page = (offsets_.phase + from) / offsets_.page;
      const int to = int(std::min<std::int64_t>(end, (page + 1) * offsets_.page - offsets_.phase));
      float add[WIDTH] = {};
      for (int j = 0; j < std::min(WIDTH, n - group.first); ++j) {
        const int row = block * BLOCK_ROWS + group.first + j;
        add[j] = offsets_of(head, row)[page] * LOG2_E;
      }
      for (int p = 0; p < 2; ++p) {
        float* const plane = s + p * (SUPER / 2 * WIDTH);
        for (int i = (from - t - p + 1) / 2; i < (to - t - p + 1) / 2; ++i)
          for (int j = 0; j < WIDTH; ++j) plane[i * WIDTH + j] += add[j];
      }
      from = to;
    }
  }

  void softmax(const RowGroup& group, int head, int block, int n, int t, int end, Worker& w) const {
    if (offsets_.base) {
      const auto add = group.width == 4   ? &Attention::add_offsets<4>
                       : group.width == 2 ? &Attention::add_offsets<2>
                                          : &Attention::add_offsets<1>;
      (this->*add)(group, head, block, n, t, end, w);
    }
    float* const s = w.scores + group.first * SUPER;
    const int width = group.width, plane = SUPER / 2 * width,
              padded_end = std::min(t + SUPER, t + up(end - t, 32));
    for (int j = 0; j < width; ++j) {
      const int r = group.first + j, i = (block * BLOCK_ROWS + r) / group_;
      const int first = r < n ? low(i) : end, last = r < n ? high(i) : end;
      const auto hide = [&](int from, int to) {
        for (int k = from - t; k < to - t; ++k) s[(k & 1) * plane + k / 2 * width + j] = -HUGE_VALF;
      };
      hide(t, std::min(first, padded_end));
      hide(std::max(t, std::min(last, end)), padded_end);
    }
    float alpha[4];
    if (!isa_.softmax[width_index(width)](s, plane, end - t, w.maximum + group.first,
                                          w.sum + group.first, alpha))
      return;
    for (int j = 0; j < width; ++j)
      isa_.scale_row(w.sum_of_values + std::ptrdiff_t(group.first + j) * value_width_, value_width_,
                     alpha[j]);
  }

  bool add_values(const RowGroup* groups, int n_groups, int head, int first, int last,
                  Worker& w) const {
    bool ok = true;
    // Row formats have one weight a token for all slices, block formats one for each block, which
    // is a group or a slice.
    const int all = groups_of(values_.dim), slice = value_path_ == REAL ? all : SLICE;
    const bool per_group = value_path_ == BLOCK && block_groups(values_.fmt) == 1;
    for (int t = first; t < last; t += TILE) {
      const Rows rows = laid_out(isa_, values_, head, t, std::min(TILE, last - t), w.space);
      for (int from = 0; from < all; from += slice) {
        const int to = std::min(all, from + slice);
        const int columns = value_path_ == REAL ? 0 : per_group ? to - from : 1;
        ok &= isa_.decode_values[layout_of(values_.fmt)](rows, value_table_, from, to, w.tile,
                                                         w.scales);
        for (int g = 0; g < n_groups; ++g) {
          const int width = groups[g].width, index = width_index(width), plane = SUPER / 2 * width;
          const float* p = w.scores + groups[g].first * SUPER + (t - first) / 2 * width;
          float* const step = w.step + groups[g].first * SLICE;
          std::int32_t* const words = w.words + groups[g].first * SLICE * (TILE / 2);
          for (int c = 0; c < columns && (from == 0 || value_path_ == BLOCK); ++c) {
            isa_.weights[index](p, plane, w.scales + c * TILE, rows.n, largest_weight_, w.products,
                                words + c * (TILE / 2) * width, step + c * width);
            for (int j = 0; j < width; ++j) step[c * width + j] /= value_table_.scale;
          }
          isa_.accumulate[value_path_][index](
              columns ? static_cast<const void*>(words) : p,
              value_path_ == REAL || per_group ? plane : 0, step, w.tile, rows.n,
              std::min(values_.dim, to * GROUP) - from * GROUP, value_table_.offset,
              w.sum_of_values + std::ptrdiff_t(groups[g].first) * value_width_ + from * GROUP,
              value_width_);
        }
      }
    }
    return ok;
  }

  void merge(int head, int block, Worker& w) const {
    float* const out = w.sum_of_values;
    for (int r = 0; r < rows_of(block); ++r) {
      std::memset(out, 0, std::size_t(value_width_) * sizeof(float));
      const Softmax s = fold(head, block, r, [&](const float* values, float weight) {
        const float* const v = values + std::ptrdiff_t(r) * value_width_;
        for (int i = 0; i < value_width_; ++i) out[i] += weight * v[i];
      });
      finish(head, block * BLOCK_ROWS + r, out, s, w);
    }
  }

  // Normalises, reorders and un-rotates one output row.
  void finish(int head, int row, const float* values, Softmax s, Worker& w) const {
    const int dim = values_.dim;
    const Output o = output(head, row, s);
    const float factor = o.factor * (values_.head_scale ? values_.head_scale[head] : 1.f);
    for (int p = 0; p < value_width_; ++p)
      if (decoded_.element[p] >= 0) w.y[decoded_.element[p]] = values[p] * factor;
    value_spin_.inverse(isa_, w.y, dim, w.y);
    std::memcpy(o.to, w.y, std::size_t(dim) * sizeof(float));
  }

  const Kernels& isa_;
  const Side keys_, values_;
  const float factor_;
  const KeyPlan plan_;
  const Path value_path_;
  const DecodedValues decoded_;
  const Table& value_table_;
  const Spin value_spin_;
  const int value_width_;
  int largest_weight_;
  std::vector<Prepared> prepared_;  // [head][block], if there are several chunks
};

}  // namespace

bool attention(const Kernels& isa, int threads, const Query& q, const Side& keys,
               const Side& values, Mask mask, const Offsets& offsets, float scale, float* out,
               float* lse) {
  // Few rows fill panels badly.
  const int rows = q.n * (q.heads / keys.heads), in_panels = up(rows, isa.panel);
  if (rows > BLOCK_ROWS || (rows > 8 && rows >= in_panels / 8 * 7))
    return prompt_attention(isa, threads, q, keys, values, mask, offsets, scale, out, lse);
  return Attention(isa, q, keys, values, mask, offsets, scale, out, lse).run(threads);
}

bool scores(const Kernels& isa, int threads, const Query& q, const Side& keys, float* out) {
  Pool& pool = Pool::get();
  std::lock_guard<std::mutex> hold(pool.gate());
  const KeyPlan plan(isa, keys);
  const int group = q.heads / keys.heads, rows = q.n * group;
  const int blocks = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS, supers = (keys.n + SUPER - 1) / SUPER;
  struct Worker {
    Prepared query;
    std::uint8_t* space;
    void* tile;
    float *scales, *scores;
  };
  const auto carve = [&](Carver& c, Worker& w) {
    w.query.carve(c, keys.stored());
    w.space = c.take<std::uint8_t>(repacked_bytes(isa, keys));
    w.tile = c.take<char>(tile_bytes(keys));
    w.scales = c.take<float>(scale_count(keys));
    w.scores = c.take<float>(std::size_t(BLOCK_ROWS) * SUPER);
  };
  Carver measure;
  Worker layout;
  carve(measure, layout);
  const std::size_t bytes = measure.used();
  for (int i = 0; i < std::max(1, threads); ++i) pool.scratch(i).at_least(bytes);
  std::atomic<bool> ok{true};
  pool.run(keys.heads * blocks * supers, threads, [&](int task, int worker) {
    Worker w;
    Carver c(pool.scratch(worker).at_least(bytes));
    carve(c, w);
    const int super = task / (keys.heads * blocks), rest = task % (keys.heads * blocks);
    const int head = rest / blocks, first = rest % blocks * BLOCK_ROWS;
    const int n = std::min(BLOCK_ROWS, rows - first);
    RowGroup groups[BLOCK_ROWS];
    const int n_groups = split_rows(n, groups);
    const int all = groups[n_groups - 1].first + groups[n_groups - 1].width;
    const float factor = keys.head_scale ? keys.head_scale[head] : 1.f;
    for (int r = 0; r < all; ++r)
      plan.prepare(r < n ? query_row(q, group, head, first + r) : nullptr, factor, r, n_groups,
                   w.query);
    const int t0 = super * SUPER, t1 = std::min(keys.n, t0 + SUPER);
    if (!plan.score(w.query, groups, n_groups, head, t0, t1, w.space, w.tile, w.scales, w.scores))
      ok = false;
    for (int g = 0; g < n_groups; ++g)
      for (int j = 0; j < groups[g].width && groups[g].first + j < n; ++j) {
        const int row = first + groups[g].first + j, width = groups[g].width;
        float* to =
            out + (std::ptrdiff_t(row / group) * q.heads + head * group + row % group) * keys.n;
        const float* s = w.scores + groups[g].first * SUPER + j;
        for (int t = t0; t < t1; ++t)
          to[t] = s[((t - t0) & 1) * (SUPER / 2) * width + (t - t0) / 2 * width];
      }
  });
  return ok;
}

}  // namespace kvproof
