// file: a mutex that is never left locked in a forked child
#include "policy/fork_safe_mutex.h"

#include <pthread.h>

#include <algorithm>
#include <thread>
#include <vector>

namespace torch_promote {

namespace {

void lock_all();
void unlock_all();

// All mutexes, and the mutex that guards the list.
struct ForkSafeMutexes {
  std::mutex mutex;
  std::vector<std::mutex*> all;

  ForkSafeMutexes() {
    pthread_atfork(&lock_all, &unlock_all, &unlock_all);
  }
};

ForkSafeMutexes& fork_safe_mutexes() {
  static auto* instance = new ForkSafeMutexes; // never destroyed: threads may outlive static destructors
  return *instance;
}

// Locks all mutexes, or none: if one is taken, unlocks the others. A thread may wait for any of them, including the
// list's, while it holds another.
bool try_lock_all() {
  ForkSafeMutexes& known = fork_safe_mutexes();
  std::unique_lock<std::mutex> list(known.mutex);
  for (size_t taken = 0; taken < known.all.size(); ++taken) {
    if (!known.all[taken]->try_lock()) {
      while (taken-- > 0) {
        known.all[taken]->unlock();
      }
      return false;
    }
  }
  list.release(); // stays locked, like the others
  return true;
}

void lock_all() {
  while (!try_lock_all()) {
    std::this_thread::yield();
  }
}

void unlock_all() {
  for (std::mutex* mutex : fork_safe_mutexes().all) {
    mutex->unlock();
  }
  fork_safe_mutexes().mutex.unlock();
}

} // namespace

ForkSafeMutex::ForkSafeMutex() {
  const std::lock_guard<std::mutex> lock(fork_safe_mutexes().mutex);
  fork_safe_mutexes().all.push_back(this);
}

ForkSafeMutex::~ForkSafeMutex() {
  const std::lock_guard<std::mutex> lock(fork_safe_mutexes().mutex);
  auto& all = fork_safe_mutexes().all;
  all.erase(std::find(all.begin(), all.end(), this));
}

} // namespace torch_promote
