/* A whole model's forward: every thread runs forward_on, doing its part of each step, with barriers between. */
#define _GNU_SOURCE
#include <string.h>

#include "angle.h"
#include "forward_step.h"
#include "threads.h"

static void turn(const struct step *step, size_t row)
{
    const struct es_model *model = step->model;
    size_t pairs = (size_t)model->rope_length / 2;
    for (size_t table = 0; table < (size_t)model->rope_tables; table++) {
        const double *frequencies = step->rows->row[row].sequence->frequencies + table * pairs;
        float *rotation = rotation_of(step, table, row);
        for (size_t i = 0; i < pairs; i++)
            turn_of((double)step->rows->row[row].position * frequencies[i], rotation + 2 * i);
        scale_row(model->rope_magnitudes[table], 2 * pairs, rotation);
    }
}

static void norm_or_copy(const struct step *step, const float *from, const float *norm, size_t length, float *to)
{
    if (norm)
        step->level->normalise(from, norm, (float)step->model->norm_epsilon, length, to);
    else if (from != to)
        memcpy(to, from, length * sizeof *to);
}

/* A token's row, and the hidden row that belongs to it. */
static void begin_pair(const struct step *step, size_t r, float *token)
{
    const struct es_model *model = step->model;
    const struct activations *to = &step->batch->pairs;
    size_t length = (size_t)model->pair_length, blocks = to->columns / BLOCK;
    norm_or_copy(step, token, model->pair_token_norm, length, token);
    norm_or_copy(step, step->rows->row[r].pair, model->pair_hidden_norm, length, token + length);
    step->level->quantise(token, blocks, to->blocks + r * blocks, 1);
}

/* A token's row of the file, scaled. */
static void read_token(const struct step *step, const struct row *row, size_t length, float *to)
{
    const struct es_model *words = row->sequence->lender ? row->sequence->lender->model : step->model;
    size_t row_bytes = file_row_bytes(words->embedding_type, (int64_t)length);
    if (!words->embedding_rows) {
        memset(to, 0, length * sizeof *to);
        return;
    }
    const uint8_t *from = words->embedding_rows + (size_t)row->token * row_bytes;
    (void)es_dequantise(words->embedding_type, from, (int64_t)length, to);
    scale_row(step->model->embedding_scale, length, to);
}

/* The tokens' embeddings, and the angles of their positions. */
static void begin_rows(const struct step *step)
{
    const struct es_model *model = step->model;
    struct es_batch *batch = step->batch;
    size_t embedding = (size_t)(model->pair_length ? model->pair_length : model->embedding);
    size_t stride = model->pair_length ? 2 * embedding : embedding;
    for (struct pool_items own = divide_rows(step, step->rows->count); pool_take(&own);)
        for (size_t r = own.begin; r < own.end; r++) {
            float *to = (model->pair_length ? batch->pairs.floats : batch->hidden) + r * stride;
            read_token(step, &step->rows->row[r], embedding, to);
            if (model->pair_length)
                begin_pair(step, r, to);
            turn(step, r);
        }
}

enum { NO_LAYER = -2, AFTER_NORM = -1 };

/* The boundary between two halves of layers. */
struct joint {
    bool adds;              /* the previous half's output, which add_product left in `added` */
    const struct es_layer *behind; /* the layer whose scale the sum gets; or null */
    const float *post_norm; /* of that; or null */
    const float *norm;      /* of the next half's input; or null */
    size_t first, count;    /* rows, which become `normed`'s rows 0 .. count - 1 */
    int64_t layer;          /* the previous one, whose scored rows are kept where that was asked for; NO_LAYER: none */
    bool ends;              /* the next half is the head */
};

static void keep_row(const struct row *row, int64_t layer, const float *from, size_t columns)
{
    float *slot = kept_slot(row->sequence, layer);
    if (slot)
        memcpy(slot + row->scored * columns, from, columns * sizeof *from);
}

static void add_half(const struct step *step, const float *post_norm, float *added, float *hidden)
{
    size_t columns = (size_t)step->model->embedding;
    if (post_norm)
        step->level->normalise(added, post_norm, (float)step->model->norm_epsilon, columns, added);
    scale_row(step->model->residual_scale, columns, added);
    for (size_t k = 0; k < columns; k++)
        hidden[k] += added[k];
}

static void join_row(const struct step *step, const struct joint *joint, size_t i)
{
    struct es_batch *batch = step->batch;
    struct activations *to = &batch->normed;
    size_t columns = to->columns, blocks = columns / BLOCK, r = joint->first + i;
    size_t unscored = step->rows->count - step->rows->scored;
    float *hidden = batch->hidden + r * columns, *floats = to->floats + i * columns;
    if (joint->adds)
        add_half(step, joint->post_norm, batch->added + r * columns, hidden);
    if (joint->behind)
        scale_row(joint->behind->output_scale, columns, hidden);
    const struct row *row = &step->rows->row[r];
    bool keeps = joint->layer != NO_LAYER && r >= unscored;
    if (keeps)
        keep_row(row, joint->layer, hidden, columns);
    if (joint->norm)
        step->level->normalise(hidden, joint->norm, (float)step->model->norm_epsilon, columns, floats);
    else
        memcpy(floats, hidden, columns * sizeof *floats);
    if (keeps && joint->ends)
        keep_row(row, AFTER_NORM, floats, columns);
    if (joint->ends && row->kept && !step->model->passed_on.tiles)
        memcpy(row->kept, floats, columns * sizeof *floats);
    if (joint->ends)
        scale_row(step->model->logit_scale, columns, floats);
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

enum { MOST_PRODUCTS = 4 };

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
        if (own[i].row_to)
            own[i].row_to += part.first;
        else
            own[i].to += part.first * own[i].stride;
    }
    multiply_tiles(step->level, own, count, part.begin, part.end, &input, part.rows);
}

void multiply(const struct step *step, const struct product *products, size_t count, const struct activations *x,
              size_t rows)
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
    size_t stride = projected_length(step->model), queries = layer_asked(step->model, layer), keys = layer_keys(layer);
    float *to = step->batch->projected;
    const struct product products[MOST_PRODUCTS] = {
        {.matrix = &layer->query, .to = to, .stride = stride},
        {.matrix = &layer->key, .to = to + queries, .stride = stride},
        {.matrix = &layer->value, .to = to + queries + keys, .stride = stride},
    };
    bool own = has_keys(step->model, (size_t)(layer - step->model->layer));
    multiply(step, products, own ? layer->value.tiles ? 3 : 2 : 1, &step->batch->normed, step->rows->count);
}

/* Adds a product to the hidden states, or leaves that to join_rows. */
static void add_product(const struct step *step, const struct es_matrix *matrix, const struct activations *x,
                        const float *post_norm)
{
    bool later = adds_later(step, post_norm);
    const struct product product = {
        .matrix = matrix,
        .to = later ? step->batch->added : step->batch->hidden,
        .stride = (size_t)step->model->embedding,
        .adds = !later,
    };
    multiply(step, &product, 1, x, step->rows->count);
}

/* Quantises block `block` of rows first .. first + count - 1 for the feed-forward's second half. */
static void put_fed(const struct step *step, const struct feeding *feeding, size_t block, size_t first, size_t count,
                    float (*from)[BLOCK])
{
    const struct activations *to = feeding->to;
    size_t blocks = to->columns / BLOCK;
    if (takes_quantised_input(feeding->down_type))
        step->level->quantise(from[0], count, to->blocks + first * blocks + block, blocks);
    else
        for (size_t i = 0; i < count; i++)
            memcpy(to->floats + (first + i) * to->columns + block * BLOCK, from[i], sizeof from[i]);
}

static void feed_block(const struct step *step, const struct feeding *feeding, join_function *join, size_t block,
                       size_t start, size_t rows)
{
    for (size_t pass = 0; pass < pass_count(rows); pass++) {
        size_t first = pass_start(rows, pass), here = pass_start(rows, pass + 1) - first;
        float joined[PASS_ROWS][BLOCK];
        first += start;
        for (size_t half = 0; half < 2; half++) {
            float gate[PASS_ROWS][TILE_ROWS], up[PASS_ROWS][TILE_ROWS];
            multiply_tile(step->level, feeding->gate, 2 * block + half, feeding->from, first, here, gate);
            multiply_tile(step->level, feeding->up, 2 * block + half, feeding->from, first, here, up);
            for (size_t r = 0; r < here; r++)
                join(gate[r], up[r], TILE_ROWS, joined[r] + half * TILE_ROWS);
        }
        put_fed(step, feeding, block, first, here, joined);
    }
}

static void feed_block_in_pairs(const struct step *step, const struct feeding *feeding, join_function *join,
                                size_t block, size_t first, size_t rows)
{
    const struct es_matrix *const matrices[2] = {feeding->gate, feeding->up};
    float both[MOST_PAIR_ROWS][2][TILE_ROWS], joined[MOST_PAIR_ROWS][BLOCK];
    for (size_t half = 0; half < 2; half++) {
        const size_t tiles[2] = {2 * block + half, 2 * block + half};
        multiply_pair(step->level, matrices, tiles, feeding->from, first, rows, both);
        for (size_t r = 0; r < rows; r++)
            join(both[r][0], both[r][1], TILE_ROWS, joined[r] + half * TILE_ROWS);
    }
    put_fed(step, feeding, block, first, rows, joined);
}

/* The gate and the input of a feed-forward, joined and quantised while both are in the cache: 32 outputs at a time. */
void feed_blocks(const struct step *step, const struct feeding *feeding, size_t begin, size_t end, size_t first,
                 size_t rows)
{
    join_function *join = step->level->join[step->model->activation];
    int in_pairs = takes_pairs(step->level, feeding->gate, feeding->up, rows);
    for (size_t block = begin; block < end; block++)
        (in_pairs ? feed_block_in_pairs : feed_block)(step, feeding, join, block, first, rows);
}

void feed(const struct step *step, const struct feeding *feeding)
{
    size_t rows = step->rows->count, blocks = feeding->to->columns / BLOCK;
    size_t columns = feeding->from->columns;
    for (struct pool_items own = divide_product(step, rows, blocks, 2 * BLOCK, columns, true); pool_take(&own);) {
        const struct part part = part_of(step, rows, blocks, &own);
        feed_blocks(step, feeding, part.begin, part.end, part.first, part.rows);
    }
}

static void feed_rows(const struct step *step, const struct es_matrix *gate, const struct es_matrix *up,
                      const struct es_matrix *down)
{
    const struct activations fed = fed_of(step, down);
    const struct feeding feeding = {
        .gate = gate, .up = up, .from = &step->batch->normed, .to = &fed, .down_type = down->type};
    feed(step, &feeding);
}

/* A product with all rows' `normed` or `fed`. */
static void multiply_into(const struct step *step, const struct es_matrix *matrix, const struct activations *x, float *to)
{
    const struct product product = {.matrix = matrix, .to = to, .stride = (size_t)matrix->rows};
    multiply(step, &product, 1, x, step->rows->count);
}

/* Adds what the dense feed-forward gives to what the experts give. */
static void add_dense(const struct step *step, const struct es_layer *layer)
{
    size_t columns = (size_t)step->model->embedding;
    float epsilon = (float)step->model->norm_epsilon;
    for (struct pool_items own = divide_rows(step, step->rows->count); pool_take(&own);)
        for (size_t r = own.begin; r < own.end; r++) {
            float *added = step->batch->added + r * columns, *dense = step->batch->dense + r * columns;
            step->level->normalise(added, layer->experts_post_norm, epsilon, columns, added);
            step->level->normalise(dense, layer->dense_post_norm, epsilon, columns, dense);
            for (size_t k = 0; k < columns; k++)
                added[k] += dense[k];
        }
}

/* Adds the tokens' own rows to the products in `inputs`, layer by layer. */
static void finish_inputs(const struct step *step)
{
    const struct es_model *model = step->model;
    size_t length = (size_t)model->input_length, all = (size_t)model->inputs;
    size_t row_bytes = file_row_bytes(model->input_type, model->inputs);
    for (struct pool_items own = divide_rows(step, step->rows->count); pool_take(&own);)
        for (size_t r = own.begin; r < own.end; r++) {
            const uint8_t *from = model->input_rows + (size_t)step->rows->row[r].token * row_bytes;
            float *to = step->batch->inputs + r * all, *end = to + all, *read = step->batch->input_gates + r * length;
            for (; to < end; to += length, from += file_row_bytes(model->input_type, model->input_length)) {
                (void)es_dequantise(model->input_type, from, model->input_length, read);
                scale_row(model->input_row_scale, length, read);
                scale_row(model->input_projection_scale, length, to);
                step->level->normalise(to, model->input_norm, (float)model->norm_epsilon, length, to);
                for (size_t k = 0; k < length; k++)
                    to[k] += read[k];
                scale_row(model->input_scale, length, to);
            }
        }
}

/* A layer's inputs, gated by its hidden states. */
static void gate_inputs(const struct step *step, const struct es_layer *layer)
{
    const struct activations fed = fed_of(step, &layer->input_down);
    join_function *join = step->level->join[step->model->activation];
    size_t length = fed.columns, all = (size_t)step->model->inputs;
    for (struct pool_items own = divide_rows(step, step->rows->count); pool_take(&own);)
        for (size_t r = own.begin; r < own.end; r++) {
            float *to = fed.floats + r * length;
            join(step->batch->input_gates + r * length, step->batch->inputs + r * all + layer->input_at, length, to);
            step->level->quantise(to, length / BLOCK, fed.blocks + r * (length / BLOCK), 1);
        }
}

/* Moves the scored rows to the front for the rest of the last layer with keys: the other rows are not needed. */
static void gather_scored(const struct step *step)
{
    size_t scored = step->rows->scored, unscored = step->rows->count - scored;
    size_t embedding = (size_t)step->model->embedding, queries = asked_length(step->model);
    float *hidden = step->batch->hidden, *projected = step->batch->projected;
    size_t stride = projected_length(step->model), inputs = (size_t)step->model->inputs;
    size_t turned = (size_t)step->model->rope_length;
    for (struct pool_items own = divide_rows(step, scored); pool_take(&own);)
        for (size_t r = own.begin; r < own.end; r++) {
            memcpy(hidden + r * embedding, hidden + (unscored + r) * embedding, embedding * sizeof *hidden);
            memcpy(projected + r * stride, projected + (unscored + r) * stride, queries * sizeof *projected);
            for (size_t table = 0; table < (size_t)step->model->rope_tables; table++)
                memcpy(rotation_of(step, table, r), rotation_of(step, table, unscored + r), turned * sizeof *hidden);
            if (inputs)
                memcpy(step->batch->inputs + r * inputs, step->batch->inputs + (unscored + r) * inputs,
                       inputs * sizeof *hidden);
        }
}

static void score(const struct step *step, const struct head_run *run)
{
    struct activations input = step->batch->normed;
    size_t first = run->first + (step->batch->keeps_rows ? step->rows->count - step->rows->scored : 0);
    input.blocks += first * (input.columns / BLOCK);
    input.floats += first * input.columns;
    multiply(step, run->products, run->product_count, &input, run->rows);
}

/* What rows give to those after them. */
static void pass_on(const struct step *step)
{
    const struct product product = {.matrix = &step->model->passed_on, .row_to = step->batch->kept_of};
    multiply(step, &product, 1, &step->batch->normed, step->rows->scored);
}

/* Parts of a row's scores, each for one thread: of 150 000 scores, 5 000. */
enum { CAP_PARTS = 32 };

static void cap_scores(const struct step *step)
{
    size_t scored = step->rows->scored, first = step->rows->count - scored;
    const struct pool_work work = {.count = scored * CAP_PARTS, .least = 1, .worth = 1};
    for (struct pool_items own = divide(step, work); pool_take(&own);)
        for (size_t item = own.begin; item < own.end; item++) {
            size_t r = item / CAP_PARTS, part = item % CAP_PARTS;
            size_t rows = step->rows->row[first + r].sequence->head_rows, begin = rows * part / CAP_PARTS;
            step->level->cap(step->batch->scores_of[r] + begin, rows * (part + 1) / CAP_PARTS - begin,
                             (float)step->model->logit_cap);
        }
}

/* Waits at a barrier before `work`; returns false if the forward was cancelled. */
#define THEN(work)                              \
    do {                                        \
        if (!pool_barrier(step->batch->pool))   \
            return false;                       \
        work;                                   \
    } while (0)

/* The hidden states, normed, for all rows. */
static struct joint reading(const struct step *step, const float *norm)
{
    return (struct joint){.norm = norm, .layer = NO_LAYER, .count = step->rows->count};
}

static bool begin(const struct step *step)
{
    begin_rows(step);
    if (step->model->pair_length)
        THEN(multiply_into(step, &step->model->pair_projection, &step->batch->pairs, step->batch->hidden));
    if (!step->model->inputs)
        return true;
    THEN(join_rows(step, reading(step, NULL)));
    THEN(multiply_into(step, &step->model->input_projection, &step->batch->normed, step->batch->inputs));
    THEN(finish_inputs(step));
    return true;
}

/* The second half of a layer with experts: the dense feed-forward that may stand beside them, then the experts. */
static bool feed_mixture(const struct step *step, const struct es_layer *layer)
{
    bool has_dense = layer->dense_down.tiles;
    if (has_dense) {
        const struct activations fed = fed_of(step, &layer->dense_down);
        THEN(feed_rows(step, &layer->dense_gate, &layer->dense_up, &layer->dense_down));
        THEN(multiply_into(step, &layer->dense_down, &fed, step->batch->dense));
        THEN(join_rows(step, reading(step, layer->router_norm)));
    }
    THEN(route(step, layer));
    THEN(choose_experts(step, layer));
    THEN(list_experts(step));
    if (has_dense)
        THEN(join_rows(step, reading(step, layer->experts_norm)));
    THEN(gather_rows(step, layer));
    THEN(feed_experts(step, layer));
    THEN(multiply_experts(step, layer));
    if (layer->shared.gate.tiles) {
        const struct feeding shared = {.gate = &layer->shared.gate,
                                       .up = &layer->shared.up,
                                       .from = &step->batch->normed,
                                       .to = &step->batch->mixture.shared,
                                       .down_type = layer->shared.down.type};
        THEN(feed(step, &shared));
        THEN(multiply_shared(step, layer));
    }
    THEN(add_experts(step, layer));
    if (has_dense)
        THEN(add_dense(step, layer));
    return true;
}

/* The second half of a layer, without its last sum. */
static bool feed_layer(const struct step *step, const struct es_layer *layer)
{
    if (layer->router.tiles)
        return feed_mixture(step, layer);
    const struct activations fed = fed_of(step, &layer->down);
    THEN(feed_rows(step, &layer->gate, &layer->up, &layer->down));
    THEN(add_product(step, &layer->down, &fed, layer->feed_forward_post_norm));
    return true;
}

/* What follows the second half in layers with inputs, without its last sum. */
static bool take_inputs(const struct step *step, const struct es_layer *layer)
{
    struct joint joint = reading(step, NULL);
    joint.adds = adds_later(step, joint.post_norm = layer->feed_forward_post_norm);
    const struct activations fed = fed_of(step, &layer->input_down);
    THEN(join_rows(step, joint));
    THEN(multiply_into(step, &layer->input_gate, &step->batch->normed, step->batch->input_gates));
    THEN(gate_inputs(step, layer));
    THEN(add_product(step, &layer->input_down, &fed, layer->input_post_norm));
    return true;
}

/* A gated delta layer in place of attention, without its last sum. */
static bool scan_layer(struct step *step, size_t number)
{
    const struct es_layer *layer = &step->model->layer[number];
    THEN(project_deltas(step, layer));
    THEN(scan_deltas(step, number));
    THEN(end_deltas(step, number));
    THEN(add_product(step, &layer->output, &step->batch->scanned, layer->attention_post_norm));
    return true;
}

/* Attention, without its last sum. Behind the last keys only scored rows are left, and none if none is scored. */
static bool attend_layer(struct step *step, size_t number)
{
    const struct es_layer *layer = &step->model->layer[number];
    THEN(project(step, layer));
    if (layer->joins_heads)
        THEN(normalise_joined_heads(step, layer));
    THEN(place_heads(step, number));
    if (number == step->batch->last_keys && step->batch->leaves_rows) {
        if (!step->rows->scored)
            return true; /* only keys and values are needed */
        THEN(gather_scored(step));
        step->rows = &step->batch->scored; /* all keys and values are stored, so the other rows have no more use */
    }
    if (mixes_blocks(step, number)) {
        THEN(mix_blocks(step, number));
        THEN(merge_mixed(step, number));
    } else {
        THEN(mix(step, number));
    }
    const struct activations mixed = mixed_of(step, layer);
    THEN(add_product(step, &layer->output, &mixed, layer->attention_post_norm));
    return true;
}

/* The second half of a layer and what follows it, without its last sum. */
static bool end_layer(const struct step *step, const struct es_layer *layer)
{
    struct joint halves = reading(step, layer->feed_forward_norm);
    halves.adds = adds_later(step, halves.post_norm = layer->attention_post_norm);
    THEN(join_rows(step, halves));
    return feed_layer(step, layer) && (!layer->input_gate.tiles || take_inputs(step, layer));
}

static bool score_rows(const struct step *step, struct joint joint)
{
    joint.ends = true;
    joint.norm = step->model->output_norm;
    joint.count = step->batch->keeps_rows ? step->rows->count : step->rows->scored;
    joint.first = step->rows->count - joint.count;
    THEN(join_rows(step, joint));
    if (!step->rows->scored)
        return true;
    for (size_t run = 0; run < step->batch->head_run_count; run++)
        THEN(score(step, &step->batch->head_runs[run]));
    if (step->model->passed_on.tiles)
        THEN(pass_on(step));
    if (step->model->logit_cap != 0.0)
        THEN(cap_scores(step));
    return true;
}

/* Returns whether the forward was not cancelled. */
static bool run(struct step *step)
{
    struct joint joint = {.layer = NO_LAYER}; /* with the layer before */
    if (!begin(step))
        return false;
    for (size_t number = 0; number < (size_t)step->model->layers; number++) {
        const struct es_layer *layer = &step->model->layer[number];
        joint.norm = layer->attention_norm;
        joint.count = step->rows->count;
        THEN(join_rows(step, joint));
        if (!(layer->delta.mixed.tiles ? scan_layer : attend_layer)(step, number))
            return false;
        if (!step->rows->scored && step->batch->leaves_rows && number == step->batch->last_keys)
            return true; /* nothing is scored, so only keys and values are needed */
        if (!end_layer(step, layer))
            return false;
        joint = (struct joint){.behind = layer, .layer = (int64_t)number};
        joint.post_norm = layer->input_gate.tiles ? layer->input_post_norm : layer->feed_forward_post_norm;
        joint.adds = adds_later(step, joint.post_norm);
    }
    return !(step->rows->scored || step->batch->keeps_rows) || score_rows(step, joint);
}

void forward_on(void *context, int thread)
{
    struct es_batch *batch = context;
    struct step step = {
        .batch = batch,
        .rows = &batch->all,
        .model = batch->model,
        .level = batch->level,
        .thread = thread,
        .threads = pool_threads(batch->pool),
    };
    if (run(&step) && thread == 0)
        batch->finished = true;
}
