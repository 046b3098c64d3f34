/* The feed-forward of a layer with experts (Shazeer et al. 2017): each row uses those that its router scores best. */
#define _GNU_SOURCE
#include <math.h>
#include <string.h>

#include "forward_step.h"
#include "threads.h"

static size_t used_by(const struct step *step)
{
    return (size_t)step->model->experts_used;
}

/* An expert's part of a matrix that holds those of all experts, one below another: whole tiles. */
static struct es_matrix part_of_expert(const struct step *step, const struct es_matrix *all, int32_t expert)
{
    struct es_matrix own = *all;
    own.rows = all->rows / step->model->experts;
    own.tiles += (size_t)expert * tile_count(own.rows) * tile_bytes(all->type, all->columns);
    if (own.bias)
        own.bias += expert * own.rows;
    return own;
}

void route(const struct step *step, const struct es_layer *layer)
{
    struct mixture *mixture = &step->batch->mixture;
    const struct product products[] = {
        {.matrix = &layer->router, .to = mixture->scores, .stride = mixture->score_stride},
        {.matrix = &layer->shared.router, .to = mixture->shared_scores, .stride = TILE_ROWS},
    };
    multiply(step, products, layer->shared.router.tiles ? 2 : 1, &step->batch->normed, step->rows->count);
}

/* ------------------------------------------------------------------------------------------------------- choice */

/* The experts with the highest scores, of equal ones the lower; any experts, but as many, where scores are not numbers. */
static void choose_best(const float *scores, size_t experts, size_t used, int32_t *chosen)
{
    bool taken[ES_MOST_EXPERTS] = {false};
    for (size_t slot = 0; slot < used; slot++) {
        size_t best = experts;
        for (size_t expert = 0; expert < experts; expert++)
            if (!taken[expert] && (best == experts || scores[expert] > scores[best]))
                best = expert;
        taken[best] = true;
        chosen[slot] = (int32_t)best;
    }
}

/* The softmax of all scores, or of the chosen ones if weights are normed. */
static void weigh(const struct step *step, const float *expert_scales, float *scores, const int32_t *chosen, float *weights)
{
    const struct es_model *model = step->model;
    size_t experts = (size_t)model->experts, padded = step->batch->mixture.score_stride, used = used_by(step);
    float largest = scores[chosen[0]], total = 0.0f;
    for (size_t expert = 0; expert < experts; expert++)
        scores[expert] -= largest;
    for (size_t expert = experts; expert < padded; expert++)
        scores[expert] = 0.0f;
    step->level->exponential(scores, padded, scores);
    if (model->experts_normed)
        for (size_t slot = 0; slot < used; slot++)
            total += scores[chosen[slot]];
    else
        for (size_t expert = 0; expert < experts; expert++)
            total += scores[expert];
    for (size_t slot = 0; slot < used; slot++)
        weights[slot] = scores[chosen[slot]] / total;
    scale_row(model->expert_scale, used, weights);
    for (size_t slot = 0; slot < used && expert_scales; slot++)
        weights[slot] *= expert_scales[chosen[slot]];
}

void choose_experts(const struct step *step, const struct es_layer *layer)
{
    struct mixture *mixture = &step->batch->mixture;
    size_t used = used_by(step);
    for (struct pool_items own = divide_rows(step, step->rows->count); pool_take(&own);)
        for (size_t r = own.begin; r < own.end; r++) {
            float *scores = mixture->scores + r * mixture->score_stride;
            int32_t *chosen = mixture->chosen + r * used;
            choose_best(scores, (size_t)step->model->experts, used, chosen);
            weigh(step, layer->expert_scales, scores, chosen, mixture->weights + r * used);
        }
}

/* --------------------------------------------------------------------------------------------------------- lists */

/* Sorts the rows' choices by expert. One thread does it: of 256 rows it takes some microseconds. */
void list_experts(const struct step *step)
{
    struct mixture *mixture = &step->batch->mixture;
    size_t count = step->rows->count * used_by(step), experts = (size_t)step->model->experts;
    int32_t next[ES_MOST_EXPERTS] = {0}, before = 0;
    if (step->thread)
        return;
    for (size_t i = 0; i < count; i++)
        next[mixture->chosen[i]]++;
    mixture->listed = 0;
    for (size_t expert = 0; expert < experts; expert++) {
        int32_t rows = next[expert];
        next[expert] = before;
        if (!rows)
            continue;
        mixture->experts[mixture->listed] = (int32_t)expert;
        mixture->starts[mixture->listed++] = before;
        before += rows;
    }
    mixture->starts[mixture->listed] = before;
    step->batch->experts_read += mixture->listed;
    for (size_t i = 0; i < count; i++) {
        int32_t entry = next[mixture->chosen[i]]++;
        mixture->entries[i] = entry;
        mixture->rows[entry] = (int32_t)(i / used_by(step));
    }
}

/* Copies each entry's row, in the forms that gate and up read. */
void gather_rows(const struct step *step, const struct es_layer *layer)
{
    const struct mixture *mixture = &step->batch->mixture;
    const struct activations *from = &step->batch->normed, *to = &mixture->gathered;
    size_t columns = from->columns, blocks = columns / BLOCK;
    int64_t up_type = layer->up.tiles ? layer->up.type : layer->gate.type;
    bool quantised[2] = {takes_quantised_input(layer->gate.type), takes_quantised_input(up_type)};
    for (struct pool_items own = divide_rows(step, step->rows->count * used_by(step)); pool_take(&own);)
        for (size_t entry = own.begin; entry < own.end; entry++) {
            size_t row = (size_t)mixture->rows[entry];
            if (quantised[0] || quantised[1])
                memcpy(to->blocks + entry * blocks, from->blocks + row * blocks, blocks * sizeof *to->blocks);
            if (!quantised[0] || !quantised[1])
                memcpy(to->floats + entry * columns, from->floats + row * columns, columns * sizeof *to->floats);
        }
}

/* ------------------------------------------------------------------------------------------------------ products */

/* A share of one listed expert's outputs. */
struct expert_part {
    int32_t expert;
    size_t first, rows; /* entries */
    size_t begin, end;  /* outputs, in the step's unit */
};

/* The part of the items from `item` on that belongs to one expert; each listed expert has `outputs` items. */
static struct expert_part expert_part_at(const struct mixture *mixture, size_t outputs, size_t item, size_t end)
{
    size_t place = item / outputs, start = place * outputs;
    size_t first = (size_t)mixture->starts[place];
    return (struct expert_part){
        .expert = mixture->experts[place],
        .first = first,
        .rows = (size_t)mixture->starts[place + 1] - first,
        .begin = item - start,
        .end = end < start + outputs ? end - start : outputs,
    };
}

/* An item is `lanes` outputs of one listed expert. */
static struct pool_items divide_experts(const struct step *step, size_t outputs, size_t lanes, size_t columns)
{
    size_t listed = step->batch->mixture.listed, rows = step->rows->count * used_by(step) / listed;
    size_t costly = rows > LEAST_COSTLY_ROWS ? rows : LEAST_COSTLY_ROWS;
    return divide(step, (struct pool_work){
                            .count = listed * outputs,
                            .least = 1,
                            .worth = WORTH_PRODUCTS / (lanes * columns * costly),
                            .uniform = step->rows->count == 1, /* experts of several rows have different numbers */
                        });
}

void feed_experts(const struct step *step, const struct es_layer *layer)
{
    const struct mixture *mixture = &step->batch->mixture;
    size_t outputs = mixture->fed.columns / BLOCK, columns = mixture->gathered.columns;
    for (struct pool_items own = divide_experts(step, outputs, 2 * BLOCK, columns); pool_take(&own);)
        for (size_t item = own.begin; item < own.end;) {
            struct expert_part part = expert_part_at(mixture, outputs, item, own.end);
            struct es_matrix gate = part_of_expert(step, &layer->gate, part.expert), up = gate;
            if (layer->up.tiles) {
                up = part_of_expert(step, &layer->up, part.expert);
            } else {
                gate.rows = up.rows = gate.rows / 2;
                up.tiles += tile_count(up.rows) * tile_bytes(up.type, up.columns);
            }
            const struct feeding feeding = {.gate = &gate,
                                            .up = &up,
                                            .from = &mixture->gathered,
                                            .to = &mixture->fed,
                                            .down_type = layer->down.type};
            feed_blocks(step, &feeding, part.begin, part.end, part.first, part.rows);
            item += part.end - part.begin;
        }
}

void multiply_experts(const struct step *step, const struct es_layer *layer)
{
    const struct mixture *mixture = &step->batch->mixture;
    const struct activations *fed = &mixture->fed;
    size_t embedding = (size_t)step->model->embedding, outputs = tile_count(step->model->embedding);
    for (struct pool_items own = divide_experts(step, outputs, TILE_ROWS, fed->columns); pool_take(&own);)
        for (size_t item = own.begin; item < own.end;) {
            struct expert_part part = expert_part_at(mixture, outputs, item, own.end);
            struct es_matrix down = part_of_expert(step, &layer->down, part.expert);
            const struct product product = {
                .matrix = &down, .to = mixture->outputs + part.first * embedding, .stride = embedding};
            const struct activations input = {
                .blocks = fed->blocks + part.first * (fed->columns / BLOCK),
                .floats = fed->floats + part.first * fed->columns,
                .columns = fed->columns,
            };
            multiply_tiles(step->level, &product, 1, part.begin, part.end, &input, part.rows);
            item += part.end - part.begin;
        }
}

void multiply_shared(const struct step *step, const struct es_layer *layer)
{
    const struct mixture *mixture = &step->batch->mixture;
    const struct product product = {
        .matrix = &layer->shared.down, .to = mixture->shared_outputs, .stride = (size_t)step->model->embedding};
    multiply(step, &product, 1, &mixture->shared, step->rows->count);
}

/* ---------------------------------------------------------------------------------------------------------- sums */

/* Of the expert that every row uses. */
static float shared_weight(const struct step *step, size_t row)
{
    float weights[TILE_ROWS] = {1.0f};
    step->level->gate(step->batch->mixture.shared_scores + row * TILE_ROWS, TILE_ROWS, weights);
    return weights[0];
}

/* Columns of a row that are summed at a time: the experts' outputs of more would leave the first cache. */
enum { SUM_COLUMNS = 256 };

static void sum_columns(const struct step *step, const struct es_layer *layer, size_t row, size_t begin, size_t count,
                        float *sums)
{
    const struct mixture *mixture = &step->batch->mixture;
    size_t used = used_by(step), embedding = (size_t)step->model->embedding;
    for (size_t slot = 0; slot < used; slot++) {
        float weight = mixture->weights[row * used + slot];
        const float *from = mixture->outputs + (size_t)mixture->entries[row * used + slot] * embedding + begin;
        for (size_t k = 0; k < count; k++)
            sums[k] = slot ? sums[k] + weight * from[k] : weight * from[k];
    }
    if (!layer->shared.gate.tiles)
        return;
    float weight = shared_weight(step, row);
    const float *from = mixture->shared_outputs + row * embedding + begin;
    for (size_t k = 0; k < count; k++)
        sums[k] += weight * from[k];
}

/* Adds each row's weighted sum to the hidden states, or leaves that to join_rows. */
void add_experts(const struct step *step, const struct es_layer *layer)
{
    struct es_batch *batch = step->batch;
    size_t embedding = (size_t)step->model->embedding, parts = (embedding + SUM_COLUMNS - 1) / SUM_COLUMNS;
    bool later = adds_later(step, layer->feed_forward_post_norm);
    for (struct pool_items own = divide_rows(step, step->rows->count * parts); pool_take(&own);)
        for (size_t item = own.begin; item < own.end; item++) {
            size_t row = item / parts, begin = item % parts * SUM_COLUMNS;
            size_t count = embedding - begin < SUM_COLUMNS ? embedding - begin : SUM_COLUMNS;
            float sums[SUM_COLUMNS];
            float *to = (later ? batch->added : batch->hidden) + row * embedding + begin;
            sum_columns(step, layer, row, begin, count, sums);
            for (size_t k = 0; k < count; k++)
                to[k] = later ? sums[k] : to[k] + sums[k];
        }
}
