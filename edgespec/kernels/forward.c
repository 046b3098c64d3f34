/* A whole model's forward: every thread runs forward_on, doing its part of each step, with barriers between. */
#define _GNU_SOURCE
#include <string.h>

#include "angle.h"
#include "forward_step.h"
#include "multiply.h"
#include "threads.h"

static void turn(const struct step *step, size_t row)
{
    const struct es_model *model = step->model;
    size_t pairs = (size_t)model->rope_length / 2;
    for (size_t table = 0; table < (size_t)model->rope_tables; table++) {
        const double *frequencies = model->rope_frequencies + table * pairs;
        float *rotation = rotation_of(step, table, row);
        for (size_t i = 0; i < pairs; i++)
            turn_of((double)position_of(step->forward, row) * frequencies[i], rotation + 2 * i);
    }
}

/* The tokens' embeddings, and the angles of their positions. */
static void begin_rows(const struct step *step)
{
    const struct es_model *model = step->model;
    size_t embedding = (size_t)model->embedding;
    size_t row_bytes = file_row_bytes(model->embedding_type, model->embedding);
    float scale = (float)model->embedding_scale;
    for (struct pool_items own = divide_rows(step, step->forward->rows); pool_take(&own);)
        for (size_t r = own.begin; r < own.end; r++) {
            const uint8_t *from = model->embedding_rows + (size_t)step->forward->tokens[r] * row_bytes;
            float *hidden = step->sequence->hidden + r * embedding;
            (void)es_dequantise(model->embedding_type, from, model->embedding, hidden);
            for (size_t k = 0; k < embedding && scale != 1.0f; k++)
                hidden[k] *= scale;
            turn(step, r);
        }
}

/* The boundary between two halves of layers. */
struct joint {
    const float *post_norm; /* of the previous half's output, not added yet; null: already added */
    const float *norm;      /* of the next half's input */
    size_t first, count;    /* rows, which become `normed`'s rows 0 .. count - 1 */
    float *keep;            /* where the scored rows' hidden states go; null: nowhere */
};

static void join_row(const struct step *step, const struct joint *joint, size_t i)
{
    struct es_sequence *sequence = step->sequence;
    struct activations *to = &sequence->normed;
    float epsilon = (float)step->model->norm_epsilon;
    size_t columns = to->columns, blocks = columns / BLOCK, r = joint->first + i;
    size_t unscored = step->forward->rows - step->forward->scored;
    float *hidden = sequence->hidden + r * columns, *added = sequence->added + r * columns;
    float *floats = to->floats + i * columns;
    if (joint->post_norm) {
        step->level->normalise(added, joint->post_norm, epsilon, columns, added);
        for (size_t k = 0; k < columns; k++)
            hidden[k] += added[k];
    }
    if (joint->keep && r >= unscored)
        memcpy(joint->keep + (r - unscored) * columns, hidden, columns * sizeof *hidden);
    step->level->normalise(hidden, joint->norm, epsilon, columns, floats);
    step->level->quantise(floats, blocks, to->blocks + i * blocks, 1);
}

static void join_rows(const struct step *step, struct joint joint)
{
    for (struct pool_items own = divide_rows(step, joint.count); pool_take(&own);)
        for (size_t i = own.begin; i < own.end; i++)
            join_row(step, &joint, i);
}

/* A thread's part of a product: some outputs of all rows or, with many rows, of one share of the rows. In the second case
 * one processor writes and reads those rows, which saves more time than unpacking all weights in each thread costs. */
struct part {
    size_t first, rows; /* rows first .. first + rows - 1 */
    size_t begin, end;  /* outputs, in the step's unit */
};

/* By rows instead of outputs: 1.02 times the time at 64 rows a thread, equal at 96, 1 / 1.01 at 128 (prompt of
 * Qwen2.5-Coder-1.5B Q4_K_M, two cores of an Emerald Rapids server). */
enum { LEAST_PART_ROWS = 128 };

/* Number of parts that rows are divided into: 1, or one for each thread. */
static size_t row_parts(const struct step *step, size_t rows)
{
    size_t threads = (size_t)step->threads;
    return rows >= LEAST_PART_ROWS * threads ? threads : 1;
}

/* Products of weights and inputs in a share large enough to divide: about 80 us, of which the exchange takes below 1 %.
 * Fewer than 4 rows take as long as 4, since reading the weights takes longer. */
enum { WORTH_PRODUCTS = 1 << 23, LEAST_COSTLY_ROWS = 4 };

/* An item is `lanes` outputs of one part of the rows; a thread's share is all outputs of a part. */
static struct pool_items divide_product(const struct step *step, size_t rows, size_t outputs, size_t lanes, size_t columns,
                                        bool uniform)
{
    size_t parts = row_parts(step, rows), costly = rows / parts > LEAST_COSTLY_ROWS ? rows / parts : LEAST_COSTLY_ROWS;
    return divide(step, (struct pool_work){
                            .count = parts * outputs,
                            .least = rows >= LEAST_PAIR_ROWS ? 2 : 1,
                            .worth = WORTH_PRODUCTS / (lanes * columns * costly),
                            .uniform = uniform,
                        });
}

static struct part part_of(const struct step *step, size_t rows, size_t outputs, const struct pool_items *own)
{
    size_t parts = row_parts(step, rows), number = own->begin / outputs, first = rows * number / parts;
    return (struct part){
        .first = first,
        .rows = rows * (number + 1) / parts - first,
        .begin = own->begin - number * outputs,
        .end = own->end - number * outputs,
    };
}

enum { MOST_PRODUCTS = 3 };

_Static_assert((int)ES_MOST_HEADS <= (int)MOST_PRODUCTS, "heads are multiplied together");

static void multiply_part(const struct step *step, const struct product *products, size_t count,
                          const struct activations *x, struct part part)
{
    const struct activations input = {
        .blocks = x->blocks + part.first * (x->columns / BLOCK),
        .floats = x->floats + part.first * x->columns,
        .columns = x->columns,
    };
    struct product own[MOST_PRODUCTS];
    for (size_t i = 0; i < count; i++) {
        own[i] = products[i];
        own[i].to += part.first * own[i].stride;
    }
    multiply_tiles(step->level, own, count, part.begin, part.end, &input, part.rows);
}

static void multiply(const struct step *step, const struct product *products, size_t count,
                     const struct activations *x, size_t rows)
{
    size_t tiles = product_tiles(products, count);
    bool uniform = true;
    for (size_t i = 1; i < count; i++)
        uniform &= products[i].matrix->type == products[0].matrix->type;
    for (struct pool_items own = divide_product(step, rows, tiles, TILE_ROWS, x->columns, uniform); pool_take(&own);)
        multiply_part(step, products, count, x, part_of(step, rows, tiles, &own));
}

static void project(const struct step *step, const struct es_layer *layer)
{
    size_t stride = projected_length(step->model), queries = query_length(step->model);
    size_t keys = (size_t)(step->model->kv_heads * step->model->head_length);
    float *to = step->sequence->projected;
    const struct product products[MOST_PRODUCTS] = {
        {.matrix = &layer->query, .to = to, .stride = stride},
        {.matrix = &layer->key, .to = to + queries, .stride = stride},
        {.matrix = &layer->value, .to = to + queries + keys, .stride = stride},
    };
    multiply(step, products, 3, &step->sequence->normed, step->forward->rows);
}

/* Adds a product to the hidden states, or leaves that to join_rows if the product is normalised first. */
static void add_product(const struct step *step, const struct es_matrix *matrix, const struct activations *x,
                        const float *post_norm)
{
    const struct product product = {
        .matrix = matrix,
        .to = post_norm ? step->sequence->added : step->sequence->hidden,
        .stride = (size_t)step->model->embedding,
        .adds = !post_norm,
    };
    multiply(step, &product, 1, x, step->forward->rows);
}

typedef void join_function(const float *gate, const float *up, size_t length, float *y);

/* Quantises block `block` of rows first .. first + count - 1 for the feed-forward's second half. */
static void put_fed(const struct step *step, const struct es_layer *layer, size_t block, size_t first, size_t count,
                    float (*from)[BLOCK])
{
    struct activations *to = &step->sequence->fed;
    size_t blocks = to->columns / BLOCK;
    if (takes_quantised_input(layer->down.type))
        step->level->quantise(from[0], count, to->blocks + first * blocks + block, blocks);
    else
        for (size_t i = 0; i < count; i++)
            memcpy(to->floats + (first + i) * to->columns + block * BLOCK, from[i], sizeof from[i]);
}

static void feed_block(const struct step *step, const struct es_layer *layer, join_function *join, size_t block,
                       const struct part *part)
{
    for (size_t pass = 0; pass < pass_count(part->rows); pass++) {
        size_t first = pass_start(part->rows, pass), here = pass_start(part->rows, pass + 1) - first;
        float joined[PASS_ROWS][BLOCK];
        first += part->first;
        for (size_t half = 0; half < 2; half++) {
            float gate[PASS_ROWS][TILE_ROWS], up[PASS_ROWS][TILE_ROWS];
            multiply_tile(step->level, &layer->gate, 2 * block + half, &step->sequence->normed, first, here, gate);
            multiply_tile(step->level, &layer->up, 2 * block + half, &step->sequence->normed, first, here, up);
            for (size_t r = 0; r < here; r++)
                join(gate[r], up[r], TILE_ROWS, joined[r] + half * TILE_ROWS);
        }
        put_fed(step, layer, block, first, here, joined);
    }
}

static void feed_block_in_pairs(const struct step *step, const struct es_layer *layer, join_function *join,
                                size_t block, const struct part *part)
{
    const struct es_matrix *const matrices[2] = {&layer->gate, &layer->up};
    float both[MOST_PAIR_ROWS][2][TILE_ROWS], joined[MOST_PAIR_ROWS][BLOCK];
    for (size_t half = 0; half < 2; half++) {
        const size_t tiles[2] = {2 * block + half, 2 * block + half};
        multiply_pair(step->level, matrices, tiles, &step->sequence->normed, part->first, part->rows, both);
        for (size_t r = 0; r < part->rows; r++)
            join(both[r][0], both[r][1], TILE_ROWS, joined[r] + half * TILE_ROWS);
    }
    put_fed(step, layer, block, part->first, part->rows, joined);
}

/* The feed-forward's gate and input, joined and quantised while both are in the cache: 32 outputs at a time. */
static void feed(const struct step *step, const struct es_layer *layer)
{
    join_function *join = step->model->activation == ES_SWIGLU ? step->level->swiglu : step->level->geglu;
    size_t rows = step->forward->rows, blocks = step->sequence->fed.columns / BLOCK;
    size_t columns = step->sequence->normed.columns;
    for (struct pool_items own = divide_product(step, rows, blocks, 2 * BLOCK, columns, true); pool_take(&own);) {
        const struct part part = part_of(step, rows, blocks, &own);
        int in_pairs = takes_pairs(step->level, &layer->gate, &layer->up, part.rows);
        for (size_t block = part.begin; block < part.end; block++)
            (in_pairs ? feed_block_in_pairs : feed_block)(step, layer, join, block, &part);
    }
}

/* Moves the scored rows to the front for the rest of the last layer: the other rows are not needed. */
static void gather_scored(const struct step *step)
{
    size_t scored = step->forward->scored, unscored = step->forward->rows - scored;
    size_t embedding = (size_t)step->model->embedding, queries = query_length(step->model);
    float *hidden = step->sequence->hidden, *projected = step->sequence->projected;
    size_t stride = projected_length(step->model);
    for (struct pool_items own = divide_rows(step, scored); pool_take(&own);)
        for (size_t r = own.begin; r < own.end; r++) {
            memcpy(hidden + r * embedding, hidden + (unscored + r) * embedding, embedding * sizeof *hidden);
            memcpy(projected + r * stride, projected + (unscored + r) * stride, queries * sizeof *projected);
        }
}

static void score(const struct step *step)
{
    const struct es_sequence *sequence = step->sequence;
    struct product products[MOST_PRODUCTS];
    float *to = sequence->scores;
    for (int32_t i = 0; i < sequence->head_count; i++) {
        products[i] = (struct product){.matrix = &sequence->heads[i], .to = to, .stride = sequence->head_rows};
        to += sequence->heads[i].rows;
    }
    multiply(step, products, (size_t)sequence->head_count, &sequence->normed, step->forward->scored);
}

/* Waits at a barrier before `work`; returns from forward_on if the forward was cancelled. */
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
    /* The forward with its scored rows only, used once all keys and values are stored. */
    struct forward rest = *forward;
    rest.rows = forward->scored;
    rest.start += forward->rows - forward->scored;
    struct step scored_only = here;
    scored_only.forward = &rest;
    int leaves_rows = 2 * forward->scored <= forward->rows; /* so no move overwrites a row still to be moved */
    const struct step *step = &here;

    const float *post_norm = NULL;
    float *keep = NULL;
    begin_rows(step);
    for (size_t number = 0; number < (size_t)model->layers; number++) {
        const struct es_layer *layer = &model->layer[number];
        struct joint joint = {.post_norm = post_norm, .norm = layer->attention_norm, .count = forward->rows, .keep = keep};
        THEN(join_rows(step, joint));
        THEN(project(step, layer));
        THEN(place_heads(step, number));
        if (leaves_rows && number + 1 == (size_t)model->layers) {
            if (!forward->scored)
                break; /* nothing is scored, so only keys and values are needed */
            THEN(gather_scored(step));
            step = &scored_only;
        }
        if (mixes_blocks(step, number)) {
            THEN(mix_blocks(step, number));
            THEN(merge_mixed(step, number));
        } else {
            THEN(mix(step, number));
        }
        THEN(add_product(step, &layer->output, &sequence->mixed, layer->attention_post_norm));
        joint = (struct joint){
            .post_norm = layer->attention_post_norm, .norm = layer->feed_forward_norm, .count = step->forward->rows};
        THEN(join_rows(step, joint));
        THEN(feed(step, layer));
        THEN(add_product(step, &layer->down, &sequence->fed, layer->feed_forward_post_norm));
        post_norm = layer->feed_forward_post_norm;
        keep = kept_slot(sequence, (int64_t)number);
    }
    if (forward->scored) {
        struct joint joint = {.post_norm = post_norm, .norm = model->output_norm, .keep = keep};
        joint.first = step->forward->rows - (joint.count = forward->scored);
        THEN(join_rows(step, joint));
        THEN(score(step));
    }
    if (thread == 0)
        forward->finished = true;
}

static int32_t run(struct es_sequence *sequence, struct forward *forward)
{
    if (sequence->process != process_number())
        return ES_OTHER_PROCESS;
    for (size_t i = 0; i < forward->rows; i++)
        if (forward->tokens[i] < 0 || forward->tokens[i] >= sequence->model->vocabulary)
            return ES_BAD_REQUEST;
    sequence->scored = 0;
    pool_run(sequence->pool, forward_on, forward);
    if (!forward->finished)
        return ES_CANCELLED;
    sequence->scored = (int32_t)forward->scored;
    return ES_OK;
}

int32_t es_forward(struct es_sequence *sequence, const int32_t *tokens, int32_t count, int64_t start, int32_t scored)
{
    if (count < 1 || count > ES_MOST_TOKENS || scored < 0 || scored > count || scored > ES_MOST_SCORED || start < 0 ||
        (size_t)start + (size_t)count > sequence->context_length)
        return ES_BAD_REQUEST;
    struct forward forward = {
        .sequence = sequence,
        .tokens = tokens,
        .rows = (size_t)count,
        .scored = (size_t)scored,
        .start = (size_t)start,
    };
    return run(sequence, &forward);
}

int32_t es_forward_tree(struct es_sequence *sequence, const int32_t *tokens, int32_t count, int64_t start,
                        const int32_t *parents, int32_t first)
{
    struct tree tree;
    if (count < 1 || start < 0 || (size_t)start > sequence->context_length || !tree_read(&tree, parents, first, count))
        return ES_BAD_REQUEST;
    struct forward forward = {
        .sequence = sequence,
        .tokens = tokens,
        .rows = (size_t)count,
        .scored = (size_t)count,
        .start = (size_t)start,
        .tree = &tree,
    };
    return run(sequence, &forward);
}
