// glibc.h: has an extension of a newer Linux run where PyTorch's wheels do, with glibc 2.28.
//
// The compiler reads it first; see tools/wheel. glibc 2.34 gave these functions a second version, which a linker takes
// by default, and the headers of libstdc++ read a variable that came with glibc 2.32. auditwheel refuses what else is
// newer: add it here.

#pragma once

#include <features.h>

#if defined(__GLIBC__) && __GLIBC_PREREQ(2, 34)
#if defined(__x86_64__)
#define TORCH_PROMOTE_FIRST_GLIBC "GLIBC_2.2.5"
#elif defined(__aarch64__)
#define TORCH_PROMOTE_FIRST_GLIBC "GLIBC_2.17"
#endif
__asm__(".symver pthread_mutex_trylock, pthread_mutex_trylock@" TORCH_PROMOTE_FIRST_GLIBC);
__asm__(".symver pthread_once, pthread_once@" TORCH_PROMOTE_FIRST_GLIBC);
#endif

// Whether the process has one thread, so that std::shared_ptr may count without atomics. This one always says no.
extern "C" {
__attribute__((visibility("hidden"), weak)) char __libc_single_threaded = 0;
}
