// file: writes that change no version, as the caches of all threads learn of them
#pragma once

#include "policy/fork_safe_mutex.h"

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

namespace torch_promote {

// NOTE [ Unversioned writes ]
// Fused optimizers, FSDP2 and collectives write weights without increasing their version, and may do so on any thread:
// in a hook on a device thread of autograd, or in a training thread beside threads that serve. Code that detects such a
// write calls `note_writes` after it. That increases the write epoch, which belongs to the process, and logs the epoch
// for each written storage. A cache compares the epoch at each lookup, which is one relaxed load; where it has changed,
// the cache drops the casts whose storage was written to after the epoch that the cache knew.
//
// A cast that began before a write may have read the old data. It is therefore kept, in any cache, only if its source
// has not been written to since the epoch at which it began. This is why a write is noted after it has happened: a cast
// that begins later reads the new data.
//
// Nothing is logged while no thread holds or makes casts. The log is bounded. A cache that it does not reach back for
// drops all its casts.
inline constinit std::atomic<uint64_t> write_epoch{0};

// Notes that these tensors have been written to.
void note_writes(const std::vector<at::Tensor>& tensors);

// Reads the log. It is locked meanwhile: destroy no tensor.
class WritesSince {
 public:
  explicit WritesSince(uint64_t epoch);
  // Whether the tensor, or its storage, was written to after the epoch. The addresses are only compared.
  bool include(const at::TensorImpl* tensor, const c10::StorageImpl* storage) const;
  uint64_t until() const {
    return write_epoch;
  }

 private:
  std::unique_lock<std::mutex> lock_;
  uint64_t epoch_;
};

// Whether the tensor has been written to since a cast of it began. Sequentially consistent: a thread announces a cast,
// and then looks at the epoch; one that writes increases the epoch, and then looks for casts.
inline bool was_written(const at::Tensor& tensor, uint64_t began) {
  if (write_epoch == began) {
    return false;
  }
  const at::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  const bool has_storage = impl->has_storage();
  return WritesSince(began).include(impl, has_storage ? impl->unsafe_storage().unsafeGetStorageImpl() : nullptr);
}

// One thread's announcement that it holds or makes casts, until it drops them or ends.
class HoldsCasts {
 public:
  HoldsCasts() = default;
  HoldsCasts(const HoldsCasts&) = delete;
  HoldsCasts& operator=(const HoldsCasts&) = delete;
  ~HoldsCasts() {
    put(false);
  }
  void put(bool holds);

 private:
  bool holds_ = false;
};
bool any_thread_holds_casts();

} // namespace torch_promote
