// file: the dispatch observer: a boxed fallback above the Autocast keys that calls an object in Python around each op
#include "python/bindings.h"

#include "policy/dispatch_state.h"
#include "policy/process.h"

#include <ATen/ThreadLocalPythonObjects.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace py = pybind11;

// Declared here because their header, torch/csrc/jit/python/pybind_utils.h, takes longer to compile than the rest of
// the Python unit. If PyTorch changes a signature, importing the extension fails with a link error.
namespace torch::jit {
TORCH_PYTHON_API IValue toIValue(py::handle object, const c10::TypePtr& type, std::optional<int32_t> count);
TORCH_PYTHON_API py::object toPyObject(IValue value);
} // namespace torch::jit

namespace torch_promote {

namespace {

// The name of a thread's observer in ThreadLocalPythonObjects, which autograd copies to the threads that run a
// backward. (The Python equivalent, torch._C._stash_obj_in_tls, misses a reference in PyTorch 2.11.)
constexpr const char* kObserverName = "torch_promote.dispatch_observer";

// NOTE [ The observer's key ]
// The observer must see a call above the Autocast keys, where the arguments are still uncast, in forward and backward,
// and inside composite ops. Python's modes cannot do that: __torch_dispatch__ comes after autocast, and
// __torch_function__ does not see calls from C++. This is the only key above autocast without kernels in PyTorch, which
// reserves it for experiments with modes of this kind. It comes before functorch's keys, so under vmap the observer
// sees batched tensors first and then the tensors inside them.
constexpr c10::DispatchKey kObserverKey = c10::DispatchKey::TESTING_ONLY_GenericMode;
constexpr c10::DispatchKeySet kBelowObserver(c10::DispatchKeySet::FULL_AFTER, kObserverKey);

// Set while the observer ignores all ops: in the observer itself, in a run under stock, and inside ops whose calls it
// does not observe. The observer's key is excluded there as well, which is cheaper but not sufficient: functorch's
// layers call ops in the dispatch state in which they were entered, which includes the key.
thread_local bool tls_unseen = false;

struct Unseen {
  Scoped<bool> unseen{tls_unseen, true};
  c10::impl::ExcludeDispatchKeyGuard key{kObserverKey};
};

// Calls the observer, which does not see its own ops. Tensor subclasses and modes are disabled while it inspects
// tensors.
template <class Function>
auto call_observer(const Function& function) {
  return in_python([&function] {
    const Unseen unseen;
    const NoTorchFunction no_modes;
    return function();
  });
}

// toPyObject reads the data of a number that is wrapped in a tensor. In torch.func.grad, an in-place op gets such a
// number inside a functorch wrapper, which has no data.
c10::IValue without_wrapper(const at::Tensor& tensor) {
  tensor.unsafeGetTensorImpl()->set_wrapped_number(false);
  const py::object wrapper = torch::jit::toPyObject(tensor);
  tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
  // The class of wrappers is in a header of which PyTorch installs only a part.
  const py::object inner = py::module_::import("torch._C._functorch").attr("get_unwrapped")(wrapper);
  return torch::jit::toIValue(inner, c10::TensorType::get(), std::nullopt);
}

// Dtypes, layouts and memory formats are ints on the stack; only the schema distinguishes them from other ints.
py::object to_python(const c10::IValue& value, const c10::TypePtr& type) {
  if (value.isInt()) {
    const auto optional = type->cast<c10::OptionalType>();
    const c10::TypePtr inner = optional ? optional->getElementType() : type;
    switch (inner->kind()) {
      case c10::TypeKind::ScalarTypeType:
        return py::cast(value.toScalarType());
      case c10::TypeKind::LayoutType:
        return py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(torch::getTHPLayout(value.toLayout())));
      case c10::TypeKind::MemoryFormatType:
        return py::cast(value.toMemoryFormat());
      default:
        break;
    }
  }
  if (value.isTensor() && value.toTensor().defined() && value.toTensor().unsafeGetTensorImpl()->is_wrapped_number() &&
      value.toTensor().key_set().has(c10::DispatchKey::FuncTorchGradWrapper)) {
    return to_python(without_wrapper(value.toTensor()), type);
  }
  return torch::jit::toPyObject(value);
}

// NOTE [ Tensors without a Python object ]
// A tensor keeps the first Python object that it gets, and the class of that object. nn.Parameter, as_subclass and
// FakeTensor call detach or alias, and give the result a Python object of their class. If the observer had already
// given it one, that would fail. A Python object also changes the use count, by which autograd decides whether it may
// reuse a gradient's memory. So the observer gets a copy that shares the data. functorch's wrappers cannot be copied,
// and do not become subclasses.
bool is_new_to_python(const at::Tensor& tensor) {
  constexpr c10::DispatchKeySet kWrappers(
      {c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::Functionalize});
  return tensor.defined() && tensor.unsafeGetTensorImpl()->pyobj_slot()->load_pyobj() == nullptr &&
         !tensor.key_set().has_any(kWrappers);
}

at::Tensor to_show(const at::Tensor& tensor) {
  if (!is_new_to_python(tensor)) {
    return tensor;
  }
  const c10::impl::ExcludeDispatchKeyGuard without_modes(c10::DispatchKey::Python); // modes would see a detach
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  at::Tensor copy(impl->shallow_copy_and_detach(impl->version_counter(), /*allow_tensor_metadata_change=*/true));
  if (!tensor.requires_grad()) {
    return copy;
  }
  const auto* autograd = torch::autograd::impl::get_autograd_meta(tensor);
  const at::TensorBase& owner = autograd->is_view_ && tensor.is_view() ? tensor._base() : tensor;
  if (owner.is_leaf()) { // a weight, or a view of one
    copy.set_requires_grad(true);
  } else {
    torch::autograd::impl::set_gradient_edge(copy, {autograd->grad_fn_, autograd->output_nr_});
  }
  return copy;
}

c10::IValue to_show(const c10::IValue& value) {
  if (value.isTensor()) {
    return to_show(value.toTensor());
  }
  if (value.isTensorList()) {
    std::vector<at::Tensor> shown;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      shown.push_back(to_show(tensor));
    }
    return shown;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> shown;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
      shown.push_back(tensor ? std::optional<at::Tensor>(to_show(*tensor)) : std::nullopt);
    }
    return shown;
  }
  return value;
}

// Converts the values on the stack for a schema's arguments, or its returns. `as_they_are`: gives tensors without a
// Python object one, instead of passing copies.
py::list to_list(
    const torch::jit::Stack& stack, const std::vector<c10::Argument>& arguments, bool as_they_are = false) {
  py::list values;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const c10::IValue& value = stack[stack.size() - arguments.size() + i];
    values.append(to_python(as_they_are ? value : to_show(value), arguments[i].real_type()));
  }
  return values;
}

// A reference that takes the GIL to release its object. False if it holds nothing, or None.
struct Reference {
  py::object value;

  Reference() = default;
  Reference(const Reference&) = delete;
  Reference& operator=(const Reference&) = delete;
  ~Reference() {
    const py::gil_scoped_acquire gil;
    value = py::object();
  }
  explicit operator bool() const {
    return value && !value.is_none();
  }
};

py::object observer_of_this_thread() {
  using Objects = at::impl::ThreadLocalPythonObjects;
  if (!Objects::contains(kObserverName) || Objects::get(kObserverName) == nullptr) {
    return py::none();
  }
  return py::reinterpret_borrow<py::object>(Objects::get(kObserverName)->ptr(getPyInterpreter()));
}

// Makes the same call under PyTorch's own autocast instead of ours. The observer does not see it.
void run_under_stock(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack& stack) {
  const Unseen unseen;
  const c10::impl::ExcludeDispatchKeyGuard without_ours(kAutocastKey);
  // An op that returns several arguments reads them after they have left the stack, where PyTorch's callers hold them.
  const torch::jit::Stack arguments = stack;
  op.redispatchBoxed((keys & kBelowObserver).remove(kAutocastKey), &stack);
}

void run(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack, bool see_through) {
  std::optional<Unseen> unseen;
  if (!see_through) {
    unseen.emplace();
  }
  op.redispatchBoxed(keys & kBelowObserver, stack);
}

void observe(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  if (tls_unseen) {
    op.redispatchBoxed(keys & kBelowObserver, stack);
    return;
  }
  const c10::FunctionSchema& schema = op.schema();
  Reference observer;
  Reference token;
  bool stock_too = false;
  bool see_through = false;
  call_observer([&] {
    observer.value = observer_of_this_thread();
    if (observer) {
      token.value =
          observer.value.attr("begin")(torch::detail::getTorchApiFunction(op), to_list(*stack, schema.arguments()));
      if (token) {
        stock_too = token.value.attr("stock_too").cast<bool>();
        see_through = token.value.attr("see_through").cast<bool>();
      }
    }
  });
  if (!token) {
    run(op, keys, stack, !observer);
    return;
  }
  try {
    if (stock_too) {
      // The observer replaces the arguments that the op writes to with copies, so that the originals are written once.
      torch::jit::Stack again;
      call_observer([&] {
        const py::list values = observer.value.attr("before_stock")(token.value);
        for (size_t i = 0; i < values.size(); ++i) {
          const c10::IValue& original = (*stack)[stack->size() - values.size() + i];
          again.push_back(
              values[i].is_none() ? original
                                  : torch::jit::toIValue(values[i], schema.arguments()[i].real_type(), std::nullopt));
        }
      });
      std::string error;
      try {
        run_under_stock(op, keys, again);
      } catch (const std::exception& raised) {
        error = *raised.what() != '\0' ? raised.what() : "error";
        const py::gil_scoped_acquire gil;
        PyErr_Clear(); // the error of a mode or a kernel in Python
      }
      call_observer([&] {
        if (error.empty()) {
          observer.value.attr("after_stock")(token.value, to_list(again, schema.returns()), py::none());
        } else {
          observer.value.attr("after_stock")(token.value, py::list(), py::str(error));
        }
      });
    }
    run(op, keys, stack, see_through);
    call_observer([&] {
      // An observer that registers hooks on results needs the real ones; copies have no autograd node.
      const bool as_they_are = py::getattr(token.value, "real_results", py::bool_(false)).cast<bool>();
      observer.value.attr("end")(token.value, to_list(*stack, schema.returns(), as_they_are));
    });
  } catch (...) {
    const py::gil_scoped_acquire gil;
    const py::error_scope in_flight; // Python code must not start while an error is set
    call_observer([&] { observer.value.attr("failed")(token.value); });
    throw;
  }
}

// Sets this thread's observer and returns the previous one; None stands for no observer.
py::object swap_observer(py::object observer) {
  py::object before = observer_of_this_thread();
  // Store nothing for None: when a thread ends, its objects may be released after Python has shut down.
  std::shared_ptr<c10::SafePyObject> holder;
  if (!observer.is_none()) {
    holder = std::make_shared<c10::SafePyObject>(observer.release().ptr(), getPyInterpreter());
  }
  at::impl::ThreadLocalPythonObjects::set(kObserverName, std::move(holder));
  return before;
}

// Registers the observer's kernel, which adds cost only in threads that include the key. Raises if another library has
// registered a fallback on the key.
void register_dispatch_observer() {
  static std::once_flag once;
  std::call_once(once, [] {
    auto* library = new torch::Library(torch::Library::IMPL, "_", kObserverKey, __FILE__, __LINE__);
    library->fallback(torch::CppFunction::makeFromBoxedFunction<&observe>());
  });
}

} // namespace

void add_observer(py::module_& m) {
  m.def("swap_observer", &swap_observer);
  m.def("register_dispatch_observer", &register_dispatch_observer);
  m.attr("DISPATCH_OBSERVER_KEY") = c10::toString(kObserverKey);
}

} // namespace torch_promote
