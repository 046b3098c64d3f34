/* Activations as int8 with a scale for each block, written over lanes; included by each level's file. */
#ifndef EDGESPEC_ROW_QUANTISE_H
#define EDGESPEC_ROW_QUANTISE_H

#include "half.h"
#include "lanes.h"
#include "level.h"
#include "unrolled.h"

/* Below this a scale counts as 0, so that no product of scales becomes subnormal, which processors are slow at. */
#define LEAST_SCALE 0x1p-100f

/* To the 11 bits of a half's significand, ties to even, with a float's range: the product with a weight's scale, a half
 * itself, is then exact. llama.cpp keeps these scales as halves, so that its scores are nearer as well. */
static inline float scale_of(float exact)
{
    uint32_t bits = bits_of_float(exact);
    return float_of_bits((bits + 0xfffu + (bits >> 13 & 1)) & ~0x1fffu);
}

/* Codes that a block's largest value may get. How well a scale fits the other values is nearly chance: the best of these
 * four has 13 % less squared error on normal values than 127 always. Whole numbers keep the largest value exact, and two
 * neighbouring codes differ enough in their errors. */
enum { TOPS = 4 };
static const float tops[TOPS] = {127.0f, 125.0f, 123.0f, 121.0f};

/* In codes, the error of the code nearest to x * inverse. */
static inline lanes missed(lanes x, lanes inverse)
{
    return lanes_fma(x, inverse, lanes_sub(lanes_set(LANES_ROUNDER), lanes_shifted_product(x, inverse)));
}

/* The number of the first top with the least squared error. `inverses`: of each top's scale. */
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
    /* Branches would be mispredicted half the time: floats from 0 on are ordered like integers, and behind
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
    to->minus32_low = -32 * sum_low;
    to->minus32_high = -32 * sum_high;
}

/* A block's steps depend on one another, those of other blocks do not: eight together take a fifth less time than one by
 * one (Emerald Rapids). Sixteen are not faster. */
enum { BLOCKS_TOGETHER = 8 };

/* Up to BLOCKS_TOGETHER blocks. */
static inline void quantise_some(const float *x, size_t blocks, struct activation_block *to, size_t apart)
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
            put_codes(x + b * BLOCK, inverses[b][best[b]], scale_of(largest[b] / tops[best[b]]), to + b * apart);
        else
            to[b * apart] = (struct activation_block){.scale = finite ? 0 : NAN, .scaled_sum = finite ? 0 : NAN};
    }
}

static void quantise(const float *x, size_t blocks, struct activation_block *to, size_t apart)
{
    for (size_t b = 0; b < blocks; b += BLOCKS_TOGETHER) {
        size_t left = blocks - b;
        quantise_some(x + b * BLOCK, left < BLOCKS_TOGETHER ? left : BLOCKS_TOGETHER, to + b * apart, apart);
    }
}

#endif
