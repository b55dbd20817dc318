// file: writes that change no version, as the caches of all threads learn of them
#include "cache/write_log.h"

#include "cast/source.h"
#include "policy/registry_sizes.h"

#include <c10/util/flat_hash_map.h>

namespace torch_promote {

namespace {

struct WriteLog {
  static constexpr size_t kMost = 1U << 16;

  ForkSafeMutex mutex;
  ska::flat_hash_map<const void*, uint64_t> last; // the epoch of the last write to a storage, or to a tensor
  uint64_t begin = 0;                             // the log holds what was written after this epoch

  void put(const void* address, uint64_t epoch) {
    last[address] = epoch;
  }
  void clear(uint64_t epoch) {
    decltype(last)().swap(last);
    begin = epoch;
  }
};

WriteLog& write_log() {
  static auto* instance = new WriteLog; // never destroyed: threads may outlive static destructors
  return *instance;
}

// Made at import: see NOTE [ Fork ].
[[maybe_unused]] const WriteLog& write_log_at_import = write_log();

[[maybe_unused]] const bool noted_written_storages = note_registry("written storages", [] {
  const std::lock_guard<std::mutex> lock(write_log().mutex);
  return write_log().last.size();
});

std::atomic<size_t> threads_with_casts{0};

} // namespace

void note_writes(const std::vector<at::Tensor>& tensors) {
  WriteLog& log = write_log();
  const std::lock_guard<std::mutex> lock(log.mutex);
  const uint64_t epoch = ++write_epoch;
  if (!any_thread_holds_casts() || log.last.size() + tensors.size() > WriteLog::kMost) {
    log.clear(epoch);
    return;
  }
  for (const at::Tensor& tensor : tensors) {
    const at::TensorImpl* impl = tensor.unsafeGetTensorImpl();
    if (impl->has_storage()) {
      log.put(impl->unsafe_storage().unsafeGetStorageImpl(), epoch);
    }
    if (!is_plain(*impl)) { // a subclass, say: its casts are recognized by the tensor
      log.put(impl, epoch);
    }
  }
}

WritesSince::WritesSince(uint64_t epoch) : lock_(write_log().mutex), epoch_(epoch) {}

bool WritesSince::include(const at::TensorImpl* tensor, const c10::StorageImpl* storage) const {
  const WriteLog& log = write_log();
  if (epoch_ < log.begin) {
    return true;
  }
  const auto after = [&](const void* address) {
    const auto found = log.last.find(address);
    return found != log.last.end() && found->second > epoch_;
  };
  return after(tensor) || after(storage);
}

bool HoldsCasts::change() {
  holds_ = !holds_;
  threads_with_casts += holds_ ? 1 : -1;
  return holds_;
}

bool any_thread_holds_casts() {
  return threads_with_casts != 0;
}

} // namespace torch_promote
