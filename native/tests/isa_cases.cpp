// The operations of one instruction set without Python, so that they run where there is only a
// processor of that kind or an emulator of it: `isa_cases < calls > results`, compiled with
// -DKVPROOF_KERNELS=kernels_neon.
//
// A call is its name and its arguments in the order in which they are read below; the functions are
// those of the module kvproof._kernels. Numbers are 8 bytes (int64 or double), strings and arrays
// are their length in bytes and those bytes, optional arrays are empty where there is none. Results
// are numbers and arrays in the same form. tests/backend/test_neon.py is the other end.
#include <cstdint>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/books.h"
#include "kernels/ops.h"

namespace kvproof {
namespace {

void read_all(void* to, std::size_t n) {
  if (n && std::fread(to, 1, n, stdin) != n) throw std::runtime_error("a call ends early");
}

template <class T>
T read_number() {
  T x;
  static_assert(sizeof x == 8);
  read_all(&x, 8);
  return x;
}
int read_int() { return int(read_number<std::int64_t>()); }
float read_real() { return float(read_number<double>()); }

template <class T>
std::vector<T> read_array() {
  const auto bytes = std::size_t(read_number<std::int64_t>());
  std::vector<T> x(bytes / sizeof(T));
  read_all(x.data(), x.size() * sizeof(T));
  return x;
}
std::string read_string() {
  const std::vector<char> x = read_array<char>();
  return {x.begin(), x.end()};
}

void write_int(std::int64_t x) { std::fwrite(&x, 8, 1, stdout); }
template <class T>
void write_array(const std::vector<T>& x) {
  write_int(std::int64_t(x.size() * sizeof(T)));
  std::fwrite(x.data(), sizeof(T), x.size(), stdout);
}

const float* or_null(const std::vector<float>& x) { return x.empty() ? nullptr : x.data(); }

// What is not written shows: no format has such a row, and a NaN fails every bound.
std::vector<float> unwritten(std::size_t n) { return std::vector<float>(n, __builtin_nanf("")); }

// Rows [token][head][bytes] of a format, with a scale per head or none.
struct SideData {
  Coded coded;
  int dim, heads;
  std::vector<std::uint8_t> bytes;
  std::vector<float> scale;

  static SideData read() {
    SideData s;
    s.coded = coded_of(read_string());
    s.dim = read_int();
    s.heads = read_int();
    s.bytes = read_array<std::uint8_t>();
    s.scale = read_array<float>();
    return s;
  }
  Side side() const {
    const std::ptrdiff_t row = row_bytes(coded.fmt, dim);
    const int n = int(std::ptrdiff_t(bytes.size()) / (row * heads));
    return {coded.fmt, coded.book, bytes.data(), row * heads, row, n, heads, dim, or_null(scale)};
  }
};

struct QueryData {
  int heads, dim;
  std::vector<float> values;

  static QueryData read() {
    QueryData q;
    q.heads = read_int();
    q.dim = read_int();
    q.values = read_array<float>();
    return q;
  }
  Query query() const {
    const std::ptrdiff_t row = std::ptrdiff_t(heads) * dim;
    return {values.data(), row, dim, int(std::ptrdiff_t(values.size()) / row), heads, dim};
  }
};

void call_encode(const Kernels& isa) {
  const int threads = read_int();
  const Coded coded = coded_of(read_string());
  const int dim = read_int();
  const std::vector<float> x = read_array<float>(), scale = read_array<float>();
  const std::size_t rows = x.size() / std::size_t(dim);
  std::vector<std::uint8_t> out(rows * std::size_t(row_bytes(coded.fmt, dim)), 0xee);
  Counts counts;
  write_int(encode(isa, threads, coded, x.data(), std::ptrdiff_t(rows), dim, or_null(scale),
                   out.data(), counts));
  write_int(counts.saturated);
  write_int(counts.flushed);
  write_array(out);
}

void call_decode(const Kernels& isa) {
  const int threads = read_int();
  const SideData data = SideData::read();
  const Side rows = data.side();
  std::vector<float> out = unwritten(std::size_t(rows.n) * std::size_t(rows.dim));
  write_int(decode(isa, threads, data.coded, rows.base, rows.token_stride, rows.n, rows.dim,
                   or_null(data.scale), out.data()));
  write_array(out);
}

void call_scores(const Kernels& isa) {
  const int threads = read_int();
  const QueryData q = QueryData::read();
  const SideData keys = SideData::read();
  const Side side = keys.side();
  std::vector<float> out =
      unwritten(std::size_t(q.query().n) * std::size_t(q.heads) * std::size_t(side.n));
  const bool ok = scores(isa, threads, q.query(), side, out.data());
  write_int(ok ? -1 : first_bad_row(isa, side));
  write_array(out);
}

void call_attention(const Kernels& isa) {
  const int threads = read_int();
  const QueryData q = QueryData::read();
  const SideData k = SideData::read(), v = SideData::read();
  const Side keys = k.side(), values = v.side();
  const int first = read_int(), end = read_int();
  const float scale = read_real();
  const std::vector<float> added = read_array<float>();
  const int page = read_int(), phase = read_int();
  const bool wants_lse = read_int();
  const std::size_t rows = std::size_t(q.query().n) * std::size_t(q.heads);
  Offsets offsets{};
  if (!added.empty()) {
    const auto pages = std::ptrdiff_t(added.size() / rows);
    offsets = {added.data(), pages * q.heads, pages, page, phase};
  }
  std::vector<float> out = unwritten(rows * std::size_t(v.dim));
  std::vector<float> lse = unwritten(wants_lse ? rows : 0);
  const bool ok = attention(isa, threads, q.query(), keys, values, {first, end}, offsets, scale,
                            out.data(), wants_lse ? lse.data() : nullptr);
  const std::ptrdiff_t bad_key = ok ? -1 : first_bad_row(isa, keys);
  const bool in_values = !ok && bad_key < 0;
  write_int(in_values);
  write_int(in_values ? first_bad_row(isa, values) : bad_key);
  write_array(out);
  write_array(lse);
}

void call_set_book() {
  const std::string format = read_string();
  const std::vector<float> values = read_array<float>(), cuts = read_array<float>();
  const float start = read_real();
  set_book(format, values, cuts, start);
}

void call_set_search() {
  const std::string format = read_string();
  const float grid = read_real();
  const std::vector<std::uint8_t> cost = read_array<std::uint8_t>();
  const std::vector<std::uint8_t> entry = read_array<std::uint8_t>();
  const std::vector<std::int32_t> beyond = read_array<std::int32_t>();
  set_search(format, grid, cost, entry, beyond);
}

void call_set_trellis() {
  const std::string format = read_string();
  const int states = read_int();
  const auto taps0 = std::uint32_t(read_int()), taps1 = std::uint32_t(read_int());
  const std::vector<int> offsets = read_array<int>();
  set_trellis(format, states, taps0, taps1, offsets);
}

void call_set_units() {
  const std::vector<float> values = read_array<float>(), cuts = read_array<float>();
  set_units(values, cuts);
}

void call_set_signs() {
  std::vector<float> signs[4];
  for (auto& s : signs) s = read_array<float>();
  set_signs(signs[0], signs[1], signs[2], signs[3]);
}

void call_add_variant() {
  const std::string format = read_string(), identity = read_string();
  const std::vector<float> table = read_array<float>();
  add_variant(format, identity, table);
}

void run() {
  const Kernels& isa = KVPROOF_KERNELS;
  for (int c; (c = std::getc(stdin)) != EOF;) {
    std::ungetc(c, stdin);
    const std::string name = read_string();
    if (name == "encode")
      call_encode(isa);
    else if (name == "decode")
      call_decode(isa);
    else if (name == "scores")
      call_scores(isa);
    else if (name == "attention")
      call_attention(isa);
    else if (name == "set_book")
      call_set_book();
    else if (name == "set_search")
      call_set_search();
    else if (name == "set_trellis")
      call_set_trellis();
    else if (name == "set_units")
      call_set_units();
    else if (name == "set_signs")
      call_set_signs();
    else if (name == "add_variant")
      call_add_variant();
    else
      throw std::invalid_argument("no call " + name);
    std::fflush(stdout);
  }
}

}  // namespace
}  // namespace kvproof

int main() {
  try {
    kvproof::run();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "isa_cases: %s\n", error.what());
    return 1;
  }
}
