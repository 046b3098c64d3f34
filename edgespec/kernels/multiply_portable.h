/* Products in plain C: the definition in level.h spelled out, and what every other level is tested against. */
#ifndef EDGESPEC_MULTIPLY_PORTABLE_H
#define EDGESPEC_MULTIPLY_PORTABLE_H

#include <math.h>

#include "half.h"
#include "level.h"

/* A block of 32 columns as the file means it: weight = scale * (code - offset) + minimum. */
struct plain_block {
    int32_t weights[BLOCK][TILE_ROWS]; /* code - offset */
    float scale[TILE_ROWS];
    float minimum[TILE_ROWS];
};

static float half_of_row(const uint8_t *line, int row)
{
    uint16_t half;
    memcpy(&half, line + 2 * row, sizeof half);
    return half_to_float(half);
}

static void read_nibbles(const uint8_t *lines, int32_t offset, struct plain_block *to)
{
    for (int j = 0; j < 4; j++)
        for (int row = 0; row < TILE_ROWS; row++)
            for (int byte = 0; byte < 4; byte++) {
                int32_t pair = lines[j * LINE_BYTES + row * 4 + byte];
                to->weights[4 * j + byte][row] = (pair & 15) - offset;
                to->weights[16 + 4 * j + byte][row] = (pair >> 4) - offset;
            }
}

static void read_bytes(const uint8_t *lines, struct plain_block *to)
{
    for (int j = 0; j < 8; j++)
        for (int row = 0; row < TILE_ROWS; row++)
            for (int byte = 0; byte < 4; byte++)
                to->weights[4 * j + byte][row] = (int8_t)lines[j * LINE_BYTES + row * 4 + byte];
}

static void read_halves(const uint8_t *line, float *to)
{
    for (int row = 0; row < TILE_ROWS; row++)
        to[row] = half_of_row(line, row);
}

/* One block of each row's chain. */
static void add_block(const struct plain_block *block, int has_minimum, const struct activation_block *x,
                      size_t stride, size_t rows, float out[][TILE_ROWS])
{
    for (size_t r = 0; r < rows; r++, x += stride)
        for (int row = 0; row < TILE_ROWS; row++) {
            int32_t dot = 0;
            for (int k = 0; k < BLOCK; k++)
                dot += block->weights[k][row] * x->q[k];
            out[r][row] = fmaf((float)dot, block->scale[row] * x->scale, out[r][row]);
            if (has_minimum)
                out[r][row] = fmaf(block->minimum[row], x->scaled_sum, out[r][row]);
        }
}

/* Walks the groups of a tile. `lines`: code lines of a block. */
static void multiply_blocks(int64_t type, size_t lines, const uint8_t *tile, const struct activations *x, size_t first,
                            size_t rows, float out[][TILE_ROWS])
{
    size_t blocks = x->columns / BLOCK;
    const struct activation_block *input = x->blocks + first * blocks;
    memset(out, 0, rows * sizeof out[0]);
    for (size_t start = 0; start < blocks; start += GROUP_BLOCKS) {
        size_t here = blocks - start < GROUP_BLOCKS ? blocks - start : GROUP_BLOCKS;
        const uint8_t *scales = tile + here * lines * LINE_BYTES;
        const uint8_t *minimums = scales + here * HALF_LINE_BYTES;
        for (size_t b = 0; b < here; b++) {
            struct plain_block block;
            if (type == ES_Q8_0)
                read_bytes(tile + b * lines * LINE_BYTES, &block);
            else
                read_nibbles(tile + b * lines * LINE_BYTES, type == ES_Q4_0 ? 8 : 0, &block);
            read_halves(scales + b * HALF_LINE_BYTES, block.scale);
            if (type == ES_Q4_1)
                read_halves(minimums + b * HALF_LINE_BYTES, block.minimum);
            add_block(&block, type == ES_Q4_1, input + start + b, blocks, rows, out);
        }
        tile += here * block_bytes(type);
    }
}

static void multiply_q4_0(const uint8_t *tile, const struct activations *x, size_t first, size_t rows,
                          float out[][TILE_ROWS])
{
    multiply_blocks(ES_Q4_0, 4, tile, x, first, rows, out);
}

static void multiply_q4_1(const uint8_t *tile, const struct activations *x, size_t first, size_t rows,
                          float out[][TILE_ROWS])
{
    multiply_blocks(ES_Q4_1, 4, tile, x, first, rows, out);
}

static void multiply_q8_0(const uint8_t *tile, const struct activations *x, size_t first, size_t rows,
                          float out[][TILE_ROWS])
{
    multiply_blocks(ES_Q8_0, 8, tile, x, first, rows, out);
}

static void multiply_floats(int64_t type, const uint8_t *tile, const struct activations *x, size_t first, size_t rows,
                            float out[][TILE_ROWS])
{
    size_t line_bytes = type == ES_F32 ? LINE_BYTES : HALF_LINE_BYTES;
    memset(out, 0, rows * sizeof out[0]);
    for (size_t k = 0; k < x->columns; k++, tile += line_bytes) {
        float weights[TILE_ROWS];
        if (type == ES_F32)
            memcpy(weights, tile, sizeof weights);
        else
            read_halves(tile, weights);
        for (size_t r = 0; r < rows; r++) {
            float value = x->floats[(first + r) * x->columns + k];
            for (int row = 0; row < TILE_ROWS; row++)
                out[r][row] = fmaf(weights[row], value, out[r][row]);
        }
    }
}

static void multiply_f16(const uint8_t *tile, const struct activations *x, size_t first, size_t rows,
                         float out[][TILE_ROWS])
{
    multiply_floats(ES_F16, tile, x, first, rows, out);
}

static void multiply_f32(const uint8_t *tile, const struct activations *x, size_t first, size_t rows,
                         float out[][TILE_ROWS])
{
    multiply_floats(ES_F32, tile, x, first, rows, out);
}

#endif
