/* What happens to one row between two products, written over lanes; included by each level's file. */
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

/* What the largest of a block's values may become. How well a scale fits the other values is nearly chance: the best of
 * these four misses normal values by 13 % less, in squares, than 127 always. Whole numbers keep the largest itself exact,
 * and neighbours two apart miss differently enough. */
enum { TOPS = 4 };
static const float tops[TOPS] = {127.0f, 125.0f, 123.0f, 121.0f};

/* In codes, what the code nearest to x * inverse misses it by. */
static inline lanes missed(lanes x, lanes inverse)
{
    return lanes_fma(x, inverse, lanes_sub(lanes_set(LANES_ROUNDER), lanes_shifted_product(x, inverse)));
}

/* The number of the first top with which codes miss the values by the least squares. `inverses`: of each top's scale. */
static inline size_t best_top(const float *x, const float inverses[TOPS])
{
    lanes low = lanes_load(x), high = lanes_load(x + LANES), squares[TOPS];
    UNROLLED
    for (int i = 0; i < TOPS; i++) {
        lanes inverse = lanes_set(inverses[i]);
        lanes of_low = missed(low, inverse), of_high = missed(high, inverse);
        squares[i] = lanes_fma(of_low, of_low, lanes_mul(of_high, of_high));
    }
    float sums[TOPS];
    lanes_sum_four(squares, sums);
    /* No processor foresees this toss-up, hence no branches: floats from 0 on are ordered like integers, and behind
     * them the number of the top makes one minimum of it. */
    uint64_t best = UINT64_MAX;
    UNROLLED
    for (uint64_t i = 0; i < TOPS; i++) {
        uint64_t here = (uint64_t)bits_of_float(sums[i] * (1.0f / (tops[i] * tops[i]))) * TOPS + i;
        best = here < best ? here : best;
    }
    return best % TOPS;
}

static inline float largest_of(const float *x)
{
    /* Without their sign floats are ordered like integers, and NaN and infinity are on top. */
    lanes_int size = lanes_int_max(lanes_int_and(lanes_bits(lanes_load(x)), 0x7fffffff),
                                   lanes_int_and(lanes_bits(lanes_load(x + LANES)), 0x7fffffff));
    return float_of_bits((uint32_t)lanes_int_largest(size));
}

static inline void put_codes(const float *x, float inverse, float scale, struct activation_block *to)
{
    lanes each = lanes_set(inverse);
    lanes_int q_low = lanes_rounded_product(lanes_load(x), each);
    lanes_int q_high = lanes_rounded_product(lanes_load(x + LANES), each);
    lanes_int_store_bytes(to->q, q_low);
    lanes_int_store_bytes(to->q + LANES, q_high);
    /* Both sums in one: 16 codes come to less than 2^15. */
    int32_t sums = lanes_int_sum(lanes_int_add(lanes_int_shift(q_low, 16), q_high));
    int32_t sum_high = (int16_t)(sums & 0xffff), sum_low = (sums - sum_high) / 0x10000, sum = sum_low + sum_high;
    to->scale = scale;
    to->scaled_sum = scale * (float)sum;
    to->minus8 = -8 * sum;
    to->minus8_low = -8 * sum_low;
}

/* A block's steps wait for one another, those of other blocks do not: on an Emerald Rapids eight together take a fifth
 * less time than one by one. Sixteen gain nothing more. */
enum { BLOCKS_TOGETHER = 8 };

static inline void quantise_some(const float *x, size_t blocks, struct activation_block *to)
{
    float largest[BLOCKS_TOGETHER], inverses[BLOCKS_TOGETHER][TOPS];
    size_t best[BLOCKS_TOGETHER];
    for (size_t b = 0; b < blocks; b++) {
        largest[b] = largest_of(x + b * BLOCK);
        UNROLLED
        for (int i = 0; i < TOPS; i++)
            inverses[b][i] = tops[i] / largest[b];
    }
    for (size_t b = 0; b < blocks; b++)
        best[b] = best_top(x + b * BLOCK, inverses[b]);
    for (size_t b = 0; b < blocks; b++) {
        int finite = largest[b] <= FLT_MAX; /* not for NaN */
        if (finite && largest[b] >= tops[0] * LEAST_SCALE)
            put_codes(x + b * BLOCK, inverses[b][best[b]], scale_of(largest[b] / tops[best[b]]), to + b);
        else
            to[b] = (struct activation_block){.scale = finite ? 0 : NAN, .scaled_sum = finite ? 0 : NAN};
    }
}

static void quantise(const float *x, size_t blocks, struct activation_block *to)
{
    while (blocks) {
        size_t some = blocks < BLOCKS_TOGETHER ? blocks : BLOCKS_TOGETHER;
        quantise_some(x, some, to);
        x += some * BLOCK;
        to += some;
        blocks -= some;
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
