// A small thread pool for calls of tens of microseconds and up.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace kvproof {

// 64-byte aligned memory that only grows, zeroed when it does: kernels may read stale scratch, but
// never a NaN that nobody wrote.
class Scratch {
 public:
  void* at_least(std::size_t bytes);

 private:
  struct Free {
    void operator()(void* p) const;
  };
  std::unique_ptr<void, Free> memory_;
  std::size_t size_ = 0;
};

class Pool {
 public:
  // The pool of this process. A fork leaves a child without threads, so it gets a new one.
  static Pool& get();

  // One call at a time: everything below is used while holding this.
  std::mutex& gate() { return gate_; }

  // fn(task, worker) for every task in [0, tasks), on `threads` threads including the caller.
  // Which worker runs a task is not fixed; results must not depend on it.
  void run(int tasks, int threads, const std::function<void(int, int)>& fn);

  Scratch& scratch(int worker);
  Scratch& shared() { return shared_; }

 private:
  void work(int worker);
  void wait_for_start(unsigned seen);

  std::mutex gate_, lock_;
  std::condition_variable wake_;
  std::vector<std::thread> workers_;
  std::vector<std::unique_ptr<Scratch>> scratch_;
  Scratch shared_;
  std::atomic<unsigned> generation_{0};
  std::atomic<int> next_{0}, busy_{0};
  int tasks_ = 0, threads_ = 1;
  const std::function<void(int, int)>* fn_ = nullptr;
};

}  // namespace kvproof
