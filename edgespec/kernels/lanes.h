/* Sixteen floats, or sixteen int32, as one value: the vector that every reduction is defined on.
 *
 * The arithmetic of a level is written once, over these, and compiled for each instruction set. All of them round to
 * nearest even, none contracts, fma is one rounding, and lanes_sum adds in one fixed tree: so every build computes the
 * same bits. Each file that includes this is compiled with the flags of one instruction set; all functions are static. */
#ifndef EDGESPEC_LANES_H
#define EDGESPEC_LANES_H

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "half.h"

#if FLT_EVAL_METHOD != 0
#error "float arithmetic must round to float"
#endif
#if defined(__FAST_MATH__)
#error "sums must be added as they are written"
#endif

enum { LANES = 16 };

/* The portable level is plain C under any compiler flags: the other levels are compared with it. */
#if defined(PORTABLE_LANES)
#include "lanes_portable.h"
#elif defined(__AVX512F__) && defined(__AVX512DQ__)
#include "lanes_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "lanes_avx2.h"
#elif defined(__aarch64__) && defined(__ARM_NEON)
#include "lanes_neon.h"
#else
#include "lanes_portable.h"
#endif

#if !defined(LANES_LARGEST)
/* The largest, which is exact in any order. Without NaN. */
static inline float lanes_largest(lanes a)
{
    float each[LANES];
    lanes_store(each, a);
    float largest = each[0];
    for (int i = 1; i < LANES; i++)
        largest = each[i] > largest ? each[i] : largest;
    return largest;
}
#endif

#if !defined(LANES_SUM_FOUR)
static inline void lanes_sum_four(const lanes of[4], float sums[4])
{
    for (int i = 0; i < 4; i++)
        sums[i] = lanes_sum(of[i]);
}
#endif

/* The nearest integer to a product below 2^22, ties to even: once 1.5 * 2^23 is added there is no room for a fraction,
 * and the last bits are the integer's. */
#define LANES_ROUNDER 0x1.8p23f
enum { LANES_ROUNDER_BITS = 0x4b400000 };
static inline lanes lanes_shifted_product(lanes a, lanes b) { return lanes_fma(a, b, lanes_set(LANES_ROUNDER)); }
static inline lanes_int lanes_rounded_product(lanes a, lanes b)
{
    return lanes_int_add(lanes_bits(lanes_shifted_product(a, b)), lanes_int_set(-LANES_ROUNDER_BITS));
}

/* e^x within 2 units in the last place; 0 below -87 (where floats become subnormal), e^88 above 88, NaN for NaN.
 *
 * x = n ln 2 + r with |r| <= ln 2 / 2, ln 2 in two parts (Cody and Waite 1980); the polynomial for e^r is the one of
 * the Cephes library's expf (Moshier 1989). */
static inline lanes lanes_exp(lanes x)
{
    /* The bound stands first, so that a NaN of the second operand comes through. */
    lanes bounded = lanes_max(lanes_set(-87.0f), lanes_min(lanes_set(88.0f), x));
    lanes shifted = lanes_fma(bounded, lanes_set(0x1.715476p+0f), lanes_set(LANES_ROUNDER));
    lanes n = lanes_sub(shifted, lanes_set(LANES_ROUNDER));
    lanes r = lanes_fma(n, lanes_set(-0x1.63p-1f), bounded);
    r = lanes_fma(n, lanes_set(0x1.bd0106p-13f), r);
    lanes p = lanes_set(1.9875691500e-4f);
    p = lanes_fma(p, r, lanes_set(1.3981999507e-3f));
    p = lanes_fma(p, r, lanes_set(8.3334519073e-3f));
    p = lanes_fma(p, r, lanes_set(4.1665795894e-2f));
    p = lanes_fma(p, r, lanes_set(1.6666665459e-1f));
    p = lanes_fma(p, r, lanes_set(5.0000001201e-1f));
    p = lanes_add(lanes_fma(p, lanes_mul(r, r), r), lanes_set(1.0f));
    /* The bits of `shifted` end in n; 127 is the bias of a float's exponent. */
    lanes_int power = lanes_int_add(lanes_bits(shifted), lanes_int_set(127 - LANES_ROUNDER_BITS));
    return lanes_zero_below(x, -87.0f, lanes_mul(p, lanes_of_bits(lanes_int_shift(power, 23))));
}

#endif
