// file: the casts that hang on one weight
#include "cache/weight_casts.h"

#include "policy/registry_sizes.h"

#include <array>
#include <typeinfo>

namespace torch_promote {

namespace {

using c10::BackendMeta;

// Guards a weight's slot and its casts. Weights share a fixed number of mutexes, for a fork has to lock them all.
ForkSafeMutex& mutex_of(const at::TensorImpl* weight) {
  struct alignas(64) Place {
    ForkSafeMutex mutex;
  };
  static auto* places = new std::array<Place, 32>;
  return (*places)[(reinterpret_cast<uintptr_t>(weight) >> 6) % places->size()].mutex;
}

// Made at import: see NOTE [ Fork ].
[[maybe_unused]] const WeightRegistry& weight_registry_at_import = weight_registry();
[[maybe_unused]] const ForkSafeMutex& mutexes_at_import = mutex_of(nullptr);

[[maybe_unused]] const bool noted_weights = note_registry("weights with casts", [] {
  const std::lock_guard<std::mutex> lock(weight_registry().mutex);
  return weight_registry().weights.size();
});

// Unique in the process: `weight.data = other` replaces the BackendMeta, and the new one must not repeat an old epoch.
uint64_t next_epoch() {
  static std::atomic<uint64_t> last = 0;
  return last.fetch_add(1, std::memory_order_relaxed) + 1;
}

} // namespace

// Never destroyed, because tensors may be freed after static destructors have run.
WeightRegistry& weight_registry() {
  static WeightRegistry* instance = new WeightRegistry;
  return *instance;
}

WeightCasts::WeightCasts(const at::TensorImpl* weight) : mutex_(mutex_of(weight)), epoch_(next_epoch()) {
  const std::lock_guard<std::mutex> lock(weight_registry().mutex);
  weight_registry().weights.insert(this);
  ++weight_registry().size;
}

WeightCasts::~WeightCasts() {
  const std::lock_guard<std::mutex> lock(weight_registry().mutex);
  weight_registry().weights.erase(this);
  --weight_registry().size;
}

void WeightCasts::release_resources() {
  PersistentCasts gone;
  const std::lock_guard<std::mutex> lock(mutex_);
  gone.swap(casts_);
}

c10::intrusive_ptr<BackendMeta> WeightCasts::clone(const c10::intrusive_ptr<BackendMeta>& /*self*/) const {
  drop();
  return {};
}

void WeightCasts::drop() const {
  PersistentCasts gone;
  const std::lock_guard<std::mutex> lock(mutex_);
  gone.swap(casts_);
  begin_epoch();
}

void WeightCasts::begin_epoch() const {
  epoch_.store(next_epoch(), std::memory_order_relaxed);
}

LockedCasts lock_casts_of(const at::TensorBase& weight) {
  at::TensorImpl* const impl = weight.unsafeGetTensorImpl();
  std::unique_lock<std::mutex> lock(mutex_of(impl));
  BackendMeta* meta = impl->get_backend_meta();
  if (meta == nullptr || typeid(*meta) != typeid(WeightCasts)) {
    return {nullptr, {}};
  }
  return {static_cast<WeightCasts*>(meta), std::move(lock)};
}

WeightCasts* casts_of(const at::TensorBase& weight) {
  return lock_casts_of(weight).casts;
}

WeightCasts* make_casts_of(const at::TensorBase& weight) {
  if (WeightCasts* const casts = casts_of(weight)) {
    return casts;
  }
  at::TensorImpl* const impl = weight.unsafeGetTensorImpl();
  auto made = c10::make_intrusive<WeightCasts>(impl); // locks the registry, so not below
  {
    const std::lock_guard<std::mutex> lock(mutex_of(impl));
    if (impl->get_backend_meta() == nullptr) {
      impl->set_backend_meta(std::move(made));
    }
  }
  return casts_of(weight);
}

} // namespace torch_promote
