// What this machine can do at most: the rates that docs/performance.md counts attention against.
//
//     g++ -O3 -std=c++20 -march=native -pthread benchmarks/peaks.cpp -o peaks && ./peaks [threads]
//
// Each line is the best of several rounds, threads together: reads of a buffer that each thread
// shares out, and (where the processor has them) vpdpbusd, vpermb, 64-byte stores, and int8 tiles
// of 16 x 16 x 64 products with all operands in registers.
#include <immintrin.h>
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <thread>
#include <vector>

#if defined(__linux__) && defined(__AMX_INT8__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

cpu_set_t allowed;  // when the program started

// Threads that the system puts on one processor at first would measure each other.
void pin(int thread) {
  int left = thread;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
    if (CPU_ISSET(cpu, &allowed) && left-- == 0) {
      cpu_set_t one;
      CPU_ZERO(&one);
      CPU_SET(cpu, &one);
      sched_setaffinity(0, sizeof one, &one);
      return;
    }
}

// Seconds of the fastest of `rounds` runs of fn(thread) on all threads.
double best(int threads, int rounds, const std::function<void(int)>& fn) {
  double fastest = 1e30;
  for (int r = 0; r < rounds; ++r) {
    const auto start = std::chrono::steady_clock::now();
    std::vector<std::thread> others;
    const auto pinned = [&](int t) {
      pin(t);
      fn(t);
    };
    for (int t = 1; t < threads; ++t) others.emplace_back(pinned, t);
    pinned(0);
    for (std::thread& t : others) t.join();
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    fastest = std::min(fastest, took.count());
  }
  return fastest;
}

void read(const std::uint8_t* p, std::size_t bytes, int times) {
  for (int k = 0; k < times; ++k) {
#if defined(__AVX512F__)
    __m512i a[4] = {};
    for (std::size_t i = 0; i < bytes; i += 256)
      for (int j = 0; j < 4; ++j) a[j] = _mm512_or_si512(a[j], _mm512_load_si512(p + i + 64 * j));
    for (__m512i& x : a) asm volatile("" : "+v"(x));
#else
    __m256i a[4] = {};
    for (std::size_t i = 0; i < bytes; i += 128)
      for (int j = 0; j < 4; ++j)
        a[j] = _mm256_or_si256(a[j],
                               _mm256_load_si256(reinterpret_cast<const __m256i*>(p + i + 32 * j)));
    for (__m256i& x : a) asm volatile("" : "+x"(x));
#endif
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int threads = argc > 1 ? std::atoi(argv[1]) : 2;
  sched_getaffinity(0, sizeof allowed, &allowed);
  std::printf("threads %d\n", threads);
  for (const std::size_t mb : {16, 32, 64, 256, 1024}) {
    const std::size_t each = (mb << 20) / std::size_t(threads) / 256 * 256;
    std::vector<std::uint8_t*> part;
    for (int t = 0; t < threads; ++t) {
      part.push_back(
          static_cast<std::uint8_t*>(std::aligned_alloc(4096, (each + 4095) / 4096 * 4096)));
      std::fill(part.back(), part.back() + each, std::uint8_t(t));
    }
    const int times = int(std::max<std::size_t>(1, 256 / mb));
    const double s = best(threads, 8, [&](int t) { read(part[std::size_t(t)], each, times); });
    std::printf("read_gb_per_s %zu MB %.1f\n", mb, double(each) * threads * times / s / 1e9);
    for (std::uint8_t* p : part) std::free(p);
  }
  constexpr long N = 20'000'000;
#if defined(__AVX512VNNI__) && defined(__AVX512VBMI__)
  {
    const double s = best(threads, 5, [](int) {
      __m512i acc[16] = {}, x = _mm512_set1_epi8(3), y = _mm512_set1_epi8(5);
      for (long i = 0; i < N / 16; ++i) {
#pragma GCC unroll 16
        for (auto& a : acc) {
          a = _mm512_dpbusd_epi32(a, x, y);
          asm volatile("" : "+v"(a));
        }
      }
    });
    std::printf("vpdpbusd_g_per_s %.2f\n", double(N) * threads / s / 1e9);
  }
  {
    const double s = best(threads, 5, [](int) {
      __m512i acc[8] = {}, table = _mm512_set1_epi8(3);
      for (long i = 0; i < N / 8; ++i) {
#pragma GCC unroll 8
        for (auto& a : acc) {
          a = _mm512_permutexvar_epi8(a, table);
          asm volatile("" : "+v"(a));
        }
      }
    });
    std::printf("vpermb_g_per_s %.2f\n", double(N) * threads / s / 1e9);
  }
  {
    const double s = best(threads, 5, [](int) {
      alignas(64) static thread_local std::uint8_t ring[4096];
      const __m512i x = _mm512_set1_epi8(1);
      for (long i = 0; i < N / 64; ++i)
#pragma GCC unroll 64
        for (int line = 0; line < 64; ++line) {
          _mm512_store_si512(ring + line * 64, x);
          asm volatile("" ::: "memory");
        }
    });
    std::printf("stores_64_bytes_g_per_s %.2f\n", double(N) * threads / s / 1e9);
  }
#endif
#if defined(__linux__) && defined(__AMX_INT8__)
  if (syscall(SYS_arch_prctl, 0x1023, 18) == 0) {
    const auto shapes = [](int rows) {
      struct {
        std::uint8_t palette = 1, start = 0, reserved[14] = {};
        std::uint16_t bytes[16] = {};
        std::uint8_t rows[16] = {};
      } s;
      for (int i = 0; i < 8; ++i) s.bytes[i] = 64, s.rows[i] = std::uint8_t(i < 6 ? rows : 16);
      _tile_loadconfig(&s);
    };
    for (const int rows : {16, 8}) {
      const double s = best(threads, 5, [&](int) {
        shapes(rows);
        for (long i = 0; i < N / 40; ++i) {
          _tile_dpbssd(0, 4, 6);
          _tile_dpbssd(1, 4, 7);
          _tile_dpbssd(2, 5, 6);
          _tile_dpbssd(3, 5, 7);
        }
        _tile_release();
      });
      std::printf("tdpbssd_%d_rows_m_per_s %.0f (%.2f TMAC/s)\n", rows,
                  double(N / 40 * 4) * threads / s / 1e6,
                  double(N / 40 * 4) * threads / s * rows * 16 * 64 / 1e12);
    }
    const double s = best(threads, 5, [&](int) {
      alignas(64) static thread_local std::uint8_t ring[4096];
      shapes(16);
      for (long i = 0; i < N / 40; ++i) {
        _tile_loadd(6, ring, 64);
        _tile_loadd(7, ring + 1024, 64);
        _tile_loadd(6, ring + 2048, 64);
        _tile_loadd(7, ring + 3072, 64);
      }
      _tile_release();
    });
    std::printf("tileloadd_16_rows_m_per_s %.0f\n", double(N / 40 * 4) * threads / s / 1e6);
  }
#endif
}
