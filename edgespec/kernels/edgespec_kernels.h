/* The whole interface of the shared library, as called from Python. Plain C types, so that ctypes can describe it.
 *
 * The library never allocates weights or opens files: the caller checks a model file, converts its matrices with
 * es_relay, describes them in an es_model, and keeps file, tiles and model alive as long as a sequence uses them. */
#ifndef EDGESPEC_KERNELS_H
#define EDGESPEC_KERNELS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define ES_EXPORT __declspec(dllexport)
#elif defined(__GNUC__)
#define ES_EXPORT __attribute__((visibility("default")))
#else
#define ES_EXPORT
#endif

/* Raised whenever a struct, a signature or the meaning of either changes; the Python side refuses any other. */
#define ES_ABI 21

enum { ES_MOST_TOKENS = 256, ES_MOST_SCORED = 64, ES_MOST_HEADS = 2, ES_MOST_THREADS = 8192 };
enum { ES_MOST_ENTRIES = 64, ES_MOST_DRAWN = 8 };
enum { ES_MOST_EXPERTS = 1024, ES_MOST_EXPERTS_USED = 64 };
enum { ES_MOST_DELTA_LENGTH = 256, ES_MOST_DELTA_KERNEL = 8 };

enum es_status {
    ES_OK = 0,
    ES_CANCELLED = 1,
    ES_BAD_REQUEST = 2,
    ES_OTHER_PROCESS = 3, /* the process forked after the batch was opened and lacks its threads */
    ES_NOT_FINITE = 4,    /* a score is NaN, or the highest is infinite */
    ES_NONE_ALLOWED = 5,  /* the mask allows none of the scored tokens */
};

/* Weight types, numbered as in GGUF files. */
enum es_type {
    ES_F32 = 0,
    ES_F16 = 1,
    ES_Q4_0 = 2,
    ES_Q4_1 = 3,
    ES_Q5_0 = 6,
    ES_Q5_1 = 7,
    ES_Q8_0 = 8,
    ES_Q3_K = 11,
    ES_Q4_K = 12,
    ES_Q5_K = 13,
    ES_Q6_K = 14,
    ES_IQ3_XXS = 18,
    ES_IQ4_NL = 20,
    ES_IQ3_S = 21,
    ES_IQ4_XS = 23,
    ES_BF16 = 30,
    ES_MXFP4 = 39,
    ES_TYPES = 40, /* one above the highest */
};

/* Instruction sets, in order of speed. All of them compute the same bits. */
enum es_level { ES_PORTABLE, ES_AVX2, ES_AVX_VNNI, ES_AVX512_VNNI, ES_NEON_DOTPROD, ES_LEVELS };

/* Which elements of a head are rotated together. */
enum es_rope { ES_ROPE_NEIGHBOURS = 0 /* 2i, 2i+1 */, ES_ROPE_HALVES = 1 /* i, i + length/2 */ };

/* y = W x (+ bias). `tiles` as es_relay wrote them; `bias` has `rows` floats or is null. */
struct es_matrix {
    const uint8_t *tiles;
    const float *bias;
    int64_t rows;
    int64_t columns;
    int64_t type;
};

/* How the feed-forward joins its gate and its input. */
enum es_activation { ES_SWIGLU = 0, ES_GEGLU = 1, ES_CLIPPED_SWIGLU = 2, ES_ACTIVATIONS = 3 };

/* A gated delta layer's part in place of attention (Yang et al. 2025). `mixed` gives the rows that are convolved: the
 * queries of all key heads, their keys, the values of all heads. Head h uses key head h modulo their number. */
struct es_delta {
    struct es_matrix mixed, gate, decay, beta; /* without tiles in other layers */
    const float *kernel; /* [delta_kernel][rows of `mixed`], the oldest row's first */
    const float *rates;  /* [delta_heads] */
    const float *norm;   /* of each head's output */
};

/* A further expert that every row uses, times 1 / (1 + e^-score). */
struct es_shared {
    struct es_matrix gate, up, down; /* without tiles in a layer that has none */
    struct es_matrix router;         /* one score */
};

struct es_layer {
    const float *attention_norm, *feed_forward_norm;           /* of a half layer's input; or null */
    const float *attention_post_norm, *feed_forward_post_norm; /* of a half layer's output, before it is added; or null */
    const float *query_norm, *key_norm;                        /* of each head, or of a row's heads as one; or null */
    const float *sinks; /* [heads]: a score without a value, which takes its share of the head's softmax; or null */
    struct es_matrix query, key, value, output;
    struct es_matrix gate, up, down; /* of a mixture: those of its experts, one below another; without `up`, each expert's
                                        gate is above its up */
    struct es_matrix router; /* one score for each expert; without tiles in a layer that has one feed-forward */
    int64_t window;     /* positions that a row sees, its own counted; 0: all before it */
    int64_t rope_table; /* which of the model's frequencies; -1: nothing is rotated */
    struct es_delta delta;
    struct es_shared shared;
    int64_t joins_heads; /* query_norm and key_norm are those of a row's heads as one vector */
    int64_t kv_heads, head_length, rope_length; /* the model's are the largest */
    int64_t cache_layer; /* whose keys and values its rows see: its own number, or that of an earlier layer with keys, whose
                            heads and window it has */
    const float *value_norm; /* of each head's values; or null */
    double output_scale;     /* of the hidden states behind the layer */

    /* A layer's inputs are a part of its token's: from element `input_at` on. No tiles: it has none. */
    struct es_matrix input_gate, input_down;
    const float *input_post_norm;
    int64_t input_at;

    /* A feed-forward that is added to the mixture; no tiles: there is none, and the rest is null. */
    struct es_matrix dense_gate, dense_up, dense_down;
    const float *router_norm, *experts_norm;           /* of the router's and the experts' input */
    const float *dense_post_norm, *experts_post_norm;  /* of what is added */
    const float *expert_scales;                        /* [experts]: of their outputs; or null */
};

struct es_model {
    int64_t layers, embedding, heads, kv_heads, head_length, feed_forward, vocabulary;
    int64_t experts, experts_used; /* of a layer that is a mixture, and of one row; feed_forward is an expert's */
    int64_t shared_length;  /* of a further expert that every row uses, in place of feed_forward; 0: there is none */
    int64_t experts_normed; /* whether the weights of a row's experts add up to 1 before they are scaled */
    double expert_scale;    /* of these weights */
    int64_t gates_heads; /* each head's query is followed by a gate of its length, for the head's output */
    int64_t delta_heads, delta_key_heads; /* of the layers that are gated delta layers; 0: there are none */
    int64_t delta_length, delta_kernel;   /* of a head's key and value, and of the convolution in rows */
    int64_t activation;  /* enum es_activation */
    int64_t rope_length; /* leading elements of a head that are rotated; even */
    int64_t rope;        /* enum es_rope */
    double norm_epsilon;
    double embedding_scale; /* of what enters the first layer */
    double residual_scale;  /* of a half layer's output, before it is added */
    double score_scale;     /* of a query's product with a key */
    double logit_scale;     /* of what enters the head */
    double score_cap;       /* c: a query's scaled product x with a key becomes c tanh(x / c); 0: no cap */
    double logit_cap;       /* the same of the scores */
    const float *query_factors; /* [query_factor_count]: of queries at positions i * query_span and on; or null */
    int64_t query_factor_count, query_span;
    int64_t rope_tables;
    const double *rope_magnitudes;  /* [rope_tables], of a table's cosines and sines */
    const double *rope_frequencies; /* [rope_tables][rope_length / 2], radians for each position */
    const double *long_frequencies; /* the same for caches of more than `original_context` positions; or null */
    int64_t original_context;
    const struct es_layer *layer;
    const float *output_norm;
    struct es_matrix head; /* one score for each of its rows */
    const uint8_t *embedding_rows; /* [vocabulary] rows as in the file */
    int64_t embedding_type;

    /* The inputs of a token's layers, `input_length` for each: a row of the file, scaled, and a normed product with its
     * embedding, added up and scaled. */
    int64_t inputs, input_length; /* of all layers; 0: there are none */
    struct es_matrix input_projection;
    const float *input_norm;   /* of one layer's part of that product, which is scaled first */
    const uint8_t *input_rows; /* [vocabulary] */
    int64_t input_type;
    double input_row_scale, input_projection_scale, input_scale;

    /* A model that drafts by another one's hidden rows. A token's row, of `pair_length` elements, and such a hidden row
     * are normed (null: they are not), put next to each other and projected: that enters the first layer. */
    int64_t pair_length; /* 0: the token's row alone enters it */
    struct es_matrix pair_projection;
    const float *pair_token_norm, *pair_hidden_norm;

    /* A model without keys, whose sequences read those of another model's (es_borrow), and that model's rows of tokens. Its
     * rows see the positions before their own. All of them are scored. */
    int64_t borrows;
    struct es_matrix passed_on; /* of what follows the head's norm, to `pair_length` elements: what `kept` gets in its place;
                                   no tiles: that itself */
};

/* The threads of a batch, the caller's among them. */
struct es_threads {
    int64_t count;
    int64_t most_busy; /* processors that the system lets this process keep busy; 0 where it sets no quota */
};

/* What es_draw measures of the distribution. */
enum es_measures { ES_MEASURE_NOTHING = 0, ES_MEASURE_MASS = 1, ES_MEASURE_SPREAD = 2 /* and mass */ };

/* How a token is drawn from a row of scores; edgespec/interfaces/drawing.py explains each field. */
struct es_draw_request {
    const int64_t *ids;                /* ascending, one for each score, below 2^32; null: 0, 1, 2, ... */
    const int64_t *seen, *occurrences; /* [seen_count]: scores to penalise, and how often the answer has their tokens */
    int64_t seen_count;
    double repeat_penalty, presence_penalty, frequency_penalty;
    const uint32_t *mask; /* [mask_words]: a bit for each token, set if it is allowed; null: all are */
    int64_t mask_words;
    int64_t top_k; /* 0: all */
    double top_p, min_p;
    uint32_t key[4]; /* of the noise */
    float scale;     /* of differences of scores; then they are logarithms to base 2 */
    int32_t noisy;   /* whether noise decides, or the scores alone, without truncation */
    int32_t wanted;  /* 1 .. ES_MOST_DRAWN */
    int32_t measures; /* enum es_measures */
};

/* ids[0] is the token, ids[1] the next choice without it, and so on. `values`: with noise their times of arrival, else
 * their weights, of which the highest is 1. `mass` is the sum of the weights that truncation kept, in units of 2^-32,
 * `spread` that of their products with their log2. */
struct es_drawn {
    int64_t count;
    int64_t ids[ES_MOST_DRAWN];
    double values[ES_MOST_DRAWN];
    int64_t mass, spread;
};

struct es_batch;
struct es_sequence;

ES_EXPORT int32_t es_abi(void);
ES_EXPORT const char *es_level_name(int32_t level); /* null if this build or processor lacks it */
ES_EXPORT bool es_level_runs(int32_t level); /* whether this processor could run it, built or not */

/* What memory is for: nothing in particular, weights, or a region of which most is never in use at a time. */
enum es_pages { ES_PAGES_SMALL = 0, ES_PAGES_HUGE = 1, ES_PAGES_SPARSE = 2 };

/* Zeroed private pages, of which only ES_PAGES_HUGE asks for large ones; null without memory. The system is not asked
 * whether it has as much as ES_PAGES_SPARSE. */
ES_EXPORT void *es_memory_take(int64_t bytes, int32_t pages);
ES_EXPORT void es_memory_give(void *memory, int64_t bytes);
/* Gives back the whole pages of a region up to byte `end`, from the page on that holds byte `first`. They stay usable, and
 * hold zeros or what they held. */
ES_EXPORT void es_memory_forget(void *memory, int64_t first, int64_t end);
/* Differs if one word differs, and nearly always if more do; detects damage to files, not forgery. */
ES_EXPORT uint64_t es_checksum(const uint8_t *bytes, int64_t length);

/* Bytes of a matrix in tiles; 0 for a type or a shape without a layout. */
ES_EXPORT int64_t es_relaid_bytes(int64_t type, int64_t rows, int64_t columns);
/* Converts rows as in the file to tiles, whose bytes must be zero: the padding of the last tile stays zero. Returns the
 * first row with a scale that is not finite, or -1. */
ES_EXPORT int64_t es_relay(int64_t type, const uint8_t *source, int64_t rows, int64_t columns, uint8_t *tiles);
/* Converts rows as in the file, of any type, to rows of Q4_0 in file format. Returns the first row with a value that Q4_0
 * cannot hold, not finite or too large, or -1; 0 for an unsupported type, shape or level. */
ES_EXPORT int64_t es_coarsen(int64_t type, const uint8_t *source, int64_t rows, int64_t columns, uint8_t *to,
                             int32_t level);

/* Threads and buffers for the sequences of a model, which share their forwards; null without memory or threads, or for
 * more than ES_MOST_THREADS. It outlives its sequences. It computes one forward at a time: the caller prevents others. */
ES_EXPORT struct es_batch *es_batch_open(const struct es_model *model, const struct es_threads *threads,
                                         int32_t level);
ES_EXPORT void es_batch_close(struct es_batch *batch);

/* A cache for `context_length` tokens; null without memory.
 *
 * While the int32 that `cancelled` points at is not 0, this sequence's forward in flight and later ones return
 * ES_CANCELLED, unless they are shared with other sequences. Any thread may write it. It outlives the sequence. */
ES_EXPORT struct es_sequence *es_open(struct es_batch *batch, int64_t context_length, const int32_t *cancelled);
ES_EXPORT void es_close(struct es_sequence *sequence);
/* Makes a sequence of a model that borrows read the cache of `lender`, in layer i that of its layer layers[i], with as many
 * heads, of the same length, and the same window. Until then, and for the rows of tokens, it reads zeros. The lender is open
 * and not computed in each later forward. Returns an es_status. */
ES_EXPORT int32_t es_borrow(struct es_sequence *sequence, const struct es_sequence *lender, const int64_t *layers);

/* What one sequence has computed in a forward: as es_forward or, with `parents`, as es_forward_tree, for which `scored`
 * equals `count`. */
struct es_entry {
    struct es_sequence *sequence;
    const int32_t *tokens;
    const int32_t *parents; /* null: a chain */
    const float *pairs; /* [count][pair_length]: the tokens' hidden rows, for a model that needs them */
    float *kept; /* null, or written: what follows the head's norm, [rows][embedding], with `passed_on` [rows][pair_length]:
                    of every row with `keeps_all`, else of those that are scored */
    int64_t start;
    int32_t count, scored;
    int32_t first;  /* of a tree's new nodes; else 0 */
    int32_t keeps_all;
    int32_t status; /* written: an es_status */
};

/* One forward for up to ES_MOST_ENTRIES entries of different sequences of the batch, at most ES_MOST_TOKENS tokens and
 * ES_MOST_SCORED scored rows in all. Each row's bits are those that it has in a forward alone.
 *
 * An entry with a fault gets its status and is left out; the others are computed. Only a single entry can be cancelled
 * while it is computed. Returns an es_status that is not ES_OK if no entry was looked at. */
ES_EXPORT int32_t es_batch_forward(struct es_batch *batch, struct es_entry *entries, int32_t count);
/* Experts whose weights the last forward read, those of all layers together; 0 for a model without any. */
ES_EXPORT int64_t es_experts_read(const struct es_batch *batch);

/* Feeds `count` tokens from position `start` on and scores the last `scored` of them.
 *
 * Positions from `start` on are overwritten; earlier ones never change. Returns an es_status. */
ES_EXPORT int32_t es_forward(struct es_sequence *sequence, const int32_t *tokens, int32_t count, int64_t start,
                             int32_t scored);
/* Adds `count` tokens to a tree that grows from position `start` on, and scores all of them.
 *
 * They become nodes first .. first + count - 1, at most ES_MOST_SCORED in all. parents[i], of all nodes so far, is the
 * node that node i follows, an earlier one, or -1. A node's row is bit-equal to that of its path in es_forward. The
 * cache and earlier nodes do not change, and es_forward does not change the tree. Returns an es_status. */
ES_EXPORT int32_t es_forward_tree(struct es_sequence *sequence, const int32_t *tokens, int32_t count, int64_t start,
                                  const int32_t *parents, int32_t first);
/* Copies these nodes' keys and values into the cache, from position `start` on. */
ES_EXPORT int32_t es_keep(struct es_sequence *sequence, const int32_t *nodes, int32_t count, int64_t start);
/* Copies the first `length` positions from another cache of the same model with the same frequencies; in layers with a
 * window those from `first` on. */
ES_EXPORT int32_t es_copy(struct es_sequence *to, const struct es_sequence *from, int64_t first, int64_t length);
/* Gives back the memory of positions first .. end - 1 in the layers with a window, and of those before them that share a
 * page with the first: no later row may see any of these before they are written again. A page that holds later positions
 * or another head's, too, stays. Returns an es_status. */
ES_EXPORT int32_t es_forget(struct es_sequence *sequence, int64_t first, int64_t end);

/* The state of the gated delta layers after a number of tokens. A sequence has those after its last tokens, 24 and more,
 * from es_state_floor on: a forward starts there, or at a position after that. A forward of more than ES_MOST_SCORED
 * tokens drops those before the ones that it scores. Trees are refused. */
ES_EXPORT int64_t es_state_bytes(const struct es_sequence *sequence); /* 0 for a model without such layers */
ES_EXPORT int64_t es_state_floor(const struct es_sequence *sequence);
/* The state after `length` tokens. It takes no part of a forward in flight of the same sequence. */
ES_EXPORT int32_t es_read_state(const struct es_sequence *sequence, int64_t length, uint8_t *to, int64_t bytes);
/* Continues from that state, or without a state from 0 tokens. ES_NOT_FINITE as es_write_part. */
ES_EXPORT int32_t es_write_state(struct es_sequence *sequence, int64_t length, const uint8_t *from, int64_t bytes);

/* Positions first .. length - 1 of a cache in parts, for a file: the keys of the heads of each layer that does not share
 * those of an earlier one, then the values. Those of a gated delta layer have numbers, and are refused. `first` is a
 * multiple of 16. A part has es_part_bytes bytes, 0 for positions that the cache cannot hold; its layout is the cache's own,
 * with zeros after the last position. */
ES_EXPORT int64_t es_part_bytes(const struct es_sequence *sequence, int64_t part, int64_t first, int64_t length);
ES_EXPORT int32_t es_read_part(const struct es_sequence *sequence, int64_t part, int64_t first, int64_t length,
                               uint8_t *to, int64_t bytes);
/* Returns ES_NOT_FINITE, and changes nothing, for a part with a number that is not finite. */
ES_EXPORT int32_t es_write_part(struct es_sequence *sequence, int64_t part, int64_t first, int64_t length,
                                const uint8_t *from, int64_t bytes);

/* From the next forward on, scores with `count` matrices next to each other: rows of the model's head, at most as many as
 * it has. The caller keeps them alive. Initially the model's own head is used. The last forward's scores become invalid.
 * ES_BAD_REQUEST for any other matrix. */
ES_EXPORT int32_t es_use_heads(struct es_sequence *sequence, const struct es_matrix *heads, int32_t count);
/* From the next forward on, keeps the output of each of these different layers: the sum that enters the next layer, or
 * the head's norm; for layer -1 what follows that norm. ES_BAD_REQUEST for an unknown layer, without memory, or in a second call. */
ES_EXPORT int32_t es_keep_hidden(struct es_sequence *sequence, const int64_t *layers, int64_t count);
/* The last forward's scored rows after a layer, [scored][embedding]. Null for a layer that is not kept. */
ES_EXPORT const float *es_hidden(const struct es_sequence *sequence, int64_t layer);

/* The scores of the last forward's rows, [scored][rows of the heads in use]. */
ES_EXPORT const float *es_scores(const struct es_sequence *sequence);
/* The id with the highest score, the lowest of several; -1 - id if that score is NaN or infinite. */
ES_EXPORT int64_t es_argmax(const struct es_sequence *sequence, int32_t row);
/* es_argmax for any row of scores, by one level, for other runtimes. -1 for an empty row or a missing level. */
ES_EXPORT int64_t es_best(const float *scores, int64_t count, int32_t level);
/* The k best of a row, best first, ties by lowest id; k <= head rows. A NaN is below everything. */
ES_EXPORT int32_t es_top_k(const struct es_sequence *sequence, int32_t row, int64_t k, int64_t *ids, float *scores);

/* Bytes of scratch memory that es_draw needs for `count` scores; 0 for an unsupported number of scores. */
ES_EXPORT int64_t es_draw_scratch(int64_t count);
/* Draws from a row of `count` scores, which are restored before it returns. Returns an es_status; with ES_NOT_FINITE
 * ids[0] and values[0] are the place and the score. Every level gives the same bits. */
ES_EXPORT int32_t es_draw(float *scores, int64_t count, const struct es_draw_request *request, void *scratch,
                          struct es_drawn *drawn, int32_t level);

/* For llama.cpp, which calls it between the nodes of its graph: whether the int32 at `flag` is not 0. Any thread may
 * write it. */
ES_EXPORT bool es_abort(void *flag);

/* For tests and benchmarks: y[rows][matrix rows] = W x for x[rows][columns], on one thread, in one level. */
ES_EXPORT int32_t es_multiply(const struct es_matrix *matrix, const float *x, int64_t rows, float *y, int32_t level);
/* For tests: one row of RMSNorm, exp, a joined gate or a dequantised row, by one level. Lengths are multiples of 32. */
ES_EXPORT int32_t es_normalise(const float *x, const float *weight, double epsilon, int64_t length, float *y,
                               int32_t level);
ES_EXPORT int32_t es_exponential(const float *x, int64_t length, float *y, int32_t level);
ES_EXPORT int32_t es_join(int64_t activation, const float *gate, const float *up, int64_t length, float *y,
                          int32_t level);
ES_EXPORT int32_t es_cap(float *x, int64_t length, float most, int32_t level); /* of any length, in place */
ES_EXPORT int32_t es_dequantise(int64_t type, const uint8_t *row, int64_t columns, float *y);
/* For tests: the cosine and the sine of each angle, [count][2]. */
ES_EXPORT void es_turns(const double *angles, int64_t count, float *y);
/* For tests: quantised activations, a struct activation_block for each 32 of x. */
ES_EXPORT int32_t es_quantise(const float *x, int64_t length, uint8_t *blocks, int32_t level);
/* For tests: attention of `queries` heads, each [head_length]; query i sees positions seen[i][0] .. seen[i][1] - 1 of
 * one cache, as if those from own_from on, a multiple of 16, were its own. A `cap` of 0 is none, `sinks`, one a query,
 * may be null. */
ES_EXPORT int32_t es_attend(const float *keys, const float *values, int64_t positions, int64_t head_length,
                            const float *queries, const int64_t *seen, int64_t count, int64_t own_from, float cap,
                            const float *sinks, float *out, int32_t level);

#endif
