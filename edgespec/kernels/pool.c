#define _GNU_SOURCE
#include "pool.h"

#include <stdalign.h>
#include <stdint.h>

#include "float_mode.h"
#include "threads.h"

/* How long a thread spins before it sleeps. Steps are 1 to 500 us apart and a wake-up takes 5 to 50 us, so within a
 * forward it pays to wait for about as long as that; between forwards there is Python, for 20 to 100 us. */
enum { STEP_SPIN_NS = 100 * 1000, IDLE_SPIN_NS = 200 * 1000 };
/* After this long a spinning thread lets any other have its processor: where two pools share their processors, whoever
 * is waited for may be waiting for it. Measured with two pools of 2 threads on 2 processors: together 0.9 to 1.2 times
 * the speed of one alone, without it 0.2 to 0.6; and alone no difference. */
enum { YIELD_NS = 5 * 1000 };
/* Linux 6.18 charges a thread a time slice of 3 ms for each yield that another one takes up. Beside two programs that
 * compute on the same 2 processors, a forward of a tiny model with 2 threads took 21 ms with a yield at every barrier, and
 * 1 ms where the threads sleep. So after a yield of CROWDED_NS (more than Python takes for a token, less than a slice) the
 * next CROWDED_WAITS waits at barriers are slept through, which costs 64 wake-ups once the others are gone. */
enum { CROWDED_NS = 1000 * 1000, CROWDED_WAITS = 64 };
enum { LOOKS_PER_CLOCK = 64, CACHE_LINE = 128 };

/* A number that only grows, and threads waiting for it to. */
struct gate {
    alignas(CACHE_LINE) atomic_uint value;
    atomic_uint sleeping;
    thread_lock lock;
    thread_condition opened;
};

struct worker {
    thread_handle thread;
    struct pool *pool;
    int number;
};

struct pool {
    struct gate started; /* counts functions */
    struct gate passed;  /* counts barriers */
    alignas(CACHE_LINE) atomic_int arrived;
    alignas(CACHE_LINE) atomic_int crowded; /* waits at barriers to sleep through: others want the processors */
    alignas(CACHE_LINE) int threads;
    bool spins;
    bool closing; /* written before `started` grows, read after */
    bool go_on;   /* written by the last to arrive at a barrier, before it lets the others pass */
    const atomic_int *cancelled;
    pool_function *function;
    void *context;
    int workers;
    struct worker worker[];
};

static inline void relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb"); /* as long as x86's pause, where yield is over at once */
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
    /* A thread counts itself as sleeping before it looks at the value for the last time, and both sides are
     * sequentially consistent: either it sees the new value, or it is seen here. */
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

void pool_run(struct pool *pool, pool_function *function, void *context)
{
    pool->function = function;
    pool->context = context;
    if (pool->threads > 1)
        gate_open(&pool->started);
    unsigned mode = float_mode_set();
    function(context, 0);
    (void)pool_barrier(pool);
    float_mode_restore(mode);
}

/* Whether each thread can have a processor of its own: if not, whoever spins keeps the others from working, or uses
 * a quota up that they then wait for. */
static bool enough_processors(const struct es_threads *threads)
{
    if (threads->most_busy && threads->count > threads->most_busy)
        return false;
    return threads->count <= processors_allowed();
}

struct pool *pool_open(const struct es_threads *wanted, const atomic_int *cancelled)
{
    int threads = (int)wanted->count;
    size_t bytes = sizeof(struct pool) + (size_t)(threads - 1) * sizeof(struct worker);
    bytes = (bytes + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE;
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
    pool->cancelled = cancelled;
    pool->workers = 0;

    bool failed = false;
    for (int i = 0; i < threads - 1 && !failed; i++) {
        pool->worker[i] = (struct worker){.pool = pool, .number = i + 1};
        failed = !thread_start(&pool->worker[i].thread, work, &pool->worker[i]);
        pool->workers += !failed;
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
    for (int i = 0; i < pool->workers; i++)
        thread_join(pool->worker[i].thread);
    gate_destroy(&pool->started);
    gate_destroy(&pool->passed);
    aligned_give(pool);
}

int pool_threads(const struct pool *pool)
{
    return pool->threads;
}
