#include "tree.h"

bool tree_read(struct tree *tree, const int32_t *parents, int32_t first, int32_t count)
{
    if (first < 0 || count < 0 || count > ES_MOST_SCORED || first > ES_MOST_SCORED - count)
        return false;
    tree->parents = parents;
    tree->first = (size_t)first;
    for (int32_t i = 0; i < first + count; i++) {
        if (parents[i] < -1 || parents[i] >= i)
            return false;
        tree->depth[i] = parents[i] < 0 ? 0 : (uint8_t)(tree->depth[parents[i]] + 1);
    }
    return true;
}

void tree_path(const struct es_sequence *sequence, const struct tree *tree, size_t start, size_t node, size_t layer,
               size_t kv_head, uint16_t *keys, uint16_t *values)
{
    size_t head_length = (size_t)sequence->model->layer[layer].head_length, from = start / TILE_ROWS * TILE_ROWS;
    size_t cached = start - from, bytes = head_length * sizeof *keys;
    if (cached) {
        memcpy(keys, keys_of(sequence, layer, kv_head) + from * head_length, TILE_ROWS * bytes);
        memcpy(values, values_of(sequence, layer, kv_head) + from * head_length, cached * bytes);
    }
    for (int32_t i = (int32_t)node; i >= 0; i = tree->parents[i])
        put_position(keys, values, head_length, cached + tree->depth[i],
                     tree_key_of(sequence, layer, kv_head, (size_t)i),
                     tree_value_of(sequence, layer, kv_head, (size_t)i));
}

int32_t es_keep(struct es_sequence *sequence, const int32_t *nodes, int32_t count, int64_t start)
{
    const struct es_model *model = sequence->model;
    if (count < 0 || start < 0 || (size_t)start + (size_t)count > sequence->context_length)
        return ES_BAD_REQUEST;
    for (int32_t i = 0; i < count; i++)
        if (nodes[i] < 0 || nodes[i] >= ES_MOST_SCORED)
            return ES_BAD_REQUEST;
    for (size_t layer = 0; layer < (size_t)model->layers; layer++)
        for (size_t head = 0; has_keys(model, layer) && head < (size_t)model->layer[layer].kv_heads; head++)
            for (size_t i = 0; i < (size_t)count; i++)
                put_position(keys_of(sequence, layer, head), values_of(sequence, layer, head),
                             (size_t)model->layer[layer].head_length, (size_t)start + i,
                             tree_key_of(sequence, layer, head, (size_t)nodes[i]),
                             tree_value_of(sequence, layer, head, (size_t)nodes[i]));
    return ES_OK;
}
