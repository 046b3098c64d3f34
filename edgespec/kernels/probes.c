/* Single kernels for the tests, which compare them with numpy and between levels. */
#include <math.h>
#include <stdlib.h>

#include "angle.h"
#include "float_mode.h"
#include "level.h"

#define ON_LEVEL(call)                                 \
    const struct level *level = level_of(number);      \
    if (!level || length < 1 || length % BLOCK)        \
        return ES_BAD_REQUEST;                         \
    unsigned mode = float_mode_set();                  \
    level->call;                                       \
    float_mode_restore(mode);                          \
    return ES_OK

int32_t es_normalise(const float *x, const float *weight, double epsilon, int64_t length, float *y, int32_t number)
{
    ON_LEVEL(normalise(x, weight, (float)epsilon, (size_t)length, y));
}

int32_t es_exponential(const float *x, int64_t length, float *y, int32_t number)
{
    ON_LEVEL(exponential(x, (size_t)length, y));
}

int32_t es_join(int64_t activation, const float *gate, const float *up, int64_t length, float *y, int32_t number)
{
    if (activation < 0 || activation >= ES_ACTIVATIONS)
        return ES_BAD_REQUEST;
    ON_LEVEL(join[activation](gate, up, (size_t)length, y));
}

int32_t es_cap(float *x, int64_t length, float most, int32_t number)
{
    const struct level *level = level_of(number);
    if (!level || length < 1)
        return ES_BAD_REQUEST;
    unsigned mode = float_mode_set();
    level->cap(x, (size_t)length, most);
    float_mode_restore(mode);
    return ES_OK;
}

int32_t es_quantise(const float *x, int64_t length, uint8_t *blocks, int32_t number)
{
    ON_LEVEL(quantise(x, (size_t)length / BLOCK, (struct activation_block *)(void *)blocks, 1));
}

void es_turns(const double *angles, int64_t count, float *y)
{
    unsigned mode = float_mode_set();
    for (int64_t i = 0; i < count; i++)
        turn_of(angles[i], y + 2 * i);
    float_mode_restore(mode);
}

int32_t es_attend(const float *keys, const float *values, int64_t positions, int64_t head_length, const float *queries,
                  const int64_t *seen, int64_t count, int64_t own_from, float cap, const float *sinks, float *out,
                  int32_t number)
{
    const struct level *level = level_of(number);
    if (!level || head_length < TILE_ROWS || head_length % TILE_ROWS || count < 1 || count > MOST_QUERIES ||
        own_from < 0 || own_from % TILE_ROWS)
        return ES_BAD_REQUEST;
    size_t length = (size_t)head_length, padded = ((size_t)positions + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS;
    uint16_t *cache = calloc(2 * padded * length, sizeof *cache);
    if (!cache)
        return ES_BAD_REQUEST;
    for (size_t p = 0; p < (size_t)positions; p++) {
        uint16_t *tile = cache + p / TILE_ROWS * TILE_ROWS * length;
        level->to_halves(keys + p * length, length, tile + p % TILE_ROWS, TILE_ROWS);
        level->to_halves(values + p * length, length, cache + (padded + p) * length, 1);
    }
    const struct attention_cache view = {
        .keys = cache,
        .values = cache + padded * length,
        .head_length = length,
        .own_from = (size_t)own_from,
    };
    size_t own = own_from < positions ? view.own_from * length : 0;
    struct attention_query query[MOST_QUERIES];
    for (size_t q = 0; q < (size_t)count; q++)
        query[q] = (struct attention_query){
            .from = queries + q * length,
            .out = out + q * length,
            .first = (size_t)seen[2 * q],
            .end = (size_t)seen[2 * q + 1],
            .own_keys = view.keys + own,
            .own_values = view.values + own,
            .sink = sinks ? sinks + q : NULL,
        };
    unsigned mode = float_mode_set();
    level->attend(&view, 1.0f / sqrtf((float)length), cap, (size_t)count, query);
    float_mode_restore(mode);
    free(cache);
    return ES_OK;
}
