/* Attention, head by head: what each thread does between the projections and the product that follows. */
#include "forward_step.h"

/* Rotary embedding (Su et al. 2021) of one head, in place. */
static void rotate(const struct es_model *model, const float *rotation, float *head)
{
    size_t pairs = (size_t)model->rope_length / 2;
    size_t step = model->rope == ES_ROPE_HALVES ? 1 : 2, apart = model->rope == ES_ROPE_HALVES ? pairs : 1;
    for (size_t i = 0; i < pairs; i++) {
        float *a = head + i * step, *b = a + apart, x = *a, y = *b, c = rotation[2 * i], s = rotation[2 * i + 1];
        *a = x * c - y * s;
        *b = x * s + y * c;
    }
}

/* The cache of one kv head, and for a tree the rows that the new nodes' keys and values go to. */
static void remember(const struct step *step, size_t layer, size_t kv_head, size_t row, const float *key,
                     const float *value)
{
    const struct es_sequence *sequence = step->sequence;
    const struct forward *forward = step->forward;
    size_t head_length = (size_t)step->model->head_length, node = 0, apart = 1;
    uint16_t *keys, *values;
    if (forward->tree) {
        node = forward->tree->first + row;
        keys = tree_key_of(sequence, layer, kv_head, node);
        values = tree_value_of(sequence, layer, kv_head, node);
    } else {
        size_t position = forward->start + row;
        keys = keys_of(sequence, layer, kv_head) + position / TILE_ROWS * TILE_ROWS * head_length + position % TILE_ROWS;
        values = values_of(sequence, layer, kv_head) + position * head_length;
        apart = TILE_ROWS;
    }
    step->level->to_halves(key, head_length, keys, apart);
    step->level->to_halves(value, head_length, values, 1);
}

void place_heads(const struct step *step, size_t number)
{
    const struct es_model *model = step->model;
    const struct es_layer *layer = &model->layer[number];
    size_t rows = step->forward->rows, head_length = (size_t)model->head_length, begin, end;
    size_t heads = (size_t)model->heads, kv_heads = (size_t)model->kv_heads;
    share(step, (heads + kv_heads) * rows, &begin, &end);
    for (size_t item = begin; item < end; item++) {
        size_t head = item / rows, r = item % rows;
        float *at = step->sequence->projected + r * projected_length(model) + head * head_length;
        const float *norm = head < heads ? layer->query_norm : layer->key_norm;
        if (norm)
            step->level->normalise(at, norm, (float)model->norm_epsilon, head_length, at);
        rotate(model, rotation_of(step, (size_t)layer->rope_table, r), at);
        if (head >= heads)
            remember(step, number, head - heads, r, at, at + kv_heads * head_length);
    }
}

/* Where a thread puts the keys of a row's path together, and right behind them its values. */
static uint16_t *path_of(const struct step *step, size_t row)
{
    size_t halves = 2 * PATH_POSITIONS * (size_t)step->model->head_length;
    return step->sequence->paths + ((size_t)step->thread * ATTENTION_ROWS + row % ATTENTION_ROWS) * halves;
}

/* Heads first .. first + count - 1, of one group, for rows begin .. end - 1, at most ATTENTION_ROWS. */
static void attend_heads(const struct step *step, size_t number, size_t first, size_t count, size_t begin, size_t end)
{
    const struct es_model *model = step->model;
    const struct forward *forward = step->forward;
    struct es_sequence *sequence = step->sequence;
    size_t head_length = (size_t)model->head_length, kv_head = first / (size_t)(model->heads / model->kv_heads);
    size_t window = (size_t)model->layer[number].window;
    const struct attention_cache cache = {
        .keys = keys_of(sequence, number, kv_head),
        .values = values_of(sequence, number, kv_head),
        .head_length = head_length,
        .own_from = forward->tree ? forward->start / TILE_ROWS * TILE_ROWS : SIZE_MAX,
    };
    struct attention_query queries[MOST_QUERIES];
    size_t taken = 0;
    for (size_t r = begin; r < end; r++) {
        struct attention_query query = {.end = position_of(forward, r) + 1};
        query.first = window && query.end > window ? query.end - window : 0;
        if (forward->tree) {
            uint16_t *keys = path_of(step, r), *values = keys + PATH_POSITIONS * head_length;
            tree_path(sequence, forward->tree, forward->start, forward->tree->first + r, number, kv_head, keys, values);
            query.own_keys = keys;
            query.own_values = values;
        }
        for (size_t head = first; head < first + count; head++) {
            query.from = sequence->projected + r * projected_length(model) + head * head_length;
            query.out = sequence->mixed.floats + r * sequence->mixed.columns + head * head_length;
            queries[taken++] = query;
            if (taken == MOST_QUERIES || (r + 1 == end && head + 1 == first + count)) {
                step->level->attend(&cache, (float)model->attention_scale, taken, queries);
                taken = 0;
            }
        }
    }
    size_t blocks = sequence->mixed.columns / BLOCK, block = first * head_length / BLOCK;
    for (size_t r = begin; r < end; r++)
        step->level->quantise(sequence->mixed.floats + r * sequence->mixed.columns + block * BLOCK,
                              count * head_length / BLOCK, sequence->mixed.blocks + r * blocks + block, 1);
}

void mix(const struct step *step, size_t layer)
{
    const struct es_model *model = step->model;
    /* What is quantised together is computed together: of heads of 16, 48, ... elements two at a time. */
    size_t unit = model->head_length % BLOCK ? 2 : 1;
    size_t group = (size_t)(model->heads / model->kv_heads), units = group / unit;
    size_t rows = step->forward->rows, chunks = (rows + ATTENTION_ROWS - 1) / ATTENTION_ROWS, begin, end;
    share(step, (size_t)model->kv_heads * chunks * units, &begin, &end);
    while (begin < end) {
        size_t together = begin / units, from = begin % units, to = from + (end - begin);
        to = to < units ? to : units;
        size_t kv_head = together / chunks, row = together % chunks * ATTENTION_ROWS;
        size_t last = row + ATTENTION_ROWS < rows ? row + ATTENTION_ROWS : rows;
        attend_heads(step, layer, kv_head * group + from * unit, (to - from) * unit, row, last);
        begin += to - from;
    }
}
