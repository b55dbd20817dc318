// file: a cast that a cache keeps: whether it is still valid, and the tensor that each use gets
#include "cache/kept_cast.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/Event.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <utility>

namespace torch_promote {

c10::Stream current_stream(const at::TensorImpl& impl) {
  return c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getStream(impl.device());
}

// --- Is it still valid?

SourceSignature::SourceSignature(const Source& source)
    : version_(source.impl.version_counter().current_version()), dtype_(source.tensor.scalar_type()) {
  if (source.plain) {
    const at::TensorImpl& impl = source.impl;
    storage_.emplace(impl.unsafe_storage().getWeakStorageImpl());
    data_ = impl.unsafe_storage().data();
    offset_ = impl.storage_offset();
    const at::IntArrayRef sizes = impl.sizes();
    const at::IntArrayRef strides = impl.strides();
    geometry_.resize_for_overwrite(2 * sizes.size());
    for (size_t dim = 0; dim < sizes.size(); ++dim) {
      geometry_[2 * dim] = sizes[dim];
      geometry_[2 * dim + 1] = strides[dim];
    }
  }
}

bool SourceSignature::matches(const Source& source) const {
  const at::TensorImpl& impl = source.impl;
  if (version_ != impl.version_counter().current_version() || dtype_ != source.tensor.scalar_type() ||
      storage_.has_value() != source.plain) {
    return false;
  }
  if (!storage_.has_value()) {
    return true;
  }
  const at::IntArrayRef sizes = impl.sizes();
  const at::IntArrayRef strides = impl.strides();
  if (storage() != impl.unsafe_storage().unsafeGetStorageImpl() || data_ != impl.unsafe_storage().data() ||
      offset_ != impl.storage_offset() || geometry_.size() != 2 * sizes.size()) {
    return false;
  }
  for (size_t dim = 0; dim < sizes.size(); ++dim) { // shorter than two calls of memcmp
    if (geometry_[2 * dim] != sizes[dim] || geometry_[2 * dim + 1] != strides[dim]) {
      return false;
    }
  }
  return true;
}

bool KeptCast::is_fresh(const CastRequest& now) const {
  // An op that returned its argument, or a view of it, may have let its caller write into the cast; the cast's version
  // tells.
  return signature_.matches(now.source) && (!plain_ || version_ == counter_.current_version()) &&
         aliases_ == now.aliases && capture_ == now.capture &&
         !std::atomic_ref<bool>(written_to_).load(std::memory_order_relaxed);
}

// --- A new cast

KeptCast::KeptCast(const CastRequest& wanted)
    : address_(&wanted.source.impl),
      signature_(wanted.source),
      kind_(wanted.kind),
      aliases_(wanted.aliases),
      capture_(wanted.capture),
      dtype_(wanted.dtype) {
  if (kind_ != Kind::frozen) {
    owner_.emplace(wanted.source.tensor.getIntrusivePtr());
  }
}

namespace {

// A new tensor over the same data and version, detached from every graph.
at::Tensor detached_alias(const at::Tensor& tensor) {
  // Otherwise a Python mode would see a `detach` that the program did not call.
  const c10::impl::ExcludeDispatchKeyGuard no_modes(
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));
  at::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  return at::Tensor(impl->shallow_copy_and_detach(impl->version_counter(), /*allow_tensor_metadata_change=*/false));
}

} // namespace

void KeptCast::fill(const Source& source, const at::Tensor& cast) {
  const at::TensorImpl& impl = *cast.unsafeGetTensorImpl();
  plain_ = is_plain(impl);
  if (!plain_) {
    memory_.held = cast;
    return;
  }
  memory_.storage = impl.unsafe_storage();
  storage_.emplace(memory_.storage.getWeakStorageImpl());
  bytes_ = memory_.storage.nbytes();
  counter_ = impl.version_counter();
  version_ = counter_.current_version();
  shaped_as_source_ = impl.strides() == source.impl.strides();
  offset_ = impl.storage_offset();
  if (impl.is_cuda()) {
    streams_.push_back(current_stream(impl).id());
  }
  if (!cast.requires_grad()) {
    memory_.held = cast; // the tensor itself, so that tools which know tensors by identity recognize it
  } else if (!shaped_as_source_) {
    memory_.held = detached_alias(cast);
  }
  if (memory_.held.defined()) {
    held_.emplace(memory_.held.getIntrusivePtr());
  }
  if (kind_ != Kind::trainable) {
    return;
  }
  if (const NodePtr* node = node_of(cast)) {
    cast_.emplace(cast.getIntrusivePtr());
    node_.emplace(*node);
    sequence_nr_ = (*node)->sequence_nr();
  } else if (!at::GradMode::is_enabled()) {
    // Stock makes the node here, for uses after no_grad. The node that ours makes later gets the same number.
    sequence_nr_ = next_sequence_nr();
  }
}

// --- What each use gets

at::Tensor KeptCast::use(const Source& source) {
  if (!plain_) {
    return memory_.held;
  }
  if (!streams_.empty()) {
    wait_until_made(source.impl);
  }
  // `wants_grad`, not `needs_node`: inside functorch's transforms autograd is excluded in this layer and active in one
  // below, where the leaf's cast has its node, as under stock.
  if (kind_ == Kind::trainable && source.wants_grad) {
    auto cast = cast_.has_value() ? cast_->lock() : c10::intrusive_ptr<at::TensorImpl, c10::UndefinedTensorImpl>();
    return cast.defined() ? at::Tensor(std::move(cast)) : use_in_graph(source);
  }
  if (kind_ == Kind::trainable || !source.needs_node) {
    return held(source.impl);
  }
  at::Tensor cast = alias(source.impl);
  if (cast.defined()) {
    attach_node(cast, source.tensor, next_sequence_nr());
  }
  return cast;
}

// No use of the cast is alive: a new one, with the same node if that is alive, else with a new node.
at::Tensor KeptCast::use_in_graph(const Source& source) {
  at::Tensor cast = alias(source.impl);
  if (!cast.defined()) {
    return cast;
  }
  std::optional<WeakTensor> weak_cast(cast.getIntrusivePtr());
  if (NodePtr node = node_.has_value() ? node_->lock() : NodePtr(); node != nullptr) {
    attach_node(cast, std::move(node));
    const Lock lock(casts_mutex());
    cast_.swap(weak_cast);
    return cast;
  }
  // The first node's number, as if that node were still alive: the engine sums in the order of the numbers.
  attach_node(cast, source.tensor, sequence_nr_ ? *sequence_nr_ : next_sequence_nr());
  const NodePtr& node = *node_of(cast);
  std::optional<WeakNode> weak_node(node);
  const Lock lock(casts_mutex());
  cast_.swap(weak_cast);
  node_.swap(weak_node);
  sequence_nr_ = node->sequence_nr();
  return cast;
}

at::Tensor KeptCast::held(const at::TensorImpl& source) {
  if (!plain_) {
    return memory_.held;
  }
  if (held_.has_value()) {
    if (auto held = held_->lock(); held.defined()) {
      return at::Tensor(std::move(held));
    }
  }
  const c10::InferenceMode normal_mode(false); // uses outside of inference mode get this tensor too
  at::Tensor held = alias(source);
  if (held.defined()) {
    const Lock lock(casts_mutex());
    held_.emplace(held.getIntrusivePtr());
    if (memory_.storage) {
      memory_.held = held; // no Python object belongs to it yet
    }
  }
  return held;
}

// A new tensor over the data, which may be given a node. Undefined if the memory was freed.
at::Tensor KeptCast::alias(const at::TensorImpl& source) const {
  if (!shaped_as_source_) {
    const at::Tensor held(held_->lock());
    return held.defined() ? detached_alias(held) : held;
  }
  c10::Storage storage(storage_->lock());
  if (!storage) {
    return {};
  }
  const c10::DispatchKey key = source.is_cuda() ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU;
  at::Tensor result = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(key), c10::scalarTypeToTypeMeta(dtype_));
  at::TensorImpl& impl = *result.unsafeGetTensorImpl();
  impl.set_storage_offset(offset_);
  impl.set_sizes_and_strides(source.sizes(), source.strides());
  impl.set_version_counter(counter_);
  return result;
}

// Another stream may run before the one that makes the cast is done. Stock's cache ignores that; ours lets the stream
// wait, and keeps the memory from being reused before it is done. An event at the first use on another stream, not when
// the cast is made, so that programs with one stream pay for none.
void KeptCast::wait_until_made(const at::TensorImpl& source) {
  const c10::Stream stream = current_stream(source);
  if (std::find(streams_.begin(), streams_.end(), stream.id()) != streams_.end()) {
    return;
  }
  const c10::Storage storage(storage_->lock());
  if (!storage) {
    return;
  }
  c10::Event made(c10::DeviceType::CUDA);
  made.record(c10::Stream(c10::Stream::UNSAFE, source.device(), streams_.front()));
  made.block(stream);
  c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).recordDataPtrOnStream(storage.data_ptr(), stream);
  const Lock lock(casts_mutex());
  streams_.push_back(stream.id());
}

// --- Its memory

bool CastMemory::frees_without_python() const {
  const auto has_object = [](const auto& impl) { return impl.pyobj_slot()->load_pyobj() != nullptr; };
  return !(storage && has_object(*storage.unsafeGetStorageImpl())) &&
         !(held.defined() && has_object(*held.unsafeGetTensorImpl()));
}

bool KeptCast::let_go() {
  if (!shaped_as_source_) {
    return false;
  }
  CastMemory gone;
  const Lock lock(casts_mutex());
  std::swap(gone, memory_);
  bytes_ = 0;
  return true;
}

CastMemory KeptCast::take_memory() {
  return frees_without_python() ? std::exchange(memory_, CastMemory()) : CastMemory();
}

bool KeptCast::hold() {
  memory_.storage = c10::Storage(storage_->lock());
  if (held_.has_value()) {
    memory_.held = at::Tensor(held_->lock());
  }
  return memory_.storage && (shaped_as_source_ || memory_.held.defined());
}

void KeptCast::leak_unless_plain() {
  if (!plain_) {
    (void)memory_.held.unsafeReleaseTensorImpl();
  }
}

} // namespace torch_promote
