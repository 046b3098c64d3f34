#define _GNU_SOURCE
#include "batch.h"

#include <stdlib.h>
#include <string.h>

#include "carver.h"

_Static_assert(sizeof(atomic_int) == sizeof(int32_t), "the caller writes the flag as a plain int32");

static void carve_buffers(struct es_sequence *sequence, struct carver *carver)
{
    sequence->scores = carve(carver, ES_MOST_SCORED * (size_t)sequence->model->head.rows * sizeof(float));
    sequence->tree = carve(carver, ES_MOST_SCORED * 2 * keys_length(sequence) * sizeof(uint16_t));
}

/* Whether most of a cache is never in use. */
static bool is_sparse(const struct es_model *model)
{
    for (int64_t layer = 0; layer < model->layers; layer++)
        if (model->layer[layer].window)
            return true;
    return false;
}

struct es_sequence *es_open(struct es_batch *batch, int64_t context_length, const int32_t *cancelled)
{
    if (context_length < 1)
        return NULL;
    struct es_sequence *sequence = calloc(1, sizeof *sequence);
    if (!sequence)
        return NULL;
    const struct es_model *model = batch->model;
    sequence->batch = batch;
    sequence->model = model;
    sequence->level = batch->level;
    sequence->cancelled = (const atomic_int *)cancelled;
    es_use_heads(sequence, &model->head, 1);
    bool is_long = model->long_frequencies && context_length > model->original_context;
    sequence->frequencies = is_long ? model->long_frequencies : model->rope_frequencies;
    sequence->context_length = (size_t)context_length;
    sequence->positions = ((size_t)context_length + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS;
    sequence->cache_at = batch->cache_at;
    if ((uint64_t)context_length > SIZE_MAX / 8 / (keys_length(sequence) + 1) - TILE_ROWS) {
        es_close(sequence);
        return NULL;
    }
    sequence->cache_bytes = 2 * keys_length(sequence) * sequence->positions * sizeof(uint16_t);
    enum es_pages pages = is_sparse(model) ? ES_PAGES_SPARSE : ES_PAGES_SMALL;
    if (sequence->cache_bytes)
        sequence->cache = es_memory_take((int64_t)sequence->cache_bytes, pages);

    struct carver carver = {0};
    carve_buffers(sequence, &carver);
    sequence->buffer_bytes = carver.used;
    sequence->buffers = es_memory_take((int64_t)carver.used, ES_PAGES_SMALL);
    carver = (struct carver){.base = sequence->buffers};
    carve_buffers(sequence, &carver);
    if ((sequence->cache_bytes && !sequence->cache) || !sequence->buffers || !delta_open(sequence)) {
        es_close(sequence);
        return NULL;
    }
    return sequence;
}

void es_close(struct es_sequence *sequence)
{
    if (!sequence->lender)
        es_memory_give(sequence->cache, (int64_t)sequence->cache_bytes);
    free(sequence->lent_at);
    es_memory_give(sequence->buffers, (int64_t)sequence->buffer_bytes);
    es_memory_give(sequence->states, (int64_t)sequence->state_bytes);
    es_memory_give(sequence->kept, (int64_t)sequence->kept_bytes);
    free(sequence->kept_layers);
    free(sequence);
}

/* Whether a layer's rows can see the cache of that layer of another model. */
static bool can_see(const struct es_layer *layer, const struct es_model *lender, int64_t number)
{
    if (number < 0 || number >= lender->layers)
        return false;
    const struct es_layer *seen = &lender->layer[number];
    return !seen->delta.mixed.tiles && seen->kv_heads == layer->kv_heads && seen->head_length == layer->head_length &&
           seen->window == layer->window;
}

int32_t es_borrow(struct es_sequence *sequence, const struct es_sequence *lender, const int64_t *layers)
{
    const struct es_model *model = sequence->model, *other = lender->model;
    if (!model->borrows || sequence->lender || other->borrows || other->embedding != model->pair_length ||
        other->vocabulary < model->vocabulary)
        return ES_BAD_REQUEST;
    for (int64_t layer = 0; layer < model->layers; layer++)
        if (!can_see(&model->layer[layer], other, layers[layer]))
            return ES_BAD_REQUEST;
    sequence->lent_at = calloc((size_t)model->layers + 1, sizeof *sequence->lent_at);
    if (!sequence->lent_at)
        return ES_BAD_REQUEST;
    for (int64_t layer = 0; layer < model->layers; layer++)
        sequence->lent_at[layer] = lender->cache_at[layers[layer]];
    sequence->lent_at[model->layers] = keys_length(lender);
    es_memory_give(sequence->cache, (int64_t)sequence->cache_bytes);
    sequence->lender = lender;
    sequence->cache = lender->cache;
    sequence->cache_at = sequence->lent_at;
    sequence->positions = lender->positions;
    return ES_OK;
}

static size_t tile_of(int64_t position)
{
    return (size_t)position / TILE_ROWS * TILE_ROWS;
}

int32_t es_copy(struct es_sequence *to, const struct es_sequence *from, int64_t first, int64_t length)
{
    const struct es_model *model = to->model;
    if (from->model != model || from->frequencies != to->frequencies || first < 0 || length < first ||
        (size_t)length > to->context_length || (size_t)length > from->context_length || length < es_state_floor(from))
        return ES_BAD_REQUEST;
    delta_copy(to, from);
    size_t end = tile_of(length + TILE_ROWS - 1);
    for (int64_t layer = 0; layer < model->layers; layer++) {
        size_t head_length = (size_t)model->layer[layer].head_length;
        size_t begin = model->layer[layer].window ? tile_of(first) * head_length : 0;
        size_t bytes = (end * head_length - begin) * sizeof(uint16_t);
        for (int64_t head = 0; has_keys(model, layer) && head < model->layer[layer].kv_heads; head++) {
            memcpy(keys_of(to, layer, head) + begin, keys_of(from, layer, head) + begin, bytes);
            memcpy(values_of(to, layer, head) + begin, values_of(from, layer, head) + begin, bytes);
        }
    }
    return ES_OK;
}

int32_t es_forget(struct es_sequence *sequence, int64_t first, int64_t end)
{
    const struct es_model *model = sequence->model;
    if (first < 0 || end < first || (size_t)end > sequence->positions)
        return ES_BAD_REQUEST;
    for (int64_t layer = 0; layer < model->layers; layer++) {
        int64_t position_bytes = model->layer[layer].head_length * (int64_t)sizeof(uint16_t);
        int64_t from = (int64_t)tile_of(first) * position_bytes, to = (int64_t)tile_of(end) * position_bytes;
        bool forgets = model->layer[layer].window && has_keys(model, layer);
        for (int64_t head = 0; head < model->layer[layer].kv_heads && forgets; head++) {
            es_memory_forget(keys_of(sequence, layer, head), from, to);
            es_memory_forget(values_of(sequence, layer, head), from, to);
        }
    }
    return ES_OK;
}

/* What a part holds: a head's keys or values, from a position on. Null: the layer has a state in their place. No head
 * length: there is no such part. */
struct part {
    uint16_t *from;
    size_t head_length;
    bool is_keys;
};

static struct part part_of(const struct es_sequence *sequence, int64_t number, int64_t first, int64_t length)
{
    const struct es_model *model = sequence->model;
    bool fits = number >= 0 && first >= 0 && first % TILE_ROWS == 0 && length > first &&
                (size_t)length <= sequence->context_length;
    for (int values = 0; values < 2 && fits; values++)
        for (int64_t layer = 0; layer < model->layers; layer++) {
            if (model->borrows || model->layer[layer].cache_layer != layer)
                continue;
            if (number >= model->layer[layer].kv_heads) {
                number -= model->layer[layer].kv_heads;
                continue;
            }
            struct part found = {.head_length = (size_t)model->layer[layer].head_length, .is_keys = !values};
            if (has_keys(model, layer))
                found.from = (values ? values_of : keys_of)(sequence, layer, number) + (size_t)first * found.head_length;
            return found;
        }
    return (struct part){.from = NULL};
}

int64_t es_part_bytes(const struct es_sequence *sequence, int64_t part, int64_t first, int64_t length)
{
    size_t positions = tile_of(length - first + TILE_ROWS - 1);
    return (int64_t)(positions * part_of(sequence, part, first, length).head_length * sizeof(uint16_t));
}

/* Positions from `length` to the end of its tile become zeros: they hold what a rejected guess left. */
static void clear_rest(uint16_t *part, bool keys, size_t head_length, size_t length)
{
    size_t end = (length + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS;
    if (!keys) {
        memset(part + length * head_length, 0, (end - length) * head_length * sizeof *part);
        return;
    }
    for (size_t position = length; position < end; position++)
        for (size_t d = 0; d < head_length; d++)
            part[position / TILE_ROWS * TILE_ROWS * head_length + d * TILE_ROWS + position % TILE_ROWS] = 0;
}

static void copy_part(uint16_t *to, const uint16_t *from, struct part part, int64_t length, int64_t bytes)
{
    memcpy(to, from, (size_t)bytes);
    clear_rest(to, part.is_keys, part.head_length, (size_t)length);
}

int32_t es_read_part(const struct es_sequence *sequence, int64_t part, int64_t first, int64_t length, uint8_t *to,
                     int64_t bytes)
{
    const struct part own = part_of(sequence, part, first, length);
    if (!own.from || bytes != es_part_bytes(sequence, part, first, length))
        return ES_BAD_REQUEST;
    copy_part((uint16_t *)to, own.from, own, length - first, bytes);
    return ES_OK;
}

int32_t es_write_part(struct es_sequence *sequence, int64_t part, int64_t first, int64_t length, const uint8_t *from,
                      int64_t bytes)
{
    enum { EXPONENT = 0x7c00 }; /* all ones: infinite, or not a number */
    const struct part own = part_of(sequence, part, first, length);
    if (!own.from || bytes != es_part_bytes(sequence, part, first, length))
        return ES_BAD_REQUEST;
    const uint16_t *halves = (const uint16_t *)from;
    for (size_t i = 0; i < (size_t)bytes / sizeof *halves; i++)
        if ((halves[i] & EXPONENT) == EXPONENT)
            return ES_NOT_FINITE;
    copy_part(own.from, halves, own, length - first, bytes);
    return ES_OK;
}

int32_t es_use_heads(struct es_sequence *sequence, const struct es_matrix *heads, int32_t count)
{
    const struct es_matrix *whole = &sequence->model->head;
    int64_t left = whole->rows;
    if (count < 1 || count > ES_MOST_HEADS)
        return ES_BAD_REQUEST;
    for (int32_t i = 0; i < count; i++) {
        if (heads[i].rows < 1 || heads[i].rows > left || heads[i].columns != whole->columns)
            return ES_BAD_REQUEST;
        left -= heads[i].rows;
    }
    memcpy(sequence->heads, heads, (size_t)count * sizeof *heads);
    sequence->head_count = count;
    sequence->head_rows = (size_t)(whole->rows - left);
    sequence->scored = 0;
    return ES_OK;
}

int32_t es_keep_hidden(struct es_sequence *sequence, const int64_t *layers, int64_t count)
{
    size_t row_bytes = (size_t)sequence->model->embedding * sizeof(float);
    if (sequence->kept_layers || count < 1 || count > sequence->model->layers + 1)
        return ES_BAD_REQUEST;
    for (int64_t i = 0; i < count; i++)
        if (layers[i] < -1 || layers[i] >= sequence->model->layers)
            return ES_BAD_REQUEST;
    sequence->kept_bytes = (size_t)count * ES_MOST_SCORED * row_bytes;
    sequence->kept = es_memory_take((int64_t)sequence->kept_bytes, ES_PAGES_SMALL);
    sequence->kept_layers = malloc((size_t)count * sizeof *layers);
    if (!sequence->kept || !sequence->kept_layers)
        return ES_BAD_REQUEST; /* nothing is kept; es_close frees the rest */
    memcpy(sequence->kept_layers, layers, (size_t)count * sizeof *layers);
    sequence->kept_count = (size_t)count;
    return ES_OK;
}

float *kept_slot(const struct es_sequence *sequence, int64_t layer)
{
    for (size_t i = 0; i < sequence->kept_count; i++)
        if (sequence->kept_layers[i] == layer)
            return sequence->kept + i * ES_MOST_SCORED * (size_t)sequence->model->embedding;
    return NULL;
}

const float *es_hidden(const struct es_sequence *sequence, int64_t layer)
{
    return kept_slot(sequence, layer);
}

const float *es_scores(const struct es_sequence *sequence)
{
    return sequence->scores;
}

int64_t es_argmax(const struct es_sequence *sequence, int32_t row)
{
    size_t count = sequence->head_rows;
    return sequence->level->argmax(sequence->scores + (size_t)row * count, count);
}

int64_t es_best(const float *scores, int64_t count, int32_t number)
{
    const struct level *level = level_of(number);
    return level && count > 0 ? level->argmax(scores, (size_t)count) : -1;
}
