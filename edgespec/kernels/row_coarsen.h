/* Weights as blocks of Q4_0, written over lanes; included by each level's file. */
#ifndef EDGESPEC_ROW_COARSEN_H
#define EDGESPEC_ROW_COARSEN_H

#include "half.h"
#include "lanes.h"
#include "level.h"
#include "unrolled.h"

/* The largest weight by magnitude gets the code -8 or nearly so: scales are tried that give it -7.25 to -9.25, in steps of
 * a half. A drafter's first choices stay right as often as with nine scales from -6.5 on, and more often than with the
 * three next to -8 (docs/results/native.md). */
enum { SCALES_TRIED = 5 };
#define FIRST_CODE (-7.25f)
#define CODES_APART 0.5f

/* A half cannot hold the scale of a much larger weight, and rounds that of a smaller one to 0. */
#define LARGEST_COARSE (7.0f * 65504.0f)
#define LEAST_COARSE 0x1p-24f

/* x * inverse between the least code and the most, in the last bits of the result. */
static inline lanes shifted_code(lanes x, lanes inverse)
{
    lanes value = lanes_max(lanes_min(lanes_mul(x, inverse), lanes_set(7.0f)), lanes_set(-8.0f));
    return lanes_add(value, lanes_set(LANES_ROUNDER));
}

/* Adds to sums over half a block: size * x * code and size * code * code. Errors weigh as much as the weight is large. */
static inline void add_codes(lanes x, lanes inverse, lanes *product, lanes *square)
{
    lanes code = lanes_sub(shifted_code(x, inverse), lanes_set(LANES_ROUNDER));
    lanes size = lanes_max(x, lanes_sub(lanes_set(0.0f), x));
    *product = lanes_fma(lanes_mul(size, x), code, *product);
    *square = lanes_fma(lanes_mul(size, code), code, *square);
}

/* Of the scales tried, the one with the least weighted squared error, each scale refitted to its codes (as in llama.cpp's
 * quantisation with an importance matrix). `top`: the weight with the largest magnitude. */
static inline float coarse_scale(lanes low, lanes high, float top)
{
    float best = -1.0f, scale = 0.0f;
    for (int i = 0; i < SCALES_TRIED; i++) {
        lanes inverse = lanes_set((FIRST_CODE - CODES_APART * (float)i) / top), product = lanes_set(0.0f), square = lanes_set(0.0f);
        add_codes(low, inverse, &product, &square);
        add_codes(high, inverse, &product, &square);
        float both = lanes_sum(product), own = lanes_sum(square), tried = both / own; /* own > 0: top has a code */
        if (tried * both > best) {
            best = tried * both;
            scale = tried;
        }
    }
    return scale;
}

static inline void put_nibbles(lanes low, lanes high, lanes inverse, uint8_t *to)
{
    const lanes_int offset = lanes_int_set(8 - LANES_ROUNDER_BITS);
    int8_t each[2][LANES];
    lanes_int_store_bytes(each[0], lanes_int_add(lanes_bits(shifted_code(low, inverse)), offset));
    lanes_int_store_bytes(each[1], lanes_int_add(lanes_bits(shifted_code(high, inverse)), offset));
    for (int k = 0; k < LANES; k++)
        to[k] = (uint8_t)(each[0][k] | each[1][k] << 4);
}

/* One block in file format. Returns false and writes zeros if Q4_0 cannot hold it. */
static inline int coarsen_block(const float *x, uint8_t *to)
{
    lanes low = lanes_load(x), high = lanes_load(x + LANES), zero = lanes_set(0.0f);
    float most = lanes_largest(lanes_max(low, high)), least = lanes_largest(lanes_sub(zero, lanes_min(low, high)));
    float size = most >= least ? most : least;
    memset(to, 0, file_block_bytes(ES_Q4_0));
    if (lanes_any_nan(low) || lanes_any_nan(high) || !(size <= LARGEST_COARSE))
        return 0;
    uint16_t half = size < LEAST_COARSE ? 0 : float_to_half(coarse_scale(low, high, most >= least ? most : -least));
    float scale = half_to_float(half);
    if (scale == 0.0f)
        return 1;
    if ((half & 0x7c00u) == 0x7c00u) /* refitted to the other weights, it may be larger than the largest one's */
        return 0;
    memcpy(to, &half, sizeof half);
    put_nibbles(low, high, lanes_set(1.0f / scale), to + sizeof half);
    return 1;
}

static int coarsen(const float *x, size_t blocks, uint8_t *to)
{
    int finite = 1;
    for (size_t b = 0; b < blocks; b++)
        finite &= coarsen_block(x + b * BLOCK, to + b * file_block_bytes(ES_Q4_0));
    return finite;
}

#endif
