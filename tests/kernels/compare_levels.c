/* Every level that runs here against the portable one, to the bit, through the library's own interface, and forwards on
 * 1 to 7 threads. For processors that the tests in Python do not reach: scripts/test_neon.sh runs it in an emulator.
 *
 * Prints a line for each level, and a digest of everything that was computed: processors of other families give the
 * same one. The number of draws may be given. With "forwards" in its place they alone are compared, on 1, 4 and 7
 * threads: the thread sanitizer finds nothing in the rest, which runs on one thread. Ends with 1 at the first
 * difference, with 2 if only the portable level runs. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "activation.h"
#include "edgespec_kernels.h"

static uint64_t drawn = 1, digest = 14695981039346656037u; /* FNV-1a */
static int level_tested;
static long compared;

/* Uniform in -1 .. 1, the same on every machine. */
static float draw(void)
{
    drawn = drawn * 6364136223846793005u + 1442695040888963407u;
    return (float)((int32_t)(drawn >> 32) >> 8) * 0x1p-23f;
}

static void fill(float *x, size_t count, float size)
{
    for (size_t i = 0; i < count; i++)
        x[i] = draw() * size;
}

static void *take(size_t bytes)
{
    void *memory = calloc(1, bytes);
    if (!memory)
        abort();
    return memory;
}

static void expect(const char *what, int64_t number, int32_t code, const void *portable, const void *found, size_t bytes)
{
    if (code != ES_OK || memcmp(portable, found, bytes)) {
        printf("%s differs: %s %lld, code %d\n", es_level_name(level_tested), what, (long long)number, code);
        exit(1);
    }
    for (size_t i = 0; i < bytes; i++)
        digest = (digest ^ ((const uint8_t *)found)[i]) * 1099511628211u;
    compared++;
}

/* ------------------------------------------------------------------------------------------------- products */

/* A block of the file: its columns, its bytes, and where its halves stand. */
static const struct format {
    int64_t type, columns;
    size_t bytes, halves[2], half_count;
} formats[] = {
    {ES_F32, 1, 4, {0}, 0},          {ES_F16, 1, 2, {0}, 1},          {ES_BF16, 1, 2, {0}, 1},
    {ES_Q4_0, 32, 18, {0}, 1},       {ES_Q4_1, 32, 20, {0, 2}, 2},    {ES_Q5_0, 32, 22, {0}, 1},
    {ES_Q5_1, 32, 24, {0, 2}, 2},    {ES_Q8_0, 32, 34, {0}, 1},       {ES_Q4_K, 256, 144, {0, 2}, 2},
    {ES_Q5_K, 256, 176, {0, 2}, 2},  {ES_Q6_K, 256, 210, {208}, 1},   {ES_Q3_K, 256, 110, {108}, 1},
    {ES_IQ3_XXS, 256, 98, {0}, 1},   {ES_IQ3_S, 256, 110, {0}, 1},    {ES_IQ4_NL, 32, 18, {0}, 1},
    {ES_IQ4_XS, 256, 136, {0}, 1},   {ES_MXFP4, 32, 17, {0}, 0},
};

/* Bytes at random, or all the same, with halves, or bfloats, of ordinary size and either sign. */
static uint8_t *file_rows(const struct format *format, int64_t rows, int64_t columns, int byte)
{
    size_t blocks = (size_t)(rows * columns / format->columns);
    uint8_t *raw = take(blocks * format->bytes);
    if (format->type == ES_F32) {
        fill((float *)(void *)raw, blocks, 1.0f);
        return raw;
    }
    const int ordinary = format->type == ES_BF16 ? 0x3b00 : 0x2000;
    for (size_t b = 0; b < blocks; b++) {
        for (size_t i = 0; i < format->bytes; i++)
            raw[b * format->bytes + i] = (uint8_t)(byte < 0 ? (int)(draw() * 128.0f) : byte);
        for (size_t h = 0; h < format->half_count; h++) {
            uint16_t half = (uint16_t)(ordinary + (int)(draw() * 2000.0f)) | (draw() < 0.0f ? 0x8000 : 0);
            memcpy(raw + b * format->bytes + format->halves[h], &half, sizeof half);
        }
        if (format->type == ES_MXFP4)
            raw[b * format->bytes] = (uint8_t)(118.0f + draw() * 6.0f);
    }
    return raw;
}

static struct es_matrix matrix_of(const struct format *format, int64_t rows, int64_t columns, int byte)
{
    uint8_t *raw = file_rows(format, rows, columns, byte);
    uint8_t *tiles = take((size_t)es_relaid_bytes(format->type, rows, columns));
    if (es_relay(format->type, raw, rows, columns, tiles) != -1)
        abort();
    free(raw);
    return (struct es_matrix){.tiles = tiles, .rows = rows, .columns = columns, .type = format->type};
}

enum { MOST_INPUTS = 17 };

static void compare_product(const struct format *format, int64_t rows, int64_t columns, int byte)
{
    struct es_matrix matrix = matrix_of(format, rows, columns, byte);
    size_t outputs = (size_t)rows * MOST_INPUTS;
    float *x = take((size_t)columns * MOST_INPUTS * sizeof *x), *bias = take((size_t)rows * sizeof *bias);
    float *portable = take(outputs * sizeof *portable), *found = take(outputs * sizeof *found);
    fill(x, (size_t)columns * MOST_INPUTS, 3.0f);
    fill(bias, (size_t)rows, 1.0f);
    if (byte >= 0) /* the largest activations, of either sign, with the largest codes */
        for (int64_t i = 0; i < columns * MOST_INPUTS; i++)
            x[i] = i / columns % 2 ? 127.0f : -127.0f;
    matrix.bias = rows % 2 ? bias : NULL;
    for (int64_t inputs = 1; inputs <= MOST_INPUTS; inputs++) {
        if (es_multiply(&matrix, x, inputs, portable, ES_PORTABLE) != ES_OK)
            abort();
        int32_t code = es_multiply(&matrix, x, inputs, found, level_tested);
        expect("product of type", format->type, code, portable, found, (size_t)(rows * inputs) * sizeof *found);
    }
    free((void *)(uintptr_t)matrix.tiles);
    free(x), free(bias), free(portable), free(found);
}

static void compare_products(void)
{
    static const int bytes[] = {0x00, 0xff, 0x80, 0x7f, 0x0f, 0xf0};
    for (size_t f = 0; f < sizeof formats / sizeof *formats; f++) {
        const struct format *format = &formats[f];
        compare_product(format, 16, 256, -1);
        compare_product(format, 33, 768, -1); /* one row alone in a tile */
        if (format->columns <= 32)
            compare_product(format, 17, 288, -1); /* one block alone in a group */
        for (size_t b = 0; format->columns > 1 && b < sizeof bytes / sizeof *bytes; b++)
            compare_product(format, 16, 256, bytes[b]);
    }
}

static void compare_coarse(void)
{
    enum { ROWS = 3, COLUMNS = 768, BYTES = ROWS * COLUMNS / 32 * 18 };
    for (size_t f = 0; f < sizeof formats / sizeof *formats; f++) {
        int64_t type = formats[f].type;
        uint8_t *raw = file_rows(&formats[f], ROWS, COLUMNS, -1), *portable = take(BYTES), *found = take(BYTES);
        (void)es_coarsen(type, raw, ROWS, COLUMNS, portable, ES_PORTABLE);
        int32_t code = es_coarsen(type, raw, ROWS, COLUMNS, found, level_tested) == -1 ? ES_OK : ES_BAD_REQUEST;
        expect("coarse type", type, code, portable, found, BYTES);
        free(raw), free(portable), free(found);
    }
}

/* ----------------------------------------------------------------------------------------------------- rows */

enum { LENGTH = 1536 };

static void compare_rows(void)
{
    static const float edges[] = {-87.0f, -87.0001f, 88.0f, 88.1f, 0.0f, -0.0f, 1e-30f, 1e30f, -1e30f, INFINITY, -INFINITY};
    static float x[LENGTH], y[LENGTH], portable[LENGTH], found[LENGTH];
    static uint8_t portable_blocks[LENGTH / 32][sizeof(struct activation_block)],
        found_blocks[LENGTH / 32][sizeof(struct activation_block)];
    static const float sizes[] = {1.0f, 1e-33f, 90.0f, 1e4f, 1e30f};
    for (int64_t s = 0; s < 5; s++) {
        fill(x, LENGTH, sizes[s]);
        fill(y, LENGTH, 2.0f);
        (void)es_quantise(x, LENGTH, portable_blocks[0], ES_PORTABLE);
        int32_t code = es_quantise(x, LENGTH, found_blocks[0], level_tested);
        expect("quantise", s, code, portable_blocks, found_blocks, sizeof found_blocks);
        memcpy(x, edges, sizeof edges);
        (void)es_exponential(x, LENGTH, portable, ES_PORTABLE);
        code = es_exponential(x, LENGTH, found, level_tested);
        expect("exponential", s, code, portable, found, sizeof found);
        fill(x, LENGTH, sizes[s]);
        for (int64_t activation = 0; activation < ES_ACTIVATIONS; activation++) {
            (void)es_join(activation, x, y, LENGTH, portable, ES_PORTABLE);
            code = es_join(activation, x, y, LENGTH, found, level_tested);
            expect("join", s, code, portable, found, sizeof found);
        }
        for (int64_t length = 32; length <= LENGTH; length += 32 * 47) {
            (void)es_normalise(x, y, 1e-6, length, portable, ES_PORTABLE);
            code = es_normalise(x, y, 1e-6, length, found, level_tested);
            expect("normalise", s, code, portable, found, (size_t)length * sizeof *found);
        }
    }
    for (int64_t at = 0; at < 96; at += 5) { /* what is not finite, in every part of a block */
        fill(x, LENGTH, 1.0f);
        x[at] = at % 2 ? INFINITY : NAN;
        (void)es_quantise(x, LENGTH, portable_blocks[0], ES_PORTABLE);
        int32_t code = es_quantise(x, LENGTH, found_blocks[0], level_tested);
        memset(portable_blocks[at / 32], 0, 8); /* NaN, whose bits differ between processors */
        memset(found_blocks[at / 32], 0, 8);
        expect("quantise", at, code, portable_blocks, found_blocks, sizeof found_blocks);
    }
}

/* Not computed by levels: the digest compares them between processors. */
static void compare_turns(void)
{
    enum { ANGLES = 20000 };
    static double angles[ANGLES];
    static float found[ANGLES][2];
    double frequency = 1.0;
    for (int i = 0; i < ANGLES; i++) {
        angles[i] = (double)(i * 6569 % 131072) * frequency;
        frequency = i % 64 == 63 ? 1.0 : frequency * 0.8659643233600653; /* 10000^(-1/64) */
    }
    for (int i = 0; i < 64; i++)
        angles[i] = ldexp(1.0 + draw() * 0.5, 16 * i); /* up to the largest */
    es_turns(angles, ANGLES, found[0]);
    expect("turns", 0, ES_OK, found, found, sizeof found);
}

static void compare_attention(void)
{
    enum { POSITIONS = 600, LONGEST = 128, QUERIES = 7 };
    static const int64_t seen[QUERIES][2] = {{0, 600}, {5, 599}, {300, 513}, {0, 512}, {0, 256}, {16, 17}, {0, 1}};
    static float keys[POSITIONS * LONGEST], values[POSITIONS * LONGEST], queries[QUERIES * LONGEST];
    static float portable[QUERIES * LONGEST], found[QUERIES * LONGEST];
    for (int64_t length = 16; length <= LONGEST; length += 16) {
        fill(keys, POSITIONS * LONGEST, 1.0f);
        fill(values, POSITIONS * LONGEST, 1.0f);
        fill(queries, QUERIES * LONGEST, 4.0f);
        for (int64_t count = 1; count <= QUERIES; count++) {
            float cap = count % 2 ? 0.0f : 3.0f;
            const float *sinks = count % 3 ? 0 : queries;
            (void)es_attend(keys, values, POSITIONS, length, queries, seen[0], count, 1 << 20, cap, sinks, portable,
                            ES_PORTABLE);
            int32_t code = es_attend(keys, values, POSITIONS, length, queries, seen[0], count, 1 << 20, cap, sinks,
                                     found, level_tested);
            expect("attention", length, code, portable, found, (size_t)(count * length) * sizeof *found);
        }
    }
}

/* ---------------------------------------------------------------------------------------------------- draws */

enum { MOST_SCORES = 3000 };

/* What a draw does not write is zero, so that the digest of a level does not depend on the levels before it. */
static void compare_draw(int64_t number, float *scores, int64_t count, const struct es_draw_request *request, void *scratch)
{
    struct es_drawn portable = {0}, found = {0};
    int32_t expected = es_draw(scores, count, request, scratch, &portable, ES_PORTABLE);
    int32_t code = es_draw(scores, count, request, scratch, &found, level_tested);
    expect("draw", number, code == expected ? ES_OK : code, &portable, &found, sizeof found);
}

static void compare_draws(int64_t draws)
{
    static const double top_ps[] = {1.0, 0.95, 0.5, 0x1.fffffffffffffp-1, 5e-324},
                        min_ps[] = {0.0, 0.05, 1e-6, 1.0};
    static const int64_t top_ks[] = {0, 1, 40, 700}, seen[] = {0, 7, 2}, occurrences[] = {1, 0, 2};
    static const float sizes[] = {0.1f, 3.0f, 30.0f}, scales[] = {1.442695f, 2.060993f, 0.01442695f, 0x1p60f};
    static float scores[MOST_SCORES];
    static int64_t ids[MOST_SCORES];
    static uint32_t mask[3 * MOST_SCORES / 32 + 2];
    for (int64_t i = 0; i < MOST_SCORES; i++)
        ids[i] = 3 * i + 1;
    for (int64_t number = 0; number < draws; number++) {
        int64_t count = number % 10 ? 10 + number % 100 : MOST_SCORES - number % 300;
        fill(scores, (size_t)count, sizes[number % 3]);
        if (number % 5 == 1) /* ties */
            for (int64_t i = 0; i < count; i++)
                scores[i] = (float)(int)scores[i];
        if (number % 7 == 1) /* tokens that are not scored */
            for (int64_t i = 0; i < count; i += 2)
                scores[i] = -INFINITY;
        if (number % 500 == 499)
            scores[count / 2] = NAN;
        if (number % 11 == 1) /* neighbours */
            for (int64_t i = 0; i < count; i++)
                scores[i] = 1.0f + (float)(i * 7 % 4) * 0x1p-23f;
        if (number % 13 == 1) /* subnormal */
            for (int64_t i = 0; i < count; i++)
                scores[i] *= 0x1p-140f;
        if (number % 17 == 1) /* all but one far below */
            for (int64_t i = 0; i < count; i++)
                scores[i] = i == number % count ? 3e38f : number % 2 ? -INFINITY : -3e38f;
        int64_t words = (number % 4 ? count : 3 * count) / 32 + number % 3; /* too short for the tokens, or too long */
        for (int64_t i = 0; i < words; i++) /* none, few, half, most or all of them are allowed */
            mask[i] = number % 23 < 2 ? 0u : number % 19 == 2 ? ~0u : number % 5 == 2 ? (i % 7 ? 0u : 1u << i % 32)
                                                          : number % 5 == 3 ? 0x9e3779b9u * (uint32_t)(i + number)
                                                                            : ~(1u << i % 32);
        struct es_draw_request request = {
            .mask = number % 8 < 3 ? mask : NULL, .mask_words = words,
            .ids = number % 4 ? NULL : ids,
            .seen = seen, .occurrences = occurrences, .seen_count = number % 6 ? 0 : 3,
            .repeat_penalty = 1.1, .presence_penalty = 0.1, .frequency_penalty = 0.2,
            .top_k = top_ks[number % 4], .top_p = top_ps[number / 4 % 5], .min_p = min_ps[number / 20 % 4],
            .key = {(uint32_t)number, 5, 6, 7},
            .scale = scales[number / 3 % 4],
            .noisy = number % 9 != 0, .wanted = 1 + (int32_t)(number % ES_MOST_DRAWN), .measures = (int32_t)(number % 3),
        };
        void *scratch = take((size_t)es_draw_scratch(count)); /* exactly, so that a sanitizer sees what is behind it */
        compare_draw(number, scores, count, &request, scratch);
        free(scratch);
    }
}

/* --------------------------------------------------------------------------------------------------- models */

enum { EMBEDDING = 256, HEADS = 4, KV_HEADS = 2, HEAD = 64, FEED_FORWARD = 512, VOCABULARY = 333, TOKENS = 40, SCORED = 9, MOST_THREADS = 7 };

static struct es_batch *batch_of(const struct es_model *model, int32_t level, int32_t count)
{
    const struct es_threads threads = {.count = count};
    struct es_batch *batch = es_batch_open(model, &threads, level);
    if (!batch)
        abort();
    return batch;
}

/* A prompt and a few scored rows. With a `companion`, another sequence's prompt and rows share each forward. */
static struct es_sequence *fed(struct es_batch *batch, struct es_sequence *companion)
{
    static const int32_t go_on = 0;
    int32_t tokens[TOKENS], others[TOKENS];
    for (int i = 0; i < TOKENS; i++) {
        tokens[i] = i * 37 % VOCABULARY;
        others[i] = i * 11 % VOCABULARY;
    }
    struct es_sequence *sequence = es_open(batch, TOKENS + SCORED, &go_on);
    struct es_entry prompts[] = {{.sequence = companion, .tokens = others, .count = TOKENS / 2},
                                 {.sequence = sequence, .tokens = tokens, .count = TOKENS}},
                    rows[] = {{.sequence = companion, .tokens = others, .start = TOKENS / 2, .count = 3, .scored = 2},
                              {.sequence = sequence, .tokens = tokens, .start = TOKENS, .count = SCORED, .scored = SCORED}};
    int32_t first = companion ? 0 : 1, count = companion ? 2 : 1;
    if (!sequence || es_batch_forward(batch, prompts + first, count) != ES_OK ||
        es_batch_forward(batch, rows + first, count) != ES_OK || prompts[1].status != ES_OK || rows[1].status != ES_OK)
        abort();
    return sequence;
}

static void compare_forwards(const struct es_model *model, int64_t type, int32_t step)
{
    struct es_batch *one = batch_of(model, ES_PORTABLE, 1);
    struct es_sequence *portable = fed(one, NULL);
    for (int32_t threads = 1; threads <= MOST_THREADS; threads += step) {
        static const int32_t go_on = 0;
        struct es_batch *batch = batch_of(model, level_tested, threads);
        struct es_sequence *companion = threads % 2 ? NULL : es_open(batch, TOKENS, &go_on);
        struct es_sequence *found = fed(batch, companion);
        expect("forward of type", type, ES_OK, es_scores(portable), es_scores(found), SCORED * VOCABULARY * sizeof(float));
        for (int32_t row = 0; row < SCORED; row++) {
            int64_t best[2] = {es_argmax(portable, row), es_argmax(found, row)};
            expect("argmax of row", row, best[1] < 0 ? ES_BAD_REQUEST : ES_OK, &best[0], &best[1], sizeof best[0]);
        }
        es_close(found);
        if (companion)
            es_close(companion);
        es_batch_close(batch);
    }
    es_close(portable);
    es_batch_close(one);
}

static void compare_models(int32_t step)
{
    static float norm[EMBEDDING];
    static double frequencies[HEAD / 2];
    static const double magnitude = 1.19;
    static const float factors[3] = {1.0f, 1.5f, 2.0f};
    for (int i = 0; i < EMBEDDING; i++)
        norm[i] = 1.0f;
    for (int i = 0; i < HEAD / 2; i++)
        frequencies[i] = 1.0 / (1 + i);
    for (size_t f = 0; f < sizeof formats / sizeof *formats; f++) {
        const struct format *format = &formats[f];
        struct es_layer layer[2] = {{
            .attention_norm = norm,
            .feed_forward_norm = norm,
            .query = matrix_of(format, HEADS * HEAD, EMBEDDING, -1),
            .key = matrix_of(format, KV_HEADS * HEAD, EMBEDDING, -1),
            .value = matrix_of(format, KV_HEADS * HEAD, EMBEDDING, -1),
            .output = matrix_of(format, EMBEDDING, HEADS * HEAD, -1),
            .gate = matrix_of(format, FEED_FORWARD, EMBEDDING, -1),
            .up = matrix_of(format, FEED_FORWARD, EMBEDDING, -1),
            .down = matrix_of(format, EMBEDDING, FEED_FORWARD, -1),
            .kv_heads = KV_HEADS,
            .head_length = HEAD,
            .rope_length = HEAD,
            .output_scale = 1.0,
        }};
        layer[1] = layer[0];
        layer[1].query_norm = layer[1].key_norm = layer[1].attention_post_norm = norm;
        layer[1].joins_heads = 1;
        layer[1].rope_table = -1;
        layer[1].cache_layer = 1;
        struct es_model model = {
            .layers = 2, .embedding = EMBEDDING, .heads = HEADS, .kv_heads = KV_HEADS, .head_length = HEAD,
            .feed_forward = FEED_FORWARD, .vocabulary = VOCABULARY, .rope_length = HEAD, .rope = ES_ROPE_HALVES,
            .norm_epsilon = 1e-5, .embedding_scale = 12.0, .residual_scale = 0.22, .score_scale = 0.125,
            .logit_scale = 0.3, .score_cap = 5.0, .logit_cap = 2.0, .query_factors = factors, .query_factor_count = 3,
            .query_span = 4, .rope_magnitudes = &magnitude, .rope_tables = 1,
            .rope_frequencies = frequencies, .layer = layer, .output_norm = norm,
            .head = matrix_of(format, VOCABULARY, EMBEDDING, -1),
            .embedding_rows = file_rows(format, VOCABULARY, EMBEDDING, -1), .embedding_type = format->type,
        };
        compare_forwards(&model, format->type, step);
        const struct es_matrix *own[] = {&layer->query, &layer->key, &layer->value, &layer->output,
                                         &layer->gate,  &layer->up,  &layer->down,  &model.head};
        for (size_t i = 0; i < sizeof own / sizeof *own; i++)
            free((void *)(uintptr_t)own[i]->tiles);
        free((void *)(uintptr_t)model.embedding_rows);
    }
}

int main(int argc, char **argv)
{
    bool forwards = argc > 1 && !strcmp(argv[1], "forwards");
    int64_t draws = argc > 1 ? atoll(argv[1]) : 3000;
    uint64_t last = 0;
    for (level_tested = ES_PORTABLE + 1; level_tested < ES_LEVELS; level_tested++) {
        if (!es_level_name(level_tested))
            continue;
        drawn = 1, digest = 14695981039346656037u, compared = 0;
        if (!forwards) {
            compare_products();
            compare_coarse();
            compare_rows();
            compare_turns();
            compare_attention();
            compare_draws(draws);
        }
        compare_models(forwards ? 3 : 1);
        printf("%s: %ld comparisons, the portable level's bits\n", es_level_name(level_tested), compared);
        last = digest;
    }
    if (!last) {
        printf("no level but the portable one runs here\n");
        return 2;
    }
    printf("digest %016llx\n", (unsigned long long)last);
    return 0;
}
