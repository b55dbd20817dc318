// file: which tensors are weights, and what later uses of a weight may share of its cast
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

// Declared as Python.h declares it, so that no more of that header is needed here.
struct _typeobject;

namespace torch_promote {

struct Source;

// What a later use of a tensor shares with the first one.
enum class Reuse : uint8_t {
  shared_grad_fn, // the data, and within one graph the autograd node: what stock's cache does
  data_only,      // the data alone; each use has its own node, because stock casts at each use
};

// The weight that a cast belongs to.
struct Weight {
  Reuse reuse;
  const at::TensorBase* owner; // the source itself, or the weight that it is a view of
  bool is_view;
};

// Whether stock's cache keeps casts of the tensor: a float32 leaf that requires a gradient, is no view, and was not
// made in inference mode, outside of inference mode. The default cache mode keeps these and no others.
bool is_stock_weight(const Source& source);

// The weight that a tensor is, or is a view of, where the persistent and the activation cache reuse casts beyond stock:
// a weight is a leaf that requires a gradient, or a torch.nn.Parameter.
std::optional<Weight> weight_beyond_stock(const Source& source);

// Whether later uses may get the data of a cast that stock would make again. The tensor has to be plain, so that it can
// be recognized by its memory, and the thread must not run a tool that follows tensors through every op, such as a
// tracer, functorch or FakeTensorMode: it would miss the cast that is not made.
bool may_share_data(const Source& source);

// Sets the type object of torch.nn.Parameter, and those of the dispatch modes that count casts (selective
// checkpointing): such a mode replays ops by their order, so a cast that the cache saves would shift all later ones.
void set_parameter_type(_typeobject* type);
void set_replaying_modes(std::vector<_typeobject*> types);

} // namespace torch_promote
