/* The pool that unequal_cores.py measures: the product's, or one with equal shares of every step that no other thread
 * takes from, each optionally with one thread slowed to a third of its speed. This file replaces pool.c, which is
 * included as pool_of_product.h. */
#define pool_take take_shared
#include "pool_of_product.h"
#undef pool_take

/* Written between forwards. */
static bool equal_shares;
static int held_thread = -1;

enum { SLOWNESS = 3 };

ES_EXPORT void es_unequal(int32_t equal, int32_t held);
void es_unequal(int32_t equal, int32_t held)
{
    equal_shares = equal;
    held_thread = held;
}

static bool take_equal(struct pool_items *items)
{
    if (items->helped >= 0)
        return false;
    items->helped = 0;
    turn_to(items, (size_t)items->thread);
    items->end = items->rest_end;
    return items->begin < items->end;
}

bool pool_take(struct pool_items *items)
{
    static _Thread_local int64_t begun; /* of the current part */
    bool held = items->thread == held_thread;
    if (held && items->helped >= 0) {
        int64_t end = begun + SLOWNESS * (now_ns() - begun);
        while (now_ns() < end)
            relax();
    }
    bool more = (equal_shares ? take_equal : take_shared)(items);
    if (held)
        begun = now_ns();
    return more;
}
