/* Quantised activations, in the form that the products read. */
#ifndef EDGESPEC_ACTIVATION_H
#define EDGESPEC_ACTIVATION_H

#include <stddef.h>
#include <stdint.h>

/* 32 activations as x = scale * q, with what folds the weights' offsets in.
 *
 * Weights are stored unsigned, w = d * (code - offset) or w = d * code + m, so that
 *     sum w x = d * scale * (sum code q - offset * sum q)   or   d * scale * sum code q + m * scale * sum q.
 * The sums are integers and exact. `minus8` is -8 * sum q; the offsets of other types are powers of two of it.
 * `minus32_low` and `minus32_high` are -32 * sum q of the first 16 and of the last, for types with a scale for
 * each. They are stored because four bytes cost less than another vector operation on x86. `scaled_sum` is
 * scale * sum q. */
struct activation_block {
    float scale;
    float scaled_sum;
    int32_t minus8;
    int32_t minus32_low;
    int32_t minus32_high;
    int8_t q[32];
};

/* Rows of input: quantised, as floats, or both, as their matrices need. `columns` counts those of `floats`;
 * `blocks` has columns / 32 to the row. */
struct activations {
    struct activation_block *blocks;
    float *floats;
    size_t columns;
};

#endif
