// file: collectives, which write without increasing versions
#pragma once

namespace torch_promote {

// Makes all collectives of torch.distributed drop the cached casts of their arguments, from now on and in all threads.
// It registers kernels on ADInplaceOrView, where PyTorch has none for these ops. Only the cache modes that keep casts
// longer than stock need this; without these modes, nothing is registered.
void watch_collectives();

} // namespace torch_promote
