/* Differences between POSIX and Windows in threads, locks, clocks and processes. A file that includes it
 * defines _GNU_SOURCE before everything else. */
#ifndef EDGESPEC_THREADS_H
#define EDGESPEC_THREADS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

/* Attention keeps 110 KB on the stack. Threads have 128 KB on musl unless they ask for more, and 512 KB on macOS. */
enum { LEAST_STACK = 512 * 1024 };

#if defined(_WIN32)

#define WIN32_LEAN_AND_MEAN
#include <malloc.h>
#include <windows.h>

typedef SRWLOCK thread_lock;
typedef CONDITION_VARIABLE thread_condition;
typedef HANDLE thread_handle;
typedef DWORD thread_result;
#define THREAD_CALL WINAPI

static inline void lock_init(thread_lock *lock) { InitializeSRWLock(lock); }
static inline void lock_destroy(thread_lock *lock) { (void)lock; }
static inline void lock_take(thread_lock *lock) { AcquireSRWLockExclusive(lock); }
static inline void lock_give(thread_lock *lock) { ReleaseSRWLockExclusive(lock); }

static inline void condition_init(thread_condition *condition) { InitializeConditionVariable(condition); }
static inline void condition_destroy(thread_condition *condition) { (void)condition; }
static inline void condition_wait(thread_condition *condition, thread_lock *lock)
{
    (void)SleepConditionVariableSRW(condition, lock, INFINITE, 0);
}
static inline void condition_wake_all(thread_condition *condition) { WakeAllConditionVariable(condition); }

static inline bool thread_start(thread_handle *thread, thread_result(THREAD_CALL *function)(void *), void *argument)
{
    *thread = CreateThread(NULL, LEAST_STACK, function, argument, STACK_SIZE_PARAM_IS_A_RESERVATION, NULL);
    return *thread != NULL;
}
static inline void thread_join(thread_handle thread)
{
    (void)WaitForSingleObject(thread, INFINITE);
    (void)CloseHandle(thread);
}
/* Yields this processor to another waiting thread. */
static inline void thread_yield(void) { (void)SwitchToThread(); }

static inline int64_t now_ns(void)
{
    LARGE_INTEGER ticks, each_second;
    QueryPerformanceCounter(&ticks);
    QueryPerformanceFrequency(&each_second);
    int64_t seconds = ticks.QuadPart / each_second.QuadPart, rest = ticks.QuadPart % each_second.QuadPart;
    return seconds * 1000000000 + rest * 1000000000 / each_second.QuadPart;
}

/* Processors that this process may use. */
static inline int64_t processors_allowed(void)
{
    DWORD_PTR mine = 0, all = 0;
    if (GetProcessAffinityMask(GetCurrentProcess(), &mine, &all) && mine)
        return __builtin_popcountll((unsigned long long)mine);
    return (int64_t)GetActiveProcessorCount(ALL_PROCESSOR_GROUPS); /* of more than one group, there is no mask */
}

static inline long process_number(void) { return (long)GetCurrentProcessId(); }

static inline void *aligned_take(size_t alignment, size_t bytes) { return _aligned_malloc(bytes, alignment); }
static inline void aligned_give(void *memory) { _aligned_free(memory); }

#else

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

typedef pthread_mutex_t thread_lock;
typedef pthread_cond_t thread_condition;
typedef pthread_t thread_handle;
typedef void *thread_result;
#define THREAD_CALL

static inline void lock_init(thread_lock *lock) { pthread_mutex_init(lock, NULL); }
static inline void lock_destroy(thread_lock *lock) { pthread_mutex_destroy(lock); }
static inline void lock_take(thread_lock *lock) { pthread_mutex_lock(lock); }
static inline void lock_give(thread_lock *lock) { pthread_mutex_unlock(lock); }

static inline void condition_init(thread_condition *condition) { pthread_cond_init(condition, NULL); }
static inline void condition_destroy(thread_condition *condition) { pthread_cond_destroy(condition); }
static inline void condition_wait(thread_condition *condition, thread_lock *lock) { pthread_cond_wait(condition, lock); }
static inline void condition_wake_all(thread_condition *condition) { pthread_cond_broadcast(condition); }

/* Blocks all signals except those of a fault, so that the application's threads receive them. A blocked fault would end
 * the process without calling its handler, for example Python's faulthandler. */
static inline void fill_with_others(sigset_t *signals)
{
    static const int faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT, SIGSYS};
    sigfillset(signals);
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++)
        sigdelset(signals, faults[i]);
}

static inline bool thread_start(thread_handle *thread, thread_result (*function)(void *), void *argument)
{
    pthread_attr_t attributes;
    size_t stack = 0;
    if (pthread_attr_init(&attributes))
        return false;
    sigset_t others, before;
    fill_with_others(&others);
    pthread_sigmask(SIG_SETMASK, &others, &before);
    bool started = !pthread_attr_getstacksize(&attributes, &stack) &&
                   (stack >= LEAST_STACK || !pthread_attr_setstacksize(&attributes, LEAST_STACK)) &&
                   !pthread_create(thread, &attributes, function, argument);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    return started;
}
static inline void thread_join(thread_handle thread) { pthread_join(thread, NULL); }
static inline void thread_yield(void) { sched_yield(); }

static inline int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static inline int64_t processors_allowed(void)
{
#if defined(__linux__)
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof allowed, &allowed) == 0)
        return CPU_COUNT(&allowed);
#endif
    return sysconf(_SC_NPROCESSORS_ONLN);
}

static inline long process_number(void) { return (long)getpid(); }

static inline void *aligned_take(size_t alignment, size_t bytes) { return aligned_alloc(alignment, bytes); }
static inline void aligned_give(void *memory) { free(memory); }

#endif
#endif
