/* The kernels' own cosine and sine: those of C libraries differ from one another in the last bit.
 *
 * Plain operations on integers and doubles, none fused, so every compiler and processor computes the same bits. In
 * double precision the relative error is below 2^-49, for any finite angle: the reduction is exact (Payne and Hanek
 * 1983). A float's error is at most half a step plus 2^-25 of one; 10^7 angles in 0 .. 131072 all gave the nearest. */
#ifndef EDGESPEC_ANGLE_H
#define EDGESPEC_ANGLE_H

#include <stdint.h>
#include <string.h>

/* 64 zeros, then the first 1216 binary digits of 2 / pi behind the point. */
static const uint64_t two_over_pi[20] = {
    0x0000000000000000u, 0xa2f9836e4e441529u, 0xfc2757d1f534ddc0u, 0xdb6295993c439041u,
    0xfe5163abdebbc561u, 0xb7246e3a424dd2e0u, 0x06492eea09d1921cu, 0xfe1deb1cb129a73eu,
    0xe88235f52ebb4484u, 0xe99c7026b45f7e41u, 0x3991d639835339f4u, 0x9c845f8bbdf9283bu,
    0x1ff897ffde05980fu, 0xef2f118b5a0a6d1fu, 0x6d367ecf27cb09b7u, 0x4f463f669e5fea2du,
    0x7527bac7ebe5f17bu, 0x3d0739f78a5292eau, 0x6bfb5fb11f8d5d08u, 0x56033046fc7b6babu,
};

/* The upper half of a product; 32-bit compilers have no type for all of it. */
static inline uint64_t upper_product(uint64_t a, uint64_t b)
{
    uint64_t a_low = (uint32_t)a, a_high = a >> 32, b_low = (uint32_t)b, b_high = b >> 32;
    uint64_t middle = a_high * b_low + (a_low * b_low >> 32);
    return a_high * b_high + (middle >> 32) + ((a_low * b_high + (uint32_t)middle) >> 32);
}

/* The nearest quarter of a turn, and the remaining angle, at most pi / 4 to either side. For a finite angle
 * from pi / 4 on. */
static inline unsigned nearest_quarter(double angle, double *rest)
{
    uint64_t bits;
    memcpy(&bits, &angle, sizeof bits);
    /* angle = whole * 2^exponent. Digits of 2 / pi that make its product a multiple of 4 quarters are left out, and of
     * those that follow 192 are used: the rest is below 2^-137 of a quarter, and no double of this size is
     * nearer than 2^-62 to a multiple of a quarter. */
    uint64_t whole = (bits & 0xfffffffffffffu) | (uint64_t)1 << 52, digits[3];
    int exponent = (int)(bits >> 52 & 0x7ff) - 1075, first = exponent + 62;
    for (int i = 0; i < 3; i++) {
        const uint64_t *from = two_over_pi + first / 64 + i;
        int into = first % 64;
        digits[i] = into ? from[0] << into | from[1] >> (64 - into) : from[0];
    }
    uint64_t low = whole * digits[2], carried = upper_product(whole, digits[2]), middle = whole * digits[1] + carried;
    uint64_t high = whole * digits[0] + upper_product(whole, digits[1]) + (middle < carried);
    /* The product has 190 digits behind the point; two stand before it. */
    uint64_t fraction = high << 2 | middle >> 62, finer = middle << 2 | low >> 62;
    double quarters = (double)(int64_t)fraction * 0x1p-64 + (double)finer * 0x1p-128;
    *rest = quarters * 0x1.921fb54442d18p+0;
    return (unsigned)(high >> 62) + (unsigned)(fraction >> 63);
}

/* Taylor's series: the first term left out is below 2^-53 of the sum. */
static inline double sine_near_zero(double x)
{
    double z = x * x;
    double p = -1.0 / 1307674368000.0;
    p = p * z + 1.0 / 6227020800.0;
    p = p * z - 1.0 / 39916800.0;
    p = p * z + 1.0 / 362880.0;
    p = p * z - 1.0 / 5040.0;
    p = p * z + 1.0 / 120.0;
    p = p * z - 1.0 / 6.0;
    return x + x * z * p;
}

static inline double cosine_near_zero(double x)
{
    double z = x * x;
    double p = 1.0 / 20922789888000.0;
    p = p * z - 1.0 / 87178291200.0;
    p = p * z + 1.0 / 479001600.0;
    p = p * z - 1.0 / 3628800.0;
    p = p * z + 1.0 / 40320.0;
    p = p * z - 1.0 / 720.0;
    p = p * z + 1.0 / 24.0;
    return 1.0 - (0.5 * z - z * z * p);
}

/* turn[0] is the cosine, turn[1] the sine; NaN for an angle that is not finite. */
static inline void turn_of(double angle, float turn[2])
{
    double size = angle < 0.0 ? -angle : angle, rest = size;
    unsigned quarter = 0;
    if (!(size <= 0x1.fffffffffffffp+1023))
        rest = size - size;
    else if (size >= 0.785)
        quarter = nearest_quarter(size, &rest);
    double cosine = cosine_near_zero(rest), sine = sine_near_zero(rest);
    double x = quarter & 1 ? sine : cosine, y = quarter & 1 ? cosine : sine;
    x = (quarter + 1) & 2 ? -x : x;
    y = quarter & 2 ? -y : y;
    turn[0] = (float)x;
    turn[1] = (float)(angle < 0.0 ? -y : y);
}

#endif
