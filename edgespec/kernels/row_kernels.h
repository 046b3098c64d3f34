/* Functions of one row between two products, written over lanes; included by each level's file. */
#ifndef EDGESPEC_ROW_KERNELS_H
#define EDGESPEC_ROW_KERNELS_H

#include "half.h"
#include "lanes.h"
#include "level.h"
#include "unrolled.h"

static void normalise(const float *x, const float *weight, float epsilon, size_t length, float *y)
{
    lanes squares = lanes_set(0.0f);
    for (size_t k = 0; k < length; k += LANES) {
        lanes value = lanes_load(x + k);
        squares = lanes_fma(value, value, squares);
    }
    float sum = lanes_sum(squares), one = 1.0f + (sum - sum); /* NaN if the sum is infinite: else y would be zeros */
    lanes scale = lanes_set(one / sqrtf(sum / (float)length + epsilon));
    for (size_t k = 0; k < length; k += LANES)
        lanes_store(y + k, lanes_mul(lanes_mul(lanes_load(x + k), scale), lanes_load(weight + k)));
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

/* gpt-oss's SwiGLU: y = gate / (1 + e^(-1.702 gate)) * (up + 1), of a gate of at most 7 and an input of -7 to 7. The bounds
 * stand first, so that a NaN comes through. */
static void clipped_swiglu(const float *gate, const float *up, size_t length, float *y)
{
    lanes one = lanes_set(1.0f), most = lanes_set(7.0f), least = lanes_set(-7.0f), slope = lanes_set(-1.702f);
    for (size_t k = 0; k < length; k += LANES) {
        lanes g = lanes_min(most, lanes_load(gate + k));
        lanes u = lanes_max(least, lanes_min(most, lanes_load(up + k)));
        lanes gated = lanes_div(g, lanes_add(one, lanes_exp(lanes_mul(slope, g))));
        lanes_store(y + k, lanes_mul(gated, lanes_add(u, one)));
    }
}

static void exponential(const float *x, size_t length, float *y)
{
    for (size_t k = 0; k < length; k += LANES)
        lanes_store(y + k, lanes_exp(lanes_load(x + k)));
}

static void to_halves(const float *x, size_t length, uint16_t *to, size_t apart)
{
    for (size_t k = 0; k < length; k += LANES, x += LANES) {
        uint16_t half[LANES];
        lanes_to_halves(apart == 1 ? to + k : half, lanes_load(x));
        for (size_t i = 0; apart != 1 && i < LANES; i++)
            to[(k + i) * apart] = half[i];
    }
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
