// file: the counts and settings of the stand-in device
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <c10/core/Storage.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace c10 {
class OperatorHandle;
}

namespace cuda_stand_in {

constexpr int max_devices = 2;

using StreamId = std::pair<int, int64_t>; // a device index and an id

struct Memory {
  std::atomic<int64_t> live{0};
  std::atomic<int64_t> peak{0};

  void add(int64_t bytes) {
    const int64_t now = live += bytes;
    int64_t before = peak.load();
    while (before < now && !peak.compare_exchange_weak(before, now)) {
    }
  }
};

// A copy of one tensor to another dtype.
struct Cast {
  c10::ScalarType from;
  c10::ScalarType to;
  int64_t elements_read;
  int64_t elements_written;
  const void* source; // the source's memory
  bool leaf;          // the source is a leaf that requires a gradient, or a view of one
  bool backward;
};

struct State {
  std::atomic<int> devices{max_devices};
  Memory memory[max_devices];
  std::atomic<int64_t> events_recorded{0};
  std::atomic<int64_t> events_waited_for{0};
  std::atomic<int64_t> data_ptrs_recorded{0};
  std::mutex mutex; // protects the members below
  std::map<std::string, int64_t> kernels;
  std::set<StreamId> capturing;
  bool notes_casts = false;
  std::vector<Cast> casts;
};

// Never destroyed: tensors may outlive static objects.
inline State& state() {
  static State& it = *new State;
  return it;
}

c10::Allocator* allocator();
// The device's index, or the current one.
c10::DeviceIndex index_of(std::optional<c10::Device> device);

// A storage of the device over the memory of a CPU storage, which it owns. Its bytes count from now on.
c10::Storage adopt(const c10::Storage& cpu, c10::DeviceIndex device);
// Gives `storage`, of the device, the memory of a CPU storage.
void replace_memory(const c10::Storage& storage, const c10::Storage& cpu);
using Stack = std::vector<c10::IValue>;
// The sources and targets of a call of an op that copies. Before the call, because the kernel gets other tensors.
using Copies = std::vector<std::pair<at::Tensor, at::Tensor>>;
Copies copies_of(const c10::OperatorHandle& op, const Stack& stack);
// Counts a call, and its casts.
void count(const c10::OperatorHandle& op, const Copies& copies);
using Kernel = void (*)(const c10::OperatorHandle&, Stack*);
// Runs a kernel. While the current stream captures a graph, records it for replays and leaves its results uncomputed.
void run_or_record(const c10::OperatorHandle& op, Stack* stack, Kernel kernel);
// A stream that waits for one that captures a graph captures too.
void join_capture(StreamId waited_for, StreamId waiting);

// Makes a storage of the device at least `bytes` long, keeping what it holds.
void grow(const c10::Storage& storage, size_t bytes);

} // namespace cuda_stand_in
