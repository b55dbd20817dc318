// file: a mutex that is never left locked in a forked child
#pragma once

#include <mutex>

namespace torch_promote {

// NOTE [ Fork ]
// A fork copies only the calling thread, so a mutex that another thread holds stays locked in the child forever. The
// thread that forks therefore locks every ForkSafeMutex first, and both processes unlock them afterwards.
//
// - Create a ForkSafeMutex, and the object that it guards, while the extension is imported: in the child, a function's
//   static object that another thread was constructing is never finished. It lives as long as the process.
// - Do not wait for the GIL while you hold one: the thread that forks may hold the GIL. PyTorch may take it where a
//   tensor or a storage with a Python object is copied or destroyed.
class ForkSafeMutex : public std::mutex {
 public:
  ForkSafeMutex();
  ForkSafeMutex(const ForkSafeMutex&) = delete;
  ForkSafeMutex& operator=(const ForkSafeMutex&) = delete;
};

} // namespace torch_promote
