/* The interface of draws: checks requests, and applies penalties, which only change the scores of tokens seen. */
#include "float_mode.h"
#include "level.h"

/* Sums of up to this many weights of at most 2^32 are exact in a double. */
static const int64_t most_scores = 1 << 21;

int64_t es_draw_scratch(int64_t count)
{
    if (count < 1 || count > most_scores)
        return 0;
    int64_t maxima = (count + DRAW_BLOCK - 1) / DRAW_BLOCK;
    /* a list of scores, weights and ids; replaced scores; allowed ones, and ids of few, with 8 bytes to align them */
    return (maxima + 5 * count) * (int64_t)sizeof(float) + ((int64_t)draw_few((size_t)count) + 1) * (int64_t)sizeof(int64_t);
}

static float penalised(float score, int64_t occurrences, const struct es_draw_request *request)
{
    double value = (double)score;
    value = value > 0.0 ? value / request->repeat_penalty : value * request->repeat_penalty;
    if (occurrences > 0) {
        value -= request->presence_penalty;
        value -= request->frequency_penalty * (double)occurrences;
    }
    return (float)value;
}

static int may_be(int64_t count, const struct es_draw_request *request)
{
    for (int64_t i = 0; i < request->seen_count; i++)
        if (request->seen[i] < 0 || request->seen[i] >= count)
            return 0;
    return es_draw_scratch(count) && request->seen_count >= 0 && request->seen_count <= count && request->top_k >= 0 &&
           request->mask_words >= 0 && request->wanted >= 1 && request->wanted <= ES_MOST_DRAWN && request->scale > 0.0f &&
           (!request->noisy || (request->top_p > 0.0 && request->min_p <= 1.0)); /* else no token would remain */
}

int32_t es_draw(float *scores, int64_t count, const struct es_draw_request *request, void *scratch,
                struct es_drawn *drawn, int32_t number)
{
    const struct level *level = level_of(number);
    if (!level || !may_be(count, request))
        return ES_BAD_REQUEST;
    float *replaced = scratch;
    unsigned mode = float_mode_set();
    for (int64_t i = 0; i < request->seen_count; i++) {
        float *score = scores + request->seen[i];
        replaced[i] = *score;
        *score = penalised(*score, request->occurrences[i], request);
    }
    int32_t status = level->draw(scores, (size_t)count, request, replaced + count, drawn);
    for (int64_t i = request->seen_count; i-- > 0;) /* backwards, which restores a token named twice too */
        scores[request->seen[i]] = replaced[i];
    float_mode_restore(mode);
    return status;
}
