/* Several sequences of a model in one forward: checks entries, lays out their rows, and runs the forward.
 *
 * A row's bits depend on nothing that is computed next to it, so each entry gets what it would get alone. */
#define _GNU_SOURCE
#include "batch.h"

#include <stdlib.h>

#include "carver.h"
#include "threads.h"

static struct activations carve_activations(struct carver *carver, int64_t columns, size_t rows)
{
    struct activations made = {.columns = (size_t)columns};
    made.floats = carve(carver, rows * made.columns * sizeof(float));
    made.blocks = carve(carver, rows * (made.columns / BLOCK) * sizeof(struct activation_block));
    return made;
}

static void carve_mixture(struct es_batch *batch, struct carver *carver)
{
    const struct es_model *model = batch->model;
    struct mixture *mixture = &batch->mixture;
    size_t entries = ES_MOST_TOKENS * (size_t)model->experts_used, experts = (size_t)model->experts;
    if (!experts)
        return;
    mixture->score_stride = tile_count(model->experts) * TILE_ROWS;
    mixture->scores = carve(carver, ES_MOST_TOKENS * mixture->score_stride * sizeof(float));
    mixture->chosen = carve(carver, entries * sizeof *mixture->chosen);
    mixture->weights = carve(carver, entries * sizeof *mixture->weights);
    mixture->entries = carve(carver, entries * sizeof *mixture->entries);
    mixture->rows = carve(carver, entries * sizeof *mixture->rows);
    mixture->experts = carve(carver, experts * sizeof *mixture->experts);
    mixture->starts = carve(carver, (experts + 1) * sizeof *mixture->starts);
    mixture->gathered = carve_activations(carver, model->embedding, entries);
    mixture->fed = carve_activations(carver, model->feed_forward, entries);
    if (model->shared_length) {
        mixture->shared = carve_activations(carver, model->shared_length, ES_MOST_TOKENS);
        mixture->shared_scores = carve(carver, ES_MOST_TOKENS * TILE_ROWS * sizeof(float));
        mixture->shared_outputs = carve(carver, ES_MOST_TOKENS * (size_t)model->embedding * sizeof(float));
    }
    mixture->outputs = carve(carver, entries * (size_t)model->embedding * sizeof(float));
}

/* Columns of the second half of any feed-forward. */
static int64_t longest_fed(const struct es_model *model)
{
    int64_t most = model->feed_forward > model->input_length ? model->feed_forward : model->input_length;
    for (int64_t number = 0; number < model->layers; number++) {
        const struct es_layer *layer = &model->layer[number];
        int64_t columns = layer->router.tiles ? layer->dense_down.columns : layer->down.columns;
        most = columns > most ? columns : most;
    }
    return most;
}

static bool has_dense(const struct es_model *model)
{
    for (int64_t layer = 0; layer < model->layers; layer++)
        if (model->layer[layer].dense_down.tiles)
            return true;
    return false;
}

static void carve_buffers(struct es_batch *batch, struct carver *carver, size_t threads)
{
    const struct es_model *model = batch->model;
    size_t row = ES_MOST_TOKENS * sizeof(float), head = 2 * (size_t)model->head_length * sizeof(uint16_t);
    batch->hidden = carve(carver, row * (size_t)model->embedding);
    batch->added = carve(carver, row * (size_t)model->embedding);
    batch->rotation = carve(carver, row * (size_t)(model->rope_tables * model->rope_length));
    batch->projected = carve(carver, row * projected_length(model));
    batch->normed = carve_activations(carver, model->embedding, ES_MOST_TOKENS);
    batch->mixed = carve_activations(carver, (int64_t)query_length(model), ES_MOST_TOKENS);
    batch->fed = carve_activations(carver, longest_fed(model), ES_MOST_TOKENS);
    batch->inputs = model->inputs ? carve(carver, row * (size_t)model->inputs) : NULL;
    batch->input_gates = model->inputs ? carve(carver, row * (size_t)model->input_length) : NULL;
    batch->dense = has_dense(model) ? carve(carver, row * (size_t)model->embedding) : NULL;
    batch->pairs = carve_activations(carver, 2 * model->pair_length, ES_MOST_TOKENS);
    carve_mixture(batch, carver);
    if (model->delta_heads) {
        batch->deltas = carve(carver, row * delta_stride(model));
        batch->scanned = carve_activations(carver, model->delta_heads * model->delta_length, ES_MOST_TOKENS);
        batch->scan_states = carve(carver, threads * delta_state_length(model) * sizeof(float));
    }
    batch->block_sums = carve(carver, MOST_BLOCK_SUMS * (size_t)model->head_length * sizeof(float));
    batch->standing = carve(carver, MOST_BLOCK_SUMS * sizeof *batch->standing);
    batch->paths = carve(carver, threads * ATTENTION_ROWS * PATH_POSITIONS * head);
}

/* Whether a layer's heads fit the model's, and those of the layer whose keys its rows see. */
static bool is_layer_fit(const struct es_model *model, int64_t number)
{
    const struct es_layer *layer = &model->layer[number], *owner = layer;
    if (layer->cache_layer < 0 || layer->cache_layer > number)
        return false;
    owner = &model->layer[layer->cache_layer];
    if (owner != layer && owner->delta.mixed.tiles)
        return false;
    return owner->cache_layer == layer->cache_layer && owner->kv_heads == layer->kv_heads &&
           owner->head_length == layer->head_length && owner->window == layer->window && layer->kv_heads >= 1 &&
           layer->kv_heads <= model->kv_heads && layer->head_length >= 1 &&
           layer->head_length <= model->head_length && layer->rope_length <= model->rope_length &&
           layer->rope_length <= layer->head_length && !(model->borrows && layer->window == 1);
}

/* Lays out the layers of a cache. */
static bool place_layers(struct es_batch *batch)
{
    const struct es_model *model = batch->model;
    size_t used = 0;
    batch->cache_at = calloc((size_t)model->layers + 1, sizeof *batch->cache_at);
    for (int64_t number = 0; batch->cache_at && number < model->layers; number++) {
        const struct es_layer *layer = &model->layer[number];
        if (!is_layer_fit(model, number))
            return false;
        batch->cache_at[number] = layer->cache_layer == number ? used : batch->cache_at[layer->cache_layer];
        if (layer->cache_layer == number) {
            used += layer->delta.mixed.tiles ? 0 : (size_t)(layer->kv_heads * layer->head_length);
            batch->last_keys = (size_t)number;
        }
        batch->cache_at[number + 1] = used;
    }
    return batch->cache_at != NULL;
}

struct es_batch *es_batch_open(const struct es_model *model, const struct es_threads *threads, int32_t level)
{
    if (threads->count < 1 || threads->count > ES_MOST_THREADS || !level_of(level))
        return NULL;
    if (model->experts && (model->experts < 1 || model->experts > ES_MOST_EXPERTS || model->experts_used < 1 ||
                           model->experts_used > ES_MOST_EXPERTS_USED || model->experts_used > model->experts ||
                           model->feed_forward % TILE_ROWS || model->embedding % TILE_ROWS ||
                           model->shared_length < 0 || model->shared_length % BLOCK))
        return NULL;
    if (!delta_is_fit(model))
        return NULL;
    struct es_batch *batch = calloc(1, sizeof *batch);
    if (!batch)
        return NULL;
    batch->model = model;
    batch->level = level_of(level);
    batch->process = process_number();
    if (!place_layers(batch)) {
        es_batch_close(batch);
        return NULL;
    }
    struct carver carver = {0};
    carve_buffers(batch, &carver, (size_t)threads->count);
    batch->buffer_bytes = carver.used;
    batch->buffers = es_memory_take((int64_t)carver.used, ES_PAGES_SMALL);
    carver = (struct carver){.base = batch->buffers};
    carve_buffers(batch, &carver, (size_t)threads->count);
    if (batch->buffers)
        batch->pool = pool_open(threads);
    if (!batch->pool) {
        es_batch_close(batch);
        return NULL;
    }
    return batch;
}

void es_batch_close(struct es_batch *batch)
{
    /* In a forked child the threads are not there to be waited for. */
    if (batch->pool && batch->process == process_number())
        pool_close(batch->pool);
    es_memory_give(batch->buffers, (int64_t)batch->buffer_bytes);
    free(batch->cache_at);
    free(batch);
}

/* ---------------------------------------------------------------------------------------------------- entries */

/* Whether there are positions before each of its rows. */
static bool can_borrow(const struct es_entry *entry)
{
    return !entry->parents && entry->scored == entry->count && entry->start > 0;
}

static bool is_fit(const struct es_batch *batch, const struct es_entry *entry, struct tree *tree)
{
    const struct es_sequence *sequence = entry->sequence;
    /* Rows that see another model's positions may stand behind the last of them. */
    size_t most_length = sequence->lender ? sequence->lender->context_length + 1 : sequence->context_length;
    if (sequence->batch != batch || entry->count < 1 || entry->count > ES_MOST_TOKENS || entry->start < 0 ||
        (size_t)entry->start > most_length)
        return false;
    if (!delta_continues(sequence, entry) || (batch->model->pair_length && !entry->pairs))
        return false;
    if ((batch->model->borrows && !can_borrow(entry)) || (batch->model->passed_on.tiles && !entry->kept))
        return false;
    if (entry->parents) {
        if (entry->scored != entry->count || !tree_read(tree, entry->parents, entry->first, entry->count))
            return false;
    } else if (entry->scored < 0 || entry->scored > entry->count || entry->scored > ES_MOST_SCORED ||
               (size_t)entry->start + (size_t)entry->count > most_length) {
        return false;
    }
    for (int32_t i = 0; i < entry->count; i++)
        if (entry->tokens[i] < 0 || entry->tokens[i] >= batch->model->vocabulary)
            return false;
    return true;
}

/* The entries of a forward, those whose sequences share a head's first matrix next to each other. */
struct order {
    const struct es_entry *entry[ES_MOST_ENTRIES];
    const struct tree *tree[ES_MOST_ENTRIES]; /* null: a chain */
    size_t count;
};

/* Gives each entry its status, and orders those that can run. */
static void check_entries(struct es_batch *batch, struct es_entry *entries, size_t count, struct order *order)
{
    for (size_t i = 0; i < count; i++) {
        entries[i].status = is_fit(batch, &entries[i], &batch->trees[i]) ? ES_OK : ES_BAD_REQUEST;
        for (size_t j = 0; j < i; j++)
            if (entries[j].sequence == entries[i].sequence)
                entries[i].status = ES_BAD_REQUEST;
    }
    bool taken[ES_MOST_ENTRIES] = {false};
    for (size_t i = 0; i < count; i++) {
        bool leads = !taken[i] && !entries[i].status;
        for (size_t j = i; leads && j < count; j++) {
            const struct es_entry *entry = &entries[j];
            if (taken[j] || entry->status || entry->sequence->heads[0].tiles != entries[i].sequence->heads[0].tiles)
                continue;
            order->entry[order->count] = entry;
            order->tree[order->count++] = entry->parents ? &batch->trees[j] : NULL;
            taken[j] = true;
        }
    }
}

/* ------------------------------------------------------------------------------------------------------- rows */

static struct row row_of(const struct order *order, size_t number, size_t i)
{
    const struct es_entry *entry = order->entry[number];
    const struct es_model *model = entry->sequence->model;
    const struct tree *tree = order->tree[number];
    size_t kept_length = (size_t)(model->passed_on.tiles ? model->pair_length : model->embedding);
    size_t unkept = entry->keeps_all ? 0 : (size_t)(entry->count - entry->scored);
    size_t start = (size_t)entry->start, node = (size_t)entry->first + i;
    return (struct row){
        .sequence = entry->sequence,
        .tree = tree,
        .start = start,
        .node = node,
        .end = start + (size_t)entry->count,
        .position = start + (tree ? tree->depth[node] : i),
        .scored = i - (size_t)(entry->count - entry->scored),
        .pair = entry->pairs ? entry->pairs + i * (size_t)model->pair_length : NULL,
        .kept = entry->kept && i >= unkept ? entry->kept + (i - unkept) * kept_length : NULL,
        .token = entry->tokens[i],
    };
}

static void add_row(struct rows *rows, struct row row)
{
    struct row_group *group = rows->groups ? &rows->group[rows->groups - 1] : NULL;
    if (!group || group->count == ATTENTION_ROWS || rows->row[group->first].sequence != row.sequence) {
        group = &rows->group[rows->groups++];
        *group = (struct row_group){.first = rows->count};
    }
    group->count++;
    rows->row[rows->count++] = row;
}

static struct chain chain_of(const struct es_entry *entry)
{
    return (struct chain){.sequence = entry->sequence,
                          .start = (size_t)entry->start,
                          .unscored = (size_t)(entry->count - entry->scored),
                          .scored = (size_t)entry->scored};
}

static void clear_rows(struct rows *rows, size_t scored)
{
    rows->count = rows->groups = 0;
    rows->scored = scored;
}

/* Rows that are not scored come first: those of all entries in order, then the scored ones in the same order. */
static void lay_out(struct es_batch *batch, const struct order *order)
{
    size_t scored = 0;
    batch->keeps_rows = false;
    for (size_t e = 0; e < order->count; e++) {
        scored += (size_t)order->entry[e]->scored;
        batch->keeps_rows |= order->entry[e]->kept && order->entry[e]->keeps_all;
    }
    clear_rows(&batch->all, scored);
    clear_rows(&batch->scored, scored);
    for (size_t e = 0; e < order->count; e++) {
        batch->chains[e] = chain_of(order->entry[e]);
        batch->chains[e].first_unscored = batch->all.count;
        for (size_t i = 0; i < batch->chains[e].unscored; i++)
            add_row(&batch->all, row_of(order, e, i));
    }
    batch->chain_count = order->count;
    size_t unscored = batch->all.count;
    for (size_t e = 0; e < order->count; e++) {
        batch->chains[e].first_scored = batch->all.count;
        for (size_t i = 0; i < batch->chains[e].scored; i++)
            add_row(&batch->all, row_of(order, e, batch->chains[e].unscored + i));
    }
    /* Then no move to the front overwrites a row still to be moved. */
    batch->leaves_rows = scored <= unscored && !batch->keeps_rows;
    for (size_t r = unscored; batch->leaves_rows && r < batch->all.count; r++)
        add_row(&batch->scored, batch->all.row[r]);
}

/* ------------------------------------------------------------------------------------------------------ heads */

static size_t column_of(const struct es_sequence *sequence, int32_t head)
{
    return head ? (size_t)sequence->heads[0].rows : 0;
}

static bool same_head(const struct es_sequence *a, const struct es_sequence *b, int32_t head)
{
    return head < a->head_count && head < b->head_count && a->heads[head].tiles == b->heads[head].tiles &&
           a->heads[head].bias == b->heads[head].bias && a->heads[head].rows == b->heads[head].rows &&
           a->heads[head].type == b->heads[head].type && column_of(a, head) == column_of(b, head);
}

static struct product scoring_product(const struct es_batch *batch, const struct es_sequence *sequence, int32_t head,
                                      size_t first)
{
    return (struct product){
        .matrix = &sequence->heads[head],
        .row_to = batch->scores_of + first,
        .column = column_of(sequence, head),
    };
}

/* Scored rows whose sequences all have the same matrices are one run. Otherwise each run of rows with the same matrix is
 * one, first by first matrices, then by second ones. */
static void plan_heads(struct es_batch *batch)
{
    const struct row *row = batch->all.row + (batch->all.count - batch->all.scored);
    size_t scored = batch->all.scored, vary = 0;
    batch->head_run_count = 0;
    for (size_t r = 0; r < scored; r++) {
        const struct es_sequence *own = row[r].sequence, *first = row[0].sequence;
        batch->scores_of[r] = own->scores + row[r].scored * own->head_rows;
        batch->kept_of[r] = row[r].kept;
        vary |= own->head_count != first->head_count || !same_head(own, first, 0) ||
                (own->head_count > 1 && !same_head(own, first, 1));
    }
    if (scored && !vary) {
        const struct es_sequence *own = row[0].sequence;
        struct head_run *run = &batch->head_runs[batch->head_run_count++];
        *run = (struct head_run){.product_count = (size_t)own->head_count, .rows = scored};
        for (int32_t head = 0; head < own->head_count; head++)
            run->products[head] = scoring_product(batch, own, head, 0);
        return;
    }
    for (int32_t head = 0; head < ES_MOST_HEADS; head++)
        for (size_t r = 0, next; r < scored; r = next) {
            const struct es_sequence *own = row[r].sequence;
            for (next = r + 1; next < scored && (row[next].sequence == own || same_head(own, row[next].sequence, head));)
                next++;
            if (head >= own->head_count)
                continue;
            struct head_run *run = &batch->head_runs[batch->head_run_count++];
            *run = (struct head_run){.product_count = 1, .first = r, .rows = next - r};
            run->products[0] = scoring_product(batch, own, head, r);
        }
}

/* --------------------------------------------------------------------------------------------------- forwards */

static const atomic_int never; /* an entry's cancel must not end the others' forward */

int32_t es_batch_forward(struct es_batch *batch, struct es_entry *entries, int32_t count)
{
    if (count < 1 || count > ES_MOST_ENTRIES)
        return ES_BAD_REQUEST;
    if (batch->process != process_number())
        return ES_OTHER_PROCESS;
    struct order order = {.count = 0};
    size_t rows = 0, scored = 0;
    check_entries(batch, entries, (size_t)count, &order);
    for (size_t e = 0; e < order.count; e++) {
        rows += (size_t)order.entry[e]->count;
        scored += (size_t)order.entry[e]->scored;
    }
    if (rows > ES_MOST_TOKENS || scored > ES_MOST_SCORED)
        return ES_BAD_REQUEST;
    if (!order.count)
        return ES_OK;
    lay_out(batch, &order);
    plan_heads(batch);
    for (size_t e = 0; e < order.count; e++)
        order.entry[e]->sequence->scored = 0;
    batch->finished = false;
    batch->experts_read = 0;
    pool_run(batch->pool, forward_on, batch, count == 1 ? entries[0].sequence->cancelled : &never);
    for (int32_t i = 0; i < count; i++)
        if (entries[i].status == ES_OK) {
            entries[i].status = batch->finished ? ES_OK : ES_CANCELLED;
            entries[i].sequence->scored = batch->finished ? entries[i].scored : 0;
        }
    return ES_OK;
}

int64_t es_experts_read(const struct es_batch *batch)
{
    return (int64_t)batch->experts_read;
}

static int32_t forward_alone(struct es_entry entry)
{
    int32_t status = es_batch_forward(entry.sequence->batch, &entry, 1);
    return status ? status : entry.status;
}

int32_t es_forward(struct es_sequence *sequence, const int32_t *tokens, int32_t count, int64_t start, int32_t scored)
{
    return forward_alone((struct es_entry){
        .sequence = sequence, .tokens = tokens, .start = start, .count = count, .scored = scored});
}

int32_t es_forward_tree(struct es_sequence *sequence, const int32_t *tokens, int32_t count, int64_t start,
                        const int32_t *parents, int32_t first)
{
    return forward_alone((struct es_entry){.sequence = sequence,
                                           .tokens = tokens,
                                           .parents = parents,
                                           .start = start,
                                           .count = count,
                                           .scored = count,
                                           .first = first});
}
