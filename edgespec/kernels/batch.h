/* What the forwards of one model's sequences share: threads, buffers, and the rows of the forward in flight. */
#ifndef EDGESPEC_BATCH_H
#define EDGESPEC_BATCH_H

#include "delta.h"
#include "multiply.h"
#include "sequence.h"
#include "tree.h"

/* A row of a forward: whose it is and where it stands. */
struct row {
    struct es_sequence *sequence;
    const struct tree *tree; /* null: a chain */
    size_t start;            /* the position that a tree's roots have */
    size_t node;             /* of the tree */
    size_t position;
    size_t end;              /* of a chain: the position after its last row */
    size_t scored;           /* its number among the sequence's scored rows, if it is one */
    const float *pair;       /* the hidden row of its token, for a model that needs one */
    float *kept;             /* where what follows the head's norm goes; or null */
    int32_t token;
};

/* Consecutive rows of one sequence, at most ATTENTION_ROWS, that attention computes together. */
struct row_group {
    size_t first, count;
};

/* The scored rows are the last ones. */
struct rows {
    size_t count, scored, groups;
    struct row row[ES_MOST_TOKENS];
    struct row_group group[ES_MOST_TOKENS];
};

/* Consecutive scored rows that the same matrices score. */
struct head_run {
    struct product products[ES_MOST_HEADS];
    size_t product_count;
    size_t first, rows; /* among the scored rows */
};

/* What a layer with experts works on; all null for a model without. An entry is a row with one of its experts; those of
 * one expert are neighbours. `used` is the model's experts_used. */
struct mixture {
    float *scores;       /* [row][score_stride]: the router's */
    size_t score_stride; /* experts, rounded up to whole tiles */
    int32_t *chosen;     /* [row][used]: experts, best first */
    float *weights;      /* [row][used] */
    int32_t *entries;    /* [row][used]: where the row with that expert is */
    int32_t *rows;       /* [entry]: its row */
    int32_t *experts;    /* [list]: those that have rows, ascending */
    int32_t *starts;     /* [list + 1]: the first entry of each */
    size_t listed;
    struct activations gathered; /* [entry]: what gate and up read */
    struct activations fed;      /* [entry]: what down reads */
    float *outputs;              /* [entry][embedding] */
    struct activations shared;   /* what the down of the expert that all rows use reads */
    float *shared_scores;        /* [row][TILE_ROWS], of which the first is its router's */
    float *shared_outputs;       /* [row][embedding] */
};

/* The rows of one sequence outside of trees: `unscored` ones from row `first_unscored` on, then the scored ones. */
struct chain {
    struct es_sequence *sequence;
    size_t start, first_unscored, unscored, first_scored, scored;
};

struct es_batch {
    const struct es_model *model;
    const struct level *level;
    struct pool *pool;
    long process;

    size_t *cache_at;   /* see es_sequence */
    size_t last_keys;   /* the last layer with keys or a state: behind it only scored rows are needed */

    /* Buffers for ES_MOST_TOKENS rows; what a forward does not use is never touched, and takes no memory. */
    uint8_t *buffers;
    size_t buffer_bytes;
    float *hidden;             /* [row][embedding]: the residual stream */
    float *added;              /* [row][embedding]: what is normalised before it is added to that */
    float *rotation;           /* [rope table][row][rope_length / 2][cos, sin] */
    float *projected;          /* [row][query heads, key heads, value heads] */
    struct activations normed; /* what the projections and the head read */
    struct activations mixed;  /* what attention gives */
    struct activations fed;    /* what the feed-forward's second half reads */
    float *inputs;             /* [row][model's inputs]: of all layers; null without */
    float *input_gates;        /* [row][input_length] */
    float *dense;              /* [row][embedding]: what is added to a mixture; null without */
    struct activations pairs;  /* what the pair projection reads */
    struct mixture mixture;
    float *deltas;             /* [row][delta_stride]: what gated delta layers project */
    struct activations scanned; /* what they give */
    float *scan_states;        /* [thread][delta_length][delta_length] */
    float *block_sums;         /* [part][head_length]: attention of a row's head over a block, see mix_blocks */
    struct standing *standing; /* [part] */
    uint16_t *paths;           /* [thread][ATTENTION_ROWS][keys, values][PATH_POSITIONS][head_length] */

    /* The forward in flight. */
    struct rows all;
    struct rows scored; /* those of `all` that are scored, if the last layer leaves the others out */
    bool leaves_rows;
    bool keeps_rows; /* what follows the head's norm in some entry's rows: then the last layer leaves none out */
    struct tree trees[ES_MOST_ENTRIES];
    struct chain chains[ES_MOST_ENTRIES];
    size_t chain_count;
    float *scores_of[ES_MOST_SCORED]; /* where a scored row's scores go */
    float *kept_of[ES_MOST_SCORED];   /* and its `kept` */
    struct head_run head_runs[ES_MOST_ENTRIES * ES_MOST_HEADS];
    size_t head_run_count;
    size_t experts_read; /* of all layers so far */
    bool finished;
};

/* One thread's part of the forward whose rows the batch, `context`, holds. In forward.c. */
void forward_on(void *context, int thread);

#endif
