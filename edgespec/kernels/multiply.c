#include "multiply.h"

#include <stdlib.h>
#include <string.h>

#include "float_mode.h"

void multiply_tile(const struct level *level, const struct es_matrix *matrix, size_t tile, const struct activations *x,
                   size_t first, size_t rows, float out[][TILE_ROWS])
{
    const uint8_t *tiles = matrix->tiles + tile * tile_bytes(matrix->type, matrix->columns);
    multiply_of(level, matrix->type)(tiles, x, first, rows, out);
    if (!matrix->bias)
        return;
    size_t start = tile * TILE_ROWS, left = (size_t)matrix->rows - start;
    size_t lanes = left < TILE_ROWS ? left : TILE_ROWS;
    for (size_t r = 0; r < rows; r++)
        for (size_t lane = 0; lane < lanes; lane++)
            out[r][lane] += matrix->bias[start + lane];
}

static void put(const struct product *product, size_t tile, size_t row, const float *from)
{
    size_t start = tile * TILE_ROWS, left = (size_t)product->matrix->rows - start;
    size_t lanes = left < TILE_ROWS ? left : TILE_ROWS;
    float *to = product->to + row * product->stride + start;
    if (product->adds)
        for (size_t lane = 0; lane < lanes; lane++)
            to[lane] += from[lane];
    else
        memcpy(to, from, lanes * sizeof *to);
}

void multiply_tiles(const struct level *level, const struct product *products, size_t count, size_t begin, size_t end,
                    const struct activations *x, size_t rows)
{
    for (size_t i = 0; i < count; i++) {
        const struct product *product = &products[i];
        size_t own = tile_count(product->matrix->rows);
        for (size_t tile = begin; tile < end && tile < own; tile++)
            for (size_t pass = 0; pass < pass_count(rows); pass++) {
                float out[PASS_ROWS][TILE_ROWS];
                size_t first = pass_start(rows, pass), here = pass_start(rows, pass + 1) - first;
                multiply_tile(level, product->matrix, tile, x, first, here, out);
                for (size_t r = 0; r < here; r++)
                    put(product, tile, first + r, out[r]);
            }
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
    level->quantise(x, blocks, input.blocks);
    struct product product = {.matrix = matrix, .to = y, .stride = (size_t)matrix->rows};
    multiply_tiles(level, &product, 1, 0, tile_count(matrix->rows), &input, (size_t)rows);
    float_mode_restore(mode);
    free(input.blocks);
    return ES_OK;
}
