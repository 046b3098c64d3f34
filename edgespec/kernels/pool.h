/* A few threads that run one function together, step by step.
 *
 * The function runs once on each thread, the caller's included, and does its share of every step; pool_barrier stands
 * between steps. Waiting threads spin for a moment, since the next step is usually a few microseconds off, and then
 * sleep: an idle pool uses no processor. Which thread does what is fixed by its number, so that each touches the same
 * weights every time. */
#ifndef EDGESPEC_POOL_H
#define EDGESPEC_POOL_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>

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

/* Thread `thread`'s part of `items`: from *begin to *end - 1, contiguous, the same every time. */
static inline void pool_share(size_t items, int thread, int threads, size_t *begin, size_t *end)
{
    *begin = items * (size_t)thread / (size_t)threads;
    *end = items * ((size_t)thread + 1) / (size_t)threads;
}

#endif
