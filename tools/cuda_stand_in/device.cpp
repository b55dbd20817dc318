// file: memory, streams and events of the stand-in device, and PyTorch's hooks for it
#include "state.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstring>
#include <memory>

namespace cuda_stand_in {

namespace {

thread_local c10::DeviceIndex current_device = 0;
thread_local int64_t current_streams[max_devices] = {};
std::atomic<int64_t> last_stream{0};

// --- memory

// Host memory that counts as memory of a device.
struct Block {
  c10::DataPtr host; // or `cpu` owns the memory
  c10::Storage cpu;
  int64_t bytes;
  c10::DeviceIndex device;

  static c10::DataPtr counted(std::unique_ptr<Block> block, void* data) {
    const c10::Device device(c10::kCUDA, block->device);
    state().memory[block->device].add(block->bytes);
    return {data, block.release(), &Block::release, device};
  }

  static void release(void* context) {
    std::unique_ptr<Block> block(static_cast<Block*>(context));
    state().memory[block->device].live -= block->bytes;
  }
};

c10::DataPtr allocate_on(c10::DeviceIndex device, size_t bytes) {
  auto block =
      std::make_unique<Block>(Block{c10::GetCPUAllocator()->allocate(bytes), {}, static_cast<int64_t>(bytes), device});
  void* data = block->host.get();
  return Block::counted(std::move(block), data);
}

c10::DataPtr adopted(const c10::Storage& cpu, c10::DeviceIndex device) {
  auto block = std::make_unique<Block>(Block{{}, cpu, static_cast<int64_t>(cpu.nbytes()), device});
  return Block::counted(std::move(block), cpu.mutable_data());
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    return allocate_on(current_device, bytes);
  }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

} // namespace

c10::Allocator* allocator() {
  static Allocator& it = *new Allocator;
  return &it;
}

c10::DeviceIndex index_of(std::optional<c10::Device> device) {
  return device && device->has_index() ? device->index() : current_device;
}

c10::Storage adopt(const c10::Storage& cpu, c10::DeviceIndex device) {
  return {c10::Storage::use_byte_size_t(), cpu.nbytes(), adopted(cpu, device), allocator(), /*resizable=*/true};
}

void replace_memory(const c10::Storage& storage, const c10::Storage& cpu) {
  storage.set_data_ptr_noswap(adopted(cpu, storage.device().index()));
  storage.set_nbytes(cpu.nbytes());
}

void grow(const c10::Storage& storage, size_t bytes) {
  if (bytes <= storage.nbytes()) {
    return;
  }
  c10::DataPtr larger = allocate_on(storage.device().index(), bytes);
  if (storage.nbytes() != 0) {
    std::memcpy(larger.mutable_get(), storage.data(), storage.nbytes());
  }
  storage.set_data_ptr_noswap(std::move(larger));
  storage.set_nbytes(bytes);
}

namespace {

// --- streams and events: all work is synchronous, so events are always complete, and waits are counted

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return c10::kCUDA;
  }
  c10::Device getDevice() const override {
    return {c10::kCUDA, current_device};
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.is_cuda() && device.index() < deviceCount(), "the stand-in has no device ", device);
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) {
      current_device = device.index();
    }
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(state().devices.load());
  }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override {
    return {};
  }

  c10::Stream getStream(c10::Device device) const override {
    device = indexed(device);
    return c10::Stream(c10::Stream::UNSAFE, device, current_streams[device.index()]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, indexed(device));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return c10::Stream(c10::Stream::UNSAFE, indexed(device), ++last_stream);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream before = getStream(stream.device());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }
  bool queryStream(const c10::Stream&) const override {
    return true;
  }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  // Not marked `override`: older releases do not have it.
  bool isStreamCapturing(const c10::Stream& stream) const {
    const std::lock_guard<std::mutex> lock(state().mutex);
    return state().capturing.count({stream.device_index(), stream.id()}) != 0;
  }

  // An event is the stream that it was recorded on.
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) {
      *event = new StreamId;
    }
    *static_cast<StreamId*>(*event) = {stream.device_index(), stream.id()};
    state().events_recorded += 1;
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) {
      state().events_waited_for += 1;
      join_capture(*static_cast<StreamId*>(event), {stream.device_index(), stream.id()});
    }
  }
  bool queryEvent(void*) const override {
    return true;
  }
  void synchronizeEvent(void*) const override {}
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<StreamId*>(event);
  }
  double elapsedTime(void*, void*, const c10::DeviceIndex) const override {
    return 0;
  }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {
    state().data_ptrs_recorded += 1;
  }

 private:
  c10::Device indexed(c10::Device device) const {
    return device.has_index() ? device : getDevice();
  }
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard)
REGISTER_ALLOCATOR(c10::kCUDA, allocator())

} // namespace

} // namespace cuda_stand_in

namespace at {

// PyTorch looks for this name, once.
struct CUDAHooks final : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}

  void init() const override {}
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasCUDA() const override {
    return true;
  }
  bool hasCUDART() const override {
    return true;
  }
  bool hasPrimaryContext(DeviceIndex) const override {
    return true;
  }
  DeviceIndex deviceCount() const override {
    return static_cast<DeviceIndex>(cuda_stand_in::state().devices.load());
  }
  int getNumGPUs() const override {
    return deviceCount();
  }
  DeviceIndex current_device() const override {
    return cuda_stand_in::current_device;
  }
  DeviceIndex getCurrentDevice() const override {
    return cuda_stand_in::current_device;
  }
  void setCurrentDevice(DeviceIndex device) const override {
    cuda_stand_in::current_device = device;
  }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    return std::exchange(cuda_stand_in::current_device, device);
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return device < 0 ? cuda_stand_in::current_device : exchangeDevice(device);
  }
  void deviceSynchronize(DeviceIndex) const override {}
  std::string showConfig() const override {
    return "  - CUDA: a stand-in\n";
  }
  Allocator* getCUDADeviceAllocator() const override {
    return cuda_stand_in::allocator();
  }
  Allocator* getPinnedMemoryAllocator() const override {
    return c10::GetCPUAllocator();
  }
  // Random numbers are the CPU's.
  const Generator& getDefaultGenerator(DeviceIndex) const override {
    return detail::getDefaultCPUGenerator();
  }
  Generator getNewGenerator(DeviceIndex) const override {
    return detail::createCPUGenerator();
  }
};

REGISTER_CUDA_HOOKS(CUDAHooks)

} // namespace at

// --- functions that Python calls through ctypes

#define STAND_IN_API extern "C" __attribute__((visibility("default")))

STAND_IN_API void stand_in_set_device_count(int count) {
  cuda_stand_in::state().devices = count;
}

STAND_IN_API int stand_in_device_count() {
  return cuda_stand_in::state().devices;
}

STAND_IN_API int stand_in_is_capturing(int device, int64_t stream) {
  auto& state = cuda_stand_in::state();
  const std::lock_guard<std::mutex> lock(state.mutex);
  return state.capturing.count({device, stream}) != 0 ? 1 : 0;
}

STAND_IN_API void stand_in_set_capturing(int device, int64_t stream, int on) {
  auto& state = cuda_stand_in::state();
  const std::lock_guard<std::mutex> lock(state.mutex);
  if (on != 0) {
    state.capturing.emplace(device, stream);
  } else {
    state.capturing.erase({device, stream});
  }
}

// All counts, such as "live_bytes0 8\naten::mm 3\n". Valid until the thread calls it again.
STAND_IN_API const char* stand_in_counts() {
  thread_local std::string text;
  text.clear();
  const auto add = [](const std::string& name, int64_t count) { text += name + " " + std::to_string(count) + "\n"; };
  auto& state = cuda_stand_in::state();
  for (int device = 0; device < cuda_stand_in::max_devices; ++device) {
    add("live_bytes" + std::to_string(device), state.memory[device].live);
    add("peak_bytes" + std::to_string(device), state.memory[device].peak);
  }
  add("events_recorded", state.events_recorded);
  add("events_waited_for", state.events_waited_for);
  add("data_ptrs_recorded", state.data_ptrs_recorded);
  const std::lock_guard<std::mutex> lock(state.mutex);
  for (const auto& [name, count] : state.kernels) {
    add(name, count);
  }
  return text.c_str();
}

STAND_IN_API void stand_in_reset_peak() {
  for (auto& memory : cuda_stand_in::state().memory) {
    memory.peak = memory.live.load();
  }
}

STAND_IN_API void stand_in_reset() {
  auto& state = cuda_stand_in::state();
  stand_in_reset_peak();
  state.events_recorded = state.events_waited_for = state.data_ptrs_recorded = 0;
  const std::lock_guard<std::mutex> lock(state.mutex);
  state.kernels.clear();
  state.capturing.clear();
}
