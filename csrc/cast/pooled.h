// file: memory of objects of one type, which a thread keeps for the next ones
#pragma once

#include <cstddef>
#include <memory>
#include <new>
#include <utility>

namespace torch_promote {

// A region makes a node and an entry for each weight, and the end of the graph or of the region frees them all at once.
// That is more than malloc keeps in its lists for a thread, so it merges them and searches for each of the next
// region's: without the pools, each weight of an MLP costs a seventh more. An object may be freed in another thread,
// which then keeps its memory. A thread keeps at most `kMost` blocks of each size.
template <size_t kBytes>
class Pool {
 public:
  static void* take() {
    Free& free = tls_free_;
    if (free.first == nullptr) {
      return ::operator new(kBytes);
    }
    --free.count;
    return std::exchange(free.first, free.first->next);
  }
  static void give(void* memory) {
    Free& free = tls_free_;
    if (free.count >= kMost) {
      ::operator delete(memory);
      return;
    }
    if (free.count++ == 0) {
      static thread_local const EndOfThread end;
    }
    free.first = new (memory) Block{free.first};
  }

 private:
  struct Block {
    Block* next;
  };
  static_assert(kBytes >= sizeof(Block));
  struct Free {
    Block* first = nullptr;
    size_t count = 0;
  };
  // Frees the blocks. What is given later is freed at once.
  struct EndOfThread {
    ~EndOfThread() {
      Free& free = tls_free_;
      free.count = kMost;
      while (free.first != nullptr) {
        ::operator delete(std::exchange(free.first, free.first->next));
      }
    }
  };
  static constexpr size_t kMost = 256;

  static inline constinit thread_local Free tls_free_;
};

// A base for types that are made with `new`.
template <class T>
struct Pooled {
  static void* operator new(size_t /*size*/) {
    return Pool<sizeof(T)>::take();
  }
  static void operator delete(void* memory) {
    Pool<sizeof(T)>::give(memory);
  }
};

// For std::allocate_shared.
template <class T>
struct PoolAllocator {
  using value_type = T;

  PoolAllocator() = default;
  template <class Other>
  PoolAllocator(const PoolAllocator<Other>& /*other*/) {}

  T* allocate(size_t /*one*/) {
    return static_cast<T*>(Pool<sizeof(T)>::take());
  }
  void deallocate(T* memory, size_t /*one*/) {
    Pool<sizeof(T)>::give(memory);
  }
  bool operator==(const PoolAllocator& /*other*/) const {
    return true;
  }
};

} // namespace torch_promote
