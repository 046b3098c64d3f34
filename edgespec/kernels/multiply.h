/* Matrices times rows, tile by tile. */
#ifndef EDGESPEC_MULTIPLY_H
#define EDGESPEC_MULTIPLY_H

#include "level.h"

/* Where a product goes: row r, element n of `to`, next to or added to the existing values. With `row_to`: each row to a
 * separate place, row_to[r], from element `column` on. */
struct product {
    const struct es_matrix *matrix;
    float *to;
    size_t stride;
    int adds;
    float *const *row_to;
    size_t column;
};

/* Passes of at most PASS_ROWS rows, as equal as can be: pass p of a count begins at row pass_start(count, p). */
static inline size_t pass_count(size_t rows)
{
    return (rows + PASS_ROWS - 1) / PASS_ROWS;
}

static inline size_t pass_start(size_t rows, size_t pass)
{
    return rows * pass / pass_count(rows);
}

/* Sixteen outputs of `rows` inputs from `first` on, bias included. rows <= PASS_ROWS. */
void multiply_tile(const struct level *level, const struct es_matrix *matrix, size_t tile, const struct activations *x,
                   size_t first, size_t rows, float out[][TILE_ROWS]);

/* From this many rows on, two tiles at a time are faster, if the level has that function. One thread, Q4_K, Emerald Rapids
 * server: 1.06 times the time with 16 rows, 1 / 1.04 with 24, 1 / 1.10 with 32 and 1 / 1.24 with 256. More tiles together
 * would only enlarge the buffers. */
enum { LEAST_PAIR_ROWS = 32, MOST_PAIR_ROWS = ES_MOST_TOKENS };

static inline int takes_pairs(const struct level *level, const struct es_matrix *a, const struct es_matrix *b,
                              size_t rows)
{
    return rows >= LEAST_PAIR_ROWS && a->type == b->type && a->columns == b->columns && level->multiply_pair[a->type];
}

/* The outputs of tile tiles[t] of matrix t for `rows` inputs from `first` on, biases included, for matrices that
 * takes_pairs accepts. It also prefetches the tiles behind these two. */
void multiply_pair(const struct level *level, const struct es_matrix *const matrices[2], const size_t tiles[2],
                   const struct activations *x, size_t first, size_t rows, float (*out)[2][TILE_ROWS]);

/* Tiles begin .. end - 1 of a row of matrices that read the same input, counted through all of them. */
void multiply_tiles(const struct level *level, const struct product *products, size_t count, size_t begin, size_t end,
                    const struct activations *x, size_t rows);

static inline size_t product_tiles(const struct product *products, size_t count)
{
    size_t tiles = 0;
    for (size_t i = 0; i < count; i++)
        tiles += tile_count(products[i].matrix->rows);
    return tiles;
}

#endif
