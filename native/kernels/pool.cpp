#include "pool.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <system_error>

namespace kvproof {
namespace {

// Long enough to bridge the gap between two layers of a model, short enough not to take a core from
// whoever runs next.
constexpr int SPINS = 2000;

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

void Scratch::Free::operator()(void* p) const { std::free(p); }

void* Scratch::at_least(std::size_t bytes) {
  if (bytes > size_) {
    const std::size_t size = (bytes + bytes / 4 + 4095) / 4096 * 4096;
    void* p = std::aligned_alloc(4096, size);
    if (!p) throw std::bad_alloc();
    std::memset(p, 0, size);
    memory_.reset(p);
    size_ = size;
  }
  return memory_.get();
}

Pool& Pool::get() {
  static std::atomic<Pool*> pool{nullptr};
  static std::atomic<pid_t> owner{0};
  static std::mutex creation;
  if (owner.load(std::memory_order_acquire) != getpid()) {
    std::lock_guard<std::mutex> hold(creation);
    if (owner.load() != getpid()) {
      pool =
          new Pool;  // never freed: workers outlive static destructors, and a forked copy has none
      owner.store(getpid(), std::memory_order_release);
    }
  }
  return *pool;
}

Scratch& Pool::scratch(int worker) {
  while (int(scratch_.size()) <= worker) scratch_.push_back(std::make_unique<Scratch>());
  return *scratch_[std::size_t(worker)];
}

void Pool::wait_for_start(unsigned seen) {
  for (int i = 0; i < SPINS; ++i) {
    if (generation_.load(std::memory_order_acquire) != seen) return;
    pause();
  }
  std::unique_lock<std::mutex> hold(lock_);
  wake_.wait(hold, [&] { return generation_.load(std::memory_order_acquire) != seen; });
}

void Pool::work(int worker) {
  unsigned seen = generation_.load(std::memory_order_acquire) - 1;
  for (;;) {
    wait_for_start(seen);
    seen = generation_.load(std::memory_order_acquire);
    if (worker < threads_) {
      for (int t; (t = next_.fetch_add(1, std::memory_order_relaxed)) < tasks_;) (*fn_)(t, worker);
    }
    busy_.fetch_sub(1, std::memory_order_release);
  }
}

void Pool::run(int tasks, int threads, const std::function<void(int, int)>& fn) {
  threads = threads < tasks ? threads : tasks;
  if (threads <= 1) {
    for (int t = 0; t < tasks; ++t) fn(t, 0);
    return;
  }
  {
    std::lock_guard<std::mutex> hold(lock_);
    fn_ = &fn;
    tasks_ = tasks;
    threads_ = threads;
    next_.store(0, std::memory_order_relaxed);
    // Every worker answers every generation, also those that this call does not use.
    const int workers = std::max(int(workers_.size()), threads - 1);
    busy_.store(workers, std::memory_order_relaxed);
    generation_.fetch_add(1, std::memory_order_release);
    try {
      while (int(workers_.size()) < workers)
        workers_.emplace_back(&Pool::work, this, int(workers_.size()) + 1);
    } catch (const std::system_error&) {  // the system gives no more threads: go on with fewer
      busy_.fetch_sub(workers - int(workers_.size()), std::memory_order_relaxed);
    }
  }
  wake_.notify_all();
  for (int t; (t = next_.fetch_add(1, std::memory_order_relaxed)) < tasks;) fn(t, 0);
  for (int i = 0; busy_.load(std::memory_order_acquire) > 0; ++i) {
    if (i < SPINS)
      pause();
    else
      std::this_thread::yield();
  }
}

}  // namespace kvproof
