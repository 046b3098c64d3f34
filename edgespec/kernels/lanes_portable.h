/* Sixteen lanes in plain C, the reference for the other lanes_*.h. Included by lanes.h. */
#ifndef EDGESPEC_LANES_PORTABLE_H
#define EDGESPEC_LANES_PORTABLE_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "half.h"

typedef struct { float at[16]; } lanes;
typedef struct { int32_t at[16]; } lanes_int;
enum { LANES_IN_REGISTERS = 4 }; /* typical compilers have 16 registers of 4 floats */

#define EACH_LANE for (int i = 0; i < LANES; i++)
#define LANES_OF(type, name, parameters, expression)   \
    static inline type name parameters                 \
    {                                                  \
        type y;                                        \
        EACH_LANE y.at[i] = expression;                \
        return y;                                      \
    }

LANES_OF(lanes, lanes_set, (float x), x)
LANES_OF(lanes, lanes_load, (const float *from), from[i])
LANES_OF(lanes, lanes_add, (lanes a, lanes b), a.at[i] + b.at[i])
LANES_OF(lanes, lanes_sub, (lanes a, lanes b), a.at[i] - b.at[i])
LANES_OF(lanes, lanes_mul, (lanes a, lanes b), a.at[i] * b.at[i])
LANES_OF(lanes, lanes_div, (lanes a, lanes b), a.at[i] / b.at[i])
LANES_OF(lanes, lanes_fma, (lanes a, lanes b, lanes c), fmaf(a.at[i], b.at[i], c.at[i]))
LANES_OF(lanes, lanes_max, (lanes a, lanes b), a.at[i] > b.at[i] ? a.at[i] : b.at[i])
LANES_OF(lanes, lanes_min, (lanes a, lanes b), a.at[i] < b.at[i] ? a.at[i] : b.at[i])
LANES_OF(lanes, lanes_zero_below, (lanes a, float limit, lanes b), a.at[i] < limit ? 0.0f : b.at[i])
LANES_OF(lanes, lanes_from_halves, (const uint16_t *from), half_to_float(from[i]))
/* A bfloat is the upper half of a float. */
LANES_OF(lanes, lanes_from_bfloats, (const uint16_t *from), float_of_bits((uint32_t)from[i] << 16))
LANES_OF(lanes, lanes_of_bits, (lanes_int x), float_of_bits((uint32_t)x.at[i]))
LANES_OF(lanes_int, lanes_bits, (lanes x), (int32_t)bits_of_float(x.at[i]))
LANES_OF(lanes_int, lanes_int_set, (int32_t x), x)
LANES_OF(lanes_int, lanes_int_add, (lanes_int a, lanes_int b), (int32_t)((uint32_t)a.at[i] + (uint32_t)b.at[i]))
LANES_OF(lanes_int, lanes_int_and, (lanes_int a, int32_t mask), a.at[i] & mask)
LANES_OF(lanes_int, lanes_int_max, (lanes_int a, lanes_int b), a.at[i] > b.at[i] ? a.at[i] : b.at[i])
LANES_OF(lanes_int, lanes_int_shift, (lanes_int a, int left), (int32_t)((uint32_t)a.at[i] << left))

static inline void lanes_store(float *to, lanes x) { memcpy(to, x.at, sizeof x.at); }
static inline void lanes_to_halves(uint16_t *to, lanes x) { EACH_LANE to[i] = float_to_half(x.at[i]); }
static inline int lanes_any_above(lanes a, float limit)
{
    int any = 0;
    EACH_LANE any |= a.at[i] > limit;
    return any;
}
static inline int lanes_any_nan(lanes a)
{
    int any = 0;
    EACH_LANE any |= a.at[i] != a.at[i];
    return any;
}
static inline int32_t lanes_int_sum(lanes_int a)
{
    int32_t sum = 0;
    EACH_LANE sum += a.at[i];
    return sum;
}
static inline int32_t lanes_int_largest(lanes_int a)
{
    int32_t largest = a.at[0];
    EACH_LANE largest = a.at[i] > largest ? a.at[i] : largest;
    return largest;
}
static inline void lanes_int_store_bytes(int8_t *to, lanes_int a)
{
    EACH_LANE to[i] = (int8_t)a.at[i];
}
static inline float lanes_sum(lanes a)
{
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++)
            a.at[i] += a.at[i + half];
    return a.at[0];
}

#endif
