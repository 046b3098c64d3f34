/* Several continuations of a cache in one forward. Their keys and values are stored separately, node by node; a row is
 * computed as if its path followed the cache. */
#ifndef EDGESPEC_TREE_H
#define EDGESPEC_TREE_H

#include "sequence.h"

struct tree {
    const int32_t *parents;       /* of all nodes */
    size_t first;                 /* of the current nodes */
    uint8_t depth[ES_MOST_SCORED]; /* of all nodes; 0 for those that follow the cache */
};

/* Whether first + count nodes with these parents are a tree; if so, fills `tree`. */
bool tree_read(struct tree *tree, const int32_t *parents, int32_t first, int32_t count);

/* The keys and values from the tile on that position `start` lies in: what the cache holds of it, then the path down to
 * `node`. Room for PATH_POSITIONS of each. */
void tree_path(const struct es_sequence *sequence, const struct tree *tree, size_t start, size_t node, size_t layer,
               size_t kv_head, uint16_t *keys, uint16_t *values);

#endif
