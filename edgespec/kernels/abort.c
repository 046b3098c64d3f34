/* Asked by other runtimes' threads, thousands of times a forward: a load and nothing else. */
#include <stdatomic.h>

#include "edgespec_kernels.h"

_Static_assert(sizeof(_Atomic int32_t) == sizeof(int32_t), "whoever owns the flag writes a plain int32");

bool es_abort(void *flag)
{
    return atomic_load_explicit((_Atomic int32_t *)flag, memory_order_relaxed) != 0;
}
