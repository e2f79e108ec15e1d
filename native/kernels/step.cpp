// One token of one layer: a decode step makes two of these calls a layer, and what they take the
// place of (a dozen calls from Python on arrays of a few hundred numbers) took longer than the
// kernels. Sums and products are those of cache.py and segments.py, in the same order.
#include "step.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>

#include "half.h"

namespace kvproof {
namespace {

constexpr float TOP = 0x1.fffffep127f;

float half_at(const std::uint8_t* row, int i) { return half_to_float(load_u16(row + 2 * i)); }

// (key - mean of the page) / scale, of one head.
void condition_key(const float* key, const Condition& c, int head, int dim,
                   const std::uint8_t* page, float* out) {
  const float* const scale = c.scale + std::ptrdiff_t(head) * dim;
  const auto keep = [&](int i, float mean) {
    out[i] = std::clamp((key[i] - mean) / scale[i], -TOP, TOP);
  };
  if (c.pairs < 0) {
    for (int i = 0; i < dim; ++i) keep(i, half_at(page, i));
    return;
  }
  const float* const mean = c.mean + std::ptrdiff_t(head) * dim;
  const int m = c.pairs;
  for (int i = 0; i < m; ++i) {
    const float cos = half_at(page, i), sin = half_at(page, m + i);
    keep(i, mean[i] * cos - mean[m + i] * sin);
    keep(m + i, mean[i] * sin + mean[m + i] * cos);
  }
  for (int i = 2 * m; i < dim; ++i) keep(i, mean[i]);
}

// The query as the rows of turns take it: q . (mean turned by a) = cos a (q . mean) + sin a (q .
// mean turned by a quarter), a pair at a time.
void against_turns(const float* q, const float* mean, int m, int dim, float* out) {
  for (int i = 0; i < m; ++i) {
    out[i] = q[i] * mean[i] + q[m + i] * mean[m + i];
    out[m + i] = q[m + i] * mean[i] - q[i] * mean[m + i];
  }
  for (int i = 2 * m; i < dim; ++i) out[i] = q[i] * mean[i];
}

bool attend(const Kernels& isa, int threads, const Query& q, const Held& held, Mask mask,
            const Offsets& offsets, float scale, float* out, float* lse) {
  if (!held.tiles)
    return attention(isa, threads, q, held.keys, held.values, mask, offsets, scale, out, lse);
  attention_tiles(isa, *held.tiles, threads, q, held.key_tiles, held.value_tiles, mask, offsets,
                  scale, out, lse);
  return true;
}

}  // namespace

bool append_token(const Kernels& isa, Coded key, Coded value, const Shape& shape, TokenRows k,
                  TokenRows v, const float* k_scale, const float* v_scale,
                  const Condition* condition, const std::uint8_t* page, std::ptrdiff_t page_stride,
                  const Slot& k_slot, const Slot& v_slot) {
  const int heads = shape.kv_heads;
  const std::size_t k_size = std::size_t(heads) * shape.dim_k,
                    v_size = std::size_t(heads) * shape.dim_v;
  const std::ptrdiff_t k_bytes = row_bytes(key.fmt, shape.dim_k),
                       v_bytes = row_bytes(value.fmt, shape.dim_v);
  const std::unique_ptr<float[]> rows(new float[k_size + v_size]);
  const std::unique_ptr<std::uint8_t[]> codes(
      new std::uint8_t[std::size_t(heads * (k_bytes + v_bytes))]);
  float *const of_k = rows.get(), *const of_v = of_k + k_size;
  std::uint8_t *const k_codes = codes.get(), *const v_codes = k_codes + heads * k_bytes;
  for (int h = 0; h < heads; ++h) {
    const float* const row = k.base + h * k.stride;
    float* const to = of_k + std::ptrdiff_t(h) * shape.dim_k;
    if (!condition)
      std::memcpy(to, row, std::size_t(shape.dim_k) * sizeof(float));
    else if (isa.finite(row, shape.dim_k))
      condition_key(row, *condition, h, shape.dim_k, page + h * page_stride, to);
    else
      return false;
    std::memcpy(of_v + std::ptrdiff_t(h) * shape.dim_v, v.base + h * v.stride,
                std::size_t(shape.dim_v) * sizeof(float));
  }
  Counts counts;
  // One call: rows that go together hide each other's waits for sums and divisions.
  const bool together = key.fmt == value.fmt && key.book == value.book &&
                        shape.dim_k == shape.dim_v && !k_scale && !v_scale;
  if (encode(isa, 1, key, of_k, together ? 2 * heads : heads, shape.dim_k, k_scale, k_codes,
             counts) >= 0)
    return false;
  if (!together && encode(isa, 1, value, of_v, heads, shape.dim_v, v_scale, v_codes, counts) >= 0)
    return false;
  const auto store = [&](const Slot& to, const std::uint8_t* from, std::ptrdiff_t bytes) {
    if (to.tiles) return pack(1, {from, 0, bytes}, 1, *to.tiles, to.at) < 0;
    for (int h = 0; h < heads; ++h)
      std::memcpy(to.base + h * to.stride, from + h * bytes, std::size_t(bytes));
    return true;
  };
  return store(k_slot, k_codes, k_bytes) && store(v_slot, v_codes, v_bytes);
}

bool attend_token(const Kernels& isa, int threads, const Query& q, const Held& held, Mask mask,
                  float scale, const Sinks* sinks, const Condition* condition, const Pages& pages,
                  float* out) {
  const int heads = q.heads, dim = q.dim, group = heads / held.kv_heads;
  for (int h = 0; h < heads; ++h)
    if (!isa.finite(q.base + h * q.head_stride, dim)) return false;
  if (!sinks && !condition) return attend(isa, threads, q, held, mask, {}, scale, out, nullptr);

  const std::size_t size = std::size_t(heads) * dim;
  Query asked = q;
  std::vector<float> folded, added;
  Offsets offsets{};
  if (condition) {
    const std::size_t count = std::size_t(heads) * pages.means.n;
    folded.resize(2 * size);
    added.resize(count);
    float* const turned = folded.data() + size;
    for (int h = 0; h < heads; ++h) {
      const float* const row = q.base + h * q.head_stride;
      const std::ptrdiff_t kv = h / group * std::ptrdiff_t(dim), at = std::ptrdiff_t(h) * dim;
      for (int i = 0; i < dim; ++i) folded[at + i] = row[i] * condition->scale[kv + i];
      if (condition->pairs >= 0)
        against_turns(row, condition->mean + kv, condition->pairs, dim, turned + at);
      else
        std::memcpy(turned + at, row, std::size_t(dim) * sizeof(float));
    }
    if (!isa.finite(folded.data(), std::ptrdiff_t(folded.size()))) return false;
    const Query whole{turned, std::ptrdiff_t(size), dim, 1, heads, dim};
    if (!scores(isa, threads, whole, pages.means, added.data())) return false;
    for (float& x : added) x *= scale;
    asked = {folded.data(), std::ptrdiff_t(size), dim, 1, heads, dim};
    if (pages.page)
      offsets = {added.data(), std::ptrdiff_t(count), pages.means.n, pages.page, pages.phase};
  }
  std::vector<float> lse(2 * std::size_t(heads));
  if (!attend(isa, threads, asked, held, mask, offsets, scale, out, lse.data())) return false;
  if (!sinks) return true;
  if (condition && !pages.page)  // one mean of all rows moves all scores of a query alike
    for (int h = 0; h < heads; ++h) lse[h] += added[h];

  std::vector<float> first(std::size_t(heads) * held.dim_v);
  if (!attention(isa, threads, q, sinks->keys, sinks->values, sinks->mask, {}, scale, first.data(),
                 lse.data() + heads))
    return false;
  for (int h = 0; h < heads; ++h) {
    const float top = std::max(lse[h], lse[heads + h]), shift = top == -HUGE_VALF ? 0 : top;
    const float of_rows = std::exp(lse[h] - shift), of_sinks = std::exp(lse[heads + h] - shift);
    const float total = of_sinks + of_rows, share = 1 / (total > 0 ? total : 1);
    float* const to = out + std::ptrdiff_t(h) * held.dim_v;
    const float* const from = first.data() + std::ptrdiff_t(h) * held.dim_v;
    for (int i = 0; i < held.dim_v; ++i)
      to[i] = from[i] * (of_sinks * share) + to[i] * (of_rows * share);
  }
  return true;
}

}  // namespace kvproof
