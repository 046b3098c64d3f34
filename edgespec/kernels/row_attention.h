/* Attention of a few queries over one key-value head, block by block; included by each level's file.
 *
 * Online softmax (Milakov and Gimelshein 2018): each block of positions gives its largest score, the sum of its
 * exponentials and the weighted sum of its values, merged in ascending order. A query's result
 * depends only on the query and the positions it sees; queries only share the conversion of keys and values,
 * from the cache's halves, to floats. */
#ifndef EDGESPEC_ROW_ATTENTION_H
#define EDGESPEC_ROW_ATTENTION_H

#include "lanes.h"
#include "level.h"
#include "row_cap.h"
#include "unrolled.h"

/* Queries and tiles of keys that are computed together: a key serves all queries and an element of a query all tiles.
 * Scores take TOGETHER * TILES_TOGETHER lanes and sums of values twice TOGETHER: all of them stay in registers, as
 * interleaved chains of fma that hide each other's latency. */
enum { TOGETHER = LANES_IN_REGISTERS >= 32 ? 8 : 4, TILES_TOGETHER = LANES_IN_REGISTERS >= 32 ? 2 : 1 };

/* Keys and values become floats once for all queries: this many elements of a few tiles' keys at a time, and two lanes of
 * each of a block's values. 32 KB, the first-level cache of most cores. */
enum { OPENED = 2 * LANES * ATTENTION_BLOCK, KEY_ELEMENTS = OPENED / (TILES_TOGETHER * LANES) };

/* Prefetched while scores are computed: the next keys, and the values of the current positions. Without it attention
 * waited for memory for as long as it computed. */
struct soon {
    const uint8_t *keys, *values;
};

/* For element d of a head: `tiles` tiles of keys, or as many positions' values, are a line for each element or for two. */
ALWAYS_INLINE void ask_for(const struct soon *soon, size_t d)
{
    enum { ELEMENTS = 2 * TILE_ROWS * TILES_TOGETHER == LINE_BYTES ? 1 : 2 };
    if (d % ELEMENTS)
        return;
    __builtin_prefetch(soon->keys + d / ELEMENTS * LINE_BYTES);
    __builtin_prefetch(soon->values + d / ELEMENTS * LINE_BYTES);
}

/* Scores of `tiles` tiles: for each query a chain of fma along the head. keys: [elements][tiles][16]. With `from` > 0
 * the chains continue from the values in `scores`. `soon` may be null. */
ALWAYS_INLINE void score_tiles(const int count, const int tiles, const float *keys, size_t from, size_t elements,
                               const struct attention_query *queries, float factor, const struct soon *soon,
                               float *scores)
{
    lanes sum[TOGETHER][TILES_TOGETHER];
    UNROLLED
    for (int q = 0; q < count; q++)
        UNROLLED
        for (int t = 0; t < tiles; t++)
            sum[q][t] = from ? lanes_load(scores + q * ATTENTION_BLOCK + t * LANES) : lanes_set(0.0f);
    for (size_t d = from; d < from + elements; d++, keys += tiles * LANES) {
        if (soon)
            ask_for(soon, d);
        lanes key[TILES_TOGETHER];
        UNROLLED
        for (int t = 0; t < tiles; t++)
            key[t] = lanes_load(keys + t * LANES);
        UNROLLED
        for (int q = 0; q < count; q++) {
            lanes element = lanes_set(queries[q].from[d]);
            UNROLLED
            for (int t = 0; t < tiles; t++)
                sum[q][t] = lanes_fma(key[t], element, sum[q][t]);
        }
    }
    UNROLLED
    for (int q = 0; q < count; q++)
        UNROLLED
        for (int t = 0; t < tiles; t++)
            lanes_store(scores + q * ATTENTION_BLOCK + t * LANES, lanes_mul(sum[q][t], lanes_set(factor)));
}

/* Adds `positions` positions of `wide` lanes of the values to each query's sums. values: [positions][wide][16]. */
ALWAYS_INLINE void add_values(const int count, const int wide, const float *values, const float *weights,
                              size_t positions, lanes (*sum)[2])
{
    for (size_t p = 0; p < positions; p++, values += wide * LANES) {
        lanes value[2];
        UNROLLED
        for (int i = 0; i < wide; i++)
            value[i] = lanes_load(values + i * LANES);
        UNROLLED
        for (int q = 0; q < count; q++) {
            lanes weight = lanes_set(weights[q * ATTENTION_BLOCK + p]);
            UNROLLED
            for (int i = 0; i < wide; i++)
                sum[q][i] = lanes_fma(value[i], weight, sum[q][i]);
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

/* A query's state, and the factors of its old and new sums in the current merge. */
struct merging {
    struct standing now;
    float keep, take;
};

static inline float exp_of(float x)
{
    float each[LANES];
    lanes_store(each, lanes_exp(lanes_set(x)));
    return each[0];
}

static inline void meet(struct merging *own, struct standing block, int first)
{
    if (first) {
        *own = (struct merging){.now = block, .keep = 0.0f, .take = 1.0f};
        return;
    }
    float most = own->now.largest > block.largest ? own->now.largest : block.largest;
    own->keep = exp_of(own->now.largest - most);
    own->take = exp_of(block.largest - most);
    own->now.total = fmaf(own->now.total, own->keep, block.total * own->take);
    own->now.largest = most;
}

ALWAYS_INLINE void merge(float *out, lanes sum, const struct merging *own, int first)
{
    if (!first)
        sum = lanes_fma(lanes_load(out), lanes_set(own->keep), lanes_mul(sum, lanes_set(own->take)));
    lanes_store(out, sum);
}

/* Consecutive queries that all see some of a block; positions count from the block's first. */
struct query_group {
    size_t first; /* of the current queries */
    int count;
    size_t from[TOGETHER], to[TOGETHER]; /* what each sees */
    size_t least, most;                  /* what any sees */
    size_t shared_from, shared_to;       /* what all see */
};

/* Puts the queries that see the block into groups. Returns how many. */
static inline size_t groups_of(size_t start, size_t count, const struct attention_query *queries,
                               struct query_group *groups)
{
    size_t taken = 0;
    for (size_t q = 0; q < count; q++) {
        if (queries[q].end <= start || queries[q].first >= start + ATTENTION_BLOCK)
            continue;
        struct query_group *group = taken ? &groups[taken - 1] : 0;
        if (!group || group->count == TOGETHER || group->first + (size_t)group->count < q) {
            group = &groups[taken++];
            *group = (struct query_group){.first = q, .least = ATTENTION_BLOCK, .shared_to = ATTENTION_BLOCK};
        }
        size_t from = queries[q].first > start ? queries[q].first - start : 0;
        size_t to = queries[q].end - start < ATTENTION_BLOCK ? queries[q].end - start : ATTENTION_BLOCK;
        group->from[group->count] = from;
        group->to[group->count] = to;
        group->count++;
        group->least = from < group->least ? from : group->least;
        group->most = to > group->most ? to : group->most;
        group->shared_from = from > group->shared_from ? from : group->shared_from;
        group->shared_to = to < group->shared_to ? to : group->shared_to;
        if (group->shared_to < group->shared_from)
            group->shared_to = group->shared_from;
    }
    return taken;
}

/* `wide` lanes, from element d on, of what a group's queries give. */
ALWAYS_INLINE void mix_values(const int count, const int wide, const float *values, const float *weights,
                              const struct query_group *group, const struct attention_query *queries, size_t d,
                              size_t start, const struct merging *standing)
{
    lanes sum[TOGETHER][2];
    size_t length = (size_t)wide * LANES, from = group->shared_from, to = group->shared_to;
    int ragged = group->least < from || group->most > to;
    UNROLLED
    for (int q = 0; q < count; q++)
        sum[q][0] = sum[q][1] = lanes_set(0.0f);
    /* A position that a query does not see may hold any value. */
    if (ragged)
        UNROLLED
        for (int q = 0; q < count; q++) {
            size_t end = group->to[q] < from ? group->to[q] : from, own = group->from[q];
            add_values(1, wide, values + own * length, weights + q * ATTENTION_BLOCK + own, end - own, sum + q);
        }
    add_values(count, wide, values + from * length, weights + from, to - from, sum);
    if (ragged)
        UNROLLED
        for (int q = 0; q < count; q++)
            if (to < group->to[q])
                add_values(1, wide, values + to * length, weights + q * ATTENTION_BLOCK + to, group->to[q] - to,
                           sum + q);
    UNROLLED
    for (int q = 0; q < count; q++) {
        UNROLLED
        for (int i = 0; i < wide; i++)
            merge(queries[q].out + d + i * LANES, sum[q][i], &standing[q], queries[q].first >= start);
    }
}

/* A specialised function for each constant count; counts above TOGETHER do not occur. */
#define FITTING(n) ((n) < TOGETHER ? (n) : TOGETHER)
#define FOR_COUNT(count, DO)       \
    switch (count) {               \
    case 1: DO(1); break;          \
    case 2: DO(2); break;          \
    case 3: DO(3); break;          \
    case 4: DO(4); break;          \
    case 5: DO(FITTING(5)); break; \
    case 6: DO(FITTING(6)); break; \
    case 7: DO(FITTING(7)); break; \
    case 8: DO(FITTING(8)); break; \
    }

static void score_group(size_t tiles, const float *keys, size_t from, size_t elements, int count,
                        const struct attention_query *queries, float factor, const struct soon *soon, float *scores)
{
#define SCORE(n) score_tiles(n, TILES_TOGETHER, keys, from, elements, queries, factor, soon, scores)
#define SCORE_ONE(n) score_tiles(n, 1, keys, from, elements, queries, factor, soon, scores)
    if (TILES_TOGETHER > 1 && tiles > 1)
        FOR_COUNT(count, SCORE)
    else
        FOR_COUNT(count, SCORE_ONE)
#undef SCORE
#undef SCORE_ONE
}

static void mix_group(size_t wide, const float *values, const float *weights, const struct query_group *group,
                      const struct attention_query *queries, size_t d, size_t start,
                      const struct merging *standing)
{
#define MIX(n) mix_values(n, 2, values, weights, group, queries, d, start, standing)
#define MIX_ONE(n) mix_values(n, 1, values, weights, group, queries, d, start, standing)
    if (wide > 1)
        FOR_COUNT(group->count, MIX)
    else
        FOR_COUNT(group->count, MIX_ONE)
#undef MIX
#undef MIX_ONE
}

/* Where a position's halves lie: among the cache's keys or values, or the owner's own. */
static inline const uint16_t *halves_at(const struct attention_cache *cache, size_t position, const uint16_t *cached,
                                        const uint16_t *own)
{
    return position < cache->own_from ? cached + position * cache->head_length
                                      : own + (position - cache->own_from) * cache->head_length;
}

/* Prefetching past the last keys and values has no use, and no harm. */
static inline struct soon soon_of(const struct attention_cache *cache, const struct attention_query *owner,
                                  size_t position)
{
    const uint16_t *keys = halves_at(cache, position, cache->keys, owner->own_keys);
    const uint16_t *values = halves_at(cache, position, cache->values, owner->own_values);
    return (struct soon){
        .keys = (const uint8_t *)keys + TILES_TOGETHER * LANES * cache->head_length * sizeof *keys,
        .values = (const uint8_t *)values,
    };
}

/* Elements from `from` on of the keys of `tiles` tiles, from `position` on. */
static inline void open_keys(const struct attention_cache *cache, const struct attention_query *owner, size_t position,
                             size_t tiles, size_t from, size_t elements, float *opened)
{
    for (size_t t = 0; t < tiles; t++, position += LANES) {
        const uint16_t *keys = halves_at(cache, position, cache->keys, owner->own_keys);
        for (size_t d = 0; d < elements; d++)
            lanes_store(opened + (d * tiles + t) * LANES, lanes_from_halves(keys + (from + d) * LANES));
    }
}

/* `wide` lanes, from element d on, of the values of positions from .. to - 1. */
static inline void open_values(const struct attention_cache *cache, const struct attention_query *owner, size_t from,
                               size_t to, size_t wide, size_t d, float *opened)
{
    for (size_t position = from; position < to; position++) {
        const uint16_t *values = halves_at(cache, position, cache->values, owner->own_values);
        for (size_t i = 0; i < wide; i++, opened += LANES)
            lanes_store(opened, lanes_from_halves(values + d + i * LANES));
    }
}

/* One block of positions, for queries that have the same keys and values there. */
static void attend_block(const struct attention_cache *cache, size_t start, float scale, float cap, size_t count,
                         const struct attention_query *queries, struct merging *standing)
{
    _Alignas(64) float weights[MOST_QUERIES][ATTENTION_BLOCK], opened[OPENED];
    struct query_group groups[MOST_QUERIES];
    const struct query_group *end = groups + groups_of(start, count, queries, groups);
    size_t length = cache->head_length, least = ATTENTION_BLOCK, most = 0;
    if (end == groups)
        return;
    for (const struct query_group *group = groups; group < end; group++) {
        least = group->least < least ? group->least : least;
        most = group->most > most ? group->most : most;
    }
    for (size_t p = least / LANES * LANES, tiles; p < most; p += tiles * LANES) {
        tiles = most - p > LANES ? TILES_TOGETHER : 1;
        for (size_t d = 0, elements; d < length; d += elements) {
            elements = length - d < KEY_ELEMENTS ? length - d : KEY_ELEMENTS;
            open_keys(cache, queries, start + p, tiles, d, elements, opened);
            const struct soon soon = soon_of(cache, queries, start + p), *asking = &soon;
            for (const struct query_group *group = groups; group < end; group++)
                if (group->least < p + tiles * LANES && p < group->most) {
                    score_group(tiles, opened, d, elements, group->count, queries + group->first,
                                d + elements == length ? scale : 1.0f, asking, weights[group->first] + p);
                    asking = 0; /* once is enough */
                }
        }
    }
    for (const struct query_group *group = groups; group < end; group++)
        for (size_t i = 0, q = group->first; i < (size_t)group->count; i++, q++) {
            struct standing block;
            size_t from = group->from[i] / LANES * LANES, to = (group->to[i] + LANES - 1) / LANES * LANES;
            if (cap != 0.0f)
                cap_values(weights[q] + from, to - from, cap);
            soften(weights[q], group->from[i], group->to[i], &block.largest, &block.total);
            meet(&standing[q], block, queries[q].first >= start);
        }
    for (size_t d = 0, wide; d < length; d += wide * LANES) {
        wide = length - d > LANES ? 2 : 1;
        open_values(cache, queries, start + least, start + most, wide, d, opened + least * wide * LANES);
        for (const struct query_group *group = groups; group < end; group++)
            mix_group(wide, opened, weights[group->first], group, queries + group->first, d, start,
                      standing + group->first);
    }
}

/* Takes the sink for a last block, whose sum of values is 0, and divides. */
static inline void finish(float *out, size_t length, struct merging *own, const float *sink)
{
    if (sink) {
        meet(own, (struct standing){.largest = *sink, .total = 1.0f}, 0);
        for (size_t d = 0; d < length; d += LANES)
            merge(out + d, lanes_set(0.0f), own, 0);
    }
    lanes total = lanes_set(own->now.total);
    for (size_t d = 0; d < length; d += LANES)
        lanes_store(out + d, lanes_div(lanes_load(out + d), total));
}

static void attend(const struct attention_cache *cache, float scale, float cap, size_t count,
                   const struct attention_query *queries)
{
    struct merging standing[MOST_QUERIES];
    size_t first = SIZE_MAX, end = 0;
    for (size_t q = 0; q < count; q++) {
        first = queries[q].first < first ? queries[q].first : first;
        end = queries[q].end > end ? queries[q].end : end;
    }
    for (size_t start = first / ATTENTION_BLOCK * ATTENTION_BLOCK; start < end; start += ATTENTION_BLOCK) {
        int shared = start + ATTENTION_BLOCK <= cache->own_from;
        for (size_t q = 0, next; q < count; q = next) {
            next = q + 1;
            while (next < count && (shared || queries[next].own_keys == queries[q].own_keys))
                next++;
            attend_block(cache, start, scale, cap, next - q, queries + q, standing + q);
        }
    }
    for (size_t q = 0; q < count; q++)
        if (queries[q].standing)
            *queries[q].standing = standing[q].now;
        else
            finish(queries[q].out, cache->head_length, &standing[q], queries[q].sink);
}

static void merge_blocks(const float *sums, const struct standing *standing, size_t blocks, size_t length,
                         const float *sink, float *out)
{
    struct merging own = {0};
    for (size_t b = 0; b < blocks; b++, sums += length) {
        meet(&own, standing[b], !b);
        for (size_t d = 0; d < length; d += LANES)
            merge(out + d, lanes_load(sums + d), &own, !b);
    }
    finish(out, length, &own, sink);
}

#endif
