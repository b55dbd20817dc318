// file: the mutex between a thread's casts and other threads
#pragma once

#include "policy/fork_safe_mutex.h"

namespace torch_promote {

// NOTE [ Casts and other threads ]
// Stock's cache belongs to the process; ours keeps a set of casts for each thread. A thread alone adds and removes the
// entries of its set. Other threads do two things with them:
//
// - The thread that clears PyTorch's cache frees the memory of the casts of all threads (`free_casts_of_all_threads`).
//   That is a region of PyTorch's that ends, or one of ours in a thread of the autograd engine: a recomputation of a
//   checkpoint, for which `install` opens regions of ours.
// - A thread of the autograd engine borrows a cast from the thread that ran the forward (`borrow_cast`). A checkpoint
//   recomputes there, and under stock finds the casts of the forward.
//
// Both hold this mutex, and the owner holds it wherever it changes an entry, or which entries there are. So the owner
// reads without a lock, and a use of a kept cast takes none. Only the reference that keeps a cast's memory may go away
// at any time; the owner does not read it, but has a weak one.
//
// While it is locked, take no other lock, and run no code that may wait for the GIL: neither copy nor destroy a tensor
// or an entry. What is taken out is destroyed after the mutex is unlocked.
ForkSafeMutex& casts_mutex();

} // namespace torch_promote
