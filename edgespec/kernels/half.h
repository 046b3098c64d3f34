/* IEEE half to float, exactly, and back to the nearest, ties to even, as processors' instructions do. */
#ifndef EDGESPEC_HALF_H
#define EDGESPEC_HALF_H

#include <stdint.h>
#include <string.h>

static inline float float_of_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t bits_of_float(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float half_to_float(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000u) << 16;
    uint32_t rest = half & 0x7fffu;
    uint32_t bits;
    if (rest > 0x7c00u)
        bits = 0x7fc00000u | rest << 13; /* a NaN, made quiet */
    else if (rest == 0x7c00u)
        bits = 0x7f800000u;
    else if (rest >= 0x0400u)
        bits = (rest << 13) + (112u << 23); /* exponents are biased by 15 and by 127 */
    else
        bits = bits_of_float((float)rest * 0x1p-24f);
    return float_of_bits(sign | bits);
}

static inline uint16_t float_to_half(float value)
{
    uint32_t bits = bits_of_float(value);
    uint32_t sign = bits >> 16 & 0x8000u;
    bits &= 0x7fffffffu;
    uint32_t half;
    if (bits > 0x7f800000u)
        half = 0x7e00u | (bits >> 13 & 0x3ffu);
    else if (bits >= 0x47800000u) /* 65536 */
        half = 0x7c00u;
    else if (bits >= 0x38800000u) /* 2^-14, the least normal half; rounding up may carry into infinity */
        half = (bits - (112u << 23) + 0xfffu + (bits >> 13 & 1u)) >> 13;
    else /* an addition rounds to a multiple of 2^-24, the step of subnormal halves */
        half = bits_of_float(float_of_bits(bits) * 0x1p24f + 0x1p23f) - 0x4b000000u;
    return (uint16_t)(sign | half);
}

#endif
