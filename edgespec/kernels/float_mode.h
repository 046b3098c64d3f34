/* Rounding to nearest with subnormals: the mode belongs to a thread, and other libraries change it. */
#ifndef EDGESPEC_FLOAT_MODE_H
#define EDGESPEC_FLOAT_MODE_H

#if defined(__x86_64__)

#include <xmmintrin.h>

enum { FLOAT_MODE = 0x1f80 }; /* every exception masked, round to nearest, neither FTZ nor DAZ */

static inline unsigned float_mode_set(void)
{
    unsigned before = _mm_getcsr();
    _mm_setcsr(FLOAT_MODE);
    return before;
}
static inline void float_mode_restore(unsigned mode) { _mm_setcsr(mode); }

#elif defined(__aarch64__)

#include <stdint.h>

static inline unsigned float_mode_set(void)
{
    uint64_t before, plain = 0;
    __asm__ volatile("mrs %0, fpcr" : "=r"(before));
    __asm__ volatile("msr fpcr, %0" : : "r"(plain));
    return (unsigned)before;
}
static inline void float_mode_restore(unsigned mode)
{
    uint64_t before = mode;
    __asm__ volatile("msr fpcr, %0" : : "r"(before));
}

#else

static inline unsigned float_mode_set(void) { return 0; }
static inline void float_mode_restore(unsigned mode) { (void)mode; }

#endif
#endif
