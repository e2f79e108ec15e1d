// A small thread pool: `run(tasks, f)` calls f(task) for every task, on the caller and its workers.
//
// A decode step makes over a hundred products of 20 to 200 microseconds each, so a worker spins for
// a moment before it sleeps; waking a sleeping thread costs as much as such a product.
#pragma once

#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvproof::weights {

class Pool {
 public:
  explicit Pool(int threads) : workers_(threads - 1) {
    for (int i = 1; i < threads; ++i) std::thread([this] { work(); }).detach();
  }
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  void run(size_t tasks, const std::function<void(size_t)>& f) {
    std::lock_guard one_at_a_time(run_mutex_);
    if (workers_ == 0 || tasks < 2) {
      for (size_t i = 0; i < tasks; ++i) f(i);
      return;
    }
    {
      std::lock_guard lock(mutex_);
      f_ = &f;
      tasks_ = tasks;
      next_.store(0);
      open_ = true;
      generation_.fetch_add(1);
    }
    if (sleeping_.load() > 0) wake_.notify_all();
    drain();
    {
      std::lock_guard lock(mutex_);
      open_ = false;  // a worker that wakes up only now finds nothing to do, and is not waited for
    }
    for (int spin = 0; inside_.load(std::memory_order_acquire) > 0; ++spin) {
      // A worker that the system has put aside (a busy machine) needs the CPU more than we do.
      spin < 2000 ? pause() : std::this_thread::yield();
    }
  }

 private:
  static void pause() {
#if defined(__x86_64__)
    _mm_pause();
#endif
  }

  void drain() {
    for (size_t i = next_.fetch_add(1); i < tasks_; i = next_.fetch_add(1)) (*f_)(i);
  }

  void work() {
    uint64_t seen = 0;
    for (;;) {
      for (int spin = 0; spin < 2000 && generation_.load(std::memory_order_acquire) == seen;
           ++spin) {
        pause();
      }
      bool enter;
      {
        std::unique_lock lock(mutex_);
        if (generation_.load() == seen) {
          sleeping_.fetch_add(1);
          wake_.wait(lock, [&] { return generation_.load() != seen; });
          sleeping_.fetch_sub(1);
        }
        seen = generation_.load();
        enter = open_;
        if (enter) inside_.fetch_add(1);
      }
      if (enter) {
        drain();
        inside_.fetch_sub(1, std::memory_order_release);
      }
    }
  }

  const int workers_;
  std::mutex run_mutex_, mutex_;
  std::condition_variable wake_;
  std::atomic<uint64_t> generation_{0};
  std::atomic<size_t> next_{0};
  std::atomic<int> inside_{0}, sleeping_{0};
  const std::function<void(size_t)>* f_ = nullptr;
  size_t tasks_ = 0;
  bool open_ = false;
};

// The process's pool of that many threads. Pools live as long as the process, since another thread
// may be using one, and are made anew after a fork, whose child has none of its parent's threads.
inline Pool& pool(int threads) {
  static std::mutex mutex;
  static std::map<int, Pool*> pools;
  static pid_t owner = 0;
  std::lock_guard lock(mutex);
  if (owner != getpid()) {
    pools.clear();
    owner = getpid();
  }
  Pool*& found = pools[threads];
  if (!found) found = new Pool(threads);
  return *found;
}

}  // namespace kvproof::weights
