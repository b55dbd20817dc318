// file: the kernels of the stand-in device: the CPU's, on CPU tensors over the same memory
#include "state.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/library.h>

#include <optional>
#include <unordered_map>
#include <vector>

namespace cuda_stand_in {

namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

constexpr c10::DispatchKeySet lazy_bits({c10::DispatchKey::Conjugate, c10::DispatchKey::Negative});

c10::DeviceIndex index_of(std::optional<c10::Device> device) {
  const c10::impl::VirtualGuardImpl guard(c10::kCUDA);
  return device && device->has_index() ? device->index() : guard.getDevice().index();
}

void copy_geometry(const Tensor& from, const Tensor& to) {
  to.unsafeGetTensorImpl()->set_sizes_and_strides(from.sizes(), from.strides(), from.storage_offset());
}

// One call of an op, carried out by the CPU's kernel.
class Call {
 public:
  explicit Call(const c10::OperatorHandle& op) : op_(op) {}

  void run(Stack* stack) {
    const size_t arguments = op_.schema().arguments().size();
    for (auto it = stack->end() - static_cast<int64_t>(arguments); it != stack->end(); ++it) {
      *it = on_cpu(*it);
    }
    {
      // The kernel may call other ops. A CUDA kernel's would see CUDA's autocast state, and these are of the CPU.
      const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
    }
    for (const Pair& pair : pairs_) {
      write_back(pair);
    }
    const size_t results = op_.schema().returns().size();
    for (auto it = stack->end() - static_cast<int64_t>(results); it != stack->end(); ++it) {
      *it = on_cuda(*it);
    }
    if (!only_views()) {
      const auto& name = op_.operator_name();
      const std::lock_guard<std::mutex> lock(state().mutex);
      state().kernels[name.overload_name.empty() ? name.name : name.name + "." + name.overload_name] += 1;
    }
  }

 private:
  struct Pair {
    Tensor cuda;
    Tensor cpu;
    c10::Storage storage; // the CPU tensor's, before the op ran
    const void* data;
    size_t bytes;
  };

  // --- arguments

  IValue on_cpu(const IValue& value) {
    if (value.isTensor()) {
      return on_cpu(value.toTensor());
    }
    if (value.isDevice() && value.toDevice().is_cuda()) {
      found(value.toDevice());
      return c10::Device(c10::kCPU);
    }
    if (value.isList()) {
      auto list = value.toList().copy();
      for (const auto i : c10::irange(list.size())) {
        if (const IValue element = list.get(i); element.isTensor()) {
          list.set(i, on_cpu(element.toTensor()));
        }
      }
      return list;
    }
    return value;
  }

  Tensor on_cpu(const Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cuda()) {
      return tensor;
    }
    found(tensor.device());
    for (const Pair& pair : pairs_) {
      if (pair.cuda.is_same(tensor)) {
        return pair.cpu;
      }
    }
    const Tensor cpu = at::detail::make_tensor<c10::TensorImpl>(
        storage_on_cpu(tensor.storage()), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
    copy_geometry(tensor, cpu);
    if (tensor.is_conj()) {
      cpu._set_conj(true);
    }
    if (tensor.is_neg()) {
      cpu._set_neg(true);
    }
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
      cpu.unsafeGetTensorImpl()->set_wrapped_number(true);
    }
    pairs_.push_back({tensor, cpu, cpu.storage(), cpu.storage().data(), cpu.storage().nbytes()});
    return cpu;
  }

  c10::Storage storage_on_cpu(const c10::Storage& cuda) {
    for (const Pair& pair : pairs_) {
      if (pair.cuda.storage().is_alias_of(cuda)) {
        return pair.storage;
      }
    }
    // It keeps the original's memory for as long as an op keeps it.
    auto owner = std::make_unique<c10::Storage>(cuda);
    void* data = cuda.mutable_data();
    c10::DataPtr host(
        data, owner.release(), [](void* context) { delete static_cast<c10::Storage*>(context); }, c10::kCPU);
    return {
        c10::Storage::use_byte_size_t(), cuda.nbytes(), std::move(host), c10::GetAllocator(c10::kCPU),
        /*resizable=*/true};
  }

  void found(c10::Device device) {
    device = {c10::kCUDA, index_of(device)};
    TORCH_CHECK(
        !device_ || *device_ == device || op_.schema().name() == "aten::copy_",
        "Expected all tensors to be on the same device, but found at least two devices, ", *device_, " and ", device,
        "! (", op_.schema().name(), " on the stand-in)");
    device_ = device_ ? device_ : device;
  }

  // --- results

  // What the op resized, or moved to another storage.
  void write_back(const Pair& pair) {
    const c10::Storage& now = pair.cpu.storage();
    const c10::Storage& original = pair.cuda.storage();
    if (!now.is_alias_of(pair.storage)) {
      const Pair* other = pair_of(now);
      pair.cuda.unsafeGetTensorImpl()->set_storage_keep_dtype(other ? other->cuda.storage() : adopt_once(now));
    } else if (
        (now.data() != pair.data || now.nbytes() != pair.bytes) &&
        (now.data() != original.data() || now.nbytes() != original.nbytes())) {
      replace_memory(original, now);
    }
    if (pair.cpu.sizes() != pair.cuda.sizes() || pair.cpu.strides() != pair.cuda.strides() ||
        pair.cpu.storage_offset() != pair.cuda.storage_offset()) {
      copy_geometry(pair.cpu, pair.cuda);
    }
  }

  IValue on_cuda(const IValue& value) {
    if (value.isTensor()) {
      return on_cuda(value.toTensor());
    }
    if (value.isList()) {
      auto list = value.toList();
      for (const auto i : c10::irange(list.size())) {
        if (const IValue element = list.get(i); element.isTensor()) {
          list.set(i, on_cuda(element.toTensor()));
        }
      }
    }
    return value;
  }

  Tensor on_cuda(const Tensor& result) {
    if (!result.defined()) {
      return result;
    }
    for (const Pair& pair : pairs_) {
      if (pair.cpu.is_same(result)) {
        return pair.cuda;
      }
    }
    TORCH_CHECK_NOT_IMPLEMENTED(
        result.layout() == c10::kStrided && !result.is_quantized() && result.has_storage(),
        "the stand-in has dense tensors only, and ", op_.schema().name(), " returns another kind");
    const c10::DispatchKeySet bits = result.key_set() & lazy_bits;
    Tensor tensor;
    if (const Pair* source = pair_of(result.storage())) {
      // With the argument's keys: in inference mode, a view of a normal tensor is a normal tensor.
      tensor = at::detail::make_tensor<c10::TensorImpl>(
          c10::TensorImpl::VIEW, c10::Storage(source->cuda.storage()), (source->cuda.key_set() - lazy_bits) | bits,
          result.dtype());
    } else {
      tensor = at::detail::make_tensor<c10::TensorImpl>(
          adopt_once(result.storage()), c10::DispatchKeySet(c10::DispatchKey::CUDA) | bits, result.dtype());
    }
    copy_geometry(result, tensor);
    return tensor;
  }

  const Pair* pair_of(const c10::Storage& cpu) const {
    for (const Pair& pair : pairs_) {
      if (pair.storage.is_alias_of(cpu)) {
        return &pair;
      }
    }
    return nullptr;
  }

  c10::Storage adopt_once(const c10::Storage& cpu) {
    for (const auto& [from, to] : adopted_) {
      if (from.is_alias_of(cpu)) {
        return to;
      }
    }
    adopted_.emplace_back(cpu, adopt(cpu, index_of(device_)));
    return adopted_.back().second;
  }

  bool only_views() const {
    const auto& returns = op_.schema().returns();
    return !returns.empty() && std::all_of(returns.begin(), returns.end(), [](const c10::Argument& result) {
      return result.alias_info() != nullptr && !result.alias_info()->isWrite();
    });
  }

  const c10::OperatorHandle& op_;
  std::vector<Pair> pairs_;
  std::vector<std::pair<c10::Storage, c10::Storage>> adopted_;
  std::optional<c10::Device> device_;
};

} // namespace

void run_on_cpu(const c10::OperatorHandle& op, Stack* stack) {
  Call(op).run(stack);
}

namespace {

// --- kernels that make tensors, or change their storage

Tensor empty(
    at::IntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device> device,
    std::optional<bool>,
    std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard({c10::kCUDA, index_of(device)});
  return Tensor(
      at::detail::empty_generic(
          size, allocator(), c10::DispatchKeySet(c10::DispatchKey::CUDA),
          dtype.value_or(c10::typeMetaToScalarType(c10::get_default_dtype())), format));
}

Tensor empty_strided(
    at::IntArrayRef size,
    at::IntArrayRef stride,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device> device,
    std::optional<bool>) {
  const c10::DeviceGuard guard({c10::kCUDA, index_of(device)});
  return Tensor(
      at::detail::empty_strided_generic(
          size, stride, allocator(), c10::DispatchKeySet(c10::DispatchKey::CUDA),
          dtype.value_or(c10::typeMetaToScalarType(c10::get_default_dtype()))));
}

// A tensor of zeros without memory, which forward-mode AD uses.
Tensor efficient_zeros(
    at::IntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device> device,
    std::optional<bool>) {
  const auto type = c10::scalarTypeToTypeMeta(dtype.value_or(c10::get_default_dtype_as_scalartype()));
  const c10::DispatchKeySet keys({c10::DispatchKey::CUDA, c10::DispatchKey::ZeroTensor});
  c10::DataPtr nothing(nullptr, {c10::kCUDA, index_of(device)});
  Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(c10::Storage::use_byte_size_t(), 0, std::move(nothing), nullptr, /*resizable=*/false), keys, type);
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return tensor;
}

// What the tensor needs of its storage.
void grow_for(const Tensor& self) {
  grow(
      self.storage(), self.numel() == 0 ? 0
                                        : at::detail::computeStorageNbytes(
                                              self.sizes(), self.strides(), self.itemsize(), self.storage_offset()));
}

const Tensor& resize(const Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  if (self.sizes() != size) {
    self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
    grow_for(self);
  }
  if (format) {
    self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
    grow_for(self);
  }
  return self;
}

Tensor& set_view(Tensor& self, c10::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  TORCH_CHECK(
      source.device() == self.device(), "set_: expected a storage on ", self.device(), ", and got one on ",
      source.device());
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  if (stride.empty() && !size.empty()) {
    self.unsafeGetTensorImpl()->set_storage_offset(offset);
    self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  } else {
    self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  }
  grow_for(self);
  return self;
}

Tensor& set_storage(Tensor& self, c10::Storage source) {
  const auto size = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_view(self, std::move(source), 0, {size}, {});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return self.is_same(source)
             ? self
             : set_view(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor& set_nothing(Tensor& self) {
  const c10::DeviceGuard guard(self.device());
  return set_view(
      self, {c10::Storage::use_byte_size_t(), 0, allocator()->allocate(0), allocator(), /*resizable=*/true}, 0, {0},
      {});
}

void record_stream(Tensor& self, c10::Stream stream) {
  c10::impl::VirtualGuardImpl(c10::kCUDA).recordDataPtrOnStream(self.storage().data_ptr(), stream);
}

} // namespace

TORCH_LIBRARY_IMPL(_, CUDA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_efficientzerotensor", efficient_zeros);
  m.impl("resize_", resize);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_view);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_nothing);
  m.impl("record_stream", record_stream);
  // Its kernel for all devices would look for one of CUDA.
  m.impl("copy_", torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
  // A kernel for all devices would come before the fallback. CUDA has a kernel of its own where the CPU has one.
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findOp(name);
    if (name.getNamespace() == "aten" && op->hasKernelForDispatchKey(c10::DispatchKey::CPU) &&
        !op->hasKernelForDispatchKey(c10::DispatchKey::CUDA) &&
        (op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) ||
         op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional) ||
         op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd))) {
      m.impl(
          (name.name + (name.overload_name.empty() ? "" : "." + name.overload_name)).c_str(),
          torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
    }
  }
}

} // namespace cuda_stand_in
