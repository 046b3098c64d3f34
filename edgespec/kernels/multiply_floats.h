/* Products of float weights over lanes, column by column. */
#ifndef EDGESPEC_MULTIPLY_FLOATS_H
#define EDGESPEC_MULTIPLY_FLOATS_H

#include "lanes.h"
#include "level.h"
#include "multiply_passes.h"
#include "unrolled.h"

ALWAYS_INLINE lanes load_weights(const int64_t type, const uint8_t *line)
{
    const void *at = line;
    switch (type) {
    case ES_F32: return lanes_load(at);
    case ES_F16: return lanes_from_halves(at);
    default: return lanes_from_bfloats(at);
    }
}

ALWAYS_INLINE void add_columns(const int64_t type, const int rows, const uint8_t *tile, const float *x,
                               size_t columns, float (*out)[TILE_ROWS])
{
    const size_t line_bytes = type == ES_F32 ? LINE_BYTES : HALF_LINE_BYTES;
    lanes sum[FEW_ROWS];
    UNROLLED
    for (int r = 0; r < rows; r++)
        sum[r] = lanes_set(0.0f);
    for (size_t k = 0; k < columns; k++, tile += line_bytes) {
        lanes weights = load_weights(type, tile);
        UNROLLED
        for (int r = 0; r < rows; r++)
            sum[r] = lanes_fma(weights, lanes_set(x[(size_t)r * columns + k]), sum[r]);
    }
    UNROLLED
    for (int r = 0; r < rows; r++)
        lanes_store(out[r], sum[r]);
}

#define DEFINE_FLOATS(name, type)                                                                            \
    static void add_##name(size_t rows, const uint8_t *tile, const float *x, size_t columns,                 \
                           float (*out)[TILE_ROWS])                                                          \
    {                                                                                                        \
        EACH_COUNT(ADD_COLUMNS, type)                                                                        \
    }                                                                                                        \
    static void multiply_##name(const uint8_t *tile, const struct activations *x, size_t first, size_t rows, \
                                float out[][TILE_ROWS])                                                      \
    {                                                                                                        \
        size_t pass = rows_of_pass(rows);                                                                    \
        for (size_t r = 0; r < rows; r += pass)                                                              \
            add_##name(rows - r < pass ? rows - r : pass, tile, x->floats + (first + r) * x->columns,        \
                       x->columns, out + r);                                                                 \
    }
#define ADD_COLUMNS(count, type) add_columns(type, count, tile, x, columns, out);

DEFINE_FLOATS(f32, ES_F32)
DEFINE_FLOATS(f16, ES_F16)
DEFINE_FLOATS(bf16, ES_BF16)

#endif
