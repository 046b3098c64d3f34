/* Loops over a handful of vectors that must stay in registers. */
#ifndef EDGESPEC_UNROLLED_H
#define EDGESPEC_UNROLLED_H

/* Compiled separately for every set of constant arguments. */
#define ALWAYS_INLINE static inline __attribute__((always_inline))

/* Before a loop of a constant number of iterations, at most 8. Without it GCC 12 unrolls too late to keep indexed arrays
 * in registers. */
#if defined(__clang__)
#define UNROLLED _Pragma("clang loop unroll(full)")
#else
#define UNROLLED _Pragma("GCC unroll 8")
#endif

#endif
