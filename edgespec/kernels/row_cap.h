/* Soft caps of scores, over lanes; included by each level's file. */
#ifndef EDGESPEC_ROW_CAP_H
#define EDGESPEC_ROW_CAP_H

#include "lanes.h"

/* tanh u = (1 - e^-2u) / (1 + e^-2u), which is exact to a unit in the last place of 1. x - x is 0, or NaN. */
static lanes cap_lanes(lanes x, lanes most, lanes minus_two_parts)
{
    lanes one = lanes_set(1.0f), power = lanes_exp(lanes_mul(x, minus_two_parts));
    lanes tangent = lanes_div(lanes_sub(one, power), lanes_add(one, power));
    return lanes_fma(most, tangent, lanes_sub(x, x));
}

static void cap_values(float *x, size_t length, float most)
{
    lanes limit = lanes_set(most), minus_two_parts = lanes_set(-2.0f / most);
    size_t whole = length / LANES * LANES, rest = length - whole;
    for (size_t k = 0; k < whole; k += LANES)
        lanes_store(x + k, cap_lanes(lanes_load(x + k), limit, minus_two_parts));
    if (rest) {
        float last[LANES] = {0};
        memcpy(last, x + whole, rest * sizeof *x);
        lanes_store(last, cap_lanes(lanes_load(last), limit, minus_two_parts));
        memcpy(x + whole, last, rest * sizeof *x);
    }
}

#endif
