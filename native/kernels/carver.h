// Scratch memory cut into pieces.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvproof {

// Consecutive pieces of one allocation, each on its own cache line.
class Carver {
 public:
  explicit Carver(void* base = nullptr) : base_(reinterpret_cast<std::uintptr_t>(base)) {}
  template <class T>
  T* take(std::size_t n) {
    T* p = reinterpret_cast<T*>(base_ + used_);
    used_ += (n * sizeof(T) + 63) / 64 * 64;
    return p;
  }
  std::size_t used() const { return used_; }

 private:
  std::uintptr_t base_;
  std::size_t used_ = 0;
};

}  // namespace kvproof
