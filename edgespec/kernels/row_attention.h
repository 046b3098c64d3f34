/* Attention of a few queries over one key-value head, block by block; included by each level's file.
 *
 * Online softmax (Milakov and Gimelshein 2018): each block of positions gives its largest score, the sum of its
 * exponentials and the weighted sum of its values, and these are merged in ascending order. What a query computes
 * depends on nothing but itself and the positions it sees; queries only share the reading of keys and values. */
#ifndef EDGESPEC_ROW_ATTENTION_H
#define EDGESPEC_ROW_ATTENTION_H

#include "lanes.h"
#include "level.h"
#include "unrolled.h"

/* Queries that share one load of a key or a value: each takes a register for scores, two for values. */
enum { TOGETHER = 4 };

/* Unscaled scores of 16 positions: a chain of fma along the head for each query. */
ALWAYS_INLINE void score_tile(const int count, const uint16_t *keys, size_t head_length, const float *const *queries,
                              float *scores, lanes scale)
{
    lanes sum[TOGETHER];
    UNROLLED
    for (int q = 0; q < count; q++)
        sum[q] = lanes_set(0.0f);
    for (size_t d = 0; d < head_length; d++) {
        lanes key = lanes_from_halves(keys + d * LANES);
        UNROLLED
        for (int q = 0; q < count; q++)
            sum[q] = lanes_fma(key, lanes_set(queries[q][d]), sum[q]);
    }
    UNROLLED
    for (int q = 0; q < count; q++)
        lanes_store(scores + q * ATTENTION_BLOCK, lanes_mul(sum[q], scale));
}

/* Adds positions from .. to - 1 of 32 elements of the values, in order, to each query's sums. */
ALWAYS_INLINE void add_values(const int count, const uint16_t *values, size_t head_length, size_t from, size_t to,
                              float (*weights)[ATTENTION_BLOCK], lanes (*sum)[2])
{
    for (size_t p = from; p < to; p++) {
        lanes first = lanes_from_halves(values + p * head_length);
        lanes second = lanes_from_halves(values + p * head_length + LANES);
        UNROLLED
        for (int q = 0; q < count; q++) {
            lanes weight = lanes_set(weights[q][p]);
            sum[q][0] = lanes_fma(first, weight, sum[q][0]);
            sum[q][1] = lanes_fma(second, weight, sum[q][1]);
        }
    }
}

/* The same for the last 16 elements of a head whose length is an odd multiple of 16. */
ALWAYS_INLINE void add_values_16(const int count, const uint16_t *values, size_t head_length, size_t from, size_t to,
                                 float (*weights)[ATTENTION_BLOCK], lanes (*sum)[2])
{
    for (size_t p = from; p < to; p++) {
        lanes value = lanes_from_halves(values + p * head_length);
        UNROLLED
        for (int q = 0; q < count; q++)
            sum[q][0] = lanes_fma(value, lanes_set(weights[q][p]), sum[q][0]);
    }
}

/* One block's softmax in place: scores become exponentials. Returns their largest score and their sum. */
static inline void soften(float *scores, size_t visible, float *largest, float *total)
{
    size_t whole = (visible + LANES - 1) / LANES * LANES;
    for (size_t p = visible; p < whole; p++)
        scores[p] = -INFINITY;
    lanes most = lanes_load(scores);
    for (size_t p = LANES; p < whole; p += LANES)
        most = lanes_max(lanes_load(scores + p), most);
    *largest = lanes_largest(most);
    lanes sum = lanes_set(0.0f);
    for (size_t p = 0; p < whole; p += LANES) {
        lanes weight = lanes_exp(lanes_sub(lanes_load(scores + p), lanes_set(*largest)));
        lanes_store(scores + p, weight);
        sum = lanes_add(sum, weight);
    }
    *total = lanes_sum(sum);
}

/* How a query stands after some blocks: sums are relative to e^largest. */
struct standing {
    float largest, total;
    float keep, take; /* what the merge in hand multiplies the old sums and the new ones by */
};

static inline float exp_of(float x)
{
    float each[LANES];
    lanes_store(each, lanes_exp(lanes_set(x)));
    return each[0];
}

static inline void meet(struct standing *own, float largest, float total, int first)
{
    if (first) {
        *own = (struct standing){.largest = largest, .total = total, .keep = 0.0f, .take = 1.0f};
        return;
    }
    float most = own->largest > largest ? own->largest : largest;
    own->keep = exp_of(own->largest - most);
    own->take = exp_of(largest - most);
    own->total = fmaf(own->total, own->keep, total * own->take);
    own->largest = most;
}

ALWAYS_INLINE void merge(float *out, lanes sum, const struct standing *own, int first)
{
    if (!first)
        sum = lanes_fma(lanes_load(out), lanes_set(own->keep), lanes_mul(sum, lanes_set(own->take)));
    lanes_store(out, sum);
}

/* One block of positions for `count` queries; `visible[q]` of its positions count, at least one. */
ALWAYS_INLINE void attend_block(const int count, const struct attention_cache *cache, size_t start, float scale,
                                const float *const *queries, const size_t *visible, struct standing *standing,
                                float *const *out)
{
    float weights[TOGETHER][ATTENTION_BLOCK];
    size_t head_length = cache->head_length, most = 0, shared = ATTENTION_BLOCK;
    for (int q = 0; q < count; q++) {
        most = visible[q] > most ? visible[q] : most;
        shared = visible[q] < shared ? visible[q] : shared;
    }
    for (size_t p = 0; p < most; p += LANES)
        score_tile(count, cache->keys + (start + p) * head_length, head_length, queries, weights[0] + p,
                   lanes_set(scale));
    for (int q = 0; q < count; q++) {
        float largest, total;
        soften(weights[q], visible[q], &largest, &total);
        meet(&standing[q], largest, total, start == 0);
    }
    for (size_t d = 0; d < head_length; d += 2 * LANES) {
        const uint16_t *values = cache->values + start * head_length + d;
        int both = d + LANES < head_length;
        lanes sum[TOGETHER][2];
        UNROLLED
        for (int q = 0; q < count; q++)
            sum[q][0] = sum[q][1] = lanes_set(0.0f);
        /* All queries see the first `shared` positions; those beyond may hold anything for whoever does not. */
        if (both)
            add_values(count, values, head_length, 0, shared, weights, sum);
        else
            add_values_16(count, values, head_length, 0, shared, weights, sum);
        UNROLLED
        for (int q = 0; q < count; q++) {
            if (both)
                add_values(1, values, head_length, shared, visible[q], weights + q, sum + q);
            else
                add_values_16(1, values, head_length, shared, visible[q], weights + q, sum + q);
            merge(out[q] + d, sum[q][0], &standing[q], start == 0);
            if (both)
                merge(out[q] + d + LANES, sum[q][1], &standing[q], start == 0);
        }
    }
}

static void attend(const struct attention_cache *cache, float scale, size_t count, const float *const *queries,
                   const int64_t *visible, float *const *out)
{
    struct standing standing[MOST_QUERIES];
    int64_t longest = 0;
    for (size_t q = 0; q < count; q++)
        longest = visible[q] > longest ? visible[q] : longest;
    for (int64_t start = 0; start < longest; start += ATTENTION_BLOCK) {
        for (size_t q = 0; q < count;) {
            size_t here[TOGETHER], first = q, together = 0;
            for (; q < count && together < TOGETHER && visible[q] > start; q++, together++)
                here[together] = visible[q] - start < ATTENTION_BLOCK ? (size_t)(visible[q] - start) : ATTENTION_BLOCK;
            struct standing *own = standing + first;
            switch (together) {
            case 1: attend_block(1, cache, start, scale, queries + first, here, own, out + first); break;
            case 2: attend_block(2, cache, start, scale, queries + first, here, own, out + first); break;
            case 3: attend_block(3, cache, start, scale, queries + first, here, own, out + first); break;
            case 4: attend_block(4, cache, start, scale, queries + first, here, own, out + first); break;
            default: q++; /* this one sees nothing here */
            }
        }
    }
    for (size_t q = 0; q < count; q++) {
        lanes total = lanes_set(standing[q].total);
        for (size_t d = 0; d < cache->head_length; d += LANES)
            lanes_store(out[q] + d, lanes_div(lanes_load(out[q] + d), total));
    }
}

#endif
