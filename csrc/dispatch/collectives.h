// file: collectives, which write without increasing versions
#pragma once

namespace torch_promote {

// From now on, collectives of torch.distributed drop the cached casts of the tensors that they are called with,
// wherever they are called. Their kernels go to ADInplaceOrView, where PyTorch has none for them. The cache modes that
// keep casts longer than stock need this; without these modes, PyTorch's dispatcher stays as it is.
void watch_collectives();

} // namespace torch_promote
