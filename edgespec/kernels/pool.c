#define _GNU_SOURCE
#include "pool.h"

#include <stdalign.h>
#include <stdint.h>

#include "float_mode.h"
#include "threads.h"

/* How long a thread spins before it sleeps. Steps are 1 to 500 us apart and a wake-up takes 5 to 50 us, so within a
 * forward a thread spins for about that long; between forwards Python takes 20 to 100 us. */
enum { STEP_SPIN_NS = 100 * 1000, IDLE_SPIN_NS = 200 * 1000 };
/* After this long a spinning thread yields its processor: if two pools share processors, a thread may wait for one that
 * waits for its processor. Two pools of 2 threads on 2 processors reach 0.9 to 1.2 times the speed of one alone, without
 * yielding 0.2 to 0.6; one pool alone is not slower. */
enum { YIELD_NS = 5 * 1000 };
/* Linux 6.18 charges a thread a time slice of 3 ms for each yield that another thread uses. With two other busy programs
 * on the same 2 processors, a forward of a tiny model with 2 threads took 21 ms with a yield at every barrier, and 1 ms
 * with sleeping threads. So after a yield of CROWDED_NS (longer than Python takes for a token, shorter than a slice)
 * threads sleep at the next CROWDED_WAITS barriers, which costs 64 wake-ups once the other programs end. */
enum { CROWDED_NS = 1000 * 1000, CROWDED_WAITS = 64 };
enum { LOOKS_PER_CLOCK = 64, CACHE_LINE = 128 };
/* Of a long share, OFFERED of PARTS parts are taken by the first free thread. A thread is slow, below 3/4 of the others'
 * speed, if other threads took all of those: from then on it keeps 1 / KEPT_SLOW of its shares, and the rest is taken in
 * steps of 1 / PARTS_SLOW. Each take costs up to 0.4 us on two cores that use the same line. If each thread kept only a
 * quarter of each share, a forward of 8 tokens took 1.03 to 1.09 times as long (135M parameters, two equal cores, steps of
 * 7 to 16 us). With one part offered, a quarter of the longest steps marked a thread slow that had only received less
 * memory bandwidth. */
enum { PARTS = 8, OFFERED = 2, KEPT_SLOW = 4, PARTS_SLOW = 32 };

/* A number that only grows, and threads that wait for it to grow. */
struct gate {
    alignas(CACHE_LINE) atomic_uint value;
    atomic_uint sleeping;
    thread_lock lock;
    thread_condition opened;
};

struct worker {
    /* Number of items taken from this share, except the kept ones, and the step they belong to: step << 32 | items. A
     * value of an earlier step counts as 0, so no step has to wait for a reset. */
    alignas(CACHE_LINE) _Atomic uint64_t taken;
    /* Whether the thread is slow, for even and for odd steps: a step writes the next step's value. On a separate line,
     * since all threads read it and it rarely changes. */
    alignas(CACHE_LINE) atomic_bool slow[2];
    thread_handle thread; /* except for the first worker, the caller of pool_run */
    struct pool *pool;
    int number;
};

struct pool {
    struct gate started; /* counts functions */
    struct gate passed;  /* counts barriers */
    alignas(CACHE_LINE) atomic_int arrived;
    alignas(CACHE_LINE) atomic_int crowded; /* barriers to sleep at: other programs need the processors */
    alignas(CACHE_LINE) int threads;
    bool spins;
    bool closing; /* written before `started` grows, read after */
    bool go_on;   /* written by the last thread at a barrier, before it releases the others */
    const atomic_int *cancelled; /* written, like the next two, before `started` grows */
    pool_function *function;
    void *context;
    int started_threads;
    struct worker worker[];
};

static inline void relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb"); /* as long as x86's pause; yield returns immediately */
#endif
}

static void gate_init(struct gate *gate)
{
    atomic_init(&gate->value, 0);
    atomic_init(&gate->sleeping, 0);
    lock_init(&gate->lock);
    condition_init(&gate->opened);
}

static void gate_destroy(struct gate *gate)
{
    lock_destroy(&gate->lock);
    condition_destroy(&gate->opened);
}

static void gate_open(struct gate *gate)
{
    atomic_fetch_add(&gate->value, 1);
    /* A thread counts itself as sleeping before it reads the value for the last time, and both sides are sequentially
     * consistent: either it sees the new value, or the other side sees it sleeping. */
    if (atomic_load(&gate->sleeping)) {
        lock_take(&gate->lock);
        condition_wake_all(&gate->opened);
        lock_give(&gate->lock);
    }
}

/* `crowded` is null for idle threads, which sleep soon anyway. */
static void gate_wait(struct gate *gate, unsigned old, int64_t spin_ns, atomic_int *crowded)
{
    int64_t begun = 0;
    for (unsigned looks = 1;; looks++) {
        if (atomic_load_explicit(&gate->value, memory_order_acquire) != old)
            return;
        if (looks % LOOKS_PER_CLOCK == 0) {
            int64_t now = now_ns();
            begun = begun ? begun : now;
            if (now >= begun + spin_ns)
                break;
            if (now >= begun + YIELD_NS) {
                if (crowded && atomic_load_explicit(crowded, memory_order_relaxed) > 0) {
                    atomic_fetch_sub_explicit(crowded, 1, memory_order_relaxed);
                    break;
                }
                thread_yield();
                if (crowded && now_ns() >= now + CROWDED_NS)
                    atomic_store_explicit(crowded, CROWDED_WAITS, memory_order_relaxed);
            }
        }
        relax();
    }
    lock_take(&gate->lock);
    atomic_fetch_add(&gate->sleeping, 1);
    while (atomic_load(&gate->value) == old)
        condition_wait(&gate->opened, &gate->lock);
    atomic_fetch_sub(&gate->sleeping, 1);
    lock_give(&gate->lock);
}

bool pool_barrier(struct pool *pool)
{
    if (pool->threads == 1)
        return !atomic_load_explicit(pool->cancelled, memory_order_relaxed);
    unsigned passed = atomic_load_explicit(&pool->passed.value, memory_order_relaxed);
    if (atomic_fetch_add(&pool->arrived, 1) + 1 == pool->threads) {
        atomic_store_explicit(&pool->arrived, 0, memory_order_relaxed);
        pool->go_on = !atomic_load_explicit(pool->cancelled, memory_order_relaxed);
        gate_open(&pool->passed);
    } else {
        gate_wait(&pool->passed, passed, pool->spins ? STEP_SPIN_NS : 0, &pool->crowded);
    }
    return pool->go_on;
}

struct pool_items pool_divide(struct pool *pool, int thread, struct pool_work work)
{
    return (struct pool_items){
        .pool = pool,
        .work = work,
        /* Equal for all threads, which are between the same two barriers. */
        .step = atomic_load_explicit(&pool->passed.value, memory_order_relaxed),
        .thread = thread,
        .helped = -1,
    };
}

static bool is_slow(const struct pool_items *items, size_t whose)
{
    return atomic_load_explicit(&items->pool->worker[whose].slow[items->step % 2], memory_order_relaxed);
}

/* Records for the next step whether this thread was slow. */
static void note_slow(const struct pool_items *items, bool slow)
{
    atomic_bool *next = &items->pool->worker[items->thread].slow[(items->step + 1) % 2];
    if (atomic_load_explicit(next, memory_order_relaxed) != slow)
        atomic_store_explicit(next, slow, memory_order_relaxed);
}

/* The largest multiple of `least` up to `items`, but at least `least`. */
static size_t part_of(size_t items, size_t least)
{
    return items > least ? items - items % least : least;
}

/* Selects a share: the owner's kept items become begin .. end - 1, the rest can be taken. */
static void turn_to(struct pool_items *items, size_t whose)
{
    const struct pool_work *work = &items->work;
    size_t threads = (size_t)items->pool->threads, share = work->count / threads, kept = work->count;
    if (threads > 1 && is_slow(items, whose)) {
        items->part = part_of(share / PARTS_SLOW, work->least);
        kept = share / KEPT_SLOW / work->least * work->least;
    } else if (threads > 1 && share > work->worth) {
        items->part = part_of((share + PARTS / 2) / PARTS, work->least);
        kept = share > OFFERED * items->part ? part_of(share - OFFERED * items->part, work->least) : share;
    }
    items->begin = work->count * whose / threads;
    items->rest_end = work->count * (whose + 1) / threads;
    items->rest = items->end = kept < items->rest_end - items->begin ? items->begin + kept : items->rest_end;
    items->taken = &items->pool->worker[whose].taken;
}

/* Takes up to `part` of `count` items. Returns how many were taken before: at least `count` if there are none left. */
static size_t take(_Atomic uint64_t *taken, unsigned step, size_t part, size_t count)
{
    /* No memory order is needed: a step reads what was complete at the last barrier, and its results are read after the
     * next. The exchange alone makes sure that each item is given once. */
    uint64_t old = atomic_load_explicit(taken, memory_order_relaxed), before;
    do {
        before = old >> 32 == step ? (uint32_t)old : 0;
        if (before >= count)
            break;
    } while (!atomic_compare_exchange_weak_explicit(taken, &old, (uint64_t)step << 32 | (before + part),
                                                    memory_order_relaxed, memory_order_relaxed));
    return (size_t)before;
}

bool pool_take(struct pool_items *items)
{
    struct pool *pool = items->pool;
    if (items->helped < 0) {
        items->helped = 0;
        note_slow(items, is_slow(items, (size_t)items->thread)); /* keeps the old value until known */
        turn_to(items, (size_t)items->thread);
        if (items->begin < items->end)
            return true;
    }
    for (;;) {
        size_t count = items->rest_end - items->rest;
        size_t before = count ? take(items->taken, items->step, items->part, count) : count;
        if (before < count) {
            items->begin = items->rest + before;
            items->end = count - before < items->part ? items->rest_end : items->begin + items->part;
            items->did += items->end - items->begin;
            return true;
        }
        size_t share = items->work.count / (size_t)pool->threads;
        if (!items->helped && count && items->work.uniform && share > items->work.worth)
            note_slow(items, !items->did || (count - items->did) * PARTS >= OFFERED * share);
        if (++items->helped >= pool->threads)
            return false;
        turn_to(items, (size_t)(items->thread + items->helped) % (size_t)pool->threads);
    }
}

static thread_result THREAD_CALL work(void *argument)
{
    struct worker *own = argument;
    struct pool *pool = own->pool;
    float_mode_set();
    for (unsigned seen = 0;; seen++) {
        gate_wait(&pool->started, seen, pool->spins ? IDLE_SPIN_NS : 0, NULL);
        if (pool->closing)
            return 0;
        pool->function(pool->context, own->number);
        (void)pool_barrier(pool); /* the last one: pool_run waits in it */
    }
}

void pool_run(struct pool *pool, pool_function *function, void *context, const atomic_int *cancelled)
{
    pool->cancelled = cancelled;
    pool->function = function;
    pool->context = context;
    if (pool->threads > 1)
        gate_open(&pool->started);
    unsigned mode = float_mode_set();
    function(context, 0);
    (void)pool_barrier(pool);
    float_mode_restore(mode);
}

/* Whether each thread can have a processor. If not, a spinning thread would keep others from working, or use up a quota
 * that they then wait for. */
static bool enough_processors(const struct es_threads *threads)
{
    if (threads->most_busy && threads->count > threads->most_busy)
        return false;
    return threads->count <= processors_allowed();
}

struct pool *pool_open(const struct es_threads *wanted)
{
    int threads = (int)wanted->count;
    size_t bytes = sizeof(struct pool) + (size_t)threads * sizeof(struct worker); /* a whole number of lines each */
    struct pool *pool = aligned_take(CACHE_LINE, bytes);
    if (!pool)
        return NULL;
    gate_init(&pool->started);
    gate_init(&pool->passed);
    atomic_init(&pool->arrived, 0);
    atomic_init(&pool->crowded, 0);
    pool->threads = threads;
    pool->spins = enough_processors(wanted);
    pool->closing = false;
    pool->go_on = true;
    pool->cancelled = NULL;
    pool->started_threads = 0;
    for (int i = 0; i < threads; i++) {
        pool->worker[i] = (struct worker){.pool = pool, .number = i};
        atomic_init(&pool->worker[i].taken, 0);
        atomic_init(&pool->worker[i].slow[0], false);
        atomic_init(&pool->worker[i].slow[1], false);
    }

    bool failed = false;
    for (int i = 1; i < threads && !failed; i++) {
        failed = !thread_start(&pool->worker[i].thread, work, &pool->worker[i]);
        pool->started_threads += !failed;
    }
    if (failed) {
        pool_close(pool);
        return NULL;
    }
    return pool;
}

void pool_close(struct pool *pool)
{
    pool->closing = true;
    gate_open(&pool->started);
    for (int i = 1; i <= pool->started_threads; i++)
        thread_join(pool->worker[i].thread);
    gate_destroy(&pool->started);
    gate_destroy(&pool->passed);
    aligned_give(pool);
}

int pool_threads(const struct pool *pool)
{
    return pool->threads;
}
