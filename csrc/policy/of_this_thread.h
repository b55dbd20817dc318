// file: objects that each thread has one of, and that may be used until the thread is gone
#pragma once

#include <utility>

namespace torch_promote {

// Returns this thread's object of a type, which is made at its first use.
//
// A thread that ends destroys thread-local objects in the reverse order of their construction. PyTorch's may come after
// ours, and may run Python: the `__del__` of what they hold may enter a region. Such a late use gets a new object,
// which is never freed.
template <class T>
T& of_this_thread() {
  static constinit thread_local T* instance = nullptr;
  struct End {
    ~End() {
      delete std::exchange(instance, nullptr);
    }
  };
  if (instance == nullptr) {
    static thread_local const End end;
    instance = new T;
  }
  return *instance;
}

} // namespace torch_promote
