// file: CUDA graphs of the stand-in device: records kernels, and runs them at each replay
#include "state.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

namespace cuda_stand_in {

namespace {

using c10::IValue;

template <class Function>
void for_each_cuda_tensor(const IValue& value, const Function& function) {
  if (value.isTensor()) {
    if (const at::Tensor& tensor = value.toTensor(); tensor.defined() && tensor.is_cuda()) {
      function(tensor);
    }
  } else if (value.isList()) {
    for (const IValue& element : value.toListRef()) {
      for_each_cuda_tensor(element, function);
    }
  }
}

std::vector<at::Tensor> cuda_tensors(const std::vector<IValue>& values) {
  std::vector<at::Tensor> tensors;
  for (const IValue& value : values) {
    for_each_cuda_tensor(value, [&](const at::Tensor& tensor) { tensors.push_back(tensor); });
  }
  return tensors;
}

// The same memory without the autograd graph: a CUDA graph owns memory, and keeps no node alive.
// A view refers to its base, and so to the node of that; its own may be out of date, which grad_fn() reports.
at::Tensor without_node(const at::Tensor& tensor) {
  const bool has_node = tensor.defined() && (tensor.is_view() || tensor.grad_fn() != nullptr);
  return has_node ? at::Tensor(tensor.unsafeGetTensorImpl()->shallow_copy_and_detach(c10::VariableVersion(0), false))
                  : tensor;
}

IValue without_node(const IValue& value) {
  if (value.isTensor()) {
    return without_node(value.toTensor());
  }
  if (!value.isList()) {
    return value;
  }
  c10::impl::GenericList copy(value.toList().elementType());
  for (const IValue& element : value.toListRef()) {
    copy.push_back(without_node(element));
  }
  return copy;
}

std::vector<IValue> top(const Stack& stack, size_t count) {
  return {stack.end() - static_cast<int64_t>(count), stack.end()};
}

// The old content of the arguments that an op writes to.
class Written {
 public:
  Written(const c10::OperatorHandle& op, const std::vector<IValue>& arguments) {
    for (size_t i = 0; i < arguments.size(); ++i) {
      const c10::AliasInfo* alias = op.schema().arguments()[i].alias_info();
      if (alias != nullptr && alias->isWrite()) {
        for_each_cuda_tensor(arguments[i], [this](const at::Tensor& tensor) {
          const auto* bytes = static_cast<const char*>(tensor.storage().data());
          saved_.emplace_back(tensor, std::vector<char>(bytes, bytes + tensor.storage().nbytes()));
        });
      }
    }
  }
  void restore() const {
    for (const auto& [tensor, bytes] : saved_) {
      const size_t size = std::min(bytes.size(), tensor.storage().nbytes());
      std::copy_n(bytes.data(), size, static_cast<char*>(tensor.storage().mutable_data()));
    }
  }

 private:
  std::vector<std::pair<at::Tensor, std::vector<char>>> saved_;
};

// One recorded kernel. It owns the memory of its tensors, as a graph does.
struct Recorded {
  c10::OperatorHandle op;
  Kernel kernel;
  std::vector<IValue> arguments;
  std::vector<at::Tensor> results; // the results with their own memory

  // After the capture: results get their nodes after their kernels.
  void drop_nodes() {
    for (IValue& argument : arguments) {
      argument = without_node(argument);
    }
    for (at::Tensor& result : results) {
      result = without_node(result);
    }
  }

  void run() const {
    Stack stack = arguments;
    kernel(op, &stack);
    std::vector<at::Tensor> computed = own(arguments, stack);
    for (size_t i = 0; i < results.size(); ++i) {
      const c10::Storage& target = results[i].storage();
      std::memcpy(target.mutable_data(), computed[i].storage().data(), target.nbytes());
    }
  }

  static std::vector<at::Tensor> own(const std::vector<IValue>& arguments, const std::vector<IValue>& results) {
    const std::vector<at::Tensor> given = cuda_tensors(arguments);
    std::vector<at::Tensor> own;
    for (const at::Tensor& result : cuda_tensors(results)) {
      const bool shared = std::any_of(given.begin(), given.end(), [&result](const at::Tensor& argument) {
        return argument.storage().is_alias_of(result.storage());
      });
      if (!shared) {
        own.push_back(result);
      }
    }
    return own;
  }
};

struct Graph {
  std::vector<Recorded> kernels;
};

struct Graphs {
  std::mutex mutex;
  std::map<int64_t, std::unique_ptr<Graph>> all;
  std::map<StreamId, Graph*> recording;
  int64_t last = 0;

  // The caller holds the lock.
  void start(StreamId stream, Graph* graph) {
    recording[stream] = graph;
    set_capturing(stream, true);
  }
  void stop(const Graph* graph) {
    for (auto it = recording.begin(); it != recording.end();) {
      if (it->second == graph) {
        set_capturing(it->first, false);
        it = recording.erase(it);
      } else {
        ++it;
      }
    }
  }
  static void set_capturing(StreamId stream, bool on) {
    const std::lock_guard<std::mutex> lock(state().mutex);
    if (on) {
      state().capturing.insert(stream);
    } else {
      state().capturing.erase(stream);
    }
  }
};

Graphs& graphs() {
  static Graphs& it = *new Graphs;
  return it;
}

Graph* recording() {
  const c10::impl::VirtualGuardImpl guard(c10::kCUDA);
  const c10::Device device = guard.getDevice();
  const std::lock_guard<std::mutex> lock(graphs().mutex);
  const auto found = graphs().recording.find({device.index(), guard.getStream(device).id()});
  return found == graphs().recording.end() ? nullptr : found->second;
}

} // namespace

void join_capture(StreamId waited_for, StreamId waiting) {
  const std::lock_guard<std::mutex> lock(graphs().mutex);
  const auto found = graphs().recording.find(waited_for);
  if (found != graphs().recording.end() && graphs().recording.count(waiting) == 0) {
    graphs().start(waiting, found->second);
  }
}

void run_or_record(const c10::OperatorHandle& op, Stack* stack, Kernel kernel) {
  Graph* const graph = recording();
  if (graph == nullptr) {
    return kernel(op, stack);
  }
  TORCH_CHECK(
      op.schema().name() != "aten::_local_scalar_dense", "operation not permitted when stream is capturing (stand-in)");
  std::vector<IValue> arguments = top(*stack, op.schema().arguments().size());
  const Written written(op, arguments);
  kernel(op, stack); // for the shapes of the results; a capture computes nothing
  written.restore();
  std::vector<at::Tensor> results = Recorded::own(arguments, top(*stack, op.schema().returns().size()));
  for (const at::Tensor& result : results) {
    std::memset(result.storage().mutable_data(), 0xff, result.storage().nbytes()); // NaN, in floating-point dtypes
  }
  graph->kernels.push_back({op, kernel, std::move(arguments), std::move(results)});
}

} // namespace cuda_stand_in

extern "C" {

__attribute__((visibility("default"))) int64_t stand_in_graph_begin(int device, int64_t stream) {
  auto& graphs = cuda_stand_in::graphs();
  const std::lock_guard<std::mutex> lock(graphs.mutex);
  auto& graph = graphs.all[++graphs.last] = std::make_unique<cuda_stand_in::Graph>();
  graphs.start({device, stream}, graph.get());
  return graphs.last;
}

__attribute__((visibility("default"))) void stand_in_graph_end(int64_t id) {
  cuda_stand_in::Graph* graph = nullptr;
  {
    auto& graphs = cuda_stand_in::graphs();
    const std::lock_guard<std::mutex> lock(graphs.mutex);
    graph = graphs.all.at(id).get();
    graphs.stop(graph);
  }
  for (auto& recorded : graph->kernels) { // without the lock: freeing a node may run code
    recorded.drop_nodes();
  }
}

__attribute__((visibility("default"))) void stand_in_graph_replay(int64_t id) {
  const cuda_stand_in::Graph* graph = nullptr;
  {
    auto& graphs = cuda_stand_in::graphs();
    const std::lock_guard<std::mutex> lock(graphs.mutex);
    graph = graphs.all.at(id).get();
  }
  for (const auto& recorded : graph->kernels) {
    recorded.run();
  }
}

__attribute__((visibility("default"))) void stand_in_graph_free(int64_t id) {
  std::unique_ptr<cuda_stand_in::Graph> gone; // destroyed without the lock: freeing a tensor may run code
  auto& graphs = cuda_stand_in::graphs();
  const std::lock_guard<std::mutex> lock(graphs.mutex);
  if (const auto found = graphs.all.find(id); found != graphs.all.end()) {
    graphs.stop(found->second.get());
    gone = std::move(found->second);
    graphs.all.erase(found);
  }
}

} // extern "C"
