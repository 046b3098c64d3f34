/* Products in plain C: the definition in level.h, and the reference for every other level. */
#ifndef EDGESPEC_MULTIPLY_PORTABLE_H
#define EDGESPEC_MULTIPLY_PORTABLE_H

#include <math.h>

#include "half.h"
#include "level.h"
#include "tables.h"

/* A block of 32 columns as the file means it: weight = scale * (code - offset) + minimum. */
struct plain_block {
    int32_t weights[BLOCK][TILE_ROWS]; /* code - offset */
    float scale[TILE_ROWS];            /* Q3_K, Q6_K: of the first 16 columns */
    float scale_high[TILE_ROWS];       /* Q3_K, Q6_K: of the last 16 */
    float minimum[TILE_ROWS];
};

static float half_of_row(const uint8_t *line, int row)
{
    uint16_t half;
    memcpy(&half, line + 2 * row, sizeof half);
    return half_to_float(half);
}

static void read_halves(const uint8_t *line, float *to)
{
    for (int row = 0; row < TILE_ROWS; row++)
        to[row] = half_of_row(line, row);
}

/* Code `byte` of dword j of a row: see layout.h. */
static int32_t code_at(int64_t type, const uint8_t *lines, int j, int row, int byte)
{
    const uint8_t *at = lines + row * 4 + byte;
    if (type == ES_Q8_0)
        return (int8_t)at[j * LINE_BYTES];
    if (type == ES_Q3_K)
        return ((at[(1 + j / 4) * LINE_BYTES] >> j % 4 * 2 & 3) | (at[0] >> j & 1) << 2) - 4;
    int32_t low = at[j % 4 * LINE_BYTES] >> j / 4 * 4 & 15;
    switch (type) {
    case ES_Q4_0: return low - 8;
    case ES_Q5_0: return (low | (at[4 * LINE_BYTES] >> j & 1) << 4) - 16;
    case ES_Q5_1:
    case ES_Q5_K: return low | (at[4 * LINE_BYTES] >> j & 1) << 4;
    case ES_Q6_K: return (low | (at[(4 + j / 4) * LINE_BYTES] >> j % 4 * 2 & 3) << 4) - 32;
    default: return has_table(type) ? values_of(type)[low] : low;
    }
}

static void read_codes(int64_t type, const uint8_t *lines, struct plain_block *to)
{
    for (int j = 0; j < 8; j++)
        for (int row = 0; row < TILE_ROWS; row++)
            for (int byte = 0; byte < 4; byte++)
                to->weights[4 * j + byte][row] = code_at(type, lines, j, row, byte);
}

/* Scale and minimum b of eight, in 12 bytes that stand 4 to a line. */
static void read_six_bits(const uint8_t *behind, size_t b, struct plain_block *to)
{
    float d[TILE_ROWS], dmin[TILE_ROWS];
    read_halves(behind + K_D_AT, d);
    read_halves(behind + K_DMIN_AT, dmin);
    for (int row = 0; row < TILE_ROWS; row++) {
        const uint8_t *scales = behind + row * 4 + b % 4, *minimums = scales + LINE_BYTES;
        int32_t scale = *scales & 63, minimum = *minimums & 63;
        if (b >= 4) {
            int32_t both = scales[2 * LINE_BYTES];
            scale = (both & 15) | *scales >> 6 << 4;
            minimum = both >> 4 | *minimums >> 6 << 4;
        }
        to->scale[row] = d[row] * (float)scale;
        to->minimum[row] = -(dmin[row] * (float)minimum);
    }
}

static void read_two_scales(const uint8_t *behind, size_t b, struct plain_block *to)
{
    float d[TILE_ROWS];
    read_halves(behind + Q6_K_D_AT, d);
    for (int row = 0; row < TILE_ROWS; row++) {
        const uint8_t *pair = behind + b * HALF_LINE_BYTES + row * 2;
        to->scale[row] = d[row] * (float)(int8_t)pair[0];
        to->scale_high[row] = d[row] * (float)(int8_t)pair[1];
    }
}

static void read_byte_scale(const uint8_t *behind, size_t b, struct plain_block *to)
{
    float d[TILE_ROWS];
    memcpy(d, behind + TABLE_D_AT, sizeof d);
    for (int row = 0; row < TILE_ROWS; row++)
        to->scale[row] = d[row] * (float)(int8_t)behind[b * QUARTER_LINE_BYTES + (size_t)row];
}

static void read_exponents(const uint8_t *behind, size_t b, struct plain_block *to)
{
    for (int row = 0; row < TILE_ROWS; row++)
        to->scale[row] = scale_of_exponent(behind[b * QUARTER_LINE_BYTES + (size_t)row]);
}

static int has_minimum(int64_t type)
{
    return type == ES_Q4_1 || type == ES_Q5_1 || type == ES_Q4_K || type == ES_Q5_K;
}

/* Block b of a group of `here`. */
static void read_block(int64_t type, const uint8_t *group, size_t here, size_t b, struct plain_block *to)
{
    const uint8_t *behind = group + here * code_lines(type) * LINE_BYTES;
    read_codes(type, group + b * code_lines(type) * LINE_BYTES, to);
    switch (type) {
    case ES_Q4_K:
    case ES_Q5_K: read_six_bits(behind, b, to); break;
    case ES_Q3_K:
    case ES_Q6_K: read_two_scales(behind, b, to); break;
    case ES_IQ4_XS:
    case ES_IQ3_S:
    case ES_IQ3_XXS: read_byte_scale(behind, b, to); break;
    case ES_MXFP4: read_exponents(behind, b, to); break;
    default:
        read_halves(behind + b * HALF_LINE_BYTES, to->scale);
        if (has_minimum(type))
            read_halves(behind + (here + b) * HALF_LINE_BYTES, to->minimum);
    }
}

static int32_t dot_product(const struct plain_block *block, int row, const int8_t *x, int begin, int end)
{
    int32_t dot = 0;
    for (int k = begin; k < end; k++)
        dot += block->weights[k][row] * x[k];
    return dot;
}

/* One step of an output's chain. */
static float add_block(int64_t type, const struct plain_block *block, int row, const struct activation_block *x,
                       float sum)
{
    if (has_two_scales(type)) {
        float part = (float)dot_product(block, row, x->q, 0, BLOCK / 2) * block->scale[row];
        part = fmaf((float)dot_product(block, row, x->q, BLOCK / 2, BLOCK), block->scale_high[row], part);
        return fmaf(part, x->scale, sum);
    }
    sum = fmaf((float)dot_product(block, row, x->q, 0, BLOCK), block->scale[row] * x->scale, sum);
    return has_minimum(type) ? fmaf(block->minimum[row], x->scaled_sum, sum) : sum;
}

static void multiply_blocks(int64_t type, const uint8_t *tile, const struct activations *x, size_t first, size_t rows,
                            float out[][TILE_ROWS])
{
    size_t blocks = x->columns / BLOCK;
    const struct activation_block *input = x->blocks + first * blocks;
    memset(out, 0, rows * sizeof out[0]);
    for (size_t start = 0; start < blocks; start += GROUP_BLOCKS) {
        size_t here = blocks - start < GROUP_BLOCKS ? blocks - start : GROUP_BLOCKS;
        for (size_t b = 0; b < here; b++) {
            struct plain_block block;
            read_block(type, tile, here, b, &block);
            for (size_t r = 0; r < rows; r++)
                for (int row = 0; row < TILE_ROWS; row++)
                    out[r][row] = add_block(type, &block, row, &input[r * blocks + start + b], out[r][row]);
        }
        tile += here * block_bytes(type);
    }
}

static float float_of_row(int64_t type, const uint8_t *line, int row)
{
    uint32_t bits = 0;
    if (type == ES_F16)
        return half_of_row(line, row);
    if (type == ES_F32)
        memcpy(&bits, line + 4 * row, 4);
    else
        bits = (uint32_t)line[2 * row] << 16 | (uint32_t)line[2 * row + 1] << 24;
    return float_of_bits(bits);
}

static void multiply_floats(int64_t type, const uint8_t *tile, const struct activations *x, size_t first, size_t rows,
                            float out[][TILE_ROWS])
{
    size_t line_bytes = type == ES_F32 ? LINE_BYTES : HALF_LINE_BYTES;
    memset(out, 0, rows * sizeof out[0]);
    for (size_t k = 0; k < x->columns; k++, tile += line_bytes)
        for (int row = 0; row < TILE_ROWS; row++) {
            float weight = float_of_row(type, tile, row);
            for (size_t r = 0; r < rows; r++)
                out[r][row] = fmaf(weight, x->floats[(first + r) * x->columns + k], out[r][row]);
        }
}

#define DEFINE_PRODUCT(name, how, type)                                                           \
    static void name(const uint8_t *tile, const struct activations *x, size_t first, size_t rows, \
                     float out[][TILE_ROWS])                                                      \
    {                                                                                             \
        how(type, tile, x, first, rows, out);                                                     \
    }

DEFINE_PRODUCT(multiply_q4_0, multiply_blocks, ES_Q4_0)
DEFINE_PRODUCT(multiply_q4_1, multiply_blocks, ES_Q4_1)
DEFINE_PRODUCT(multiply_q5_0, multiply_blocks, ES_Q5_0)
DEFINE_PRODUCT(multiply_q5_1, multiply_blocks, ES_Q5_1)
DEFINE_PRODUCT(multiply_q8_0, multiply_blocks, ES_Q8_0)
DEFINE_PRODUCT(multiply_q3_k, multiply_blocks, ES_Q3_K)
DEFINE_PRODUCT(multiply_q4_k, multiply_blocks, ES_Q4_K)
DEFINE_PRODUCT(multiply_q5_k, multiply_blocks, ES_Q5_K)
DEFINE_PRODUCT(multiply_q6_k, multiply_blocks, ES_Q6_K)
DEFINE_PRODUCT(multiply_iq3_xxs, multiply_blocks, ES_IQ3_XXS)
DEFINE_PRODUCT(multiply_iq3_s, multiply_blocks, ES_IQ3_S)
DEFINE_PRODUCT(multiply_iq4_nl, multiply_blocks, ES_IQ4_NL)
DEFINE_PRODUCT(multiply_iq4_xs, multiply_blocks, ES_IQ4_XS)
DEFINE_PRODUCT(multiply_mxfp4, multiply_blocks, ES_MXFP4)
DEFINE_PRODUCT(multiply_f32, multiply_floats, ES_F32)
DEFINE_PRODUCT(multiply_f16, multiply_floats, ES_F16)
DEFINE_PRODUCT(multiply_bf16, multiply_floats, ES_BF16)

#endif
