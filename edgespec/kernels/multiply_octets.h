/* Products for instruction sets whose registers hold 8 rows or fewer: half a tile, an octet, at a time.
 *
 * octet_avx2.h and octet_neon.h say what an octet is and how a dot product is made; what is computed stands here once.
 * A block's codes are unpacked once and serve up to 4 inputs, as many as the registers hold sums and codes for. Tiles
 * are walked a group at a time, both octets and all inputs, so that only the first comes from memory; sums wait in
 * `out` meanwhile, which rounds nothing. */
#ifndef EDGESPEC_MULTIPLY_OCTETS_H
#define EDGESPEC_MULTIPLY_OCTETS_H

#include <string.h>

#include "lanes.h"
#include "level.h"
#include "unrolled.h"

#if defined(__aarch64__)
#include "octet_neon.h"
#else
#include "octet_avx2.h"
#endif

enum { OCTET = TILE_ROWS / 2, OCTET_PASS_ROWS = 4 };

/* Inputs of the first of one or two passes: 5 are 3 and 2, not 4 and 1. */
static inline size_t pass_rows(size_t rows)
{
    return rows <= OCTET_PASS_ROWS ? rows : (rows + 1) / 2;
}

/* Blocks that lie together, and the inputs that meet them. */
struct group {
    const uint8_t *tile;              /* of the group */
    size_t blocks;
    size_t half;                      /* 0 or 1: which octet */
    const struct activation_block *x; /* of the first input */
    size_t stride;                    /* blocks from one input to the next */
};

ALWAYS_INLINE void unpack_codes(const int64_t type, const uint8_t *line, octet_codes codes[8])
{
    UNROLLED
    for (int j = 0; j < 8; j++) {
        if (type == ES_Q8_0)
            codes[j] = codes_load(line + j * LINE_BYTES);
        else if (j < 4)
            codes[j] = codes_low_nibbles(codes_load(line + j * LINE_BYTES));
        else
            codes[j] = codes_high_nibbles(codes_load(line + (j - 4) * LINE_BYTES));
    }
}

ALWAYS_INLINE octet_ints dot_32(const int64_t type, const octet_codes codes[8], const struct activation_block *x)
{
    switch (type) {
    case ES_Q8_0: return dot_signed(codes, x->q, x->minus8);
    case ES_Q4_0: return dot_4_bits(codes, x->q, x->minus8);
    default: return dot_4_bits(codes, x->q, 0);
    }
}

/* A group's share of the sums of `rows` inputs, to out[r]. Constant arguments make each call a loop of its own. */
ALWAYS_INLINE void add_group(const int64_t type, const int rows, const struct group *group, float (*out)[TILE_ROWS])
{
    const int lines = type == ES_Q8_0 ? 8 : 4;
    const uint8_t *codes_at = group->tile + group->half * (LINE_BYTES / 2);
    const uint8_t *scales_at =
        group->tile + group->blocks * lines * LINE_BYTES + group->half * (HALF_LINE_BYTES / 2);
    /* Each octet asks for its half of the next group, spread over its blocks. */
    const size_t share = block_bytes(type) / 2;
    const uint8_t *ahead = group->tile + group->blocks * (block_bytes(type) + group->half * share);
    octet sum[OCTET_PASS_ROWS];
    UNROLLED
    for (int r = 0; r < rows; r++)
        sum[r] = octet_load(out[r] + group->half * OCTET);
    for (size_t b = 0; b < group->blocks; b++) {
        octet_codes codes[8];
        unpack_codes(type, codes_at + b * lines * LINE_BYTES, codes);
        prefetch(ahead + b * share, share);
        octet scale = octet_halves(scales_at + b * HALF_LINE_BYTES), minimum = scale;
        if (type == ES_Q4_1)
            minimum = octet_halves(scales_at + (group->blocks + b) * HALF_LINE_BYTES);
        const struct activation_block *x = group->x + b;
        UNROLLED
        for (int r = 0; r < rows; r++, x += group->stride) {
            octet dot = octet_from_ints(dot_32(type, codes, x));
            sum[r] = octet_fma(dot, octet_times(scale, x->scale), sum[r]);
            if (type == ES_Q4_1)
                sum[r] = octet_fma_times(minimum, x->scaled_sum, sum[r]);
        }
    }
    UNROLLED
    for (int r = 0; r < rows; r++)
        octet_store(out[r] + group->half * OCTET, sum[r]);
}

typedef void add_group_function(size_t rows, const struct group *group, float (*out)[TILE_ROWS]);

ALWAYS_INLINE void multiply_groups(const int64_t type, add_group_function *add, const uint8_t *tile,
                                   const struct activations *x, size_t first, size_t rows, float out[][TILE_ROWS])
{
    size_t blocks = x->columns / BLOCK;
    const struct activation_block *input = x->blocks + first * blocks;
    size_t pass = pass_rows(rows);
    memset(out, 0, rows * sizeof out[0]);
    for (size_t start = 0; start < blocks; start += GROUP_BLOCKS) {
        size_t here = blocks - start < GROUP_BLOCKS ? blocks - start : GROUP_BLOCKS;
        for (size_t half = 0; half < 2; half++)
            for (size_t r = 0; r < rows; r += pass) {
                const struct group group = {tile, here, half, input + r * blocks + start, blocks};
                add(rows - r < pass ? rows - r : pass, &group, out + r);
            }
        tile += here * block_bytes(type);
    }
}

/* Products of float weights, over whole tiles: one column's lanes after another's. */
ALWAYS_INLINE void add_columns(const int64_t type, const int rows, const uint8_t *tile, const float *x,
                               size_t columns, float (*out)[TILE_ROWS])
{
    const size_t line_bytes = type == ES_F32 ? LINE_BYTES : HALF_LINE_BYTES;
    lanes sum[OCTET_PASS_ROWS];
    UNROLLED
    for (int r = 0; r < rows; r++)
        sum[r] = lanes_set(0.0f);
    for (size_t k = 0; k < columns; k++, tile += line_bytes) {
        lanes weights = type == ES_F32 ? lanes_load((const float *)(const void *)tile)
                                       : lanes_from_halves((const uint16_t *)(const void *)tile);
        UNROLLED
        for (int r = 0; r < rows; r++)
            sum[r] = lanes_fma(weights, lanes_set(x[(size_t)r * columns + k]), sum[r]);
    }
    UNROLLED
    for (int r = 0; r < rows; r++)
        lanes_store(out[r], sum[r]);
}

#define EACH_COUNT(call, ...)           \
    switch (rows) {                     \
    case 1: call(1, __VA_ARGS__) break; \
    case 2: call(2, __VA_ARGS__) break; \
    case 3: call(3, __VA_ARGS__) break; \
    case 4: call(4, __VA_ARGS__) break; \
    }

#define DEFINE_BLOCKS(name, type)                                                                 \
    static void add_##name(size_t rows, const struct group *group, float (*out)[TILE_ROWS])       \
    {                                                                                             \
        EACH_COUNT(CALL_GROUP, type)                                                              \
    }                                                                                             \
    static void multiply_##name(const uint8_t *tile, const struct activations *x, size_t first,   \
                                size_t rows, float out[][TILE_ROWS])                              \
    {                                                                                             \
        multiply_groups(type, add_##name, tile, x, first, rows, out);                             \
    }
#define CALL_GROUP(count, type) add_group(type, count, group, out);

DEFINE_BLOCKS(q4_0, ES_Q4_0)
DEFINE_BLOCKS(q4_1, ES_Q4_1)
DEFINE_BLOCKS(q8_0, ES_Q8_0)

#define DEFINE_FLOATS(name, type)                                                                             \
    static void add_##name(size_t rows, const uint8_t *tile, const float *x, size_t columns,                  \
                           float (*out)[TILE_ROWS])                                                           \
    {                                                                                                         \
        EACH_COUNT(CALL_COLUMNS, type)                                                                        \
    }                                                                                                         \
    static void multiply_##name(const uint8_t *tile, const struct activations *x, size_t first, size_t rows,  \
                                float out[][TILE_ROWS])                                                       \
    {                                                                                                         \
        size_t pass = pass_rows(rows);                                                                        \
        for (size_t r = 0; r < rows; r += pass)                                                               \
            add_##name(rows - r < pass ? rows - r : pass, tile, x->floats + (first + r) * x->columns,         \
                       x->columns, out + r);                                                                  \
    }
#define CALL_COLUMNS(count, type) add_columns(type, count, tile, x, columns, out);

DEFINE_FLOATS(f16, ES_F16)
DEFINE_FLOATS(f32, ES_F32)

#endif
