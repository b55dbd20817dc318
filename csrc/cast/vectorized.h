// file: functions that the compiler vectorizes for several instruction sets
#pragma once

// The compiler vectorizes the loops once for each of these instruction sets, and the loader picks one. It calls a
// function for that, before it has linked the functions that TSan's instrumentation of this function calls. Clang has
// no target_clones for function templates, and vectorizes for the CPU of its options, with SSE2 by default: `measure`
// takes 1396 instead of 481 microseconds for 2**20 elements (Zen 5), casts hardly longer.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_THREAD__)
#define VECTORIZED __attribute__((optimize("O3"), target_clones("avx512f", "avx2", "default")))
#else
#define VECTORIZED
#endif
