/* From a row of scores to a token: truncation, and a draw by keyed noise among the remaining tokens; included by each
 * level's file. Plain C in simple loops, which every level's compiler turns into its own vectors.
 *
 * The rule is in tests/interfaces/draw_specification.py, and edgespec/interfaces/drawing.py computes it with numpy: all
 * three give the same bits. A weight is a float, computed by elementwise operations, none fused. Sums are of weights
 * rounded to multiples of 2^-32, which are integers: no order, width or number of lanes changes them. */
#ifndef EDGESPEC_ROW_DRAW_H
#define EDGESPEC_ROW_DRAW_H

#include <math.h>

#include "half.h"
#include "lanes.h"
#include "level.h"

/* Exponents of two below which a weight counts as 0, and below which it adds nothing to a sum. */
#define LEAST_EXPONENT -40.0f
#define LEAST_SUMMED -34.0f

/* The state of a draw. `list`: remaining tokens, by ascending id. */
struct drawing {
    const float *scores;
    size_t count;
    const struct es_draw_request *request;
    float best;
    size_t best_at;
    float *maxima; /* of each DRAW_BLOCK scores */
    float *list_scores, *list_weights;
    uint32_t *list_ids;
    size_t list_count;
};

static inline size_t draw_blocks(size_t count)
{
    return (count + DRAW_BLOCK - 1) / DRAW_BLOCK;
}

/* log2 of a weight, at most 0, and at least -60, which replaces -infinity. The limit is applied to the bits: compilers
 * vectorise comparisons of integers, but not every comparison of floats. */
static inline float exponent_of(float score, float best, float scale)
{
    uint32_t size = bits_of_float((score - best) * scale) & 0x7fffffffu;
    size = size < 0x42700000u ? size : 0x42700000u;
    return float_of_bits(size | 0x80000000u);
}

/* 2^(y + more) for y in -60 .. 0, within 2 units in the last place; 1 exactly for 0. The polynomial is that of the
 * Cephes library's exp2f (Moshier 1989). The sum with 1.5 * 2^23 rounds y to an integer, its last bits. */
static inline float power_of_two(float y, uint32_t more)
{
    float shifted = y + LANES_ROUNDER, f = y - (shifted - LANES_ROUNDER);
    float p = 1.535336188319500e-4f;
    p = p * f + 1.339887440266574e-3f;
    p = p * f + 9.618437357674640e-3f;
    p = p * f + 5.550332471162809e-2f;
    p = p * f + 2.402264791363012e-1f;
    p = p * f + 6.931472028550421e-1f;
    p = p * f + 1.0f;
    return float_of_bits(bits_of_float(p) + (bits_of_float(shifted) << 23) + (more << 23));
}

/* The nearest integer, ties to even, of a double below 2^51. */
#define DOUBLE_ROUNDER 0x1.8p52
static inline double nearest(double value)
{
    return (value + DOUBLE_ROUNDER) - DOUBLE_ROUNDER;
}

enum { SUM_BLOCK = 64, SUM_LANES = 8 };

/* Adds the weights of some scores, in units of 2^-32, and if `spread` is not null each times its exponent as well. All
 * sums are of integers below 2^53, so exact. */
static void add_weights(const float *scores, size_t count, float best, float scale, int64_t *mass, int64_t *spread)
{
    double sums[SUM_LANES] = {0}, products[SUM_LANES] = {0};
    for (size_t from = 0; from < count; from += SUM_BLOCK) {
        float padded[SUM_BLOCK], y[SUM_BLOCK], weights[SUM_BLOCK];
        const float *here = scores + from;
        if (count - from < SUM_BLOCK) {
            for (size_t i = 0; i < SUM_BLOCK; i++)
                padded[i] = i < count - from ? here[i] : -INFINITY;
            here = padded;
        }
        for (int i = 0; i < SUM_BLOCK; i++) {
            y[i] = exponent_of(here[i], best, scale);
            weights[i] = power_of_two(y[i], 32);
        }
        for (int i = 0; i < SUM_BLOCK; i += SUM_LANES)
            for (int lane = 0; lane < SUM_LANES; lane++)
                sums[lane] += nearest((double)weights[i + lane]);
        for (int i = 0; spread && i < SUM_BLOCK; i += SUM_LANES)
            for (int lane = 0; lane < SUM_LANES; lane++)
                products[lane] += nearest(nearest((double)weights[i + lane]) * (double)y[i + lane]);
    }
    for (int lane = 0; lane < SUM_LANES; lane++) {
        *mass += (int64_t)sums[lane];
        if (spread)
            *spread += (int64_t)products[lane];
    }
}

/* The maximum of each block and of all, at best_at. Returns whether it is finite and no score is NaN. */
static int scan(struct drawing *drawing)
{
    const float *scores = drawing->scores;
    float best = -INFINITY;
    for (size_t from = 0, block = 0; from < drawing->count; from += DRAW_BLOCK, block++) {
        size_t end = drawing->count - from < DRAW_BLOCK ? drawing->count : from + DRAW_BLOCK, k = from;
        lanes sixteen = lanes_set(-INFINITY);
        int nan = 0;
        for (; k + LANES <= end; k += LANES) {
            lanes value = lanes_load(scores + k);
            nan |= lanes_any_nan(value);
            sixteen = lanes_max(value, sixteen); /* the second operand if one is NaN */
        }
        float largest = lanes_largest(sixteen);
        for (; k < end; k++) {
            nan |= scores[k] != scores[k];
            largest = scores[k] > largest ? scores[k] : largest;
        }
        for (k = from; nan && k < end; k++)
            if (scores[k] != scores[k]) {
                drawing->best_at = k;
                return 0;
            }
        drawing->maxima[block] = largest;
        best = largest > best ? largest : best;
    }
    size_t block = 0;
    while (drawing->maxima[block] != best)
        block++;
    size_t at = block * DRAW_BLOCK;
    while (scores[at] != best)
        at++;
    drawing->best = best;
    drawing->best_at = at;
    return best >= -FLT_MAX && best <= FLT_MAX;
}

static inline int64_t id_of(const struct drawing *drawing, size_t at)
{
    return drawing->request->ids ? drawing->request->ids[at] : (int64_t)at;
}

/* Makes the list of the scores from `least` on whose exponents are not below `lowest`. */
static void collect(struct drawing *drawing, float least, float lowest)
{
    float best = drawing->best, scale = drawing->request->scale;
    const int64_t *ids = drawing->request->ids;
    size_t found = 0;
    for (size_t block = 0; block < draw_blocks(drawing->count); block++) {
        if (drawing->maxima[block] < least || (drawing->maxima[block] - best) * scale < lowest)
            continue;
        size_t from = block * DRAW_BLOCK;
        size_t end = drawing->count - from < DRAW_BLOCK ? drawing->count : from + DRAW_BLOCK;
        for (size_t i = from; i < end; i++) {
            float score = drawing->scores[i];
            drawing->list_scores[found] = score; /* the next score overwrites it if it is dropped */
            drawing->list_ids[found] = (uint32_t)(ids ? ids[i] : (int64_t)i);
            found += (size_t)((score >= least) & ((score - best) * scale >= lowest));
        }
    }
    drawing->list_count = found;
}

static void weigh_list(struct drawing *drawing)
{
    float best = drawing->best, scale = drawing->request->scale;
    for (size_t i = 0; i < drawing->list_count; i++)
        drawing->list_weights[i] = power_of_two(exponent_of(drawing->list_scores[i], best, scale), 0);
}

/* Integers in the order of the floats; both zeros are one. */
static inline uint32_t key_of(float score)
{
    uint32_t bits = bits_of_float(score + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

/* A weight in units of 2^-32; without weights, one of a number. */
static inline double worth_of(const float *weights, size_t i)
{
    return weights ? nearest((double)weights[i] * 0x1p32) : 1.0;
}

/* The end of a list that is sorted by falling score, then by place: the first place at which the sum of the weights, or
 * without weights the number, is at least `wanted`. Returns the last score's key, and how many of that key are kept.
 *
 * A search by the key's four bytes from the highest on, with a fixed number of steps. */
struct end_of_list {
    uint32_t key;
    size_t ties;
};
static struct end_of_list end_of(const float *scores, const float *weights, size_t count, double wanted)
{
    double sum = 0.0;
    uint32_t prefix = 0, known = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        double bins[256] = {0};
        for (size_t i = 0; i < count; i++) {
            uint32_t key = key_of(scores[i]);
            if ((key & known) == prefix)
                bins[key >> shift & 255] += worth_of(weights, i);
        }
        uint32_t byte = 255;
        while (byte && sum + bins[byte] < wanted)
            sum += bins[byte--];
        prefix |= byte << shift;
        known |= 255u << shift;
    }
    struct end_of_list end = {.key = prefix};
    for (size_t i = 0; i < count && sum < wanted; i++)
        if (key_of(scores[i]) == prefix) {
            sum += worth_of(weights, i);
            end.ties++;
        }
    return end;
}

/* Cuts the list; see end_of. */
static void cut(struct drawing *drawing, int weighted, double wanted)
{
    float *scores = drawing->list_scores, *weights = drawing->list_weights;
    struct end_of_list end = end_of(scores, weighted ? weights : NULL, drawing->list_count, wanted);
    size_t kept = 0;
    for (size_t i = 0; i < drawing->list_count; i++) {
        uint32_t key = key_of(scores[i]);
        int tie = (key == end.key) & (end.ties > 0);
        end.ties -= (size_t)tie;
        scores[kept] = scores[i];
        weights[kept] = weights[i];
        drawing->list_ids[kept] = drawing->list_ids[i];
        kept += (size_t)((key > end.key) | tie);
    }
    drawing->list_count = kept;
}

/* Makes a list of scores whose exponents are not below `lowest`: the `most` best of them, and few others.
 *
 * Each of the `most` blocks with the highest maxima has a score from the least of those maxima on, so none below that
 * can be among the best. */
static void collect_best(struct drawing *drawing, size_t most, float lowest)
{
    size_t blocks = draw_blocks(drawing->count);
    float least = -FLT_MAX;
    if (most <= blocks) {
        uint32_t key = end_of(drawing->maxima, NULL, blocks, (double)most).key;
        float border = float_of_bits(key & 0x80000000u ? key & 0x7fffffffu : ~key);
        least = border > least ? border : least;
    }
    collect(drawing, least, lowest);
}

/* The weights of all scores. */
static void add_all_weights(const struct drawing *drawing, int64_t *mass, int64_t *spread)
{
    float best = drawing->best, scale = drawing->request->scale;
    for (size_t block = 0; block < draw_blocks(drawing->count); block++) {
        if ((drawing->maxima[block] - best) * scale < LEAST_SUMMED)
            continue;
        size_t from = block * DRAW_BLOCK, left = drawing->count - from;
        add_weights(drawing->scores + from, left < DRAW_BLOCK ? left : DRAW_BLOCK, best, scale, mass, spread);
    }
}

/* Makes the list of the smallest set of the best that holds `top_p` of all weights. */
static void collect_nucleus(struct drawing *drawing)
{
    int64_t total = 0;
    add_all_weights(drawing, &total, NULL);
    double wanted = drawing->request->top_p * (double)total;
    /* Scores below `enough` have less mass together than may be left out; rounding may need a third try. Most nuclei lie
     * within 2^-8 of the best. */
    float enough = (float)log2(((double)total - wanted) * 0x1p-32 / (double)drawing->count) - 0x1p-10f;
    const float lowest[] = {enough > -8.0f ? enough : -8.0f, enough > LEAST_EXPONENT ? enough : LEAST_EXPONENT,
                            LEAST_EXPONENT};
    for (int i = 0; i < 3; i++) {
        collect(drawing, -FLT_MAX, lowest[i]);
        int64_t mass = 0;
        add_weights(drawing->list_scores, drawing->list_count, drawing->best, drawing->request->scale, &mass, NULL);
        if ((double)mass >= wanted)
            break;
    }
    weigh_list(drawing);
    cut(drawing, 1, wanted);
}

/* Drops what is less likely than min_p times the likeliest, whose weight is 1. */
static void drop_unlikely(struct drawing *drawing)
{
    size_t kept = 0;
    for (size_t i = 0; i < drawing->list_count; i++)
        if ((double)drawing->list_weights[i] >= drawing->request->min_p) {
            drawing->list_scores[kept] = drawing->list_scores[i];
            drawing->list_weights[kept] = drawing->list_weights[i];
            drawing->list_ids[kept++] = drawing->list_ids[i];
        }
    drawing->list_count = kept;
}

/* ---------------------------------------------------------------------------------------------------- noise */

/* A bijection of ids for each key: the three rounds of Wellons's triple32, with the key added before two of them. */
static inline uint32_t noise_bits(uint32_t id, uint32_t first, uint32_t second)
{
    uint32_t x = id + first;
    x = (x ^ x >> 17) * 0xed5ad4bbu + second;
    x = (x ^ x >> 11) * 0xac4c1b51u;
    x = (x ^ x >> 15) * 0x31848babu;
    return x ^ x >> 14;
}

/* -log(1 - v) for v in (0, 1), within a relative 2^-40: with 1 - v = z * 2^e it is
 * 2 artanh((1 - z) / (1 + z)) - e log 2, by the series of artanh. Near 0, where 1 - v loses bits of v, z is not formed. */
static inline double exponential_of(double v)
{
    double f, twos = 0.0;
    if (v < 0.25)
        f = v / (2.0 - v);
    else {
        int exponent;
        double z = frexp(1.0 - v, &exponent);
        if (z < 0x1.6a09e667f3bcdp-1) { /* the root of a half */
            z = z * 2.0;
            exponent -= 1;
        }
        f = (1.0 - z) / (1.0 + z);
        twos = (double)-exponent * 0x1.62e42fefa39efp-1;
    }
    double g = f * f;
    double p = 2.0 / 15.0;
    p = p * g + 2.0 / 13.0;
    p = p * g + 2.0 / 11.0;
    p = p * g + 2.0 / 9.0;
    p = p * g + 2.0 / 7.0;
    p = p * g + 2.0 / 5.0;
    p = p * g + 2.0 / 3.0;
    p = p * g + 2.0;
    return twos + p * f;
}

/* The first tokens to arrive, earliest first, ties by lowest id. A token arrives after an exponentially distributed time
 * at the rate of its weight: so weights are the odds of arriving first, and -log of the time is log weight plus Gumbel
 * noise. */
struct race {
    const struct es_draw_request *request;
    struct es_drawn *drawn;
    float reach; /* log2 of the time that a token has to arrive in, rounded up */
};

/* Keeps the `wanted` least values inserted, ascending; equal values in order of insertion. */
static void insert(struct es_drawn *drawn, int64_t wanted, int64_t id, double value)
{
    int64_t place = drawn->count;
    while (place && value < drawn->values[place - 1])
        place--;
    if (place == wanted)
        return;
    drawn->count += drawn->count < wanted;
    for (int64_t i = drawn->count - 1; i > place; i--) {
        drawn->values[i] = drawn->values[i - 1];
        drawn->ids[i] = drawn->ids[i - 1];
    }
    drawn->values[place] = value;
    drawn->ids[place] = id;
}

static void enter(struct race *race, uint32_t id, float weight)
{
    const uint32_t *key = race->request->key;
    double high = (double)noise_bits(id, key[0], key[1]), low = (double)(noise_bits(id, key[2], key[3]) >> 12);
    double time = exponential_of((high * 0x1p20 + low + 0.5) * 0x1p-52) / (double)weight;
    struct es_drawn *drawn = race->drawn;
    insert(drawn, race->request->wanted, (int64_t)id, time);
    if (drawn->count == race->request->wanted)
        race->reach = (float)log2(drawn->values[drawn->count - 1]) + 0x1p-10f;
}

enum { RACE_BLOCK = 64 };

/* Lets RACE_BLOCK tokens arrive. Only those that could still arrive in time are computed fully.
 *
 * A time is e / weight with e = -log(1 - v) >= v >= h, where h are the noise's first 31 bits as a fraction. A token that is
 * in time has log2 h <= log2 weight + log2 time, and the weight is 2^y within a relative 2^-22. The bits of h as a float,
 * read as a number, are at most log2 h: they are chords of the logarithm, which is concave. Rounding here moves either
 * side by less than 2^-14 in all, and `reach` has a margin of 2^-10. h = 0 gives 0's bits, far below every logarithm. */
static void run(struct race *race, const float *scores, const uint32_t *ids, float best)
{
    uint32_t first = race->request->key[0], second = race->request->key[1];
    float scale = race->request->scale, reach = race->reach;
    float y[RACE_BLOCK], late[RACE_BLOCK];
    int any = 0;
    for (int i = 0; i < RACE_BLOCK; i++) {
        y[i] = (scores[i] - best) * scale;
        float h = (float)(int32_t)(noise_bits(ids[i], first, second) >> 1);
        late[i] = ((float)(int32_t)bits_of_float(h) * 0x1p-23f - 158.0f) - y[i]; /* 158: the bias 127, and 31 bits */
    }
    for (int i = 0; i < RACE_BLOCK; i++)
        any |= late[i] <= reach;
    for (int i = 0; any && i < RACE_BLOCK; i++)
        if (late[i] <= race->reach && y[i] >= LEAST_EXPONENT)
            enter(race, ids[i], power_of_two(y[i], 0));
}

/* Lets `count` tokens arrive, in whole blocks; `ids64` or `ids` name them, else they are 0, 1, 2, ... */
static void run_all(struct race *race, const float *scores, const int64_t *ids64, const uint32_t *ids, size_t start,
                    size_t count, float best)
{
    for (size_t from = start; from < start + count; from += RACE_BLOCK) {
        size_t left = start + count - from, here = left < RACE_BLOCK ? left : RACE_BLOCK;
        float padded[RACE_BLOCK];
        uint32_t named[RACE_BLOCK];
        const float *scores_here = scores + from;
        for (size_t i = 0; i < here; i++)
            named[i] = ids ? ids[from + i] : (uint32_t)(ids64 ? ids64[from + i] : (int64_t)(from + i));
        if (here < RACE_BLOCK) {
            for (size_t i = 0; i < RACE_BLOCK; i++)
                padded[i] = i < here ? scores_here[i] : -INFINITY;
            for (size_t i = here; i < RACE_BLOCK; i++)
                named[i] = 0;
            scores_here = padded;
        }
        run(race, scores_here, named, best);
    }
}

/* ----------------------------------------------------------------------------------------------------- draws */

/* The best by score, best first: `values` are their weights. */
static void take_best(struct drawing *drawing, struct es_drawn *drawn)
{
    const struct es_draw_request *request = drawing->request;
    if (request->wanted == 1) {
        drawn->ids[0] = id_of(drawing, drawing->best_at);
        drawn->values[0] = 1.0;
        drawn->count = 1;
        return;
    }
    collect_best(drawing, (size_t)request->wanted, -INFINITY);
    for (size_t i = 0; i < drawing->list_count; i++)
        insert(drawn, request->wanted, (int64_t)drawing->list_ids[i], -(double)drawing->list_scores[i]);
    for (int64_t i = 0; i < drawn->count; i++) {
        float y = ((float)-drawn->values[i] - drawing->best) * request->scale;
        drawn->values[i] = y < LEAST_EXPONENT ? 0.0 : (double)power_of_two(y, 0);
    }
}

static int32_t draw_any(const float *scores, size_t count, const struct es_draw_request *request, void *scratch,
                        struct es_drawn *drawn)
{
    struct drawing drawing = {.scores = scores, .count = count, .request = request, .maxima = scratch};
    drawing.list_scores = drawing.maxima + draw_blocks(count);
    drawing.list_weights = drawing.list_scores + count;
    drawing.list_ids = (uint32_t *)(drawing.list_weights + count);
    *drawn = (struct es_drawn){0};
    if (!scan(&drawing)) {
        drawn->ids[0] = id_of(&drawing, drawing.best_at);
        drawn->values[0] = (double)scores[drawing.best_at];
        return ES_NOT_FINITE;
    }
    int64_t *mass = request->measures >= ES_MEASURE_MASS ? &drawn->mass : NULL;
    int64_t *spread = request->measures >= ES_MEASURE_SPREAD ? &drawn->spread : NULL;
    struct race race = {.request = request, .drawn = drawn, .reach = INFINITY};
    int all = !request->top_k && request->top_p >= 1.0 && request->min_p <= 0.0;
    if (!request->noisy || all) {
        if (mass)
            add_all_weights(&drawing, mass, spread);
        if (!request->noisy) {
            take_best(&drawing, drawn);
            return ES_OK;
        }
        for (size_t block = 0; block < draw_blocks(count); block++) {
            if ((drawing.maxima[block] - drawing.best) * request->scale < LEAST_EXPONENT)
                continue;
            size_t from = block * DRAW_BLOCK, left = count - from;
            run_all(&race, scores, request->ids, NULL, from, left < DRAW_BLOCK ? left : DRAW_BLOCK, drawing.best);
        }
        return ES_OK;
    }
    if (request->top_k) {
        collect_best(&drawing, (size_t)request->top_k, LEAST_EXPONENT);
        weigh_list(&drawing);
        if (drawing.list_count > (size_t)request->top_k)
            cut(&drawing, 0, (double)request->top_k);
        if (request->top_p < 1.0) {
            int64_t total = 0;
            add_weights(drawing.list_scores, drawing.list_count, drawing.best, request->scale, &total, NULL);
            cut(&drawing, 1, request->top_p * (double)total);
        }
    } else if (request->top_p < 1.0) {
        collect_nucleus(&drawing);
    } else {
        float lowest = (float)log2(request->min_p) - 0x1p-10f; /* what is below that is certainly dropped */
        collect(&drawing, -FLT_MAX, lowest > LEAST_EXPONENT ? lowest : LEAST_EXPONENT);
        weigh_list(&drawing);
    }
    if (request->min_p > 0.0)
        drop_unlikely(&drawing);
    if (mass)
        add_weights(drawing.list_scores, drawing.list_count, drawing.best, request->scale, mass, spread);
    run_all(&race, drawing.list_scores, NULL, drawing.list_ids, 0, drawing.list_count, drawing.best);
    return ES_OK;
}

/* ----------------------------------------------------------------------------------------------------- masks */

/* The mask's bits for tokens 32 word .. 32 word + 31; tokens outside the mask are not allowed. */
static inline uint32_t mask_word(const struct es_draw_request *request, int64_t word)
{
    return word >= 0 && word < request->mask_words ? request->mask[word] : 0u;
}

static inline uint32_t is_allowed(const struct es_draw_request *request, int64_t id)
{
    return mask_word(request, id >> 5) >> (id & 31) & 1u;
}

/* Gathers the allowed scores and their ids, if they are at most `few`. Returns their number, else few + 1. */
static size_t gather_allowed(const float *scores, size_t count, const struct es_draw_request *request, size_t few,
                             float *gathered, int64_t *ids)
{
    size_t found = 0;
    if (request->ids) {
        for (size_t i = 0; i < count; i++) {
            if (!is_allowed(request, request->ids[i]))
                continue;
            if (found == few)
                return few + 1;
            gathered[found] = scores[i];
            ids[found++] = request->ids[i];
        }
        return found;
    }
    for (size_t from = 0; from < count; from += 32)
        for (uint32_t bits = mask_word(request, (int64_t)(from >> 5)); bits; bits &= bits - 1) {
            size_t i = from + (size_t)__builtin_ctz(bits);
            if (i >= count)
                break;
            if (found == few)
                return few + 1;
            gathered[found] = scores[i];
            ids[found++] = (int64_t)i;
        }
    return found;
}

/* Copies the scores, those of tokens that are not allowed as -infinity. */
static void hide_others(const float *scores, size_t count, const struct es_draw_request *request, float *copy)
{
    if (request->ids) {
        for (size_t i = 0; i < count; i++)
            copy[i] = is_allowed(request, request->ids[i]) ? scores[i] : -INFINITY;
        return;
    }
    size_t from = 0;
    for (; from + 32 <= count; from += 32) {
        uint32_t bits = mask_word(request, (int64_t)(from >> 5));
        for (uint32_t i = 0; i < 32; i++)
            copy[from + i] = bits >> i & 1u ? scores[from + i] : -INFINITY;
    }
    for (; from < count; from++)
        copy[from] = is_allowed(request, (int64_t)from) ? scores[from] : -INFINITY;
}

static int32_t draw(const float *scores, size_t count, const struct es_draw_request *request, void *scratch,
                    struct es_drawn *drawn)
{
    if (!request->mask)
        return draw_any(scores, count, request, scratch, drawn);
    float *allowed = scratch, *rest = allowed + count;
    int64_t *ids = (int64_t *)(((uintptr_t)(rest + draw_blocks(count) + 3 * count) + 7) & ~(uintptr_t)7);
    struct es_draw_request own = *request;
    size_t few = draw_few(count), found = gather_allowed(scores, count, request, few, allowed, ids);
    if (!found)
        return ES_NONE_ALLOWED;
    if (found <= few) {
        own.ids = ids;
        own.top_k = own.top_k < (int64_t)found ? own.top_k : (int64_t)found;
        return draw_any(allowed, found, &own, rest, drawn);
    }
    hide_others(scores, count, request, allowed);
    return draw_any(allowed, count, &own, rest, drawn);
}

#endif
