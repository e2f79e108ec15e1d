// The threads of both modules: `run(tasks, threads, fn)` calls fn(task, worker) for every task.
//
// A decode step makes hundreds of calls of 20 to 200 microseconds, so a worker spins for a moment
// before it sleeps; waking a sleeping thread costs as much as such a call. For the same reason a
// call is over when its tasks are: a worker that wakes up late finds it closed and is not waited
// for.
#pragma once

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

namespace kvproof {

// 64-byte aligned memory that only grows, zeroed when it does: kernels may read stale scratch, but
// never a NaN that nobody wrote.
class Scratch {
 public:
  void* at_least(std::size_t bytes) {
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
  std::size_t size() const { return size_; }

 private:
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  std::unique_ptr<void, Free> memory_;
  std::size_t size_ = 0;
};

class Pool {
 public:
  // The pool of this module in this process. A fork leaves a child without threads, so it gets a
  // new one; asking for the process at every call would take a tenth of a microsecond.
  static Pool& get() {
    if (Pool* const pool = of_process_.load(std::memory_order_acquire)) return *pool;
    static std::mutex creation;
    std::lock_guard<std::mutex> hold(creation);
    static const bool forgets =
        pthread_atfork(nullptr, nullptr, [] { of_process_.store(nullptr); }) == 0;
    if (!forgets) throw std::bad_alloc();
    // Never freed: workers outlive static destructors, and a forked copy has none.
    if (!of_process_.load()) of_process_.store(new Pool, std::memory_order_release);
    return *of_process_.load();
  }

  // One call at a time: everything below is used while holding this.
  std::mutex& gate() { return gate_; }

  // Up to `threads` threads, the caller (worker 0) included. Which worker runs a task is not fixed;
  // results must not depend on it.
  void run(int tasks, int threads, const std::function<void(int, int)>& fn) {
    threads = std::min(threads, tasks);
    if (threads > 1) grow(threads - 1);
    if (threads <= 1 || workers_ == 0) {
      for (int t = 0; t < tasks; ++t) fn(t, 0);
      return;
    }
    fn_ = &fn;
    tasks_ = tasks;
    threads_ = threads;
    next_.store(0, std::memory_order_relaxed);
    open_.store(true);
    generation_.fetch_add(1);
    if (sleeping_.load() > 0) {
      {
        std::lock_guard<std::mutex> hold(lock_);
      }  // one that is about to sleep is asleep now
      wake_.notify_all();
    }
    drain(0);
    open_.store(false);
    for (int i = 0; inside_.load() > 0; ++i) {
      // A worker that the system has put aside (a busy machine) needs the CPU more than we do.
      i < SPINS ? pause() : std::this_thread::yield();
    }
  }

  Scratch& scratch(int worker) {
    while (int(scratch_.size()) <= worker) scratch_.push_back(std::make_unique<Scratch>());
    return *scratch_[std::size_t(worker)];
  }
  Scratch& shared() { return shared_; }

  // All scratch memory held.
  std::size_t scratch_bytes() const {
    std::size_t bytes = shared_.size();
    for (const auto& scratch : scratch_) bytes += scratch->size();
    return bytes;
  }

 private:
  // Long enough to bridge the gap between two layers of a model, short enough not to take a core
  // from whoever runs next.
  static constexpr int SPINS = 2000;

  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }

  void grow(int workers) {
    try {
      for (; workers_ < workers; ++workers_)
        std::thread(&Pool::work, this, workers_ + 1, generation_.load()).detach();
    } catch (const std::system_error&) {  // the system gives no more threads: go on with fewer
    }
  }

  void drain(int worker) {
    for (int t; (t = next_.fetch_add(1, std::memory_order_relaxed)) < tasks_;) (*fn_)(t, worker);
  }

  void work(int worker, unsigned seen) {
    for (;;) {
      wait_for_start(seen);
      seen = generation_.load();
      // Either this sees that the call is closed, or `run` sees somebody inside and waits; both
      // orders rest on the sequential consistency of the two variables.
      inside_.fetch_add(1);
      if (open_.load() && worker < threads_) drain(worker);
      inside_.fetch_sub(1);
    }
  }

  void wait_for_start(unsigned seen) {
    for (int i = 0; i < SPINS; ++i) {
      if (generation_.load(std::memory_order_acquire) != seen) return;
      pause();
    }
    std::unique_lock<std::mutex> hold(lock_);
    sleeping_.fetch_add(1);
    wake_.wait(hold, [&] { return generation_.load() != seen; });
    sleeping_.fetch_sub(1);
  }

  static inline std::atomic<Pool*> of_process_{nullptr};
  std::mutex gate_, lock_;
  std::condition_variable wake_;
  int workers_ = 0;
  std::vector<std::unique_ptr<Scratch>> scratch_;
  Scratch shared_;
  std::atomic<unsigned> generation_{0};
  std::atomic<int> next_{0}, inside_{0}, sleeping_{0};
  std::atomic<bool> open_{false};
  int tasks_ = 0, threads_ = 1;
  const std::function<void(int, int)>* fn_ = nullptr;
};

}  // namespace kvproof
