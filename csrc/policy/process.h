// file: what lives as long as the process, a thread or a scope: mutexes, objects of a thread, variables set in a scope
#pragma once

#include <mutex>
#include <utility>

namespace torch_promote {

// NOTE [ Fork ]
// A fork copies only the calling thread, so a mutex that another thread holds stays locked in the child forever. The
// thread that forks therefore locks every ForkSafeMutex first, and both processes unlock them afterwards.
//
// - Create a ForkSafeMutex, and the object that it guards, while the extension is imported: in the child, a function's
//   static object that another thread was constructing is never finished. It lives as long as the process, because
//   threads may outlive static destructors.
// - Do not wait for the GIL while you hold one: the thread that forks may hold the GIL. PyTorch may take it where a
//   tensor or a storage with a Python object is copied or destroyed.
class ForkSafeMutex : public std::mutex {
 public:
  ForkSafeMutex();
};

using Lock = std::lock_guard<std::mutex>;

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

// Sets a variable of this thread as long as it lives.
template <class T>
class Scoped {
 public:
  Scoped(T& variable, T value) : variable_(variable), before_(std::exchange(variable, value)) {}
  Scoped(const Scoped&) = delete;
  ~Scoped() {
    variable_ = before_;
  }

 private:
  T& variable_;
  T before_;
};

} // namespace torch_promote
