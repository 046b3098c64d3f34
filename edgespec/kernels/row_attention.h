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

/* Whether the first group of queries opens keys and values, that is converts and stores them, while it computes: it
 * then waits for half of the conversions only. Elsewhere they are opened before. Measured with AVX-512 on Zen 4. */
enum { OPENS_WHILE = LANES_IN_REGISTERS >= 32 };

/* Halves of the cache, and the floats that they become. The first group of queries prefetches the next keys, and the
 * values of the current positions. Without it attention waited for memory for as long as it computed. */
struct opening {
    const uint16_t *halves[TILES_TOGETHER]; /* of each tile of keys, or of the first position's values */
    const uint8_t *next_keys, *values;
    float *floats;
};

/* For element d of a head: `tiles` tiles of keys, or as many positions' values, are a line for each element or for two. */
ALWAYS_INLINE void ask_for(const struct opening *opening, size_t d)
{
    enum { ELEMENTS = 2 * TILE_ROWS * TILES_TOGETHER == LINE_BYTES ? 1 : 2 };
    if (d % ELEMENTS)
        return;
    __builtin_prefetch(opening->next_keys + d / ELEMENTS * LINE_BYTES);
    __builtin_prefetch(opening->values + d / ELEMENTS * LINE_BYTES);
}

/* Sixteen floats, which are opened or were. */
ALWAYS_INLINE lanes floats_at(const int opens, const uint16_t *halves, float *floats)
{
    if (!opens)
        return lanes_load(floats);
    lanes opened = lanes_from_halves(halves);
    lanes_store(floats, opened);
    return opened;
}

/* Scores of `tiles` tiles: for each query a chain of fma along the head. Floats: [elements][tiles][16]. With `from` > 0
 * the chains continue from the values in `scores`. `asks`: prefetches. */
ALWAYS_INLINE void score_tiles(const int opens, const int asks, const int count, const int tiles,
                               const struct opening *opening, size_t from, size_t elements,
                               const struct attention_query *queries, float factor, float *scores)
{
    lanes sum[TOGETHER][TILES_TOGETHER];
    float *keys = opening->floats;
    UNROLLED
    for (int q = 0; q < count; q++)
        UNROLLED
        for (int t = 0; t < tiles; t++)
            sum[q][t] = from ? lanes_load(scores + q * ATTENTION_BLOCK + t * LANES) : lanes_set(0.0f);
    for (size_t d = from; d < from + elements; d++, keys += tiles * LANES) {
        if (asks)
            ask_for(opening, d);
        lanes key[TILES_TOGETHER];
        UNROLLED
        for (int t = 0; t < tiles; t++)
            key[t] = floats_at(opens, opening->halves[t] + d * LANES, keys + t * LANES);
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

/* Adds positions from .. to - 1 of `wide` lanes of the values to each query's sums. Floats: [positions][wide][16]. Halves:
 * of position `from`, and of the next `apart` further. */
ALWAYS_INLINE void add_values(const int opens, const int count, const int wide, const uint16_t *halves, size_t apart,
                              float *floats, const float *weights, size_t from, size_t to, lanes (*sum)[2])
{
    floats += from * (size_t)wide * LANES;
    for (size_t p = from; p < to; p++, floats += wide * LANES, halves += opens ? apart : 0) {
        lanes value[2];
        UNROLLED
        for (int i = 0; i < wide; i++)
            value[i] = floats_at(opens, halves + i * LANES, floats + i * LANES);
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

/* `wide` lanes, from element d on, of what a group's queries give. What not all of them see is open already. */
ALWAYS_INLINE void mix_values(const int opens, const int count, const int wide, const struct opening *opening,
                              size_t apart, const float *weights, const struct query_group *group,
                              const struct attention_query *queries, size_t d, size_t start,
                              const struct merging *standing)
{
    lanes sum[TOGETHER][2];
    float *floats = opening->floats;
    size_t from = group->shared_from, to = group->shared_to;
    int ragged = group->least < from || group->most > to;
    UNROLLED
    for (int q = 0; q < count; q++)
        sum[q][0] = sum[q][1] = lanes_set(0.0f);
    /* A position that a query does not see may hold any value. */
    if (ragged)
        UNROLLED
        for (int q = 0; q < count; q++) {
            size_t end = group->to[q] < from ? group->to[q] : from;
            add_values(0, 1, wide, 0, 0, floats, weights + q * ATTENTION_BLOCK, group->from[q], end, sum + q);
        }
    add_values(opens, count, wide, opening->halves[0], apart, floats, weights, from, to, sum);
    if (ragged)
        UNROLLED
        for (int q = 0; q < count; q++)
            add_values(0, 1, wide, 0, 0, floats, weights + q * ATTENTION_BLOCK, to, group->to[q], sum + q);
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

/* The first group opens the keys where it OPENS_WHILE it computes, and prefetches. */
static void score_group(int first, size_t tiles, const struct opening *opening, size_t from, size_t elements, int count,
                        const struct attention_query *queries, float factor, float *scores)
{
    int asks = first && !OPENS_WHILE;
#define SCORE(n) score_tiles(0, asks, n, TILES_TOGETHER, opening, from, elements, queries, factor, scores)
#define SCORE_ONE(n) score_tiles(0, asks, n, 1, opening, from, elements, queries, factor, scores)
#define OPEN_AND_SCORE(n) score_tiles(1, 1, n, TILES_TOGETHER, opening, from, elements, queries, factor, scores)
#define OPEN_AND_SCORE_ONE(n) score_tiles(1, 1, n, 1, opening, from, elements, queries, factor, scores)
    int opens = first && OPENS_WHILE, several = TILES_TOGETHER > 1 && tiles > 1;
    if (opens && several)
        FOR_COUNT(count, OPEN_AND_SCORE)
    else if (opens)
        FOR_COUNT(count, OPEN_AND_SCORE_ONE)
    else if (several)
        FOR_COUNT(count, SCORE)
    else
        FOR_COUNT(count, SCORE_ONE)
#undef SCORE
#undef SCORE_ONE
#undef OPEN_AND_SCORE
#undef OPEN_AND_SCORE_ONE
}

static void mix_group(int opens, size_t wide, const struct opening *opening, size_t apart, const float *weights,
                      const struct query_group *group, const struct attention_query *queries, size_t d, size_t start,
                      const struct merging *standing)
{
#define MIX(n) mix_values(0, n, 2, opening, apart, weights, group, queries, d, start, standing)
#define MIX_ONE(n) mix_values(0, n, 1, opening, apart, weights, group, queries, d, start, standing)
#define OPEN_AND_MIX(n) mix_values(1, n, 2, opening, apart, weights, group, queries, d, start, standing)
    if (OPENS_WHILE && opens)
        FOR_COUNT(group->count, OPEN_AND_MIX)
    else if (wide > 1)
        FOR_COUNT(group->count, MIX)
    else
        FOR_COUNT(group->count, MIX_ONE)
#undef MIX
#undef MIX_ONE
#undef OPEN_AND_MIX
}

/* Where a position's halves lie: among the cache's keys or values, or the owner's own. */
static inline const uint16_t *halves_at(const struct attention_cache *cache, size_t position, const uint16_t *cached,
                                        const uint16_t *own)
{
    return position < cache->own_from ? cached + position * cache->head_length
                                      : own + (position - cache->own_from) * cache->head_length;
}

/* Elements from `from` on of the keys of `tiles` tiles. */
static inline void open_keys(const struct opening *opening, size_t tiles, size_t from, size_t elements)
{
    for (size_t t = 0; t < tiles; t++)
        for (size_t d = 0; d < elements; d++)
            lanes_store(opening->floats + (d * tiles + t) * LANES,
                        lanes_from_halves(opening->halves[t] + (from + d) * LANES));
}

/* `wide` lanes, from element d on, of the values of positions from .. to - 1 of the block at `start`. */
static inline void open_values(const struct attention_cache *cache, const struct attention_query *owner, size_t start,
                               size_t from, size_t to, size_t wide, size_t d, float *floats)
{
    for (size_t p = from; p < to; p++) {
        const uint16_t *values = halves_at(cache, start + p, cache->values, owner->own_values);
        for (size_t i = 0; i < wide; i++)
            lanes_store(floats + (p * wide + i) * LANES, lanes_from_halves(values + d + i * LANES));
    }
}

/* Queries that have the same keys and values in a block of positions. */
struct block_queries {
    const struct attention_cache *cache;
    const struct attention_query *queries;
    struct query_group groups[MOST_QUERIES];
    const struct query_group *end;
    size_t start, least, most; /* where the block begins; what any query sees */
};

static void score_block(const struct block_queries *block, float scale, float (*weights)[ATTENTION_BLOCK],
                        float *floats)
{
    const struct attention_cache *cache = block->cache;
    const struct attention_query *queries = block->queries;
    size_t length = cache->head_length;
    for (size_t p = block->least / LANES * LANES, tiles; p < block->most; p += tiles * LANES) {
        tiles = block->most - p > LANES ? TILES_TOGETHER : 1;
        struct opening opening = {.floats = floats};
        for (size_t t = 0; t < tiles; t++)
            opening.halves[t] = halves_at(cache, block->start + p + t * LANES, cache->keys, queries->own_keys);
        /* Prefetching past the last keys and values has no use, and no harm. */
        opening.next_keys = (const uint8_t *)(opening.halves[0] + TILES_TOGETHER * LANES * length);
        opening.values = (const uint8_t *)halves_at(cache, block->start + p, cache->values, queries->own_values);
        for (size_t d = 0, elements; d < length; d += elements) {
            elements = length - d < KEY_ELEMENTS ? length - d : KEY_ELEMENTS;
            int first = 1;
            if (!OPENS_WHILE)
                open_keys(&opening, tiles, d, elements);
            for (const struct query_group *group = block->groups; group < block->end; group++)
                if (group->least < p + tiles * LANES && p < group->most) {
                    score_group(first, tiles, &opening, d, elements, group->count, queries + group->first,
                                d + elements == length ? scale : 1.0f, weights[group->first] + p);
                    first = 0;
                }
        }
    }
}

static void mix_block(const struct block_queries *block, float (*weights)[ATTENTION_BLOCK],
                      const struct merging *standing, float *floats)
{
    const struct attention_cache *cache = block->cache;
    const struct attention_query *queries = block->queries;
    const struct query_group *first = block->groups;
    size_t length = cache->head_length, start = block->start, from = first->shared_from, to = first->shared_to;
    /* Without a gap between the cache's values and the queries' own. */
    int opens_while = OPENS_WHILE && (start + to <= cache->own_from || start + from >= cache->own_from);
    for (size_t d = 0, wide; d < length; d += wide * LANES) {
        wide = length - d > LANES ? 2 : 1;
        int opens = opens_while && wide > 1;
        struct opening opening = {.floats = floats};
        opening.halves[0] = halves_at(cache, start + from, cache->values, queries->own_values) + d;
        open_values(cache, queries, start, block->least, opens ? from : to, wide, d, floats);
        open_values(cache, queries, start, to, block->most, wide, d, floats);
        for (const struct query_group *group = first; group < block->end; group++)
            mix_group(opens && group == first, wide, &opening, length, weights[group->first], group,
                      queries + group->first, d, start, standing + group->first);
    }
}

/* One block of positions, for queries that have the same keys and values there. */
static void attend_block(const struct attention_cache *cache, size_t start, float scale, float cap, size_t count,
                         const struct attention_query *queries, struct merging *standing)
{
    _Alignas(64) float weights[MOST_QUERIES][ATTENTION_BLOCK], floats[OPENED];
    struct block_queries block = {.cache = cache, .queries = queries, .start = start, .least = ATTENTION_BLOCK};
    block.end = block.groups + groups_of(start, count, queries, block.groups);
    if (block.end == block.groups)
        return;
    for (const struct query_group *group = block.groups; group < block.end; group++) {
        block.least = group->least < block.least ? group->least : block.least;
        block.most = group->most > block.most ? group->most : block.most;
    }
    score_block(&block, scale, weights, floats);
    for (const struct query_group *group = block.groups; group < block.end; group++)
        for (size_t i = 0, q = group->first; i < (size_t)group->count; i++, q++) {
            struct standing own;
            size_t from = group->from[i] / LANES * LANES, to = (group->to[i] + LANES - 1) / LANES * LANES;
            if (cap != 0.0f)
                cap_values(weights[q] + from, to - from, cap);
            soften(weights[q], group->from[i], group->to[i], &own.largest, &own.total);
            meet(&standing[q], own, queries[q].first >= start);
        }
    mix_block(&block, weights, standing, floats);
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
