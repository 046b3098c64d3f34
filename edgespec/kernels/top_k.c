/* The best of a row, through a heap whose root is the worst one kept. */
#include <math.h>

#include "sequence.h"

struct candidates {
    int64_t *ids;
    float *scores;
    int64_t count;
};

static int is_worse(const struct candidates *all, int64_t a, int64_t b)
{
    if (all->scores[a] != all->scores[b])
        return all->scores[a] < all->scores[b];
    return all->ids[a] > all->ids[b];
}

static void swap(struct candidates *all, int64_t a, int64_t b)
{
    int64_t id = all->ids[a];
    float score = all->scores[a];
    all->ids[a] = all->ids[b];
    all->scores[a] = all->scores[b];
    all->ids[b] = id;
    all->scores[b] = score;
}

static void sink(struct candidates *all, int64_t at)
{
    for (;;) {
        int64_t worst = at;
        for (int64_t child = 2 * at + 1; child <= 2 * at + 2 && child < all->count; child++)
            if (is_worse(all, child, worst))
                worst = child;
        if (worst == at)
            return;
        swap(all, at, worst);
        at = worst;
    }
}

int32_t es_top_k(const struct es_sequence *sequence, int32_t row, int64_t k, int64_t *ids, float *scores)
{
    int64_t rows = (int64_t)sequence->head_rows;
    if (k < 0 || k > rows || row < 0 || row >= sequence->scored)
        return ES_BAD_REQUEST;
    const float *from = sequence->scores + row * rows;
    struct candidates all = {.ids = ids, .scores = scores, .count = k};
    for (int64_t id = 0; id < k; id++) {
        ids[id] = id;
        scores[id] = from[id] == from[id] ? from[id] : -INFINITY;
    }
    for (int64_t at = k / 2; at-- > 0;)
        sink(&all, at);
    /* Ids ascend, so a score equal to the worst kept one belongs to a higher id and stays out. */
    for (int64_t id = k; k && id < rows; id++)
        if (from[id] > scores[0]) {
            ids[0] = id;
            scores[0] = from[id];
            sink(&all, 0);
        }
    while (all.count > 1) { /* the worst goes to the end, again and again */
        swap(&all, 0, --all.count);
        sink(&all, 0);
    }
    return ES_OK;
}
