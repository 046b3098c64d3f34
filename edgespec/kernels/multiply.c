#include "multiply.h"

#include <stdlib.h>
#include <string.h>

#include "float_mode.h"
#include "unrolled.h"

static const uint8_t *tile_of(const struct es_matrix *matrix, size_t tile)
{
    return matrix->tiles + tile * tile_bytes(matrix->type, matrix->columns);
}

static void add_bias(const struct es_matrix *matrix, size_t tile, float *out)
{
    size_t start = tile * TILE_ROWS, left = (size_t)matrix->rows - start;
    size_t lanes = left < TILE_ROWS ? left : TILE_ROWS;
    for (size_t lane = 0; lane < lanes; lane++)
        out[lane] += matrix->bias[start + lane];
}

void multiply_tile(const struct level *level, const struct es_matrix *matrix, size_t tile, const struct activations *x,
                   size_t first, size_t rows, float out[][TILE_ROWS])
{
    multiply_of(level, matrix->type)(tile_of(matrix, tile), x, first, rows, out);
    for (size_t r = 0; matrix->bias && r < rows; r++)
        add_bias(matrix, tile, out[r]);
}

void multiply_pair(const struct level *level, const struct es_matrix *const matrices[2], const size_t tiles[2],
                   const struct activations *x, size_t first, size_t rows, float (*out)[2][TILE_ROWS])
{
    const uint8_t *const both[2] = {tile_of(matrices[0], tiles[0]), tile_of(matrices[1], tiles[1])};
    level->multiply_pair[matrices[0]->type](both, x, first, rows, out);
    for (size_t t = 0; t < 2; t++)
        for (size_t r = 0; matrices[t]->bias && r < rows; r++)
            add_bias(matrices[t], tiles[t], out[r][t]);
}

ALWAYS_INLINE void put_lanes(const struct product *product, float *to, const float *from, size_t lanes)
{
    if (product->adds)
        for (size_t lane = 0; lane < lanes; lane++)
            to[lane] += from[lane];
    else
        memcpy(to, from, lanes * sizeof *to);
}

static void put(const struct product *product, size_t tile, size_t row, const float *from)
{
    size_t start = tile * TILE_ROWS, left = (size_t)product->matrix->rows - start;
    float *to = product->row_to ? product->row_to[row] + product->column : product->to + row * product->stride;
    to += start;
    if (left >= TILE_ROWS)
        put_lanes(product, to, from, TILE_ROWS); /* a constant, so the compiler inlines and unrolls */
    else
        put_lanes(product, to, from, left);
}

static void multiply_one(const struct level *level, const struct product *product, size_t tile,
                         const struct activations *x, size_t rows)
{
    for (size_t pass = 0; pass < pass_count(rows); pass++) {
        float out[PASS_ROWS][TILE_ROWS];
        size_t first = pass_start(rows, pass), here = pass_start(rows, pass + 1) - first;
        multiply_tile(level, product->matrix, tile, x, first, here, out);
        for (size_t r = 0; r < here; r++)
            put(product, tile, first + r, out[r]);
    }
}

static void multiply_two(const struct level *level, const struct product *product, const size_t tiles[2],
                         const struct activations *x, size_t rows)
{
    const struct es_matrix *const matrices[2] = {product->matrix, product->matrix};
    float out[MOST_PAIR_ROWS][2][TILE_ROWS];
    for (size_t first = 0, here; first < rows; first += here) {
        here = rows - first < MOST_PAIR_ROWS ? rows - first : MOST_PAIR_ROWS;
        multiply_pair(level, matrices, tiles, x, first, here, out);
        for (size_t r = 0; r < here; r++)
            for (size_t t = 0; t < 2; t++)
                put(product, tiles[t], first + r, out[r][t]);
    }
}

void multiply_tiles(const struct level *level, const struct product *products, size_t count, size_t begin, size_t end,
                    const struct activations *x, size_t rows)
{
    for (size_t i = 0; i < count; i++) {
        const struct product *product = &products[i];
        size_t own = tile_count(product->matrix->rows), last = end < own ? end : own, rest = begin;
        if (begin < last && takes_pairs(level, product->matrix, product->matrix, rows)) {
            /* A tile of each half, so that both halves proceed in order. */
            size_t half = (last - begin) / 2;
            for (size_t tile = begin; tile < begin + half; tile++)
                multiply_two(level, product, (const size_t[]){tile, tile + half}, x, rows);
            rest += 2 * half;
        }
        for (size_t tile = rest; tile < last; tile++)
            multiply_one(level, product, tile, x, rows);
        begin = begin > own ? begin - own : 0;
        end = end > own ? end - own : 0;
    }
}

int32_t es_multiply(const struct es_matrix *matrix, const float *x, int64_t rows, float *y, int32_t level_number)
{
    const struct level *level = level_of(level_number);
    if (!level || !multiply_of(level, matrix->type) || rows < 1 ||
        matrix->columns % file_block_columns(matrix->type))
        return ES_BAD_REQUEST;
    struct activations input = {.floats = (float *)x, .columns = (size_t)matrix->columns};
    size_t blocks = (size_t)rows * input.columns / BLOCK;
    input.blocks = malloc(blocks * sizeof *input.blocks);
    if (!input.blocks)
        return ES_BAD_REQUEST;
    unsigned mode = float_mode_set();
    level->quantise(x, blocks, input.blocks, 1);
    struct product product = {.matrix = matrix, .to = y, .stride = (size_t)matrix->rows};
    multiply_tiles(level, &product, 1, 0, tile_count(matrix->rows), &input, (size_t)rows);
    float_mode_restore(mode);
    free(input.blocks);
    return ES_OK;
}
