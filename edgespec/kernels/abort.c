/* Called by other runtimes' threads, thousands of times a forward, so it only loads the flag. */
#include <stdatomic.h>

#include "edgespec_kernels.h"

_Static_assert(sizeof(_Atomic int32_t) == sizeof(int32_t), "the caller writes the flag as a plain int32");

bool es_abort(void *flag)
{
    return atomic_load_explicit((_Atomic int32_t *)flag, memory_order_relaxed) != 0;
}
