// file: thread-local free lists for objects of one type
#pragma once

#include <cstddef>
#include <new>
#include <utility>

namespace torch_promote {

// A region allocates a node and an entry for each weight, and the end of the graph or of the region frees them all at
// once. These are more blocks than malloc's thread-local lists hold, so malloc would merge them and search again for
// each block of the next region: without the pools, each weight of an MLP costs a seventh more. An object may be freed
// in another thread, which then keeps its memory. A thread keeps at most `kMost` blocks of each size.
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
  // Frees the blocks. Later blocks are freed immediately.
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
