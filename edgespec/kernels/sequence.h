/* One cache, the buffers of its forwards, and its threads. */
#ifndef EDGESPEC_SEQUENCE_H
#define EDGESPEC_SEQUENCE_H

#include <stdatomic.h>
#include <sys/types.h>

#include "activation.h"
#include "edgespec_kernels.h"
#include "level.h"
#include "pool.h"

struct es_sequence {
    const struct es_model *model;
    const struct level *level;
    struct pool *pool;
    atomic_int cancelled;
    pid_t process;

    size_t context_length;
    size_t positions; /* context_length rounded up to whole tiles of keys */
    uint16_t *cache;  /* keys, then values: [layer][kv head][positions][head_length], see struct attention_cache */
    size_t cache_bytes;

    /* Buffers for ES_MOST_TOKENS rows; what a forward does not use is never touched, and takes no memory. */
    uint8_t *buffers;
    size_t buffer_bytes;
    float *hidden;             /* [row][embedding]: the residual stream */
    float *rotation;           /* [row][rope_length / 2][cos, sin] */
    float *projected;          /* [row][query heads, key heads, value heads] */
    struct activations normed; /* what the projections and the head read */
    struct activations mixed;  /* what attention gives */
    struct activations fed;    /* what the feed-forward's second half reads */
    float *scores;             /* [scored][vocabulary] */
    int32_t scored;
};

static inline size_t query_length(const struct es_model *model)
{
    return (size_t)(model->heads * model->head_length);
}

static inline size_t projected_length(const struct es_model *model)
{
    return (size_t)((model->heads + 2 * model->kv_heads) * model->head_length);
}

static inline size_t head_cache_length(const struct es_sequence *sequence)
{
    return sequence->positions * (size_t)sequence->model->head_length;
}

static inline uint16_t *keys_of(const struct es_sequence *sequence, size_t layer, size_t kv_head)
{
    return sequence->cache + (layer * (size_t)sequence->model->kv_heads + kv_head) * head_cache_length(sequence);
}

static inline uint16_t *values_of(const struct es_sequence *sequence, size_t layer, size_t kv_head)
{
    return keys_of(sequence, (size_t)sequence->model->layers + layer, kv_head);
}

#endif
