/* Pages directly from the system: zeroed, private, returned as a whole or, where nothing reads them any more, singly. */
#define _GNU_SOURCE
#include <stddef.h>

#include "edgespec_kernels.h"

#if defined(_WIN32)
#define WIN32_LEAN_AND_MEAN
#include <windows.h>

static size_t page_bytes(void)
{
    SYSTEM_INFO info;
    GetSystemInfo(&info);
    return info.dwPageSize;
}

static void give_pages(void *pages, size_t bytes)
{
    (void)VirtualAlloc(pages, bytes, MEM_RESET, PAGE_READWRITE);
}

void *es_memory_take(int64_t bytes, int32_t pages)
{
    (void)pages; /* huge ones need a privilege that few users have */
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
#include <unistd.h>

#if !defined(MAP_NORESERVE)
#define MAP_NORESERVE 0
#endif

static size_t page_bytes(void)
{
    return (size_t)sysconf(_SC_PAGESIZE);
}

static void give_pages(void *pages, size_t bytes)
{
#if defined(__linux__)
    (void)madvise(pages, bytes, MADV_DONTNEED);
#else
    (void)madvise(pages, bytes, MADV_FREE);
#endif
}

void *es_memory_take(int64_t bytes, int32_t pages)
{
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | (pages == ES_PAGES_SPARSE ? MAP_NORESERVE : 0);
    void *memory = mmap(NULL, (size_t)bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (memory == MAP_FAILED)
        return NULL;
#if defined(MADV_HUGEPAGE) && defined(MADV_NOHUGEPAGE)
    /* Optional: without huge pages there are only more page walks. A cache has none even where the system gives them
       to everybody: a conversation of 2 000 tokens in a context of 32 768 would take four times its share. */
    (void)madvise(memory, (size_t)bytes, pages == ES_PAGES_HUGE ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
#endif
    return memory;
}

void es_memory_give(void *memory, int64_t bytes)
{
    if (memory)
        (void)munmap(memory, (size_t)bytes);
}

#endif

void es_memory_forget(void *memory, int64_t first, int64_t end)
{
    uintptr_t page = page_bytes(), start = (uintptr_t)memory;
    uintptr_t whole = (start + page - 1) / page * page, from = (start + (uintptr_t)first) / page * page;
    uintptr_t to = (start + (uintptr_t)end) / page * page;
    from = from < whole ? whole : from;
    if (from < to)
        give_pages((void *)from, to - from);
}
