/* Attention, head by head: the work of each thread between the projections and the next product. */
#include <string.h>

#include "forward_step.h"

/* Rotary embedding (Su et al. 2021) of one head, in place. */
static void rotate(const struct es_model *model, size_t length, const float *rotation, float *head)
{
    size_t pairs = length / 2;
    size_t step = model->rope == ES_ROPE_HALVES ? 1 : 2, apart = model->rope == ES_ROPE_HALVES ? pairs : 1;
    for (size_t i = 0; i < pairs; i++) {
        float *a = head + i * step, *b = a + apart, x = *a, y = *b, c = rotation[2 * i], s = rotation[2 * i + 1];
        *a = x * c - y * s;
        *b = x * s + y * c;
    }
}

/* Puts a key and a value into the row's cache or, for a tree, among those of its nodes. */
static void remember(const struct step *step, size_t layer, size_t kv_head, const struct row *row, const float *key,
                     const float *value)
{
    const struct es_sequence *sequence = row->sequence;
    size_t head_length = (size_t)step->model->layer[layer].head_length, position = row->position, apart = 1;
    uint16_t *keys, *values;
    if (row->tree) {
        keys = tree_key_of(sequence, layer, kv_head, row->node);
        values = tree_value_of(sequence, layer, kv_head, row->node);
    } else {
        keys = keys_of(sequence, layer, kv_head) + position / TILE_ROWS * TILE_ROWS * head_length + position % TILE_ROWS;
        values = values_of(sequence, layer, kv_head) + position * head_length;
        apart = TILE_ROWS;
    }
    step->level->to_halves(key, head_length, keys, apart);
    step->level->to_halves(value, head_length, values, 1);
}

/* A head's query, which its gate follows where it has one. */
static float *query_at(const struct step *step, const struct es_layer *layer, size_t row, size_t head)
{
    const struct es_model *model = step->model;
    size_t apart = (size_t)layer->head_length * (model->gates_heads ? 2 : 1);
    return step->batch->projected + row * projected_length(model) + head * apart;
}

void normalise_joined_heads(const struct step *step, const struct es_layer *layer)
{
    const struct es_model *model = step->model;
    size_t queries = layer_queries(model, layer), keys = layer_keys(layer);
    float epsilon = (float)model->norm_epsilon;
    for (struct pool_items own = divide_rows(step, step->rows->count); pool_take(&own);)
        for (size_t r = own.begin; r < own.end; r++) {
            float *query = step->batch->projected + r * projected_length(model), *key = query + layer_asked(model, layer);
            step->level->normalise(query, layer->query_norm, epsilon, queries, query);
            step->level->normalise(key, layer->key_norm, epsilon, keys, key);
        }
}

/* Of a query at that position. */
static double query_factor(const struct es_model *model, size_t position)
{
    if (!model->query_factors)
        return 1.0;
    size_t number = position / (size_t)model->query_span, last = (size_t)model->query_factor_count - 1;
    return model->query_factors[number < last ? number : last];
}

static void place_head(const struct step *step, size_t number, size_t head, size_t r)
{
    const struct es_model *model = step->model;
    const struct es_layer *layer = &model->layer[number];
    size_t head_length = (size_t)layer->head_length, heads = (size_t)model->heads;
    float *at = head < heads ? query_at(step, layer, r, head)
                             : step->batch->projected + r * projected_length(model) + layer_asked(model, layer) +
                                   (head - heads) * head_length;
    float *value = at + layer_keys(layer); /* if it is a key */
    const float *norm = head < heads ? layer->query_norm : layer->key_norm;
    if (head >= heads && !layer->value.tiles)
        memcpy(value, at, head_length * sizeof *value);
    if (head >= heads && layer->value_norm)
        step->level->normalise(value, layer->value_norm, (float)model->norm_epsilon, head_length, value);
    if (norm && !layer->joins_heads)
        step->level->normalise(at, norm, (float)model->norm_epsilon, head_length, at);
    if (layer->rope_table >= 0)
        rotate(model, (size_t)layer->rope_length, rotation_of(step, (size_t)layer->rope_table, r), at);
    if (head < heads)
        scale_row(query_factor(model, step->rows->row[r].position), head_length, at);
    else
        remember(step, number, head - heads, &step->rows->row[r], at, value);
}

void place_heads(const struct step *step, size_t number)
{
    size_t rows = step->rows->count, heads = (size_t)step->model->heads;
    if (has_keys(step->model, number))
        heads += (size_t)step->model->layer[number].kv_heads;
    const struct pool_work work = {.count = heads * rows, .least = 4, .worth = WORTH_HEADS};
    for (struct pool_items own = divide(step, work); pool_take(&own);)
        for (size_t item = own.begin; item < own.end; item++)
            place_head(step, number, item / rows, item % rows);
}

/* Where a thread gathers the keys of a row's path, followed by its values. */
static uint16_t *path_of(const struct step *step, size_t row)
{
    size_t halves = 2 * PATH_POSITIONS * (size_t)step->model->head_length;
    return step->batch->paths + ((size_t)step->thread * ATTENTION_ROWS + row % ATTENTION_ROWS) * halves;
}

/* Positions first .. end - 1. */
struct seen {
    size_t first, end;
};

static struct seen seen_by(const struct step *step, size_t layer, size_t row)
{
    size_t window = (size_t)step->model->layer[layer].window, end = step->rows->row[row].position + 1;
    size_t own = step->model->borrows ? 1 : 0; /* then its own position has no key */
    return (struct seen){.first = window && end > window ? end - window : 0, .end = end - own};
}

/* Blocks of positions, from number `first` on, that the rows of a forward see. */
struct blocks {
    size_t first, count;
};

static struct blocks blocks_of(const struct step *step, size_t layer)
{
    struct seen all = seen_by(step, layer, 0);
    for (size_t r = 1; r < step->rows->count; r++) {
        struct seen seen = seen_by(step, layer, r);
        all.first = seen.first < all.first ? seen.first : all.first;
        all.end = seen.end > all.end ? seen.end : all.end;
    }
    size_t first = all.first / ATTENTION_BLOCK;
    return (struct blocks){.first = first, .count = (all.end - 1) / ATTENTION_BLOCK + 1 - first};
}

/* Index of the sums of a row's head over a block; the next block's sums follow. */
static size_t part_at(const struct step *step, const struct blocks *blocks, size_t row, size_t head, size_t block)
{
    return (row * (size_t)step->model->heads + head) * blocks->count + (block - blocks->first);
}

/* Where a head's output goes, as floats and quantised. */
static float *mixed_at(const struct step *step, size_t layer, size_t row, size_t head)
{
    const struct activations mixed = mixed_of(step, &step->model->layer[layer]);
    return mixed.floats + row * mixed.columns + head * (size_t)step->model->layer[layer].head_length;
}

static void quantise_mixed(const struct step *step, size_t layer, size_t row, size_t head, size_t count)
{
    const struct es_layer *own = &step->model->layer[layer];
    const struct activations mixed = mixed_of(step, own);
    size_t head_length = (size_t)own->head_length;
    struct activation_block *to = mixed.blocks + row * (mixed.columns / BLOCK) + head * head_length / BLOCK;
    for (size_t h = head; step->model->gates_heads && h < head + count; h++)
        step->level->gate(query_at(step, own, row, h) + head_length, head_length, mixed_at(step, layer, row, h));
    step->level->quantise(mixed_at(step, layer, row, head), count * head_length / BLOCK, to, 1);
}

static size_t heads_of_group(const struct step *step, size_t layer)
{
    return (size_t)(step->model->heads / step->model->layer[layer].kv_heads);
}

static const float *sink_of(const struct es_model *model, size_t layer, size_t head)
{
    const float *sinks = model->layer[layer].sinks;
    return sinks ? sinks + head : NULL;
}

/* Heads first .. first + count - 1 of one group, for a group of rows: over all positions, or with `blocks` over block
 * number `block` of them, keeping its sums. */
static void attend_heads(const struct step *step, size_t number, size_t first, size_t count,
                         const struct row_group *group, const struct blocks *blocks, size_t block)
{
    const struct es_model *model = step->model;
    const struct row *row = &step->rows->row[group->first];
    const struct es_batch *batch = step->batch;
    size_t head_length = (size_t)model->layer[number].head_length, kv_head = first / heads_of_group(step, number);
    size_t start = blocks ? block * ATTENTION_BLOCK : 0, stop = blocks ? start + ATTENTION_BLOCK : SIZE_MAX;
    const struct attention_cache cache = {
        .keys = keys_of(row->sequence, number, kv_head),
        .values = values_of(row->sequence, number, kv_head),
        .head_length = head_length,
        .own_from = row->tree ? row->start / TILE_ROWS * TILE_ROWS : SIZE_MAX,
    };
    struct attention_query queries[MOST_QUERIES];
    float scale = (float)model->score_scale, cap = (float)model->score_cap;
    size_t taken = 0, end = group->first + group->count;
    for (size_t r = group->first; r < end; r++, row++) {
        const struct seen seen = seen_by(step, number, r);
        struct attention_query query = {
            .first = seen.first > start ? seen.first : start,
            .end = seen.end < stop ? seen.end : stop,
        };
        if (query.first >= query.end)
            continue;
        if (query.end > cache.own_from) {
            uint16_t *keys = path_of(step, r), *values = keys + PATH_POSITIONS * head_length;
            tree_path(row->sequence, row->tree, row->start, row->node, number, kv_head, keys, values);
            query.own_keys = keys;
            query.own_values = values;
        }
        for (size_t head = first; head < first + count; head++) {
            query.from = query_at(step, &model->layer[number], r, head);
            query.out = mixed_at(step, number, r, head);
            query.sink = sink_of(model, number, head);
            if (blocks) {
                size_t part = part_at(step, blocks, r, head, block);
                query.out = batch->block_sums + part * head_length;
                query.standing = batch->standing + part;
            }
            if (taken == MOST_QUERIES) {
                step->level->attend(&cache, scale, cap, taken, queries);
                taken = 0;
            }
            queries[taken++] = query;
        }
    }
    if (taken)
        step->level->attend(&cache, scale, cap, taken, queries);
    for (size_t r = group->first; r < end && !blocks; r++)
        quantise_mixed(step, number, r, first, count);
}

/* Heads that share a quantisation block are computed together: two at a time for 16, 48, ... elements. */
static size_t heads_together(const struct step *step, size_t layer)
{
    return step->model->layer[layer].head_length % BLOCK ? 2 : 1;
}

/* Whether there are too few groups (heads that share keys, times groups of rows) to divide evenly among the threads. A
 * thread that takes part of a group converts the group's keys again. */
static bool few_groups(const struct step *step, size_t layer)
{
    return (size_t)step->model->layer[layer].kv_heads * step->rows->groups < 8 * (size_t)step->threads;
}

void mix(const struct step *step, size_t layer)
{
    size_t unit = heads_together(step, layer), group = heads_of_group(step, layer), units = group / unit;
    size_t row_groups = step->rows->groups, items = (size_t)step->model->heads / unit * row_groups;
    bool few = few_groups(step, layer); /* then divided only if a thread is slow */
    const struct pool_work work = {.count = items, .least = few ? 1 : units, .worth = few ? items : units};
    for (struct pool_items own = divide(step, work); pool_take(&own);)
        for (size_t begin = own.begin; begin < own.end;) {
            size_t together = begin / units, from = begin % units, to = from + (own.end - begin);
            to = to < units ? to : units;
            size_t head = together / row_groups * group + from * unit;
            attend_heads(step, layer, head, (to - from) * unit, &step->rows->group[together % row_groups], NULL, 0);
            begin += to - from;
        }
}

/* In a shorter context attention ends before another barrier would save time; a share of this many blocks takes 20 us. */
enum { LEAST_BLOCKS = 4, WORTH_BLOCKS = 4 };

bool mixes_blocks(const struct step *step, size_t layer)
{
    if (step->threads == 1 || !few_groups(step, layer))
        return false;
    size_t blocks = blocks_of(step, layer).count;
    return blocks >= LEAST_BLOCKS && step->rows->count * (size_t)step->model->heads * blocks <= MOST_BLOCK_SUMS;
}

void mix_blocks(const struct step *step, size_t layer)
{
    const struct blocks blocks = blocks_of(step, layer);
    size_t group = heads_of_group(step, layer), row_groups = step->rows->groups;
    size_t items = (size_t)step->model->layer[layer].kv_heads * row_groups * blocks.count;
    const struct pool_work work = {.count = items, .least = 1, .worth = WORTH_BLOCKS};
    for (struct pool_items own = divide(step, work); pool_take(&own);)
        for (size_t item = own.begin; item < own.end; item++) {
            size_t together = item / blocks.count;
            attend_heads(step, layer, together / row_groups * group, group,
                         &step->rows->group[together % row_groups], &blocks, blocks.first + item % blocks.count);
        }
}

static void merge_head(const struct step *step, size_t layer, const struct blocks *blocks, size_t row, size_t head)
{
    const struct es_batch *batch = step->batch;
    const struct seen seen = seen_by(step, layer, row);
    size_t head_length = (size_t)step->model->layer[layer].head_length, first = seen.first / ATTENTION_BLOCK;
    size_t count = (seen.end - 1) / ATTENTION_BLOCK + 1 - first, part = part_at(step, blocks, row, head, first);
    step->level->merge_blocks(batch->block_sums + part * head_length, batch->standing + part, count, head_length,
                              sink_of(step->model, layer, head), mixed_at(step, layer, row, head));
}

void merge_mixed(const struct step *step, size_t layer)
{
    const struct blocks blocks = blocks_of(step, layer);
    size_t unit = heads_together(step, layer), units = (size_t)step->model->heads / unit;
    const struct pool_work work = {.count = step->rows->count * units, .least = 1, .worth = WORTH_HEADS};
    for (struct pool_items own = divide(step, work); pool_take(&own);)
        for (size_t item = own.begin; item < own.end; item++) {
            size_t row = item / units, head = item % units * unit;
            for (size_t h = head; h < head + unit; h++)
                merge_head(step, layer, &blocks, row, h);
            quantise_mixed(step, layer, row, head, unit);
        }
}
