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

/* Queries that share one load of a key or a value. Each takes lanes for its scores, two for its sums of values: what
 * is in registers, and how many chains of fma there are to take turns while each waits for its last one. */
enum { TOGETHER = LANES_IN_REGISTERS >= 32 ? 8 : 4 };

/* Scores of 16 positions: a chain of fma along the head for each query. */
ALWAYS_INLINE void score_tile(const int count, const uint16_t *keys, size_t head_length,
                              const struct attention_query *queries, float *scores, lanes scale)
{
    lanes sum[TOGETHER];
    UNROLLED
    for (int q = 0; q < count; q++)
        sum[q] = lanes_set(0.0f);
    for (size_t d = 0; d < head_length; d++) {
        lanes key = lanes_from_halves(keys + d * LANES);
        UNROLLED
        for (int q = 0; q < count; q++)
            sum[q] = lanes_fma(key, lanes_set(queries[q].from[d]), sum[q]);
    }
    UNROLLED
    for (int q = 0; q < count; q++)
        lanes_store(scores + q * ATTENTION_BLOCK, lanes_mul(sum[q], scale));
}

/* Adds so many positions of 32 elements of the values (of 16, without `both`), in order, to each query's sums. */
ALWAYS_INLINE void add_values(const int count, const int both, const uint16_t *values, size_t head_length,
                              const float *weights, size_t positions, lanes (*sum)[2])
{
    for (size_t p = 0; p < positions; p++, values += head_length) {
        lanes low = lanes_from_halves(values), high = both ? lanes_from_halves(values + LANES) : low;
        UNROLLED
        for (int q = 0; q < count; q++) {
            lanes weight = lanes_set(weights[q * ATTENTION_BLOCK + p]);
            sum[q][0] = lanes_fma(low, weight, sum[q][0]);
            if (both)
                sum[q][1] = lanes_fma(high, weight, sum[q][1]);
        }
    }
}

/* One block's softmax in place: scores from .. to - 1 become exponentials. Returns their largest and their sum. */
static inline void soften(float *scores, size_t from, size_t to, float *largest, float *total)
{
    size_t begin = from / LANES * LANES, end = (to + LANES - 1) / LANES * LANES;
    for (size_t p = begin; p < from; p++)
        scores[p] = -INFINITY;
    for (size_t p = to; p < end; p++)
        scores[p] = -INFINITY;
    lanes most = lanes_load(scores + begin);
    for (size_t p = begin + LANES; p < end; p += LANES)
        most = lanes_max(lanes_load(scores + p), most);
    *largest = lanes_largest(most);
    lanes sum = lanes_set(0.0f);
    for (size_t p = begin; p < end; p += LANES) {
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

/* A block of positions as the queries in hand see it, counted from its first. */
struct block {
    size_t start;
    size_t border;                       /* what lies behind it is the queries' own */
    size_t from[TOGETHER], to[TOGETHER]; /* what each sees */
    size_t shared_from, shared_to;       /* what all see */
    int ragged;                          /* whether some see more than that */
};

ALWAYS_INLINE struct block block_of(const int count, const struct attention_cache *cache, size_t start,
                                    const struct attention_query *queries)
{
    struct block block = {.start = start, .shared_to = ATTENTION_BLOCK};
    block.border = cache->own_from > start ? cache->own_from - start : 0;
    for (int q = 0; q < count; q++) {
        block.from[q] = queries[q].first > start ? queries[q].first - start : 0;
        block.to[q] = queries[q].end - start < ATTENTION_BLOCK ? queries[q].end - start : ATTENTION_BLOCK;
        block.shared_from = block.from[q] > block.shared_from ? block.from[q] : block.shared_from;
        block.shared_to = block.to[q] < block.shared_to ? block.to[q] : block.shared_to;
    }
    if (block.shared_to < block.shared_from)
        block.shared_to = block.shared_from;
    for (int q = 0; q < count; q++)
        block.ragged |= block.from[q] < block.shared_from || block.to[q] > block.shared_to;
    return block;
}

/* Positions from .. to - 1 of the block; `count` queries with the same keys and values. */
ALWAYS_INLINE void add_range(const int count, const int both, const struct attention_cache *cache,
                             const struct block *block, const struct attention_query *query, size_t d, size_t from,
                             size_t to, const float *weights, lanes (*sum)[2])
{
    size_t length = cache->head_length, middle = block->border < to ? block->border : to;
    if (from < middle)
        add_values(count, both, cache->values + (block->start + from) * length + d, length, weights + from,
                   middle - from, sum);
    middle = middle > from ? middle : from;
    if (middle < to)
        add_values(count, both, query->own_values + (block->start + middle - cache->own_from) * length + d, length,
                   weights + middle, to - middle, sum);
}

ALWAYS_INLINE void mix_values(const int count, const int both, const struct attention_cache *cache,
                              const struct block *block, const struct attention_query *queries, size_t d,
                              float (*weights)[ATTENTION_BLOCK], const struct standing *standing)
{
    lanes sum[TOGETHER][2];
    UNROLLED
    for (int q = 0; q < count; q++)
        sum[q][0] = sum[q][1] = lanes_set(0.0f);
    /* Positions that not all see may hold anything for whoever does not. */
    if (block->ragged)
        UNROLLED
        for (int q = 0; q < count; q++)
            add_range(1, both, cache, block, queries + q, d, block->from[q],
                      block->to[q] < block->shared_from ? block->to[q] : block->shared_from, weights[q], sum + q);
    add_range(count, both, cache, block, queries, d, block->shared_from, block->shared_to, weights[0], sum);
    if (block->ragged)
        UNROLLED
        for (int q = 0; q < count; q++)
            add_range(1, both, cache, block, queries + q, d, block->shared_to, block->to[q], weights[q], sum + q);
    UNROLLED
    for (int q = 0; q < count; q++) {
        int first = queries[q].first >= block->start;
        merge(queries[q].out + d, sum[q][0], &standing[q], first);
        if (both)
            merge(queries[q].out + d + LANES, sum[q][1], &standing[q], first);
    }
}

/* One block of positions for `count` queries that all see some of it, and have the same keys and values there. */
ALWAYS_INLINE void attend_block(const int count, const struct attention_cache *cache, size_t start, float scale,
                                const struct attention_query *queries, struct standing *standing)
{
    float weights[TOGETHER][ATTENTION_BLOCK];
    const struct block block = block_of(count, cache, start, queries);
    size_t length = cache->head_length, least = ATTENTION_BLOCK, most = 0;
    for (int q = 0; q < count; q++) {
        least = block.from[q] < least ? block.from[q] : least;
        most = block.to[q] > most ? block.to[q] : most;
    }
    for (size_t p = least / LANES * LANES; p < most; p += LANES) {
        const uint16_t *keys = p < block.border ? cache->keys + (start + p) * length
                                                : queries->own_keys + (start + p - cache->own_from) * length;
        score_tile(count, keys, length, queries, weights[0] + p, lanes_set(scale));
    }
    for (int q = 0; q < count; q++) {
        float largest, total;
        soften(weights[q], block.from[q], block.to[q], &largest, &total);
        meet(&standing[q], largest, total, queries[q].first >= start);
    }
    size_t d = 0;
    for (; d + 2 * LANES <= length; d += 2 * LANES)
        mix_values(count, 1, cache, &block, queries, d, weights, standing);
    if (d < length)
        mix_values(count, 0, cache, &block, queries, d, weights, standing);
}

static inline int sees_block(const struct attention_query *query, size_t start)
{
    return query->end > start && query->first < start + ATTENTION_BLOCK;
}

static void attend(const struct attention_cache *cache, float scale, size_t count,
                   const struct attention_query *queries)
{
    struct standing standing[MOST_QUERIES];
    size_t first = SIZE_MAX, end = 0;
    for (size_t q = 0; q < count; q++) {
        first = queries[q].first < first ? queries[q].first : first;
        end = queries[q].end > end ? queries[q].end : end;
    }
    for (size_t start = first / ATTENTION_BLOCK * ATTENTION_BLOCK; start < end; start += ATTENTION_BLOCK) {
        int shared = start + ATTENTION_BLOCK <= cache->own_from;
        for (size_t q = 0, next; q < count; q = next) {
            const struct attention_query *here = queries + q;
            for (next = q; next < count && next < q + TOGETHER && sees_block(&queries[next], start); next++)
                if (!shared && queries[next].own_keys != here->own_keys)
                    break;
            switch (next - q) {
/* Constant counts make each a function of its own; those above TOGETHER do not occur. */
#define ATTEND(n) \
    case n: attend_block(n <= TOGETHER ? n : 1, cache, start, scale, here, standing + q); break;
                ATTEND(1) ATTEND(2) ATTEND(3) ATTEND(4) ATTEND(5) ATTEND(6) ATTEND(7) ATTEND(8)
#undef ATTEND
            default: next = q + 1; /* this one sees nothing here */
            }
        }
    }
    for (size_t q = 0; q < count; q++) {
        lanes total = lanes_set(standing[q].total);
        for (size_t d = 0; d < cache->head_length; d += LANES)
            lanes_store(queries[q].out + d, lanes_div(lanes_load(queries[q].out + d), total));
    }
}

#endif
