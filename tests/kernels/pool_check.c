/* The thread pool by itself, one question a run: prints the values that test_pool.py checks. */
#include "pool.c"

#include <stdio.h>
#include <string.h>
#if !defined(_WIN32)
#include <sys/resource.h>
#endif

enum { MOST_THREADS = 16, STEPS = 40 };

static atomic_int cancelled;

struct job {
    struct pool *pool;
    atomic_int arrived[STEPS];
    int cancel_at; /* the step in which the last thread cancels; -1: in none */
    int ended_at[MOST_THREADS];
    int early; /* steps that began before the one before had ended on all threads */
};

static void many_steps(void *context, int thread)
{
    struct job *job = context;
    int threads = pool_threads(job->pool);
    for (int step = 0; step < STEPS; step++) {
        if (step && atomic_load(&job->arrived[step - 1]) != threads)
            job->early++;
        atomic_fetch_add(&job->arrived[step], 1);
        if (step == job->cancel_at && thread == threads - 1)
            atomic_store(&cancelled, 1);
        job->ended_at[thread] = step;
        if (!pool_barrier(job->pool))
            return;
    }
}

static struct pool *open_pool(int threads)
{
    const struct es_threads wanted = {.count = threads};
    struct pool *pool = pool_open(&wanted);
    if (!pool)
        exit(2);
    return pool;
}

#if defined(_WIN32)
static double processor_s(void)
{
    FILETIME begun, ended, system, own;
    GetProcessTimes(GetCurrentProcess(), &begun, &ended, &system, &own);
    return 1e-7 * ((double)system.dwLowDateTime + (double)own.dwLowDateTime); /* of a process of seconds */
}

static void wait_half_a_second(void) { Sleep(500); }
#else
static double processor_s(void)
{
    struct rusage used;
    getrusage(RUSAGE_SELF, &used);
    return (double)(used.ru_utime.tv_sec + used.ru_stime.tv_sec) +
           1e-6 * (double)(used.ru_utime.tv_usec + used.ru_stime.tv_usec);
}

static void wait_half_a_second(void) { nanosleep(&(struct timespec){.tv_nsec = 500 * 1000 * 1000}, NULL); }
#endif

/* Prints the steps that ran out of turn, and those that ran on too few threads. */
static void check_steps(int threads)
{
    struct pool *pool = open_pool(threads);
    int early = 0, missing = 0;
    for (int run = 0; run < 200; run++) {
        struct job job = {.pool = pool, .cancel_at = -1};
        pool_run(pool, many_steps, &job, &cancelled);
        early += job.early;
        for (int step = 0; step < STEPS; step++)
            missing += atomic_load(&job.arrived[step]) != threads;
    }
    pool_close(pool);
    printf("%d %d\n", early, missing);
}

/* Prints the step that each thread ended in when it was cancelled in step 7, and where the next run ended. */
static void check_cancel(int threads)
{
    struct pool *pool = open_pool(threads);
    for (int run = 0; run < 2; run++) {
        struct job job = {.pool = pool, .cancel_at = run ? -1 : 7};
        atomic_store(&cancelled, 0);
        pool_run(pool, many_steps, &job, &cancelled);
        for (int thread = 0; thread < threads; thread++)
            printf("%d ", job.ended_at[thread]);
    }
    pool_close(pool);
}

/* Prints the processor seconds of half a second with nothing to do. */
static void check_idle(int threads)
{
    struct pool *pool = open_pool(threads);
    struct job job = {.pool = pool, .cancel_at = -1};
    pool_run(pool, many_steps, &job, &cancelled);
    double before = processor_s();
    wait_half_a_second();
    printf("%f\n", processor_s() - before);
    pool_close(pool);
}

enum { MOST_ITEMS = 5000 };

struct sharing {
    struct pool *pool;
    const size_t *counts; /* of the items of each step */
    int steps, cancel_at;
    atomic_int given[MOST_ITEMS]; /* how often each item was */
    int wrong;
    atomic_int beyond; /* parts that are empty, end behind the last item, or are not multiples of `least` */
};

/* Steps of all sizes; the first thread checks each step's items after it. */
static void share_steps(void *context, int thread)
{
    struct sharing *sharing = context;
    for (int step = 0; step < sharing->steps; step++) {
        size_t count = sharing->counts[step], least = 1 + (size_t)step % 3;
        const struct pool_work work = {.count = count, .least = least, .worth = (size_t)step % 7, .uniform = step % 2};
        for (struct pool_items own = pool_divide(sharing->pool, thread, work); pool_take(&own);) {
            if (own.begin >= own.end || own.end > count)
                atomic_fetch_add(&sharing->beyond, 1);
            for (size_t i = own.begin; i < own.end; i++)
                atomic_fetch_add_explicit(&sharing->given[i], 1, memory_order_relaxed);
        }
        if (step == sharing->cancel_at)
            atomic_store(&cancelled, 1);
        if (!pool_barrier(sharing->pool))
            return;
        for (size_t i = 0; !thread && i < MOST_ITEMS; i++)
            sharing->wrong += atomic_exchange_explicit(&sharing->given[i], 0, memory_order_relaxed) != (i < count);
        if (!pool_barrier(sharing->pool))
            return;
    }
}

/* Prints the items that were not given exactly once, and the invalid parts. Every fifth run is cancelled. */
static void check_sharing(int threads)
{
    static const size_t counts[] = {1, 96, 0, 2, 14, 3, 4999, 560, 17, 96, 1, 16, 1000, 5, 33};
    static struct sharing sharing;
    sharing = (struct sharing){.pool = open_pool(threads), .counts = counts, .steps = sizeof counts / sizeof *counts};
    for (int run = 0; run < 300; run++) {
        atomic_store(&cancelled, 0);
        sharing.cancel_at = run % 5 == 4 ? run % sharing.steps : -1;
        pool_run(sharing.pool, share_steps, &sharing, &cancelled);
        for (size_t i = 0; i < MOST_ITEMS; i++) /* of the step that was cancelled */
            atomic_store(&sharing.given[i], 0);
    }
    pool_close(sharing.pool);
    printf("%d %d\n", sharing.wrong, atomic_load(&sharing.beyond));
}

/* One step on a simulated clock, on which thread t takes cost[t] for an item: the first free thread takes next. Returns
 * when the last one is done, and how many items each did. */
static double clocked_step(struct pool *pool, size_t count, size_t worth, const double *cost, size_t *did)
{
    struct pool_items items[MOST_THREADS];
    double free_at[MOST_THREADS] = {0}, end = 0.0;
    bool left[MOST_THREADS];
    for (int t = 0; t < pool->threads; t++) {
        items[t] = pool_divide(pool, t, (struct pool_work){.count = count, .least = 1, .worth = worth, .uniform = true});
        left[t] = true;
        did[t] = 0;
    }
    for (;;) {
        int next = -1;
        for (int t = 0; t < pool->threads; t++)
            if (left[t] && (next < 0 || free_at[t] < free_at[next]))
                next = t;
        if (next < 0)
            break;
        left[next] = pool_take(&items[next]);
        if (left[next]) {
            did[next] += items[next].end - items[next].begin;
            free_at[next] += (double)(items[next].end - items[next].begin) * cost[next];
        }
        end = free_at[next] > end ? free_at[next] : end;
    }
    atomic_fetch_add(&pool->passed.value, 1); /* as if all had passed a barrier */
    return end;
}

/* With one thread at 1 / slowness of the others' speed, prints the worst step relative to items divided by speed, the
 * least and the most that the slow thread did in it relative to the others' average, and the worst step of equal threads.
 * Steps have at least this many items for each thread; once a thread is known to be slow, small shares are divided as
 * well. */
static void check_unequal(int threads, int slowness, int each)
{
    struct pool *pool = open_pool(threads);
    double worst = 0.0, most = 0.0, least = 1e9, equal = 0.0;
    for (int slow = 0; slow < threads; slow++)
        for (size_t count = (size_t)(each * threads); count < 3000; count += 1 + count / 7) {
            double cost[MOST_THREADS];
            size_t did[MOST_THREADS];
            for (int t = 0; t < threads; t++)
                cost[t] = 1.0;
            double even = clocked_step(pool, count, 1, cost, did) * threads / (double)count;
            cost[slow] = slowness;
            (void)clocked_step(pool, count, 1, cost, did); /* from which a thread learns that it is slow */
            double took = clocked_step(pool, count, slow % 2 ? 1 : count, cost, did);
            double ideal = (double)count / (threads - 1 + 1.0 / slowness);
            double share = (double)did[slow] * (threads - 1) / (double)(count - did[slow]);
            worst = took / ideal > worst ? took / ideal : worst;
            equal = even > equal ? even : equal;
            most = share > most ? share : most;
            least = share < least ? share : least;
        }
    pool_close(pool);
    printf("%.3f %.3f %.3f %.3f\n", worst, least, most, equal);
}

/* Prints how many of 1600 items the first thread, at a third of the others' speed, receives: first of a share too small to
 * divide, then of a larger one, of the first again, and of both once it is as fast as the others. */
static void check_worth(int threads)
{
    static const struct {
        double cost;
        size_t share, worth;
    } steps[] = {{3.0, 100, 100}, {3.0, 101, 100}, {3.0, 100, 100}, {1.0, 100, 100}, {1.0, 101, 100}, {3.0, 100, 100}};
    struct pool *pool = open_pool(threads);
    for (size_t i = 0; i < sizeof steps / sizeof *steps; i++) {
        double cost[MOST_THREADS];
        size_t did[MOST_THREADS];
        for (int t = 0; t < threads; t++)
            cost[t] = t ? 1.0 : steps[i].cost;
        (void)clocked_step(pool, steps[i].share * (size_t)threads, steps[i].worth, cost, did);
        printf("%zu ", did[0]);
    }
    pool_close(pool);
}

static thread_result THREAD_CALL run_often(void *argument)
{
    struct pool *pool = argument;
    for (int run = 0; run < 300; run++) {
        struct job job = {.pool = pool, .cancel_at = -1};
        pool_run(pool, many_steps, &job, &cancelled);
        if (job.early)
            exit(3);
    }
    return 0;
}

/* Two pools, each unaware of the other, possibly on the same processors. Prints how many of them spin. */
static void check_crowd(int threads)
{
    struct pool *pools[2];
    thread_handle callers[2];
    int spinning = 0;
    for (int i = 0; i < 2; i++) {
        pools[i] = open_pool(threads);
        spinning += pools[i]->spins;
        if (!thread_start(&callers[i], run_often, pools[i]))
            exit(2);
    }
    for (int i = 0; i < 2; i++) {
        thread_join(callers[i]);
        pool_close(pools[i]);
    }
    printf("%d\n", spinning);
}

static atomic_int leave;

static thread_result THREAD_CALL compute(void *unused)
{
    (void)unused;
    while (!atomic_load_explicit(&leave, memory_order_relaxed))
        ;
    return 0;
}

struct company {
    struct pool *pool;
    bool alone; /* whether the pool believed itself alone at a step */
};

/* The first thread keeps the others waiting for longer than they spin without yielding. */
static void uneven_steps(void *context, int thread)
{
    struct company *company = context;
    for (int step = 0; step < STEPS; step++) {
        if (!thread)
            company->alone |= atomic_load(&company->pool->crowded) <= 0;
        int64_t end = now_ns() + 4 * YIELD_NS;
        while (!thread && now_ns() < end)
            ;
        if (!pool_barrier(company->pool))
            return;
    }
}

/* Runs until the pool detects other threads on its processors, and then until it detects that they have left. */
static void check_neighbours(void)
{
    struct company company = {.pool = open_pool(2)};
    thread_handle neighbours[2];
    for (int i = 0; i < 2; i++)
        if (!thread_start(&neighbours[i], compute, NULL))
            exit(2);
    while (atomic_load(&company.pool->crowded) <= 0)
        pool_run(company.pool, uneven_steps, &company, &cancelled);
    printf("crowded ");
    atomic_store(&leave, 1);
    for (int i = 0; i < 2; i++)
        thread_join(neighbours[i]);
    company.alone = false;
    while (!company.alone)
        pool_run(company.pool, uneven_steps, &company, &cancelled);
    printf("alone\n");
    pool_close(company.pool);
}

#if !defined(_WIN32)
static void told(int number)
{
    static const char text[] = "handled";
    (void)!write(STDOUT_FILENO, text, sizeof text - 1);
    _exit(number == SIGSEGV ? 0 : 4);
}

static void fault(void *context, int thread)
{
    if (thread)
        *(volatile int *)context = 1;
}

/* Prints what a handler says of a fault in a thread of the pool. */
static void check_fault(void)
{
    struct pool *pool = open_pool(2);
    signal(SIGSEGV, told);
    pool_run(pool, fault, NULL, &cancelled);
}

/* Prints whether a thread of the pool takes the application's signals: 0 or 1. */
static void look_at_mask(void *context, int thread)
{
    sigset_t blocked;
    pthread_sigmask(SIG_BLOCK, NULL, &blocked);
    if (thread)
        *(int *)context = !sigismember(&blocked, SIGINT) || !sigismember(&blocked, SIGTERM) || !sigismember(&blocked, SIGUSR1);
}

static void check_signals(void)
{
    struct pool *pool = open_pool(2);
    int taken = -1;
    pool_run(pool, look_at_mask, &taken, &cancelled);
    printf("%d\n", taken);
    pool_close(pool);
}

#endif

static void spins(int threads, int most_busy)
{
    const struct es_threads wanted = {.count = threads, .most_busy = most_busy};
    struct pool *pool = pool_open(&wanted);
    printf("%d ", pool->spins);
    pool_close(pool);
}

#if defined(__linux__) && !defined(OLD_C_LIBRARY) /* which cannot set the default stack */
static void use_stack(void *context, int thread)
{
    (void)thread;
    volatile char used[300 * 1024];
    for (size_t i = 0; i < sizeof used; i += 1024)
        used[i] = 1;
    atomic_fetch_add((atomic_int *)context, used[0]);
}

/* Prints how many workers could use the stack they need, where threads have 128 KB unless asked for more. */
static void check_stack(void)
{
    pthread_attr_t small;
    pthread_attr_init(&small);
    pthread_attr_setstacksize(&small, 128 * 1024);
    pthread_setattr_default_np(&small);
    struct pool *pool = open_pool(3);
    atomic_int used = 0;
    pool_run(pool, use_stack, &used, &cancelled);
    printf("%d\n", atomic_load(&used));
    pool_close(pool);
}
#endif

int main(int count, char **words)
{
    int threads = count > 2 ? atoi(words[2]) : 1;
    const char *question = words[1];
    if (!strcmp(question, "steps"))
        check_steps(threads);
    else if (!strcmp(question, "cancel"))
        check_cancel(threads);
    else if (!strcmp(question, "sharing"))
        check_sharing(threads);
    else if (!strcmp(question, "unequal"))
        check_unequal(threads, atoi(words[3]), atoi(words[4]));
    else if (!strcmp(question, "worth"))
        check_worth(threads);
    else if (!strcmp(question, "idle"))
        check_idle(threads);
    else if (!strcmp(question, "crowd"))
        check_crowd(threads);
    else if (!strcmp(question, "neighbours"))
        check_neighbours();
    else if (!strcmp(question, "spins"))
        spins(threads, count > 3 ? atoi(words[3]) : 0);
#if !defined(_WIN32)
    else if (!strcmp(question, "fault"))
        check_fault();
    else if (!strcmp(question, "signals"))
        check_signals();
#endif
#if defined(__linux__) && !defined(OLD_C_LIBRARY)
    else if (!strcmp(question, "stack"))
        check_stack();
#endif
    else
        return 1;
    return 0;
}
