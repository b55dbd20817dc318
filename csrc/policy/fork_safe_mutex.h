// file: a mutex that no fork leaves locked in the child
#pragma once

#include <mutex>

namespace torch_promote {

// NOTE [ Fork ]
// A fork copies one thread. A mutex that another thread holds at that moment stays locked in the child, and whoever
// locks it there waits for ever. Every mutex of this library is therefore a ForkSafeMutex: the thread that forks locks
// all of them first, and both processes unlock them afterwards. It never waits for one while it holds another, so that
// it cannot deadlock with threads that nest them.
//
// The same holds for a static object in a function: if another thread is making it, it stays half made in the child,
// and whoever asks for it there waits for ever. Objects with a ForkSafeMutex are therefore made at import.
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
