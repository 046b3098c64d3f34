/* A whole model's forward: every thread runs forward_on, doing its share of each step, with barriers between. */
#include <math.h>
#include <string.h>
#include <unistd.h>

#include "half.h"
#include "multiply.h"
#include "sequence.h"

struct forward {
    struct es_sequence *sequence;
    const int32_t *tokens;
    size_t rows, scored;
    size_t start; /* the first row's position */
    bool finished;
};

/* What every step knows. */
struct step {
    struct forward *forward;
    struct es_sequence *sequence;
    const struct es_model *model;
    const struct level *level;
    int thread, threads;
};

static void share(const struct step *step, size_t items, size_t *begin, size_t *end)
{
    pool_share(items, step->thread, step->threads, begin, end);
}

/* The tokens' embeddings, and the angles of their positions. */
static void begin_rows(const struct step *step)
{
    const struct es_model *model = step->model;
    struct es_sequence *sequence = step->sequence;
    size_t embedding = (size_t)model->embedding, pairs = (size_t)model->rope_length / 2, begin, end;
    size_t row_bytes = file_row_bytes(model->embedding_type, model->embedding);
    share(step, step->forward->rows, &begin, &end);
    for (size_t r = begin; r < end; r++) {
        const uint8_t *from = model->embedding_rows + (size_t)step->forward->tokens[r] * row_bytes;
        (void)es_dequantise(model->embedding_type, from, model->embedding, sequence->hidden + r * embedding);
        float *rotation = sequence->rotation + r * 2 * pairs;
        for (size_t i = 0; i < pairs; i++) {
            double angle = (double)(step->forward->start + r) * model->rope_frequencies[i];
            rotation[2 * i] = (float)cos(angle);
            rotation[2 * i + 1] = (float)sin(angle);
        }
    }
}

/* RMSNorm of rows first .. first + count - 1 into normed's rows 0 .. count - 1, quantised as well. */
static void normalise_rows(const struct step *step, const float *weight, size_t first, size_t count)
{
    struct es_sequence *sequence = step->sequence;
    struct activations *to = &sequence->normed;
    size_t begin, end, blocks = to->columns / BLOCK;
    share(step, count, &begin, &end);
    for (size_t r = begin; r < end; r++) {
        float *floats = to->floats + r * to->columns;
        step->level->normalise(sequence->hidden + (first + r) * to->columns, weight, (float)step->model->norm_epsilon,
                               to->columns, floats);
        step->level->quantise(floats, blocks, to->blocks + r * blocks);
    }
}

static void multiply_share(const struct step *step, const struct product *products, size_t count,
                           const struct activations *x, size_t rows)
{
    size_t begin, end;
    share(step, product_tiles(products, count), &begin, &end);
    multiply_tiles(step->level, products, count, begin, end, x, rows);
}

static void project(const struct step *step, const struct es_layer *layer)
{
    size_t stride = projected_length(step->model), queries = query_length(step->model);
    size_t keys = (size_t)(step->model->kv_heads * step->model->head_length);
    float *to = step->sequence->projected;
    const struct product products[] = {
        {.matrix = &layer->query, .to = to, .stride = stride},
        {.matrix = &layer->key, .to = to + queries, .stride = stride},
        {.matrix = &layer->value, .to = to + queries + keys, .stride = stride},
    };
    multiply_share(step, products, 3, &step->sequence->normed, step->forward->rows);
}

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

static void remember(const struct es_sequence *sequence, size_t layer, size_t kv_head, size_t position,
                     const float *key, const float *value)
{
    size_t head_length = (size_t)sequence->model->head_length;
    uint16_t *keys = keys_of(sequence, layer, kv_head) + position / TILE_ROWS * TILE_ROWS * head_length;
    uint16_t *values = values_of(sequence, layer, kv_head) + position * head_length;
    for (size_t d = 0; d < head_length; d++) {
        keys[d * TILE_ROWS + position % TILE_ROWS] = float_to_half(key[d]);
        values[d] = float_to_half(value[d]);
    }
}

/* Turns queries and keys by their positions, and puts keys and values into the cache. */
static void place_heads(const struct step *step, size_t layer)
{
    const struct es_model *model = step->model;
    size_t rows = step->forward->rows, head_length = (size_t)model->head_length, begin, end;
    size_t heads = (size_t)model->heads, kv_heads = (size_t)model->kv_heads;
    share(step, (heads + kv_heads) * rows, &begin, &end);
    for (size_t item = begin; item < end; item++) {
        size_t head = item / rows, r = item % rows;
        float *at = step->sequence->projected + r * projected_length(model) + head * head_length;
        rotate(model, step->sequence->rotation + r * (size_t)model->rope_length, at);
        if (head >= heads)
            remember(step->sequence, layer, head - heads, step->forward->start + r, at, at + kv_heads * head_length);
    }
}

/* Rows that one call of attend takes with all heads of a group; what it saves is reading the cache for each. */
enum { ATTENTION_ROWS = 8 };

/* Heads first .. first + count - 1, of one group, for rows begin .. end - 1. */
static void attend_heads(const struct step *step, size_t layer, size_t first, size_t count, size_t begin, size_t end)
{
    const struct es_model *model = step->model;
    struct es_sequence *sequence = step->sequence;
    size_t head_length = (size_t)model->head_length, group = (size_t)(model->heads / model->kv_heads);
    const struct attention_cache cache = {
        .keys = keys_of(sequence, layer, first / group),
        .values = values_of(sequence, layer, first / group),
        .head_length = head_length,
    };
    float scale = 1.0f / sqrtf((float)head_length);
    const float *queries[MOST_QUERIES];
    float *out[MOST_QUERIES];
    int64_t visible[MOST_QUERIES];
    size_t taken = 0;
    for (size_t r = begin; r < end; r++)
        for (size_t head = first; head < first + count; head++) {
            queries[taken] = sequence->projected + r * projected_length(model) + head * head_length;
            out[taken] = sequence->mixed.floats + r * sequence->mixed.columns + head * head_length;
            visible[taken] = (int64_t)(step->forward->start + r + 1);
            if (++taken == MOST_QUERIES || (r + 1 == end && head + 1 == first + count)) {
                step->level->attend(&cache, scale, taken, queries, visible, out);
                taken = 0;
            }
        }
    size_t blocks = sequence->mixed.columns / BLOCK, block = first * head_length / BLOCK;
    for (size_t r = begin; r < end; r++)
        step->level->quantise(sequence->mixed.floats + r * sequence->mixed.columns + block * BLOCK,
                              count * head_length / BLOCK, sequence->mixed.blocks + r * blocks + block);
}

static void mix(const struct step *step, size_t layer)
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

static void add_product(const struct step *step, const struct es_matrix *matrix, const struct activations *x)
{
    const struct product product = {
        .matrix = matrix, .to = step->sequence->hidden, .stride = (size_t)step->model->embedding, .adds = 1};
    multiply_share(step, &product, 1, x, step->forward->rows);
}

/* The feed-forward's gate and its input, joined and quantised while they are at hand: 32 outputs at a time. */
static void feed(const struct step *step, const struct es_layer *layer)
{
    struct activations *to = &step->sequence->fed;
    size_t rows = step->forward->rows, blocks = to->columns / BLOCK, begin, end;
    share(step, blocks, &begin, &end);
    for (size_t block = begin; block < end; block++)
        for (size_t pass = 0; pass < pass_count(rows); pass++) {
            size_t first = pass_start(rows, pass), here = pass_start(rows, pass + 1) - first;
            float joined[PASS_ROWS][BLOCK];
            for (size_t half = 0; half < 2; half++) {
                float gate[PASS_ROWS][TILE_ROWS], up[PASS_ROWS][TILE_ROWS];
                multiply_tile(step->level, &layer->gate, 2 * block + half, &step->sequence->normed, first, here, gate);
                multiply_tile(step->level, &layer->up, 2 * block + half, &step->sequence->normed, first, here, up);
                for (size_t r = 0; r < here; r++)
                    step->level->swiglu(gate[r], up[r], TILE_ROWS, joined[r] + half * TILE_ROWS);
            }
            for (size_t r = 0; r < here; r++) {
                if (takes_quantised_input(layer->down.type))
                    step->level->quantise(joined[r], 1, to->blocks + (first + r) * blocks + block);
                else
                    memcpy(to->floats + (first + r) * to->columns + block * BLOCK, joined[r], sizeof joined[r]);
            }
        }
}

static void score(const struct step *step)
{
    const struct product product = {
        .matrix = &step->model->head, .to = step->sequence->scores, .stride = (size_t)step->model->vocabulary};
    multiply_share(step, &product, 1, &step->sequence->normed, step->forward->scored);
}

/* Everything after the barrier that makes `work` safe to start; leaves forward_on if the forward was cancelled. */
#define THEN(work)                            \
    do {                                      \
        if (!pool_barrier(sequence->pool))    \
            return;                           \
        work;                                 \
    } while (0)

static void forward_on(void *context, int thread)
{
    struct forward *forward = context;
    struct es_sequence *sequence = forward->sequence;
    const struct es_model *model = sequence->model;
    const struct step here = {
        .forward = forward,
        .sequence = sequence,
        .model = model,
        .level = sequence->level,
        .thread = thread,
        .threads = pool_threads(sequence->pool),
    };
    const struct step *step = &here;

    begin_rows(step);
    for (size_t number = 0; number < (size_t)model->layers; number++) {
        const struct es_layer *layer = &model->layer[number];
        THEN(normalise_rows(step, layer->attention_norm, 0, forward->rows));
        THEN(project(step, layer));
        THEN(place_heads(step, number));
        THEN(mix(step, number));
        THEN(add_product(step, &layer->output, &sequence->mixed));
        THEN(normalise_rows(step, layer->feed_forward_norm, 0, forward->rows));
        THEN(feed(step, layer));
        THEN(add_product(step, &layer->down, &sequence->fed));
    }
    if (forward->scored) {
        THEN(normalise_rows(step, model->output_norm, forward->rows - forward->scored, forward->scored));
        THEN(score(step));
    }
    if (thread == 0)
        forward->finished = true;
}

int32_t es_forward(struct es_sequence *sequence, const int32_t *tokens, int32_t count, int64_t start, int32_t scored,
                   const uint64_t *visible)
{
    if (sequence->process != getpid())
        return ES_OTHER_PROCESS;
    if (visible || count < 1 || count > ES_MOST_TOKENS || scored < 0 || scored > count || scored > ES_MOST_SCORED ||
        start < 0 || (size_t)start + (size_t)count > sequence->context_length)
        return ES_BAD_REQUEST;
    for (int32_t i = 0; i < count; i++)
        if (tokens[i] < 0 || tokens[i] >= sequence->model->vocabulary)
            return ES_BAD_REQUEST;
    struct forward forward = {
        .sequence = sequence,
        .tokens = tokens,
        .rows = (size_t)count,
        .scored = (size_t)scored,
        .start = (size_t)start,
    };
    sequence->scored = 0;
    pool_run(sequence->pool, forward_on, &forward);
    if (!forward.finished)
        return ES_CANCELLED;
    sequence->scored = scored;
    return ES_OK;
}
