// file: memory for the small results of casts
#include "cast/small_blocks.h"

#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>

#include <array>
#include <bit>
#include <cstddef>

namespace torch_promote {

namespace {

constexpr size_t kSmallest = 64; // bytes; each kind of block is twice the one before
constexpr size_t kKinds = 9;
constexpr size_t kLargest = kSmallest << (kKinds - 1);
constexpr size_t kKeptBytes = size_t{64} << 10; // of each kind, in each thread

size_t kind_for(size_t bytes) {
  return static_cast<size_t>(std::bit_width((bytes - 1) / kSmallest));
}

// The blocks of a kind that are free, each of them holding the address of the next.
struct FreeBlocks {
  void* first = nullptr;
  size_t count = 0;
};

class Pool {
 public:
  Pool() = default;
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;
  ~Pool() {
    open_ = false; // tensors of this thread may yet die
    for (FreeBlocks& blocks : kinds_) {
      while (blocks.first != nullptr) {
        c10::free_cpu(pop(blocks));
      }
    }
  }

  void* take(size_t kind) {
    FreeBlocks& blocks = kinds_[kind];
    return blocks.first != nullptr ? pop(blocks) : c10::alloc_cpu(kSmallest << kind);
  }

  void give(void* block, size_t kind) {
    FreeBlocks& blocks = kinds_[kind];
    if (!open_ || (blocks.count + 1) * (kSmallest << kind) > kKeptBytes) {
      c10::free_cpu(block);
      return;
    }
    *static_cast<void**>(block) = blocks.first;
    blocks.first = block;
    ++blocks.count;
  }

 private:
  static void* pop(FreeBlocks& blocks) {
    void* block = blocks.first;
    blocks.first = *static_cast<void**>(block);
    --blocks.count;
    return block;
  }

  bool open_ = true;
  std::array<FreeBlocks, kKinds> kinds_;
};

Pool& pool() {
  static thread_local Pool instance;
  return instance;
}

template <size_t kind>
void give_back(void* block) {
  c10::profiledCPUMemoryReporter().Delete(block);
  pool().give(block, kind);
}

template <size_t... kinds>
constexpr std::array<c10::DeleterFnPtr, kKinds> deleters_of(std::index_sequence<kinds...> /*kinds*/) {
  return {&give_back<kinds>...};
}
constexpr std::array<c10::DeleterFnPtr, kKinds> kDeleters = deleters_of(std::make_index_sequence<kKinds>());

class SmallBlocks final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    // Somebody else's allocator gets every request.
    if (bytes == 0 || bytes > kLargest || c10::GetCPUAllocator() != c10::GetDefaultCPUAllocator()) {
      return c10::GetCPUAllocator()->allocate(bytes);
    }
    const size_t kind = kind_for(bytes);
    void* block = pool().take(kind);
    c10::profiledCPUMemoryReporter().New(block, bytes);
    return {block, block, kDeleters[kind], c10::Device(c10::DeviceType::CPU)};
  }

  void copy_data(void* to, const void* from, size_t count) const override {
    default_copy_data(to, from, count);
  }
};

} // namespace

c10::Allocator* small_blocks() {
  static SmallBlocks* instance = new SmallBlocks; // tensors outlive everything
  return instance;
}

} // namespace torch_promote
