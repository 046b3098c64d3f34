/* One cache, and the scores of its last forward. */
#ifndef EDGESPEC_SEQUENCE_H
#define EDGESPEC_SEQUENCE_H

#include <stdatomic.h>
#include <string.h>

#include "activation.h"
#include "edgespec_kernels.h"
#include "level.h"
#include "pool.h"

struct es_sequence {
    struct es_batch *batch; /* what computes */
    const struct es_model *model;
    const atomic_int *cancelled;
    struct es_matrix heads[ES_MOST_HEADS]; /* what scores rows now: the model's head, or parts of it side by side */
    int32_t head_count;
    size_t head_rows;
    const struct level *level;

    const double *frequencies; /* of the rotation, by the context's length */
    size_t context_length;
    size_t positions; /* context_length rounded up to whole tiles of keys */
    uint16_t *cache;  /* keys, then values: [layer][kv head][positions][head_length], see struct attention_cache */
    const size_t *cache_at; /* [layers + 1]: elements of a position in the layers before; those of all */
    size_t cache_bytes;
    const struct es_sequence *lender; /* whose cache that is; null: its own */
    size_t *lent_at;                  /* cache_at then */

    /* Of the gated delta layers; see delta.c. */
    float *states;     /* [layer][head][enum delta_state][delta_length][delta_length] */
    int64_t *state_at; /* [layer][head][enum delta_state]: the tokens that a state is after */
    float *log;        /* [layer][position modulo LOG_ROWS][log_length]: the rows as projected */
    size_t state_bytes;

    /* What a caller asked to keep of the scored rows: slot i, [scored][embedding], is of layer kept_layers[i]. */
    int64_t *kept_layers;
    float *kept;
    size_t kept_count, kept_bytes;

    /* What forwards do not use is never touched, and takes no memory. */
    uint8_t *buffers;
    size_t buffer_bytes;
    float *scores;  /* [scored][head_rows] */
    uint16_t *tree; /* keys, then values of a tree's nodes: [layer][kv head][node][head_length] */
    int32_t scored;
};

/* Rows of a chunk that attention takes at a time, and the positions that a row's path can add to the last tile. */
enum { ATTENTION_ROWS = 8, PATH_POSITIONS = (TILE_ROWS - 1 + ES_MOST_SCORED + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS };

/* Rows times heads times blocks of positions whose attention is kept until it is merged: at most 4 MB with heads of 128
 * elements, which is one token of 32 heads with a context of 65536. */
enum { MOST_BLOCK_SUMS = 8192 };

/* Where a layer's hidden rows are kept, for layer -1 those after the head's norm; null if they are not. */
float *kept_slot(const struct es_sequence *sequence, int64_t layer);

/* Of the layer with the longest heads. */
static inline size_t query_length(const struct es_model *model)
{
    return (size_t)(model->heads * model->head_length);
}

/* Queries of the same layer, with gates where heads have them. */
static inline size_t asked_length(const struct es_model *model)
{
    return query_length(model) * (model->gates_heads ? 2 : 1);
}

/* Room for a row's queries, keys and values of any layer. */
static inline size_t projected_length(const struct es_model *model)
{
    return asked_length(model) + (size_t)(2 * model->kv_heads * model->head_length);
}

static inline bool has_keys(const struct es_model *model, size_t layer)
{
    const struct es_layer *own = &model->layer[layer];
    return !model->borrows && !own->delta.mixed.tiles && own->cache_layer == (int64_t)layer;
}

/* Elements of a position in the layers whose keys are before a head's. */
static inline size_t head_at(const struct es_sequence *sequence, size_t layer, size_t kv_head)
{
    return sequence->cache_at[layer] + kv_head * (size_t)sequence->model->layer[layer].head_length;
}

/* The same of all layers' keys, which are before the values. */
static inline size_t keys_length(const struct es_sequence *sequence)
{
    return sequence->cache_at[sequence->model->layers];
}

static inline uint16_t *keys_of(const struct es_sequence *sequence, size_t layer, size_t kv_head)
{
    return sequence->cache + head_at(sequence, layer, kv_head) * sequence->positions;
}

static inline uint16_t *values_of(const struct es_sequence *sequence, size_t layer, size_t kv_head)
{
    return keys_of(sequence, layer, kv_head) + keys_length(sequence) * sequence->positions;
}

static inline uint16_t *tree_key_of(const struct es_sequence *sequence, size_t layer, size_t kv_head, size_t node)
{
    return sequence->tree + head_at(sequence, layer, kv_head) * ES_MOST_SCORED +
           node * (size_t)sequence->model->layer[layer].head_length;
}

static inline uint16_t *tree_value_of(const struct es_sequence *sequence, size_t layer, size_t kv_head, size_t node)
{
    return tree_key_of(sequence, layer, kv_head, node) + keys_length(sequence) * ES_MOST_SCORED;
}

/* Puts one position's key and value among others laid out as in struct attention_cache. */
static inline void put_position(uint16_t *keys, uint16_t *values, size_t head_length, size_t position,
                                const uint16_t *key, const uint16_t *value)
{
    keys += position / TILE_ROWS * TILE_ROWS * head_length + position % TILE_ROWS;
    for (size_t d = 0; d < head_length; d++)
        keys[d * TILE_ROWS] = key[d];
    memcpy(values + position * head_length, value, head_length * sizeof *value);
}

#endif
