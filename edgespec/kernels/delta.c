/* Gated delta layers: their rows' steps in a forward, and their states. */
#define _GNU_SOURCE
#include "delta.h"

#include <math.h>

#include "carver.h"
#include "float_mode.h"
#include "forward_step.h"
#include "half.h"

bool delta_is_fit(const struct es_model *model)
{
    int64_t length = model->delta_length;
    return !model->delta_heads ||
           (model->delta_heads > 0 && model->delta_key_heads > 0 && model->delta_heads % model->delta_key_heads == 0 &&
            length >= TILE_ROWS && length <= ES_MOST_DELTA_LENGTH && length % TILE_ROWS == 0 &&
            model->delta_heads * length % BLOCK == 0 && model->delta_kernel >= 1 &&
            model->delta_kernel <= ES_MOST_DELTA_KERNEL);
}

static void carve_states(struct es_sequence *sequence, struct carver *carver)
{
    const struct es_model *model = sequence->model;
    size_t states = (size_t)(model->layers * model->delta_heads) * DELTA_STATES;
    sequence->states = carve(carver, states * delta_state_length(model) * sizeof(float));
    sequence->state_at = carve(carver, states * sizeof *sequence->state_at);
    sequence->log = carve(carver, (size_t)model->layers * LOG_ROWS * log_length(model) * sizeof(float));
}

bool delta_open(struct es_sequence *sequence)
{
    if (!sequence->model->delta_heads)
        return true;
    struct carver carver = {0};
    carve_states(sequence, &carver);
    sequence->state_bytes = carver.used;
    carver.base = es_memory_take((int64_t)carver.used, ES_PAGES_SPARSE);
    carver.used = 0;
    carve_states(sequence, &carver);
    return carver.base;
}

/* The rows before a position that the convolution reads. */
static size_t rows_before(const struct es_model *model)
{
    return (size_t)model->delta_kernel - 1;
}

static bool is_delta(const struct es_model *model, size_t layer)
{
    return model->layer[layer].delta.mixed.tiles;
}

void delta_copy(struct es_sequence *to, const struct es_sequence *from)
{
    const struct es_model *model = to->model;
    size_t states = (size_t)model->delta_heads * DELTA_STATES, state = states * delta_state_length(model);
    size_t rows = LOG_ROWS * log_length(model);
    for (size_t layer = 0; model->delta_heads && layer < (size_t)model->layers; layer++)
        if (is_delta(model, layer)) {
            memcpy(to->states + layer * state, from->states + layer * state, state * sizeof *to->states);
            memcpy(to->state_at + layer * states, from->state_at + layer * states, states * sizeof *to->state_at);
            memcpy(to->log + layer * rows, from->log + layer * rows, rows * sizeof *to->log);
        }
}

/* One head of a layer: its states, and the tokens that they are after. */
struct delta_head {
    const struct es_sequence *sequence;
    size_t layer, head;
    float *state[DELTA_STATES];
    int64_t *at;
};

static struct delta_head head_of(const struct es_sequence *sequence, size_t layer, size_t head)
{
    const struct es_model *model = sequence->model;
    size_t first = (layer * (size_t)model->delta_heads + head) * DELTA_STATES, length = delta_state_length(model);
    return (struct delta_head){
        .sequence = sequence,
        .layer = layer,
        .head = head,
        .state = {sequence->states + first * length, sequence->states + (first + 1) * length},
        .at = sequence->state_at + first,
    };
}

static float *log_row(const struct es_sequence *sequence, size_t layer, size_t position)
{
    return sequence->log + (layer * LOG_ROWS + position % LOG_ROWS) * log_length(sequence->model);
}

int64_t es_state_floor(const struct es_sequence *sequence)
{
    const struct es_model *model = sequence->model;
    int64_t floor = 0;
    for (size_t layer = 0; model->delta_heads && layer < (size_t)model->layers; layer++)
        for (size_t head = 0; head < (size_t)model->delta_heads; head++) {
            int64_t at = head_of(sequence, layer, head).at[BASE];
            floor = at > floor ? at : floor;
        }
    return floor;
}

bool delta_continues(const struct es_sequence *sequence, const struct es_entry *entry)
{
    return !sequence->model->delta_heads || (!entry->parents && entry->start >= es_state_floor(sequence) &&
                                             entry->start - es_state_floor(sequence) <= LOG_ROWS);
}

/* -------------------------------------------------------------------------------------------------------- rows */

/* The rows of one head that a forward in flight projects; outside of one `batch` and `chain` are null. */
struct projected {
    const struct es_batch *batch;
    const struct chain *chain;
};

static size_t row_number(const struct chain *chain, size_t position)
{
    size_t i = position - chain->start;
    return i < chain->unscored ? chain->first_unscored + i : chain->first_scored + (i - chain->unscored);
}

/* A row as projected, by the forward in flight or by an earlier one. */
static const float *row_at(const struct delta_head *own, struct projected rows, size_t position)
{
    const struct es_sequence *sequence = own->sequence;
    if (rows.chain && position >= rows.chain->start)
        return rows.batch->deltas + row_number(rows.chain, position) * delta_stride(sequence->model);
    return log_row(sequence, own->layer, position);
}

static const float nothing[ES_MOST_DELTA_LENGTH]; /* before the first token */

/* The convolved elements of a row from `channel` on. */
static void convolve_row(const struct delta_head *own, struct projected rows, size_t position, size_t channel, float *to)
{
    const struct es_model *model = own->sequence->model;
    size_t count = (size_t)model->delta_kernel, length = (size_t)model->delta_length;
    const float *taps[ES_MOST_DELTA_KERNEL];
    for (size_t tap = 0; tap < count; tap++) {
        size_t back = count - 1 - tap;
        taps[tap] = back > position ? nothing : row_at(own, rows, position - back) + channel;
    }
    own->sequence->level->convolve(taps, count, model->layer[own->layer].delta.kernel + channel,
                                   delta_channels(model), length, to);
}

/* The same, with a norm of `norm` over the elements. */
static void convolve_unit(const struct delta_head *own, struct projected rows, size_t position, size_t channel,
                          float norm, float *to)
{
    const struct es_model *model = own->sequence->model;
    size_t length = (size_t)model->delta_length;
    float weights[ES_MOST_DELTA_LENGTH];
    for (size_t i = 0; i < length; i++)
        weights[i] = norm / sqrtf((float)length);
    convolve_row(own, rows, position, channel, to);
    own->sequence->level->normalise(to, weights, (float)model->norm_epsilon / (float)length, length, to);
}

/* Up to DELTA_ROWS rows of a head in the form that scan reads. */
struct head_rows {
    float queries[DELTA_ROWS * ES_MOST_DELTA_LENGTH], keys[DELTA_ROWS * ES_MOST_DELTA_LENGTH];
    float values[DELTA_ROWS * ES_MOST_DELTA_LENGTH], out[DELTA_ROWS * ES_MOST_DELTA_LENGTH];
    struct delta_rows rows;
};

static void gather(const struct delta_head *own, struct projected rows, size_t first, size_t count, bool asks,
                   struct head_rows *to)
{
    const struct es_model *model = own->sequence->model;
    size_t length = (size_t)model->delta_length, key_heads = (size_t)model->delta_key_heads;
    size_t query = own->head % key_heads * length, key = query + key_heads * length;
    size_t value = (2 * key_heads + own->head) * length, channels = delta_channels(model);
    to->rows = (struct delta_rows){
        .count = count, .keys = to->keys, .values = to->values, .queries = asks ? to->queries : NULL, .out = to->out};
    for (size_t r = 0; r < count; r++) {
        const float *row = row_at(own, rows, first + r);
        to->rows.decays[r] = row[channels + own->head];
        to->rows.betas[r] = row[channels + (size_t)model->delta_heads + own->head];
        convolve_unit(own, rows, first + r, key, 1.0f, to->keys + r * length);
        convolve_row(own, rows, first + r, value, to->values + r * length);
        if (asks)
            convolve_unit(own, rows, first + r, query, 1.0f / sqrtf((float)length), to->queries + r * length);
    }
}

static void put_out(const struct delta_head *own, struct projected rows, size_t first, size_t count, const float *out)
{
    const struct activations *to = &rows.batch->scanned;
    size_t length = (size_t)own->sequence->model->delta_length;
    for (size_t r = 0; r < count; r++)
        memcpy(to->floats + row_number(rows.chain, first + r) * to->columns + own->head * length, out + r * length,
               length * sizeof *out);
}

/* Applies positions first .. end - 1 to a state; with `asks` their outputs are kept. */
static void apply(const struct delta_head *own, struct projected rows, float *state, size_t first, size_t end, bool asks)
{
    const struct es_model *model = own->sequence->model;
    struct head_rows here;
    for (size_t count; first < end; first += count) {
        count = end - first < DELTA_ROWS ? end - first : DELTA_ROWS;
        gather(own, rows, first, count, asks, &here);
        own->sequence->level->scan(state, (size_t)model->delta_length, model->layer[own->layer].delta.rates[own->head],
                                   &here.rows);
        if (asks)
            put_out(own, rows, first, count, here.out);
    }
}

/* ------------------------------------------------------------------------------------------------------- steps */

void project_deltas(const struct step *step, const struct es_layer *layer)
{
    const struct es_model *model = step->model;
    size_t stride = delta_stride(model), heads = (size_t)model->delta_heads;
    float *to = step->batch->deltas, *decays = to + delta_channels(model);
    const struct product products[] = {
        {.matrix = &layer->delta.mixed, .to = to, .stride = stride},
        {.matrix = &layer->delta.decay, .to = decays, .stride = stride},
        {.matrix = &layer->delta.beta, .to = decays + heads, .stride = stride},
        {.matrix = &layer->delta.gate, .to = decays + 2 * heads, .stride = stride},
    };
    multiply(step, products, sizeof products / sizeof *products, &step->batch->normed, step->rows->count);
}

/* Brings a state to `position`, by rows of earlier forwards. */
static void bring(const struct delta_head *own, enum delta_state which, size_t position)
{
    apply(own, (struct projected){NULL, NULL}, own->state[which], (size_t)own->at[which], position, false);
    own->at[which] = (int64_t)position;
}

static void scan_head(const struct step *step, const struct delta_head *own, const struct chain *chain)
{
    const struct es_model *model = step->model;
    struct projected rows = {step->batch, chain};
    size_t bytes = delta_state_length(model) * sizeof(float), start = chain->start;
    size_t end = start + chain->unscored + chain->scored, settled = start;
    size_t before = rows_before(model);
    float *guessed = step->batch->scan_states + (size_t)step->thread * delta_state_length(model);
    if (end - start > ES_MOST_SCORED)
        settled = start + chain->unscored;
    else if (end - (size_t)own->at[BASE] + before > LOG_ROWS)
        bring(own, BASE, start - LEAST_BACK);
    if ((size_t)own->at[HEAD] > start) {
        memcpy(own->state[HEAD], own->state[BASE], bytes);
        own->at[HEAD] = own->at[BASE];
    }
    bring(own, HEAD, start);
    if (settled > start) {
        apply(own, rows, own->state[HEAD], start, settled, true);
        memcpy(own->state[BASE], own->state[HEAD], bytes);
        own->at[BASE] = own->at[HEAD] = (int64_t)settled;
    }
    if (settled == end)
        return;
    memcpy(guessed, own->state[HEAD], bytes);
    apply(own, rows, guessed, settled, end, true);
}

void scan_deltas(const struct step *step, size_t layer)
{
    size_t heads = (size_t)step->model->delta_heads;
    const struct pool_work work = {.count = step->batch->chain_count * heads, .least = 1, .worth = 1};
    for (struct pool_items own = divide(step, work); pool_take(&own);)
        for (size_t item = own.begin; item < own.end; item++) {
            const struct chain *chain = &step->batch->chains[item / heads];
            const struct delta_head head = head_of(chain->sequence, layer, item % heads);
            scan_head(step, &head, chain);
        }
}

/* Norms and gates the outputs, and keeps the rows that a later forward may need. */
void end_deltas(const struct step *step, size_t layer)
{
    const struct es_model *model = step->model;
    const struct es_delta *delta = &model->layer[layer].delta;
    const struct activations *to = &step->batch->scanned;
    size_t length = (size_t)model->delta_length, heads = (size_t)model->delta_heads, kept = log_length(model);
    for (struct pool_items own = divide_rows(step, step->rows->count); pool_take(&own);)
        for (size_t r = own.begin; r < own.end; r++) {
            const struct row *row = &step->rows->row[r];
            const float *projected = step->batch->deltas + r * delta_stride(model), *gate = projected + kept;
            float *out = to->floats + r * to->columns;
            for (size_t head = 0; head < heads; head++)
                step->level->normalise(out + head * length, delta->norm, (float)model->norm_epsilon, length,
                                       out + head * length);
            step->level->join[ES_SWIGLU](gate, out, to->columns, out);
            step->level->quantise(out, to->columns / BLOCK, to->blocks + r * (to->columns / BLOCK), 1);
            if (row->position + LOG_ROWS >= row->end)
                memcpy(log_row(row->sequence, layer, row->position), projected, kept * sizeof *projected);
        }
}

/* ---------------------------------------------------------------------------------------------- states in files */

static size_t layer_floats(const struct es_model *model)
{
    return (size_t)model->delta_heads * delta_state_length(model) + rows_before(model) * log_length(model);
}

int64_t es_state_bytes(const struct es_sequence *sequence)
{
    const struct es_model *model = sequence->model;
    size_t floats = 0;
    for (size_t layer = 0; model->delta_heads && layer < (size_t)model->layers; layer++)
        floats += is_delta(model, layer) ? layer_floats(model) : 0;
    return (int64_t)(floats * sizeof(float));
}

static void read_layer(const struct es_sequence *sequence, size_t layer, size_t length, float *to)
{
    const struct es_model *model = sequence->model;
    size_t state = delta_state_length(model), row = log_length(model);
    for (size_t head = 0; head < (size_t)model->delta_heads; head++, to += state) {
        const struct delta_head own = head_of(sequence, layer, head);
        enum delta_state from = (size_t)own.at[HEAD] <= length ? HEAD : BASE;
        memcpy(to, own.state[from], state * sizeof *to);
        apply(&own, (struct projected){NULL, NULL}, to, (size_t)own.at[from], length, false);
    }
    for (size_t back = rows_before(model); back; back--, to += row)
        if (back > length)
            memset(to, 0, row * sizeof *to);
        else
            memcpy(to, log_row(sequence, layer, length - back), row * sizeof *to);
}

int32_t es_read_state(const struct es_sequence *sequence, int64_t length, uint8_t *to, int64_t bytes)
{
    const struct es_model *model = sequence->model;
    if (bytes != es_state_bytes(sequence) || length < es_state_floor(sequence) ||
        (size_t)length > sequence->context_length)
        return ES_BAD_REQUEST;
    unsigned mode = float_mode_set();
    for (size_t layer = 0; bytes && layer < (size_t)model->layers; layer++)
        if (is_delta(model, layer)) {
            read_layer(sequence, layer, (size_t)length, (float *)(void *)to);
            to += layer_floats(model) * sizeof(float);
        }
    float_mode_restore(mode);
    return ES_OK;
}

static void write_layer(const struct es_sequence *sequence, size_t layer, size_t length, const float *from)
{
    const struct es_model *model = sequence->model;
    size_t state = delta_state_length(model), row = log_length(model);
    for (size_t head = 0; head < (size_t)model->delta_heads; head++) {
        const struct delta_head own = head_of(sequence, layer, head);
        for (size_t which = 0; which < DELTA_STATES; which++) {
            own.at[which] = (int64_t)length;
            if (from)
                memcpy(own.state[which], from + head * state, state * sizeof *from);
            else
                memset(own.state[which], 0, state * sizeof *from);
        }
    }
    from = from ? from + (size_t)model->delta_heads * state : NULL;
    for (size_t back = rows_before(model); from && back; back--, from += row)
        if (back <= length)
            memcpy(log_row(sequence, layer, length - back), from, row * sizeof *from);
}

int32_t es_write_state(struct es_sequence *sequence, int64_t length, const uint8_t *from, int64_t bytes)
{
    enum { EXPONENT = 0x7f800000 }; /* all ones: infinite, or not a number */
    const struct es_model *model = sequence->model;
    const float *floats = (const float *)(const void *)from;
    if (length < 0 || (size_t)length > sequence->context_length || (!from && length) ||
        (from && bytes != es_state_bytes(sequence)))
        return ES_BAD_REQUEST;
    for (size_t i = 0; from && i < (size_t)bytes / sizeof *floats; i++)
        if ((bits_of_float(floats[i]) & EXPONENT) == EXPONENT)
            return ES_NOT_FINITE;
    for (size_t layer = 0; model->delta_heads && layer < (size_t)model->layers; layer++)
        if (is_delta(model, layer)) {
            write_layer(sequence, layer, (size_t)length, floats);
            floats = floats ? floats + layer_floats(model) : NULL;
        }
    return ES_OK;
}
