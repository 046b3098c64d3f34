/* The states of gated delta layers, and the rows since then. */
#ifndef EDGESPEC_DELTA_H
#define EDGESPEC_DELTA_H

#include "sequence.h"

/* A layer's state is kept twice: BASE is after an earlier token than HEAD. A forward applies the rows between HEAD and its
 * start to HEAD, once, and scans its own rows on a copy, since they may be guesses. One that starts before HEAD begins
 * with BASE. All apply the same rows by the same operations, so the state has the bits of plain decoding. */
enum delta_state { BASE, HEAD, DELTA_STATES };

/* Positions before the start of a forward at which the next one can start again. A choice: what a drafter takes back of
 * its guesses, one forward for each. */
enum { LEAST_BACK = 24 };

/* The rows from BASE on, those of a forward, and what the convolution reads before them. */
enum { LOG_ROWS = 96 };

_Static_assert((int)LOG_ROWS >= (int)LEAST_BACK + (int)ES_MOST_SCORED + (int)ES_MOST_DELTA_KERNEL - 1, "all fit");

static inline size_t delta_state_length(const struct es_model *model)
{
    return (size_t)(model->delta_length * model->delta_length);
}

/* Queries, keys and values of a row. */
static inline size_t delta_channels(const struct es_model *model)
{
    return (size_t)((2 * model->delta_key_heads + model->delta_heads) * model->delta_length);
}

/* What is kept of a row: that, then each head's decay and beta. */
static inline size_t log_length(const struct es_model *model)
{
    return delta_channels(model) + 2 * (size_t)model->delta_heads;
}

/* A row as projected: what is kept, and the gates. */
static inline size_t delta_stride(const struct es_model *model)
{
    return log_length(model) + (size_t)(model->delta_heads * model->delta_length);
}

bool delta_is_fit(const struct es_model *model);
bool delta_open(struct es_sequence *sequence);
void delta_copy(struct es_sequence *to, const struct es_sequence *from);
/* Whether the sequence has the state that the entry starts with. */
bool delta_continues(const struct es_sequence *sequence, const struct es_entry *entry);

#endif
