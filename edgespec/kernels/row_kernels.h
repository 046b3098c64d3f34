/* What happens to one row between two products, written over lanes; included by each level's file. */
#ifndef EDGESPEC_ROW_KERNELS_H
#define EDGESPEC_ROW_KERNELS_H

#include "half.h"
#include "lanes.h"
#include "level.h"

static void normalise(const float *x, const float *weight, float epsilon, size_t length, float *y)
{
    lanes squares = lanes_set(0.0f);
    for (size_t k = 0; k < length; k += LANES) {
        lanes value = lanes_load(x + k);
        squares = lanes_fma(value, value, squares);
    }
    lanes scale = lanes_set(1.0f / sqrtf(lanes_sum(squares) / (float)length + epsilon));
    for (size_t k = 0; k < length; k += LANES)
        lanes_store(y + k, lanes_mul(lanes_mul(lanes_load(x + k), scale), lanes_load(weight + k)));
}

/* Below this a scale counts as 0, so that no product of scales becomes subnormal, which processors are slow at. */
#define LEAST_SCALE 0x1p-100f

/* To the 11 bits of a half's significand, ties to even, with a float's range: the product with a weight's scale, a half
 * itself, is then exact. llama.cpp keeps these scales as halves, so that its scores are nearer as well. */
static inline float scale_of(float exact)
{
    uint32_t bits = bits_of_float(exact);
    return float_of_bits((bits + 0xfffu + (bits >> 13 & 1)) & ~0x1fffu);
}

static void quantise(const float *x, size_t blocks, struct activation_block *to)
{
    for (size_t b = 0; b < blocks; b++, x += BLOCK, to++) {
        lanes low = lanes_load(x), high = lanes_load(x + LANES);
        /* Without their sign floats are ordered like integers, and NaN and infinity are on top. */
        lanes_int size = lanes_int_max(lanes_int_and(lanes_bits(low), 0x7fffffff),
                                       lanes_int_and(lanes_bits(high), 0x7fffffff));
        float largest = float_of_bits((uint32_t)lanes_int_largest(size));
        int finite = largest <= FLT_MAX; /* not for NaN */
        float scale = largest / 127.0f;
        int usable = finite && scale >= LEAST_SCALE;
        lanes inverse = lanes_set(usable ? 127.0f / largest : 0.0f);
        lanes_int q_low = lanes_int_set(0), q_high = q_low;
        if (usable) {
            q_low = lanes_round(lanes_mul(low, inverse));
            q_high = lanes_round(lanes_mul(high, inverse));
        }
        lanes_int_store_bytes(to->q, q_low);
        lanes_int_store_bytes(to->q + LANES, q_high);
        int32_t sum_low = lanes_int_sum(q_low), sum = sum_low + lanes_int_sum(q_high);
        to->scale = usable ? scale_of(scale) : finite ? 0.0f : NAN;
        to->scaled_sum = to->scale * (float)sum;
        to->minus8 = -8 * sum;
        to->minus8_low = -8 * sum_low;
    }
}

static void swiglu(const float *gate, const float *up, size_t length, float *y)
{
    lanes one = lanes_set(1.0f);
    for (size_t k = 0; k < length; k += LANES) {
        lanes g = lanes_load(gate + k);
        lanes silu = lanes_div(g, lanes_add(one, lanes_exp(lanes_sub(lanes_set(0.0f), g))));
        lanes_store(y + k, lanes_mul(silu, lanes_load(up + k)));
    }
}

/* gelu(g) = g (1 + tanh u) / 2 with u = sqrt(2 / pi) (g + 0.044715 g^3), and (1 + tanh u) / 2 = 1 / (1 + e^-2u): a
 * quotient without the cancellation of 1 + tanh u near -1. */
static void geglu(const float *gate, const float *up, size_t length, float *y)
{
    lanes one = lanes_set(1.0f), minus_two_roots = lanes_set(-0x1.988454p+0f); /* -2 sqrt(2 / pi) */
    for (size_t k = 0; k < length; k += LANES) {
        lanes g = lanes_load(gate + k);
        lanes cubic = lanes_fma(lanes_mul(lanes_set(0.044715f), lanes_mul(g, g)), g, g);
        lanes gelu = lanes_div(g, lanes_add(one, lanes_exp(lanes_mul(minus_two_roots, cubic))));
        lanes_store(y + k, lanes_mul(gelu, lanes_load(up + k)));
    }
}

static void exponential(const float *x, size_t length, float *y)
{
    for (size_t k = 0; k < length; k += LANES)
        lanes_store(y + k, lanes_exp(lanes_load(x + k)));
}

static int64_t argmax(const float *scores, size_t count)
{
    size_t whole = count / LANES * LANES, best = 0;
    float largest = scores[0];
    for (size_t k = 0; k < whole; k += LANES) {
        lanes sixteen = lanes_load(scores + k);
        if (!lanes_any_above(sixteen, largest) && !lanes_any_nan(sixteen))
            continue; /* nearly always: a new best is met about log(count) times */
        for (size_t i = k; i < k + LANES; i++) {
            if (scores[i] != scores[i])
                return -1 - (int64_t)i;
            if (scores[i] > largest)
                largest = scores[best = i];
        }
    }
    for (size_t i = whole; i < count; i++) {
        if (scores[i] != scores[i])
            return -1 - (int64_t)i;
        if (scores[i] > largest)
            largest = scores[best = i];
    }
    return largest >= -FLT_MAX && largest <= FLT_MAX ? (int64_t)best : -1 - (int64_t)best;
}

#endif
