/* One instruction set's build of the arithmetic. A level is a table of functions; level_*.c define one each. */
#ifndef EDGESPEC_LEVEL_H
#define EDGESPEC_LEVEL_H

#include "activation.h"
#include "edgespec_kernels.h"
#include "layout.h"

/* Rows that one pass over a tile's codes serves: 8 sums, 8 code vectors, a scale and the values in flight fill the 32
 * vector registers of AVX-512. More rows take more passes, over a tile that is then cached. */
enum { PASS_ROWS = 8 };

/* Positions whose attention is reduced separately before it is merged with that of earlier blocks. The grid is one of
 * absolute positions, so a row's sums never depend on the width, the thread count or the length of the cache. */
enum { ATTENTION_BLOCK = 256, MOST_QUERIES = 64 };

/* Sixteen outputs of each of `rows` (1 to PASS_ROWS) inputs: out[r][i] = sum over k of W[i][k] x[first + r][k].
 *
 * This defines the result, for every level: sums start at 0; blocks of 32 columns follow one another;
 *     sum = fma((float)dot, round(d * scale), sum)            dot: exact integers, offset folded in
 *     sum = fma(m, scaled_sum, sum)                           types with a minimum
 * For Q4_K and Q5_K, d is the super-block's d times the block's 6-bit scale and m is -(dmin times the 6-bit minimum):
 * 11 bits times 6, exact in a float. The scales of IQ4_XS and IQ3 are products of the same size. Q3_K and Q6_K have a
 * scale for each 16 columns, d_low and d_high, exact as well:
 *     part = round((float)dot_low * d_low)                    the first 16 columns
 *     part = fma((float)dot_high, d_high, part)
 *     sum = fma(part, scale, sum)
 * and for float weights sum = fma(w, x, sum), column by column. Nothing is split along k. */
typedef void multiply_function(const uint8_t *tile, const struct activations *x, size_t first, size_t rows,
                               float out[][TILE_ROWS]);

/* The same outputs of two tiles of one type, of `rows` inputs, any number: out[r][t][i] is tile t's out[r][i]. */
typedef void multiply_pair_function(const uint8_t *const tiles[2], const struct activations *x, size_t first,
                                    size_t rows, float (*out)[2][TILE_ROWS]);

/* Keys and values of one key-value head, as halves.
 *
 * Keys lie in tiles of 16 positions, [position / 16][head_length][16], so that lane i of a score is position i and no
 * score needs a sum across lanes; values in rows, [position][head_length]. Half precision, since reading the cache is
 * what attention costs at length, and its rounding, 2^-11, is below that of 8-bit activations. */
struct attention_cache {
    const uint16_t *keys;
    const uint16_t *values;
    size_t head_length;
    size_t own_from; /* from this position on, a multiple of 16, each query has separate keys and values */
};

/* A query's state after some blocks: its sums are relative to e^largest, and `total` is the sum of its weights. */
struct standing {
    float largest, total;
};

/* A query sees positions first .. end - 1, at least one. Its separate keys and values, laid out like the cache's, begin at
 * position own_from; null if no query sees that far. With a `standing` its sums stay undivided: it then sees one block,
 * for merge_blocks, which has the sink. */
struct attention_query {
    const float *from;
    float *out;
    size_t first, end;
    const uint16_t *own_keys, *own_values;
    const float *sink; /* a score of no position, whose value is 0; or null */
    struct standing *standing;
};

/* y of a feed-forward's gate and its input. */
typedef void join_function(const float *gate, const float *up, size_t length, float *y);

/* Up to 16 rows of one head of a gated delta layer. `decays` and `betas` are as projected; with `queries` their products
 * with the state after each row go to `out`. All but these two: [count][length]. */
enum { DELTA_ROWS = 16 };
struct delta_rows {
    size_t count;
    const float *keys, *values, *queries;
    float *out;
    float decays[DELTA_ROWS], betas[DELTA_ROWS];
};

/* Scores whose maximum is computed before the single scores are compared. */
enum { DRAW_BLOCK = 256 };

/* Up to this many allowed scores of a row are gathered. Otherwise the row is copied without the others. */
static inline size_t draw_few(size_t count)
{
    return count / 8 + 1;
}

struct level {
    const char *name;
    multiply_function *multiply[ES_TYPES]; /* by type; null for an unused number */
    multiply_pair_function *multiply_pair[ES_TYPES]; /* null where it would be no faster */
    /* RMSNorm (Zhang and Sennrich 2019): y = x / sqrt(mean(x^2) + epsilon) * weight, NaN if the mean is infinite. length: a
     * multiple of 16. */
    void (*normalise)(const float *x, const float *weight, float epsilon, size_t length, float *y);
    /* Symmetric int8 and a scale for each 32, the best of four (best_top in row_quantise.h), block b to to[b * apart].
     * A block with a value that is not finite gets the scale NaN. */
    void (*quantise)(const float *x, size_t blocks, struct activation_block *to, size_t apart);
    /* By enum es_activation: SwiGLU (Shazeer 2020), y = gate / (1 + e^-gate) * up; GeGLU (the same), with the tanh
     * approximation of GELU (Hendrycks and Gimpel 2016); gpt-oss's SwiGLU of clipped values. length: a multiple of 16. */
    join_function *join[ES_ACTIVATIONS];
    void (*exponential)(const float *x, size_t length, float *y);
    /* The nearest halves, ties to even, x[i] to to[i * apart]. length: as above. */
    void (*to_halves)(const float *x, size_t length, uint16_t *to, size_t apart);
    /* x = most tanh(x / most); NaN for what is not finite. */
    void (*cap)(float *x, size_t length, float most);
    /* x = x / (1 + e^-gate). length: a multiple of 16. */
    void (*gate)(const float *gate, size_t length, float *x);
    /* y = SiLU of the sum of `count` rows times those of `kernel`, which has `channels` columns. length: as above. */
    void (*convolve)(const float *const *taps, size_t count, const float *kernel, size_t channels, size_t length,
                     float *y);
    /* The gated delta rule, row by row: with decay = e^(rate log(1 + e^d)) and beta = 1 / (1 + e^-b),
     *     state = decay state + key (beta (value - key decay state))       state[length of a key][length of a value] */
    void (*scan)(float *state, size_t length, float rate, const struct delta_rows *rows);
    /* Softmax attention of up to MOST_QUERIES queries over one key-value head. A `cap` of 0 is none. */
    void (*attend)(const struct attention_cache *cache, float scale, float cap, size_t count,
                   const struct attention_query *queries);
    /* Merges blocks to attend's bits for a query over all of them: sums[block][length] and their states. */
    void (*merge_blocks)(const float *sums, const struct standing *standing, size_t blocks, size_t length,
                         const float *sink, float *out);
    /* Blocks of 32 weights as Q4_0 (row_coarsen.h). Returns false if Q4_0 cannot hold a block, which becomes zeros. */
    int (*coarsen)(const float *x, size_t blocks, uint8_t *to);
    /* See es_argmax. */
    int64_t (*argmax)(const float *scores, size_t count);
    /* See es_draw. */
    int32_t (*draw)(const float *scores, size_t count, const struct es_draw_request *request, void *scratch,
                    struct es_drawn *drawn);
};

/* A level's complete table of products: each level's file has functions of these names. */
#define MULTIPLY_EVERY_TYPE              \
    {                                    \
        [ES_F32] = multiply_f32,         \
        [ES_F16] = multiply_f16,         \
        [ES_BF16] = multiply_bf16,       \
        [ES_Q4_0] = multiply_q4_0,       \
        [ES_Q4_1] = multiply_q4_1,       \
        [ES_Q5_0] = multiply_q5_0,       \
        [ES_Q5_1] = multiply_q5_1,       \
        [ES_Q8_0] = multiply_q8_0,       \
        [ES_Q3_K] = multiply_q3_k,       \
        [ES_Q4_K] = multiply_q4_k,       \
        [ES_Q5_K] = multiply_q5_k,       \
        [ES_Q6_K] = multiply_q6_k,       \
        [ES_IQ3_XXS] = multiply_iq3_xxs, \
        [ES_IQ3_S] = multiply_iq3_s,     \
        [ES_IQ4_NL] = multiply_iq4_nl,   \
        [ES_IQ4_XS] = multiply_iq4_xs,   \
        [ES_MXFP4] = multiply_mxfp4,     \
    }

/* A level's complete table of the functions in row_*.h, with its quantiser. */
#define EVERY_ROW_FUNCTION(quantises)                                                                            \
    .normalise = normalise, .quantise = quantises, .join = {swiglu, geglu, clipped_swiglu},                      \
    .exponential = exponential, .cap = cap_values, .gate = gate_values, .convolve = convolve, .scan = scan_rows, \
    .to_halves = to_halves, .attend = attend, .merge_blocks = merge_blocks, .coarsen = coarsen, .argmax = argmax, \
    .draw = draw

/* EDGESPEC_HAS_... tells which levels were built. */
extern const struct level level_portable, level_avx2, level_avx_vnni, level_avx512_vnni, level_neon_dotprod;

/* The level's table, or null if this build or this processor lacks the level. In cpu.c. */
const struct level *level_of(int64_t number);

static inline multiply_function *multiply_of(const struct level *level, int64_t type)
{
    return type >= 0 && type < ES_TYPES ? level->multiply[type] : 0;
}

#endif
