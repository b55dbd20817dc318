// file: which of the tensors that are cast are weights, and how their casts may be reused
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

// Declared as Python.h declares it, which is not needed for more.
struct _typeobject;

namespace torch_promote {

// How a later use of a tensor may get the cast of an earlier one.
enum class Reuse : uint8_t {
  none, // it is no weight
  node, // a float32 leaf that requires a gradient: the data, and within a graph the autograd node, as in stock
  data, // the data alone: stock casts these anew at every use
};

struct Weight {
  Reuse reuse = Reuse::none;
  const at::TensorBase* owner = nullptr; // the weight: the tensor itself, or the one that it is a view of
  bool is_view = false;
};

// A weight is a leaf that requires a gradient, or a torch.nn.Parameter that does not.
Weight weight_of(const at::Tensor& tensor);

// Whether a use of the tensor now is recorded in a graph.
bool gets_node(const at::Tensor& tensor);

// Whether casts of the tensor may be told apart by its identity, and their data handed to later uses: it is plain, and
// nobody in this thread follows tensors by other means (tracers, functorch, fake and functional tensors).
bool may_share_data(const at::Tensor& tensor);

// Tells which Python type is torch.nn.Parameter, and which dispatch modes replay the ops that they have seen, cast by
// cast: those of selective checkpointing.
void set_parameter_type(_typeobject* type);
void set_replaying_modes(std::vector<_typeobject*> types);

} // namespace torch_promote
