/* Gated delta layers (Yang et al. 2025), over lanes; included by each level's file. */
#ifndef EDGESPEC_ROW_DELTA_H
#define EDGESPEC_ROW_DELTA_H

#include "lanes.h"
#include "level.h"
#include "unrolled.h"

static inline lanes sigmoid_lanes(lanes x)
{
    lanes one = lanes_set(1.0f);
    return lanes_div(one, lanes_add(one, lanes_exp(lanes_sub(lanes_set(0.0f), x))));
}

/* log(1 + e^x) = max(x, 0) + log(1 + u) with u = e^-|x|, and log(1 + u) = 2 artanh s with s = u / (2 + u) <= 1/3: the
 * first eight terms of the series of artanh leave less than 2^-29. */
static inline lanes softplus_lanes(lanes x)
{
    enum { TERMS = 8 };
    lanes zero = lanes_set(0.0f), negative = lanes_sub(zero, x);
    lanes u = lanes_exp(lanes_sub(zero, lanes_max(x, negative)));
    lanes s = lanes_div(u, lanes_add(lanes_set(2.0f), u)), squared = lanes_mul(s, s);
    lanes sum = lanes_set(2.0f / (2 * TERMS - 1));
    for (int term = TERMS - 2; term >= 0; term--)
        sum = lanes_fma(sum, squared, lanes_set(2.0f / (float)(2 * term + 1)));
    return lanes_fma(sum, s, lanes_max(zero, x));
}

static void gate_values(const float *gate, size_t length, float *x)
{
    for (size_t k = 0; k < length; k += LANES)
        lanes_store(x + k, lanes_mul(lanes_load(x + k), sigmoid_lanes(lanes_load(gate + k))));
}

static void convolve(const float *const *taps, size_t count, const float *kernel, size_t channels, size_t length, float *y)
{
    for (size_t k = 0; k < length; k += LANES) {
        lanes sum = lanes_set(0.0f);
        for (size_t tap = 0; tap < count; tap++)
            sum = lanes_fma(lanes_load(kernel + tap * channels + k), lanes_load(taps[tap] + k), sum);
        lanes_store(y + k, lanes_mul(sum, sigmoid_lanes(sum)));
    }
}

/* Columns of a state that are scanned together: their sums are registers. */
enum { SCAN_LANES = 4 };

ALWAYS_INLINE void scan_columns(float *state, size_t length, const struct delta_rows *rows, const float *decays,
                                const float *betas, size_t column, const int count)
{
    for (size_t r = 0; r < rows->count; r++) {
        const float *key = rows->keys + r * length, *query = rows->queries ? rows->queries + r * length : NULL;
        lanes decay = lanes_set(decays[r]), beta = lanes_set(betas[r]), change[SCAN_LANES], sum[SCAN_LANES];
        UNROLLED
        for (int c = 0; c < count; c++)
            sum[c] = lanes_set(0.0f);
        for (size_t i = 0; i < length; i++) {
            lanes k = lanes_set(key[i]);
            UNROLLED
            for (int c = 0; c < count; c++)
                sum[c] = lanes_fma(k, lanes_load(state + i * length + column + (size_t)c * LANES), sum[c]);
        }
        UNROLLED
        for (int c = 0; c < count; c++) {
            lanes value = lanes_load(rows->values + r * length + column + (size_t)c * LANES);
            change[c] = lanes_mul(beta, lanes_sub(value, lanes_mul(decay, sum[c])));
            sum[c] = lanes_set(0.0f);
        }
        for (size_t i = 0; i < length; i++) {
            lanes k = lanes_set(key[i]), q = lanes_set(query ? query[i] : 0.0f);
            UNROLLED
            for (int c = 0; c < count; c++) {
                float *at = state + i * length + column + (size_t)c * LANES;
                lanes next = lanes_fma(k, change[c], lanes_mul(decay, lanes_load(at)));
                lanes_store(at, next);
                sum[c] = lanes_fma(q, next, sum[c]);
            }
        }
        if (!query)
            continue;
        UNROLLED
        for (int c = 0; c < count; c++)
            lanes_store(rows->out + r * length + column + (size_t)c * LANES, sum[c]);
    }
}

/* Column by column of the state, in the order of rows: neither their number nor what is computed next to them changes a
 * bit. */
static void scan_rows(float *state, size_t length, float rate, const struct delta_rows *rows)
{
    float decays[LANES], betas[LANES];
    lanes_store(decays, lanes_exp(lanes_mul(lanes_set(rate), softplus_lanes(lanes_load(rows->decays)))));
    lanes_store(betas, sigmoid_lanes(lanes_load(rows->betas)));
    size_t column = 0;
    for (; column + SCAN_LANES * LANES <= length; column += SCAN_LANES * LANES)
        scan_columns(state, length, rows, decays, betas, column, SCAN_LANES);
    for (; column < length; column += LANES)
        scan_columns(state, length, rows, decays, betas, column, 1);
}

#endif
