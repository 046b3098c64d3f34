/* A few threads that run one function together, step by step.
 *
 * The function runs once on each thread, the caller's included; pool_barrier stands between steps. Waiting threads spin
 * for a moment, since the next step is usually a few microseconds off, and then sleep: an idle pool uses no processor.
 * A step's items are divided among the threads, the same way every time, so that each touches the same weights; whoever
 * has done its own helps the others, so that a step takes as long as all cores need together, and not as long as the
 * slowest one does by itself. */
#ifndef EDGESPEC_POOL_H
#define EDGESPEC_POOL_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "edgespec_kernels.h"

struct pool;

typedef void pool_function(void *context, int thread);

/* `cancelled` is looked at in every barrier. Null without memory or threads. */
struct pool *pool_open(const struct es_threads *threads, const atomic_int *cancelled);
void pool_close(struct pool *pool);
int pool_threads(const struct pool *pool);

/* Runs the function on all threads and waits for the last. */
void pool_run(struct pool *pool, pool_function *function, void *context);

/* Waits for all threads. Tells each of them alike whether to go on; after a false, return from the function. */
bool pool_barrier(struct pool *pool);

/* The items of a step, fewer than 2^31. */
struct pool_work {
    size_t count;
    size_t least; /* they are taken in multiples of this, but for a share's last ones */
    size_t worth; /* a share of up to so many is not worth the asking: its owner has it alone, unless it has been slow */
    bool alike;   /* whether they take equally long: only then does whoever needs help with its share count as slow */
};

/* A step's items as one thread sees them. */
struct pool_items {
    size_t begin, end; /* what pool_take gave: items begin .. end - 1 */
    struct pool *pool;
    struct pool_work work;
    size_t part, rest, rest_end, did;
    _Atomic uint64_t *taken;
    unsigned step;
    int thread, helped;
};

/* Divides a step's items among all threads: each begins with a share of its own, which is contiguous and the same every
 * time. What pool_take gives is part of one share.
 *
 * Every thread divides the same work, and does so at most once between two barriers. */
struct pool_items pool_divide(struct pool *pool, int thread, struct pool_work work);

/* Takes items that no other thread has taken. False if there are none left: then go on to the barrier, since the others
 * may be at work on theirs. */
bool pool_take(struct pool_items *items);

#endif
