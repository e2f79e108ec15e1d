// Encoding of the trellis formats (src/kvproof/formats/tcq.py is the reference).
//
// Every value spends one bit u on a path; the XORs of the path's bits at two sets of taps name one
// of four subsets of the codebook, and the code m an entry of it. The encoder searches all paths:
// the state is the last bits of the path, the newest in bit 0, and each state has two predecessors.
#pragma once

#include "leaf.h"

namespace kvproof {
namespace {

// Position of step p of a group of n values within it: the order of tq3's 2-bit fields.
constexpr int step_element(int p, int n) { return p % 4 * (n / 4) + p / 4; }

// Squared distances [n][4] of y * inverse to the nearest entry of each subset; and with CODES,
// instead, which entry is nearest in the subset that each step is in. n is a multiple of 16. Not
// inlined: GCC 12 vectorises the scalar set's inlined copy for two entries to wrong distances.
template <class I, int ENTRIES, bool CODES>
[[gnu::noinline]] void subset_distances(const float* y, int n, float inverse,
                                        const Trellis& trellis, float* distance,
                                        const std::uint8_t* subset, std::uint8_t* codes) {
  constexpr int L = I::LANES;
  for (int i = 0; i < n; i += L) {
    const typename I::F z = I::mul(I::load(y + i), I::set(inverse));
    typename I::F squares[4];
    alignas(64) std::int32_t lanes[4][L];
#pragma GCC unroll 4
    for (int s = 0; s < 4; ++s) {
      typename I::W below = I::zero_words();
#pragma GCC unroll 8
      for (int k = 0; k + 1 < ENTRIES; ++k)
        below = I::count_above(below, z, I::set(trellis.cut[s][k]));
      if constexpr (CODES) {
        I::store_words(lanes[s], below);
      } else {
        const typename I::F off = I::sub(z, I::template look_up<8>(trellis.entry[s], below));
        squares[s] = I::mul(off, off);
      }
    }
    if constexpr (CODES)
      for (int j = 0; j < L; ++j) codes[i + j] = std::uint8_t(lanes[subset[i + j]][j]);
    else
      I::store_by_four(squares, distance + 4 * i);
  }
}

// The bits u of the cheapest path among the states at the end, and the state that it starts from.
inline int trace(const std::uint8_t* decisions, int n, int states, int state, std::uint8_t* path) {
  const int bytes = states / 8, high = __builtin_ctz(unsigned(states)) - 1;
  for (int t = n; t-- > 0;) {
    path[t] = state & 1;
    const int from_high = decisions[t * bytes + (state >> 3)] >> (state & 7) & 1;
    state = state >> 1 | from_high << high;
  }
  return state;
}

template <class I, int F>
void encode_trellis(const float* y, int dim, const Book& book, std::uint8_t* out, Counts& counts) {
  constexpr int BITS = code_bits(F), ENTRIES = 1 << (BITS - 1);
  const Trellis& trellis = *book.trellis;
  const Units& units = *book.units;
  const int states = trellis.states;
  alignas(64) float steps[MAX_DIM], distance[MAX_WALKS * 4 * MAX_DIM];
  alignas(64) float cost[MAX_WALKS][MAX_STATES];
  alignas(64) std::uint8_t path[MAX_DIM], decisions[MAX_DIM * MAX_WALKS * MAX_STATES / 8];
  std::uint8_t* const end = out + dim * BITS / 8;  // of the codes
  std::memset(out, 0, std::size_t(end - out + trellis.start_bytes + 1));

  const float base = root_mean_square<I>(y, dim) * book.start;
  int nearest = 0;
  while (nearest < 256 && units.cut[nearest] < base) ++nearest;
  if (nearest == 256) ++counts.saturated;
  if (nearest == 0) {
    if (largest_magnitude<I>(y, dim) != 0) ++counts.flushed;
    return;
  }
  for (int s = 0; s < dim; s += GROUP) {
    const int n = smaller(GROUP, dim - s);
    for (int p = 0; p < n; ++p) steps[s + p] = y[s + step_element(p, n)];
  }
  // Units that are not tried yet, MAX_WALKS at a time: their walks go side by side, because the
  // steps of one wait for each other.
  float least = __builtin_inff();
  int unit = 0, start = 0, tried = 0;
  for (int i = 0; i < trellis.n_offsets;) {
    int bytes[MAX_WALKS], walks = 0;
    for (; i < trellis.n_offsets && walks < MAX_WALKS; ++i) {
      int byte = nearest + trellis.offset[i];
      byte = byte < 1 ? 1 : byte > 255 ? 255 : byte;
      if (byte == tried) continue;  // at an end of the table: the same again
      tried = bytes[walks] = byte;
      subset_distances<I, ENTRIES, false>(steps, dim, units.inverse[byte], trellis,
                                          distance + walks * 4 * dim, nullptr, nullptr);
      for (int s = 0; s < states; ++s)
        cost[walks][s] = s && !trellis.start_bytes ? __builtin_inff() : 0;
      ++walks;
    }
    I::walk(distance, dim, walks, trellis, cost, decisions);
    int best = -1, last = 0;
    for (int w = 0; w < walks; ++w) {
      int state = 0;  // ties go to the lower state and to the first unit
      for (int s = 1; s < states; ++s)
        if (cost[w][s] < cost[w][state]) state = s;
      const float error = cost[w][state] * (units.value[bytes[w]] * units.value[bytes[w]]);
      if (unit == 0 || error < least) {
        least = error;
        unit = bytes[w];
        best = w;
        last = state;
      }
    }
    if (best >= 0) start = trace(decisions + best * dim * (states / 8), dim, states, last, path);
  }

  alignas(64) std::uint8_t subset[MAX_DIM], codes[MAX_DIM];
  std::uint32_t history = std::uint32_t(start);
  for (int t = 0; t < dim; ++t) {
    history = history << 1 | path[t];
    subset[t] = trellis.subset_of[history & std::uint32_t(2 * trellis.states - 1)];
  }
  subset_distances<I, ENTRIES, true>(steps, dim, units.inverse[unit], trellis, nullptr, subset,
                                     codes);
  if constexpr (BITS == 2) {
    pack1(codes, dim, 0, out);
  } else {
    for (int i = 0; i < dim; i += 4)
      out[i / 4] = std::uint8_t((codes[i] & 3) | (codes[i + 1] & 3) << 2 | (codes[i + 2] & 3) << 4 |
                                (codes[i + 3] & 3) << 6);
    if constexpr (BITS == 4) pack1(codes, dim, 2, out + dim / 4);
  }
  pack1(path, dim, 0, end - dim / 8);
  if (trellis.start_bytes)  // newest in the highest bit
    for (int bit = 0; bit < 8; ++bit) *end |= std::uint8_t((start >> bit & 1) << (7 - bit));
  end[trellis.start_bytes] = std::uint8_t(unit);
}

}  // namespace
}  // namespace kvproof
