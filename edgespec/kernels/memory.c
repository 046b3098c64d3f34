/* Pages directly from the system: zeroed, private, and returned as a whole. */
#define _GNU_SOURCE
#include <stddef.h>

#include "edgespec_kernels.h"

#if defined(_WIN32)
#define WIN32_LEAN_AND_MEAN
#include <windows.h>

void *es_memory_take(int64_t bytes, int32_t huge)
{
    (void)huge; /* needs a privilege that few users have */
    return VirtualAlloc(NULL, (size_t)bytes, MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE);
}

void es_memory_give(void *memory, int64_t bytes)
{
    (void)bytes;
    if (memory)
        (void)VirtualFree(memory, 0, MEM_RELEASE);
}

#else
#include <sys/mman.h>

void *es_memory_take(int64_t bytes, int32_t huge)
{
    void *memory = mmap(NULL, (size_t)bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        return NULL;
#if defined(MADV_HUGEPAGE) && defined(MADV_NOHUGEPAGE)
    /* Optional: without huge pages there are only more page walks. A cache has none even where the system gives them
       to everybody: a conversation of 2 000 tokens in a context of 32 768 would take four times its share. */
    (void)madvise(memory, (size_t)bytes, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
#else
    (void)huge;
#endif
    return memory;
}

void es_memory_give(void *memory, int64_t bytes)
{
    if (memory)
        (void)munmap(memory, (size_t)bytes);
}

#endif
