/* Hands out parts of one allocation, each from a cache line on; called twice, to count and to take. */
#ifndef EDGESPEC_CARVER_H
#define EDGESPEC_CARVER_H

#include <stddef.h>
#include <stdint.h>

#include "layout.h"

struct carver {
    uint8_t *base; /* null while counting */
    size_t used;
};

static inline void *carve(struct carver *carver, size_t bytes)
{
    void *part = carver->base ? carver->base + carver->used : NULL;
    carver->used += (bytes + LINE_BYTES - 1) / LINE_BYTES * LINE_BYTES;
    return part;
}

#endif
