// file: a mutex that is never left locked in a forked child
#pragma once

#include <mutex>

namespace torch_promote {

// NOTE [ Fork ]
// A fork copies only the calling thread. A mutex that another thread holds at that moment stays locked in the child,
// and locking it there deadlocks. Every mutex of this library is therefore a ForkSafeMutex: the thread that forks locks
// all of them first, and both processes unlock them afterwards. It never waits for one while it holds another, so it
// cannot deadlock with threads that nest them.
//
// The same applies to a static object in a function: if another thread is constructing it during the fork, it is never
// finished in the child, and using it there deadlocks. Objects with a ForkSafeMutex are therefore created at import.
//
// The thread that forks may hold the GIL. Code that holds a ForkSafeMutex must therefore not wait for the GIL. PyTorch
// may take the GIL where a tensor or a storage with a Python object is copied or destroyed.
class ForkSafeMutex : public std::mutex {
 public:
  ForkSafeMutex();
  ~ForkSafeMutex();
  ForkSafeMutex(const ForkSafeMutex&) = delete;
  ForkSafeMutex& operator=(const ForkSafeMutex&) = delete;
};

} // namespace torch_promote
