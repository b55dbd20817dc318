// file: the cache of casts of trainable weights, one per thread
#include "cast_cache.h"

#include "region.h"

#include <ATen/CachedTensorUtils.h>
#include <ATen/SequenceNumber.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <optional>
#include <unordered_map>
#include <vector>

namespace torch_promote {

namespace {

using torch::autograd::Edge;
using torch::autograd::Node;

// NOTE [ What an entry holds ]
// A cast of a trainable weight is a tensor whose grad_fn leads to the weight's AccumulateGrad, and that owns the
// weight. A cache that holds this tensor therefore keeps every weight it has seen alive until the region ends, however
// weak its own reference to the weight is. So an entry owns the *data* of the cast only, as a detached alias, and
// refers weakly to the weight, to the cast itself and to its autograd node. A second use in the same graph gets the
// same node, which is what makes its gradients be summed in the same place, and to the same bits, as stock's. A node
// that nobody holds any more belongs to a graph that is gone; the next use that needs a gradient gets a new one over
// the same data.
//
// Only a plain tensor can be taken apart like this. Subclasses, wrappers of functorch, fake and functional tensors are
// held whole, as stock holds them, until the region ends or their source changes.

// torch::autograd::Node is held by shared_ptr up to PyTorch 2.12 and by intrusive_ptr since.
template <class Pointer>
struct WeakOf;
template <class T>
struct WeakOf<std::shared_ptr<T>> {
  using type = std::weak_ptr<T>;
};
template <class T>
struct WeakOf<c10::intrusive_ptr<T>> {
  using type = c10::weak_intrusive_ptr<T>;
};
using NodePtr = std::decay_t<decltype(std::declval<Edge>().function)>;
using WeakNode = WeakOf<NodePtr>::type;
using WeakTensor = c10::weak_intrusive_ptr<at::TensorImpl, c10::UndefinedTensorImpl>;
using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

constexpr c10::DispatchKeySet kNotPlain = c10::DispatchKeySet({
                                              c10::DispatchKey::Python,
                                              c10::DispatchKey::PythonTLSSnapshot,
                                              c10::DispatchKey::Functionalize,
                                              c10::DispatchKey::FuncTorchBatched,
                                              c10::DispatchKey::FuncTorchGradWrapper,
                                              c10::DispatchKey::BatchedNestedTensor,
                                              c10::DispatchKey::Batched,
                                              c10::DispatchKey::Conjugate,
                                              c10::DispatchKey::Negative,
                                              c10::DispatchKey::ZeroTensor,
                                          }) |
                                          c10::DispatchKeySet(c10::DispatchKey::NestedTensor) |
                                          c10::DispatchKeySet(c10::DispatchKey::AutogradNestedTensor);

bool is_plain(const at::TensorImpl& impl) {
  return impl.layout() == at::kStrided && impl.has_storage() && !impl.key_set().has_any(kNotPlain) &&
         !impl.has_symbolic_sizes_strides() && (impl.is_cpu() || impl.is_cuda());
}

// What tells whether a source is still what was cast. The storage is held weakly, so that its address cannot come to
// mean another one: `weight.data = other`, twice, may land on the same data pointer.
class Stamp {
 public:
  explicit Stamp(const at::TensorImpl& impl) : version_(impl.version_counter().current_version()) {
    if (is_plain(impl)) {
      storage_.emplace(impl.unsafe_storage().getWeakStorageImpl());
      data_ = impl.data();
    }
  }
  bool matches(const at::TensorImpl& impl) const {
    if (version_ != impl.version_counter().current_version() || storage_.has_value() != is_plain(impl)) {
      return false;
    }
    return !storage_.has_value() ||
           (storage_->_unsafe_get_target() == impl.unsafe_storage().unsafeGetStorageImpl() && data_ == impl.data());
  }

  bool same_storage(const at::TensorImpl& impl) const {
    return storage_.has_value() && impl.has_storage() &&
           storage_->_unsafe_get_target() == impl.unsafe_storage().unsafeGetStorageImpl();
  }

 private:
  uint32_t version_;
  std::optional<WeakStorage> storage_;
  const void* data_ = nullptr;
};

at::Tensor detached_alias(const at::Tensor& tensor) {
  // A Python mode would otherwise be shown a `detach` that no program made.
  const c10::impl::ExcludeDispatchKeyGuard no_modes(
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));
  at::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  return at::Tensor(impl->shallow_copy_and_detach(impl->version_counter(), /*allow_tensor_metadata_change=*/false));
}

// The node of a cast for a new graph over data that is there already. It does what the node of `to` does; a raw node
// has no forward-mode AD of its own, and a leaf that requires a gradient has no tangent to carry.
class CastBackward : public torch::autograd::Node {
 public:
  // With the sequence number of the first cast's node, as if that had lived on: the engine orders the sums by it.
  CastBackward(uint64_t sequence_nr, const at::Tensor& source)
      : Node(sequence_nr, {torch::autograd::impl::gradient_edge(source)}), dtype_(source.scalar_type()) {}

  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override {
    return {grads[0].defined() ? grads[0].to(dtype_) : at::Tensor()};
  }
  std::string name() const override {
    return "CastBackward";
  }
  // Compiled autograd traces `apply`; there is nothing saved to swap.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& /*args*/) const override {}
  torch::autograd::variable_list apply_with_saved(
      const torch::autograd::variable_list& grads, torch::dynamo::autograd::SwapSavedVariables& /*saved*/) override {
    return apply(torch::autograd::variable_list(grads));
  }

 private:
  at::ScalarType dtype_;
};

template <class Pointer>
Pointer make_node(uint64_t sequence_nr, const at::Tensor& source) {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<Node>>) {
    return std::make_shared<CastBackward>(sequence_nr, source);
  } else {
    return c10::make_intrusive<CastBackward>(sequence_nr, source);
  }
}

class Entry {
 public:
  Entry(const at::Tensor& source, Stamp stamp, const at::Tensor& cast)
      : source_(source.getIntrusivePtr()), stamp_(std::move(stamp)), plain_(is_plain(*source.unsafeGetTensorImpl())) {
    if (plain_) {
      held_ = detached_alias(cast);
      link(cast);
    } else {
      held_ = cast;
    }
    held_version_ = held_.is_inference() ? 0 : held_._version();
  }

  bool is_dead() const {
    return source_.expired();
  }
  bool is_cast_of(const at::TensorImpl& tensor) const {
    return source_._unsafe_get_target() == &tensor || stamp_.same_storage(tensor);
  }
  // An op that returned its argument, or a view of it, may have let somebody write into the cast: that ends it too.
  bool is_fresh(const at::TensorImpl& source) const {
    return stamp_.matches(source) && (held_.is_inference() || held_version_ == held_._version());
  }
  size_t bytes() const {
    return plain_ ? held_.nbytes() : 0;
  }
  // The cast as a use under the present grad mode needs it.
  at::Tensor use(const at::Tensor& source) {
    if (!plain_ || !at::GradMode::is_enabled()) {
      return held_;
    }
    if (cast_.has_value()) {
      if (auto cast = cast_->lock(); cast.defined()) {
        return at::Tensor(std::move(cast));
      }
    }
    at::Tensor cast = detached_alias(held_);
    NodePtr node = node_.has_value() ? node_->lock() : NodePtr();
    if (node == nullptr) {
      node = make_node<NodePtr>(sequence_nr_ ? *sequence_nr_ : at::sequence_number::get_and_increment(), source);
      node->add_input_metadata(cast);
    }
    torch::autograd::impl::set_gradient_edge(cast, Edge(std::move(node), 0));
    link(cast);
    return cast;
  }
  // At thread exit Python may be gone, and a subclass's tensor cannot be let go without it.
  void leak_unless_plain() {
    if (!plain_) {
      (void)held_.unsafeReleaseTensorImpl();
    }
  }

 private:
  void link(const at::Tensor& cast) {
    const NodePtr node = cast.grad_fn();
    if (node == nullptr) {
      return; // cast below autograd, in the kernel of a custom op: good as data, and for no graph
    }
    cast_.emplace(cast.getIntrusivePtr());
    sequence_nr_ = node->sequence_nr();
    node_.emplace(node);
  }

  WeakTensor source_;
  Stamp stamp_;
  bool plain_;
  at::Tensor held_; // plain: the data of the cast; otherwise the cast
  uint32_t held_version_ = 0;
  std::optional<WeakTensor> cast_;
  std::optional<WeakNode> node_;
  std::optional<uint64_t> sequence_nr_; // of the first cast's node
};

class Cache {
 public:
  Cache() = default;
  Cache(const Cache&) = delete;
  Cache& operator=(const Cache&) = delete;
  ~Cache() {
    for (Entry& entry : entries_) {
      entry.leak_unless_plain();
    }
  }

  std::optional<at::Tensor> find(const at::Tensor& source, c10::ScalarType dtype) {
    const auto found = index_.find({source.unsafeGetTensorImpl(), dtype});
    if (found == index_.end()) {
      return std::nullopt;
    }
    Entry& entry = entries_[found->second];
    if (!entry.is_fresh(*source.unsafeGetTensorImpl())) {
      ++info_.stale;
      erase(found->second);
      return std::nullopt;
    }
    ++info_.hits;
    return entry.use(source);
  }

  // `stamp` is the source's from before the cast.
  void insert(const at::Tensor& source, Stamp stamp, c10::ScalarType dtype, const at::Tensor& cast) {
    ++info_.misses;
    const Key key{source.unsafeGetTensorImpl(), dtype};
    const auto found = index_.find(key);
    if (found != index_.end()) { // made by code that ran inside this cast
      erase(found->second);
    }
    index_.emplace(key, entries_.size());
    entries_.emplace_back(source, std::move(stamp), cast);
    keys_.push_back(key);
    sweep();
  }

  void forget(const std::vector<at::Tensor>& tensors) {
    for (size_t at = entries_.size(); at-- > 0;) {
      const bool written = std::any_of(tensors.begin(), tensors.end(), [&](const at::Tensor& tensor) {
        return tensor.defined() && entries_[at].is_cast_of(*tensor.unsafeGetTensorImpl());
      });
      if (written) {
        ++info_.stale;
        erase(at);
      }
    }
  }

  void clear() {
    // Taken out first: what dies here may run Python, and come back.
    std::vector<Entry> entries;
    entries.swap(entries_);
    index_.clear();
    keys_.clear();
    next_to_sweep_ = 0;
  }

  CacheInfo info() const {
    CacheInfo result = info_;
    result.entries = entries_.size();
    for (const Entry& entry : entries_) {
      result.bytes += entry.bytes();
    }
    return result;
  }

 private:
  struct Key {
    const at::TensorImpl* source;
    c10::ScalarType dtype;
    bool operator==(const Key& other) const {
      return source == other.source && dtype == other.dtype;
    }
  };
  struct HashKey {
    size_t operator()(const Key& key) const {
      return std::hash<const void*>()(key.source) * 31 + static_cast<size_t>(key.dtype);
    }
  };

  void erase(size_t at) {
    // Swapped with the last, then taken off the end; kept alive until the maps agree again.
    const Entry gone = std::move(entries_[at]);
    index_.erase(keys_[at]);
    if (at + 1 != entries_.size()) {
      entries_[at] = std::move(entries_.back());
      keys_[at] = keys_.back();
      index_[keys_[at]] = at;
    }
    entries_.pop_back();
    keys_.pop_back();
  }

  // Looks at two entries at each insertion, round and round: dead ones never outnumber the living by much, and no
  // insertion pays for a walk over all of them.
  void sweep() {
    for (int looked = 0; looked < 2 && !entries_.empty(); ++looked) {
      if (next_to_sweep_ >= entries_.size()) {
        next_to_sweep_ = 0;
      }
      if (entries_[next_to_sweep_].is_dead()) {
        ++info_.dropped;
        erase(next_to_sweep_);
      } else {
        ++next_to_sweep_;
      }
    }
  }

  std::unordered_map<Key, size_t, HashKey> index_;
  std::vector<Entry> entries_;
  std::vector<Key> keys_; // of entries_, position by position
  size_t next_to_sweep_ = 0;
  CacheInfo info_;
};

Cache& cache() {
  static thread_local Cache instance;
  return instance;
}

// Stock's conditions for caching, and two of ours: this thread has a region, whose end will clear the cache (an
// autograd device thread has none); and jit.trace is not at work, which would take a cast that it did not see for a
// constant.
bool may_cache(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kFloat && tensor.requires_grad() && tensor.is_leaf() && !tensor.is_view() &&
         at::autocast::is_autocast_cache_enabled() && !tensor.is_inference() && !c10::InferenceMode::is_enabled() &&
         !at::caching::is_cached_tensor(tensor) && depth() != 0 &&
         !c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::Tracer);
}

} // namespace

at::Tensor cached_cast(const at::Tensor& tensor, c10::ScalarType dtype) {
  if (!may_cache(tensor)) {
    return tensor.to(dtype);
  }
  if (std::optional<at::Tensor> hit = cache().find(tensor, dtype)) {
    return *std::move(hit);
  }
  Stamp stamp(*tensor.unsafeGetTensorImpl());
  // With grad mode on, as stock, so that a use after no_grad is differentiable. The cast may run Python (a dispatch
  // mode, a subclass) which may itself cast, enter and leave regions: nothing of the cache is held across it.
  at::Tensor cast = [&] {
    const at::AutoGradMode grad(true);
    return tensor.to(dtype);
  }();
  const bool plain = is_plain(*tensor.unsafeGetTensorImpl());
  // Not kept: what a mode answered with a tensor of its own kind (a fake one, say); and a tensor held whole that was
  // cast below autograd, which would cut later uses off from their gradient.
  const bool good_for_others = plain == is_plain(*cast.unsafeGetTensorImpl()) && (plain || cast.requires_grad());
  if (good_for_others && depth() != 0) {
    cache().insert(tensor, std::move(stamp), dtype, cast);
  }
  return cast;
}

void forget_casts_of(const std::vector<at::Tensor>& tensors) {
  cache().forget(tensors);
}

CacheInfo cast_cache_info() {
  return cache().info();
}

void clear_cast_cache() {
  cache().clear();
}

} // namespace torch_promote
