// Python module `_weights`: GGUF tensors to torch tensors, and the engine's matrix products.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "cpu.h"
#include "pool.h"
#include "weights/ops.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvproof::weights {
namespace {

// The instruction sets of the attention kernels by name, best last, with what they have to offer
// here: integer dot products are no use to float32 products.
struct Isa {
  const char* name;
  const Ops* ops;
};

std::vector<Isa> available() {
  std::vector<Isa> list{{"scalar", &ops_scalar}};
#if defined(__x86_64__)
  if (missing_for_avx2().empty()) list.push_back({"avx2", &ops_avx2});
  if (missing_for_avx2vnni().empty()) list.push_back({"avx2vnni", &ops_avx2});
  if (missing_for_avx512().empty()) list.push_back({"avx512", &ops_avx512});
  if (missing_for_amx().empty()) list.push_back({"amx", &ops_avx512});
#elif defined(__aarch64__)
  // NEON is what the compiler makes of plain loops there.
  if (missing_for_neon().empty()) list.push_back({"neon", &ops_scalar});
#endif
  return list;
}

Isa find(const std::string& name) {
  std::string names;
  for (const Isa& isa : available()) {
    if (name == isa.name) return isa;
    names += names.empty() ? isa.name : std::string(", ") + isa.name;
  }
  throw std::invalid_argument("KVPROOF_CPU_ISA: " + name + " cannot run here; choose one of " +
                              names);
}

// The set that KVPROOF_CPU_ISA names, or the best.
const Isa& chosen() {
  static const Isa isa = [] {
    const char* forced = std::getenv("KVPROOF_CPU_ISA");
    return forced && *forced ? find(forced) : available().back();
  }();
  return isa;
}

const Ops& ops(const std::string& isa) { return *(isa.empty() ? chosen() : find(isa)).ops; }

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<float, nb::c_contig, nb::device::cpu>;
using Halves = nb::ndarray<int16_t, nb::c_contig, nb::device::cpu>;

// f(task) for every task, one call at a time.
template <class F>
void in_parallel(size_t tasks, int threads, const F& f) {
  Pool& pool = Pool::get();
  std::lock_guard<std::mutex> hold(pool.gate());
  pool.run(int(tasks), threads, [&](int task, int) { f(size_t(task)); });
}

constexpr size_t kChunk = 4096;  // values of one step: 16 KiB of float32, in L1

template <class Store>
void dequantize_tensor(int type_id, const Bytes& src, size_t values, int threads,
                       const std::string& isa, Store store) {
  const Type type = Type(type_id);
  const BlockShape shape = block_shape(type);
  if (shape.values == 0) {
    throw std::invalid_argument("tensor type " + std::to_string(type_id) + " is not supported");
  }
  if (values % shape.values || src.shape(0) != values / shape.values * shape.bytes) {
    throw std::invalid_argument("tensor data: " + std::to_string(src.shape(0)) +
                                " bytes do not hold " + std::to_string(values) +
                                " values of type " + std::to_string(type_id));
  }
  const Ops& o = ops(isa);
  const uint8_t* bytes = src.data();
  nb::gil_scoped_release release;
  const size_t per_task = 16 * kChunk, tasks = (values + per_task - 1) / per_task;
  in_parallel(tasks, threads, [&](size_t task) {
    float buffer[kChunk];
    const size_t last = std::min(values, (task + 1) * per_task);
    for (size_t at = task * per_task; at < last; at += kChunk) {
      const size_t n = std::min(kChunk, last - at);
      o.dequantize(type, bytes + at / shape.values * shape.bytes, n / shape.values, buffer);
      store(o, at, buffer, n);
    }
  });
}

void dequantize_f32(int type, Bytes src, Floats out, int threads, const std::string& isa) {
  float* y = out.data();
  dequantize_tensor(type, src, out.size(), threads, isa,
                    [y](const Ops&, size_t at, const float* x, size_t n) {
                      std::memcpy(y + at, x, n * sizeof(float));
                    });
}

void dequantize_bf16(int type, Bytes src, Halves out, int threads, const std::string& isa) {
  uint16_t* y = reinterpret_cast<uint16_t*>(out.data());
  dequantize_tensor(
      type, src, out.size(), threads, isa,
      [y](const Ops& o, size_t at, const float* x, size_t n) { o.to_bf16(x, n, y + at); });
}

// Whole pages of [at, at + bytes); advice only, so a refusal by the kernel changes nothing.
void advise(uintptr_t at, size_t bytes, int advice, uintptr_t page) {
  const uintptr_t begin = (at + page - 1) / page * page, end = (at + bytes) / page * page;
  if (end > begin) madvise(reinterpret_cast<void*>(begin), end - begin, advice);
}

// Asks for 2 MiB pages: fewer page faults while loading, and 4 % less time for a product that walks
// 335 MB (11.2 to 10.7 ms).
void advise_huge(uintptr_t at, size_t bytes) {
#if defined(MADV_HUGEPAGE)
  advise(at, bytes, MADV_HUGEPAGE, uintptr_t(sysconf(_SC_PAGESIZE)));
#else
  (void)at, (void)bytes;
#endif
}

// Lets go of the pages of a read-only mapped file, which would count as memory of this process.
void release_mapped(Bytes view) {
  advise(uintptr_t(view.data()), view.shape(0), MADV_DONTNEED, uintptr_t(sysconf(_SC_PAGESIZE)));
}

// Addresses instead of arrays: a decode step makes over a hundred of these calls, and an array
// argument costs microseconds through DLPack. weights.py checks shapes, types and layout.
void linear(uintptr_t x_at, uintptr_t w_at, uintptr_t out_at, size_t m, size_t n, size_t k,
            int threads, const std::string& isa) {
  const Ops& o = ops(isa);
  const float* x = reinterpret_cast<const float*>(x_at);
  const uint16_t* w = reinterpret_cast<const uint16_t*>(w_at);
  float* out = reinterpret_cast<float*>(out_at);
  nb::gil_scoped_release release;
  thread_local std::vector<float> packed;
  if (m <= size_t(kMaxVecRows)) {
    if (packed.size() < m * k) packed.resize(m * k);
    for (size_t r = 0; r < m; ++r) o.pack_vec(x + r * k, k, packed.data() + r * k);
    const float* p = packed.data();
    // A task reads at least 64 KiB: a hand-over between threads costs about a microsecond.
    const size_t rows = std::max<size_t>(8, (64 * 1024 / (2 * k) + 3) / 4 * 4);
    const size_t tasks = (n + rows - 1) / rows;
    in_parallel(tasks, threads, [&, p](size_t task) {
      o.matvec(p, int(m), k, w, task * rows, std::min(n, (task + 1) * rows), out, n);
    });
    return;
  }
  const size_t padded = (m + o.mr - 1) / o.mr * o.mr;
  if (packed.size() < padded * k) packed.resize(padded * k);
  o.pack_rows(x, m, k, packed.data());
  const float* p = packed.data();
  // Several tasks a thread, so that one that finishes late is not waited for long, and whole
  // panels.
  const size_t panels = (n + o.nr - 1) / o.nr, wanted = 8 * size_t(threads);
  const size_t block = std::min(kRowBlock, std::max<size_t>(1, panels / wanted) * o.nr);
  const size_t tasks = (n + block - 1) / block;
  in_parallel(tasks, threads, [&, p](size_t task) {
    thread_local std::vector<float> scratch(kRowBlock * kDepthBlock);
    o.gemm(p, m, k, w, task * block, std::min(n, (task + 1) * block), out, n, scratch.data());
  });
}

// Addresses for the same reason as in `linear`.
void rms_norm(uintptr_t x, uintptr_t weight, uintptr_t out, size_t rows, size_t n, float eps,
              const std::string& isa) {
  ops(isa).rms_norm(reinterpret_cast<const float*>(x), reinterpret_cast<const float*>(weight), rows,
                    n, eps, reinterpret_cast<float*>(out));
}

}  // namespace
}  // namespace kvproof::weights

NB_MODULE(_weights, m) {
  using namespace kvproof::weights;
  m.def("isas", [] {
    std::vector<std::string> names;
    for (const Isa& isa : available()) names.emplace_back(isa.name);
    return names;
  });
  m.def("isa", [] { return std::string(chosen().name); });
  m.def("dequantize_f32", &dequantize_f32, "type"_a, "src"_a, "out"_a, "threads"_a, "isa"_a = "");
  m.def("dequantize_bf16", &dequantize_bf16, "type"_a, "src"_a, "out"_a, "threads"_a, "isa"_a = "");
  m.def("advise_huge", &advise_huge, "at"_a, "bytes"_a);
  m.def("release_mapped", &release_mapped, "view"_a);
  m.def("linear", &linear, "x"_a, "w"_a, "out"_a, "m"_a, "n"_a, "k"_a, "threads"_a, "isa"_a = "");
  m.def("rms_norm", &rms_norm, "x"_a, "weight"_a, "out"_a, "rows"_a, "n"_a, "eps"_a, "isa"_a = "");
}
