// file: START HERE: what the cast cache does, and its one entry point for ops
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

// Declared as Python.h declares it, so that no more of that header is needed here.
struct _typeobject;

namespace torch_promote {

// NOTE [ The life of a cast ]
//
//   an op needs a tensor in another dtype
//        |  cached_cast
//        v                   no kind (see kind_of), or the region's cache flag is off
//     [ asked ] ----------------------------------------------------> cast, not kept
//        |  one is kept, and fresh             ^ not fresh: dropped, and made again
//        +------------------------> [ kept ] --+
//        |                            ^  ^
//        |  made: KeptCast, then cast |  | persistent mode: the data comes from [ on the weight ]
//        +----------------------------+  | instead, and goes there if it was made
//                                        |
//     [ kept ] -- the region ends ----> freed        [ on the weight ] -- the weight changes or dies --> freed
//
// What makes a cast stale? Its source has another version, dtype, memory or geometry; the cast itself was written to;
// another CUDA graph is captured; a write without a version was reported (KeptCast::is_fresh). Persistent casts and
// those of frozen weights also end when a tensor is made that could change the weight unseen (alias_epoch).
//
// Who frees it? The thread that made it, at the end of its outermost autocast region (end_casts_of_thread), when its
// source has died (CastSet::sweep), or when it is found to be stale. Whoever clears PyTorch's cache frees the memory of
// all threads' casts (end_casts_of_all_threads). A persistent cast is freed with its weight, or by clear_casts.
//
// Which lock protects it? casts_mutex, see NOTE [ Casts and other threads ]: the owner reads without it. Persistent
// casts have the mutex of their registry.
//
//   file              what it has
//   cached_cast       which casts are kept, and the path of a use
//   kept_cast         one cast: is it valid, and what does a use get? NOTE [ What a kept cast holds ]
//   thread_casts      the casts of each thread, and when they end; writes that change no version
//   persistent_casts  casts that hang on the weight and outlive regions: NOTE [ Persistent casts ]
//   capture           which CUDA graph is captured: NOTE [ Casts and CUDA graphs ]
//   check             compares reused casts with fresh ones, for torch_promote.check_casts

// `tensor.to(dtype)`, or an earlier cast if this thread's cache mode allows it. The caller has checked that the tensor
// is eligible and has another dtype.
at::Tensor cached_cast(const at::Tensor& tensor, c10::ScalarType dtype);

// What `make` returns, a weight in float8 and its scale in one tensor of bytes, or what it returned earlier: kept as a
// persistent cast is. No value: this weight's are not kept. `format`, which is not 0, tells different results apart.
std::optional<at::Tensor> kept_float8(
    const at::Tensor& weight, uint8_t format, const std::function<at::Tensor()>& make);

enum class CacheMode : uint8_t; // in thread_casts.h

// Whether a mode would keep a cast of the tensor for later uses in the region, or with `persistent` beyond it.
bool would_keep(const at::Tensor& tensor, CacheMode mode);

// Whether the thread casts for an op that may return a view of its argument. The op's caller may write into that view,
// so the caches then share no data beyond what stock shares.
inline constinit thread_local bool tls_results_may_alias = false;

// Sets the type object of torch.nn.Parameter, and those of the dispatch modes that count casts (selective
// checkpointing): such a mode replays ops by their order, so a cast that the cache saves would shift all later ones.
void set_parameter_type(_typeobject* type);
void set_replaying_modes(std::vector<_typeobject*> types);

} // namespace torch_promote
