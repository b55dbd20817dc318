// file: a mutex that is never left locked in a forked child
#include "policy/process.h"

#include <pthread.h>

#include <thread>
#include <vector>

namespace torch_promote {

namespace {

std::vector<ForkSafeMutex*>& mutexes() {
  static auto* instance = new std::vector<ForkSafeMutex*>; // never destroyed; see NOTE [ Fork ]
  return *instance;
}

// Locks all of them or none. A thread that holds one may wait for another, in any order.
bool try_lock_all() {
  for (size_t locked = 0; locked < mutexes().size(); ++locked) {
    if (!mutexes()[locked]->try_lock()) {
      while (locked-- > 0) {
        mutexes()[locked]->unlock();
      }
      return false;
    }
  }
  return true;
}

void lock_all() {
  while (!try_lock_all()) {
    std::this_thread::yield();
  }
}

void unlock_all() {
  for (ForkSafeMutex* mutex : mutexes()) {
    mutex->unlock();
  }
}

} // namespace

ForkSafeMutex::ForkSafeMutex() {
  if (mutexes().empty()) {
    pthread_atfork(&lock_all, &unlock_all, &unlock_all);
  }
  mutexes().push_back(this);
}

} // namespace torch_promote
