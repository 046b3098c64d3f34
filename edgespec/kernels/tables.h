/* The values behind codes of types that look them up. */
#ifndef EDGESPEC_TABLES_H
#define EDGESPEC_TABLES_H

#include "edgespec_kernels.h"
#include "half.h"

/* A code is an index; of all types but IQ4 its highest bit is the value's sign. MXFP4's values are doubled. */
static inline const int8_t *values_of(int64_t type)
{
    static const int8_t iq4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
    static const int8_t mxfp4[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    static const int8_t iq3_s[16] = {1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15};
    static const int8_t iq3_xxs[16] = {4, 12, 20, 28, 36, 44, 52, 62, -4, -12, -20, -28, -36, -44, -52, -62};
    switch (type) {
    case ES_MXFP4: return mxfp4;
    case ES_IQ3_S: return iq3_s;
    case ES_IQ3_XXS: return iq3_xxs;
    default: return iq4;
    }
}

/* MXFP4's scale, 2^(exponent - 128): half the standard's, since the values are doubled. 0 instead of a subnormal. */
static inline float scale_of_exponent(uint32_t exponent)
{
    return float_of_bits(exponent ? (exponent - 1) << 23 : 0);
}

#endif
