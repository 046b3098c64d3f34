/* A few threads that run one function together, step by step.
 *
 * The function runs once on each thread, the caller's included; pool_barrier separates steps. Waiting threads spin
 * for a moment, since the next step is usually a few microseconds away, and then sleep: an idle pool uses no processor.
 * A step's items are divided among the threads, the same way every time, so that each thread reads the same weights. A
 * thread that has finished its share takes items of other shares, so that a step takes the time that all cores need
 * together, instead of the slowest core's. */
#ifndef EDGESPEC_POOL_H
#define EDGESPEC_POOL_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "edgespec_kernels.h"

struct pool;

typedef void pool_function(void *context, int thread);

/* Null without memory or threads. */
struct pool *pool_open(const struct es_threads *threads);
void pool_close(struct pool *pool);
int pool_threads(const struct pool *pool);

/* Runs the function on all threads and waits for the last. Every barrier reads `cancelled`. */
void pool_run(struct pool *pool, pool_function *function, void *context, const atomic_int *cancelled);

/* Waits for all threads. Returns the same to each of them: whether to continue; after false, return from the function. */
bool pool_barrier(struct pool *pool);

/* The items of a step, fewer than 2^31. */
struct pool_work {
    size_t count;
    size_t least; /* taken in multiples of this, except a share's last items */
    size_t worth; /* shares up to this size are not divided, unless their owner has been slow */
    bool uniform;   /* whether items take equally long: only then can a step mark a thread as slow */
};

/* A step's items as one thread sees them. */
struct pool_items {
    size_t begin, end; /* result of pool_take: items begin .. end - 1 */
    struct pool *pool;
    struct pool_work work;
    size_t part, rest, rest_end, did;
    _Atomic uint64_t *taken;
    unsigned step;
    int thread, helped;
};

/* Divides a step's items among all threads: each begins with a separate share, which is contiguous and the same every
 * time. pool_take returns parts of one share.
 *
 * Every thread divides the same work, and does so at most once between two barriers. */
struct pool_items pool_divide(struct pool *pool, int thread, struct pool_work work);

/* Takes items that no other thread has taken. False if none is left: then call the barrier, since other threads may still
 * be busy. */
bool pool_take(struct pool_items *items);

#endif
