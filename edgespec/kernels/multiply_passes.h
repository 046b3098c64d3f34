/* For instruction sets with fewer or narrower registers than AVX-512: 4 inputs at a time. */
#ifndef EDGESPEC_MULTIPLY_PASSES_H
#define EDGESPEC_MULTIPLY_PASSES_H

#include <stddef.h>

/* Of 16 registers, AVX2's, 8 codes and the sums of 4 inputs leave 4 for all else. */
enum { FEW_ROWS = 4 };

/* Inputs of the first of one or two passes: 5 are 3 and 2, not 4 and 1. */
static inline size_t rows_of_pass(size_t rows)
{
    return rows <= FEW_ROWS ? rows : (rows + 1) / 2;
}

/* call(n, ...) for the constant n that `rows` is. */
#define EACH_COUNT(call, ...)           \
    switch (rows) {                     \
    case 1: call(1, __VA_ARGS__) break; \
    case 2: call(2, __VA_ARGS__) break; \
    case 3: call(3, __VA_ARGS__) break; \
    case 4: call(4, __VA_ARGS__) break; \
    }

#endif
