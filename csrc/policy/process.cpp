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

// Locks all of them or none: a thread that holds one may wait for another, in any order.
void lock_all() {
  for (size_t locked = 0; locked < mutexes().size();) {
    if (mutexes()[locked]->try_lock()) {
      ++locked;
      continue;
    }
    while (locked > 0) {
      mutexes()[--locked]->unlock();
    }
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
