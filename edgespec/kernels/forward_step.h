/* State shared by the steps of a forward, and the steps in attention_step.c. */
#ifndef EDGESPEC_FORWARD_STEP_H
#define EDGESPEC_FORWARD_STEP_H

#include "batch.h"

/* The state that every step reads. */
struct step {
    struct es_batch *batch;
    const struct rows *rows;
    const struct es_model *model;
    const struct level *level;
    int thread, threads;
};

static inline struct pool_items divide(const struct step *step, struct pool_work work)
{
    return pool_divide(step->batch->pool, step->thread, work);
}

static inline void scale_row(double scale, size_t length, float *row)
{
    if (scale == 1.0)
        return;
    for (size_t k = 0; k < length; k++)
        row[k] *= (float)scale;
}

/* Shares of rows, and of heads of rows, that are large enough to divide: about 20 us. */
enum { WORTH_ROWS = 16, WORTH_HEADS = 512 };

static inline struct pool_items divide_rows(const struct step *step, size_t rows)
{
    return divide(step, (struct pool_work){.count = rows, .least = 1, .worth = WORTH_ROWS});
}

/* Cosines and sines of a row's position, [rope_length / 2][cos, sin]. */
static inline float *rotation_of(const struct step *step, size_t table, size_t row)
{
    return step->batch->rotation + (table * ES_MOST_TOKENS + row) * (size_t)step->model->rope_length;
}

/* Elements of a row's queries and of its keys in a layer. */
static inline size_t layer_queries(const struct es_model *model, const struct es_layer *layer)
{
    return (size_t)(model->heads * layer->head_length);
}

/* Its queries, with gates where heads have them. */
static inline size_t layer_asked(const struct es_model *model, const struct es_layer *layer)
{
    return layer_queries(model, layer) * (model->gates_heads ? 2 : 1);
}

static inline size_t layer_keys(const struct es_layer *layer)
{
    return (size_t)(layer->kv_heads * layer->head_length);
}

/* What attention gives in a layer. */
static inline struct activations mixed_of(const struct step *step, const struct es_layer *layer)
{
    struct activations mixed = step->batch->mixed;
    mixed.columns = layer_queries(step->model, layer);
    return mixed;
}

/* What the second half of a feed-forward reads. */
static inline struct activations fed_of(const struct step *step, const struct es_matrix *down)
{
    struct activations fed = step->batch->fed;
    fed.columns = (size_t)down->columns;
    return fed;
}

/* Products of all outputs of matrices and rows of `x`, divided among the threads. */
void multiply(const struct step *step, const struct product *products, size_t count, const struct activations *x,
              size_t rows);

/* Products of weights and inputs in a share large enough to divide: about 80 us, of which the exchange takes below 1 %.
 * Fewer than 4 rows take as long as 4, since reading the weights takes longer. */
enum { WORTH_PRODUCTS = 1 << 23, LEAST_COSTLY_ROWS = 4 };

/* Whether join_rows adds a half layer's output: it is normalised or scaled first. */
static inline bool adds_later(const struct step *step, const float *post_norm)
{
    return post_norm || step->model->residual_scale != 1.0;
}

/* The first half of a feed-forward: what it reads, and where it goes in the form that `down_type` reads. */
struct feeding {
    const struct es_matrix *gate, *up;
    const struct activations *from, *to;
    int64_t down_type;
};

/* Blocks begin .. end - 1 of 32 outputs, for rows first .. first + rows - 1. */
void feed_blocks(const struct step *step, const struct feeding *feeding, size_t begin, size_t end, size_t first,
                 size_t rows);

/* A feed-forward of experts, in steps with barriers between. The router scores the rows' experts; each row chooses; one
 * thread lists each expert's rows; they are gathered, so that each expert's weights are read once; the experts compute;
 * each row adds its experts' outputs in the order of choice. A row's bits depend on no other row. */
void route(const struct step *step, const struct es_layer *layer);
void choose_experts(const struct step *step, const struct es_layer *layer);
void list_experts(const struct step *step);
void gather_rows(const struct step *step, const struct es_layer *layer);
void feed_experts(const struct step *step, const struct es_layer *layer);
void multiply_experts(const struct step *step, const struct es_layer *layer);
void add_experts(const struct step *step, const struct es_layer *layer);
/* The same of the expert that every row uses, before add_experts, which adds its output last. */
void multiply_shared(const struct step *step, const struct es_layer *layer);

/* The first half of one feed-forward, of all rows. */
void feed(const struct step *step, const struct feeding *feeding);

/* A gated delta layer in place of attention, in three steps with barriers between, into `scanned`. */
void project_deltas(const struct step *step, const struct es_layer *layer);
void scan_deltas(const struct step *step, size_t layer);
void end_deltas(const struct step *step, size_t layer);

/* Normalises a row's queries as one vector, and its keys. */
void normalise_joined_heads(const struct step *step, const struct es_layer *layer);

/* Normalises and turns queries and keys by their positions, and puts keys and values into the cache or the tree. */
void place_heads(const struct step *step, size_t layer);

/* Attention, into `mixed`, in one step. If that would leave threads idle: block by block of the positions, merged in the
 * next step, with the same bits. All threads make the same choice. */
bool mixes_blocks(const struct step *step, size_t layer);
void mix(const struct step *step, size_t layer);
void mix_blocks(const struct step *step, size_t layer);
void merge_mixed(const struct step *step, size_t layer);

#endif
