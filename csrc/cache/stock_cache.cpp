// file: notices when PyTorch's own autocast cache is cleared
#include <Python.h>

#include "cache/stock_cache.h"

#include "policy/fork_safe_mutex.h"
#include "policy/inside_kernel.h"
#include "policy/of_this_thread.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <pthread.h>

#include <chrono>
#include <cstddef>
#include <optional>
#include <thread>

namespace torch_promote {

namespace {

// Trivially destructible: PyTorch's cache may be destroyed after our static objects.
constinit std::atomic<size_t> holders = 0;
constinit std::atomic<size_t> sentinels = 0;
constinit std::atomic<void (*)()> when_cleared = nullptr;
// How often our regions' ends have cleared PyTorch's cache.
constinit std::atomic<uint64_t> silent_clears = 0;
// How many threads clear it, or plant a sentinel. Meanwhile a clearing may go unnoticed, also if there is a sentinel:
// the thread that has planted it holds the cast for a moment, and a clearing then does not destroy it.
constinit std::atomic<uint32_t> changing = 0;
constinit thread_local uint32_t tls_changing = 0;
// How many threads are about to fork.
constinit std::atomic<uint32_t> forking = 0;
// How often this process and its parents have forked while another thread was changing PyTorch's cache.
constinit std::atomic<uint32_t> forks = 0;
constexpr uint64_t kNeverEqual = ~uint64_t{0};
constinit thread_local bool tls_region_ends = false;

// NOTE [ Forks and PyTorch's cache ]
// PyTorch holds a lock while it clears its cache or casts, and no fork releases it: if another thread holds it, the
// child hangs as soon as it uses autocast. A fork therefore waits until no thread is in a scope of this class, and new
// scopes wait until it is over. It gives up after a while: in its scope a thread may wait for the GIL, which the thread
// that forks holds. Threads in regions of PyTorch's own are not waited for.
class Changing {
 public:
  Changing() {
    while (true) {
      ++changing; // before it looks: a fork looks in the other order
      if (forking.load() == 0 || tls_changing > 0) {
        break;
      }
      --changing;
      while (forking.load() > 0) {
        std::this_thread::yield();
      }
    }
    ++tls_changing;
  }
  Changing(const Changing&) = delete;
  Changing& operator=(const Changing&) = delete;
  ~Changing() {
    --tls_changing;
    --changing;
  }
};

// Whether a thread other than this one is in such a scope. This one may fork in a kernel that casts for it.
bool others_are_changing() {
  return changing.load() > tls_changing;
}

void before_fork() {
  ++forking;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(100);
  while (others_are_changing() && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::yield();
  }
}

void after_fork_in_parent() {
  --forking;
}

// Only the thread that forked goes on. Another one that held a sentinel would hold it for good.
void after_fork_in_child() {
  forking = 0;
  if (others_are_changing()) {
    changing = tls_changing;
    ++forks;
    sentinels = 0;
    ++stock_clears;
  }
}

[[maybe_unused]] const int handles_forks = [] {
  static const ForkSafeMutex first; // so its handlers are registered before, and lock the mutexes after the fork has waited
  return pthread_atfork(&before_fork, &after_fork_in_parent, &after_fork_in_child);
}();

class Sentinel final : public c10::BackendMeta {
 public:
  Sentinel() {
    ++sentinels;
  }
  ~Sentinel() override {
    if (made_after_ == forks.load()) {
      --sentinels;
    }
    if (!tls_region_ends) {
      ++stock_clears;
      when_cleared.load()();
    }
  }
  Sentinel(const Sentinel&) = delete;
  Sentinel& operator=(const Sentinel&) = delete;

 private:
  uint32_t made_after_ = forks.load();
};

// Stock holds its lock while it casts, which may need the GIL, so nobody may wait for the lock with the GIL.
class WithoutGil {
 public:
  WithoutGil() : held_(Py_IsInitialized() != 0 && PyGILState_Check() != 0 ? PyEval_SaveThread() : nullptr) {}
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;
  ~WithoutGil() noexcept(false) { // when Python ends, taking the GIL may end the thread, by unwinding its stack
    if (held_ != nullptr) {
      PyEval_RestoreThread(held_);
    }
  }

 private:
  PyThreadState* held_;
};

// Meets the conditions under which stock's `cached_cast` keeps a cast, and makes it one inside a region, as stock's own
// are: a region that the cast's kernel opens would otherwise be the outermost, and its end would wait for the lock that
// the cast holds.
class StockKeepsCasts {
 public:
  StockKeepsCasts() {
    at::autocast::increment_nesting();
    at::autocast::set_autocast_cache_enabled(true);
    at::autocast::set_autocast_dtype(c10::DeviceType::CPU, at::kBFloat16);
  }
  StockKeepsCasts(const StockKeepsCasts&) = delete;
  StockKeepsCasts& operator=(const StockKeepsCasts&) = delete;
  ~StockKeepsCasts() {
    at::autocast::decrement_nesting();
    at::autocast::set_autocast_cache_enabled(cache_enabled_);
    at::autocast::set_autocast_dtype(c10::DeviceType::CPU, dtype_);
  }

 private:
  bool cache_enabled_ = at::autocast::is_autocast_cache_enabled();
  at::ScalarType dtype_ = at::autocast::get_autocast_dtype(c10::DeviceType::CPU);
};

// An empty float32 leaf that requires a gradient. Each thread has its own: stock finds casts by their source, and two
// threads that plant at the same time must not write to one tensor.
struct Leaf {
  at::Tensor tensor = at::detail::empty_cpu({0}, at::TensorOptions(at::kFloat));

  Leaf() {
    tensor.unsafeGetTensorImpl()->set_requires_grad(true);
  }
};

// Has stock cache an empty cast, unseen by modes, the profiler and autograd, and gives that a sentinel.
void plant() {
  const WithoutGil without_gil;
  const c10::InferenceMode normal_mode(false);
  const c10::impl::ForceDispatchKeyGuard only_kernels(
      c10::DispatchKeySet(c10::DispatchKey::BackendSelect),
      c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset);
  std::optional<at::DisableRecordFunctionGuard> no_profiler; // without one, the guard takes half of the time
  if (at::hasCallbacks()) {
    no_profiler.emplace();
  }
  const StockKeepsCasts keeps;
  const at::Tensor cast = at::autocast::cached_cast(at::kBFloat16, of_this_thread<Leaf>().tensor, c10::DeviceType::CPU);
  c10::TensorImpl& impl = *cast.unsafeGetTensorImpl();
  if (cast.use_count() > 1 && impl.get_backend_meta() == nullptr) {
    impl.set_backend_meta(c10::make_intrusive<Sentinel>());
  }
}

} // namespace

void CastHolder::watch(void (*on_clear)()) {
  when_cleared = on_clear; // before the holders are counted: from then on, other threads plant sentinels too
  if (!holds_) {
    clears_ = stock_clears.load();
    silent_clears_ = silent_clears.load();
    holds_ = true;
    ++holders; // before the sentinels are counted: a region that ends in another thread counts in the other order
  }
  watching_ = sentinels.load() > 0;
  if (!watching_ && !inside_kernel()) {
    {
      const Changing now;
      plant();
    }
    watching_ = sentinels.load() > 0;
  }
  if (changing.load() > 0) { // after the sentinels are counted: one may still be held by who has planted it
    silent_clears_ = kNeverEqual;
  }
}

void CastHolder::end() {
  if (holds_) {
    holds_ = watching_ = false;
    --holders;
  }
}

bool CastHolder::may_have_missed_a_clear() const {
  return silent_clears_ != silent_clears.load();
}

void clear_stock_cache() {
  if (!std::exchange(tls_stock_may_have_cast, false) && holders.load() > 0) {
    return;
  }
  const WithoutGil without_gil;
  const Changing now;
  ++silent_clears;
  tls_region_ends = true;
  at::autocast::clear_cache();
  tls_region_ends = false;
  if (holders.load() > 0 && sentinels.load() == 0) {
    plant();
  }
}

void clear_stock_cache_for_all_threads() {
  const WithoutGil without_gil;
  const Changing now;
  tls_stock_may_have_cast = false;
  at::autocast::clear_cache();
}

} // namespace torch_promote
