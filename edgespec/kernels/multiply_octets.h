/* Products of quantised weights for instruction sets whose registers hold 8 rows or fewer: half a tile, an octet, at a
 * time.
 *
 * octet_avx2.h and octet_neon.h say what an octet is and how a dot product is made; what is computed stands here once.
 * A block's codes are unpacked once and serve up to 4 inputs. Tiles are walked a group at a time, both octets and all
 * inputs, so that only the first comes from memory; sums wait in `out` meanwhile, which rounds nothing. */
#ifndef EDGESPEC_MULTIPLY_OCTETS_H
#define EDGESPEC_MULTIPLY_OCTETS_H

#include <string.h>

#include "level.h"
#include "multiply_passes.h"
#include "unrolled.h"

#if defined(__aarch64__)
#include "octet_neon.h"
#else
#include "octet_avx2.h"
#endif

enum { OCTET = TILE_ROWS / 2 };

/* How far ahead of a group memory is asked for its like, in bytes; found as for AVX-512. */
enum { AHEAD_OF_GROUP = 8192 };

/* Blocks that lie together, one octet of them, and the inputs that meet it. */
struct group {
    const uint8_t *tile; /* where the group begins */
    size_t blocks;
    size_t half;                      /* 0 or 1: which octet */
    const struct activation_block *x; /* of the first input */
    size_t stride;                    /* blocks from one input to the next */
};

/* What the codes of a block are multiplied by, and what is added or, for K-quants, subtracted. */
struct scales {
    octet scale; /* Q6_K: of the first 16 columns */
    octet high;  /* Q6_K: of the last 16 */
    octet minimum;
};

/* Four blocks' 6-bit scales and minimums, a byte for each; the next one is byte 0. */
struct six_bits {
    octet_codes scales, minimums;
};

/* A block's codes without their offset; see layout.h. */
ALWAYS_INLINE void unpack_codes(const int64_t type, const uint8_t *lines, octet_codes codes[8])
{
    UNROLLED
    for (int j = 0; j < 8; j++) {
        if (type == ES_Q8_0) {
            codes[j] = codes_load(lines + j * LINE_BYTES);
            continue;
        }
        codes[j] = codes_field(codes_load(lines + j % 4 * LINE_BYTES), j < 4 ? 0 : -4, 0x0f);
        if (code_lines(type) == 5)
            codes[j] = codes_or(codes[j], codes_field(codes_load(lines + 4 * LINE_BYTES), 4 - j, 0x10));
        if (type == ES_Q6_K)
            codes[j] = codes_or(codes[j],
                                codes_field(codes_load(lines + (4 + j / 4) * LINE_BYTES), 4 - j % 4 * 2, 0x30));
    }
}

ALWAYS_INLINE struct six_bits load_six_bits(const uint8_t *behind, int upper_four)
{
    octet_codes scales = codes_load(behind), minimums = codes_load(behind + LINE_BYTES);
    if (!upper_four)
        return (struct six_bits){codes_field(scales, 0, 0x3f), codes_field(minimums, 0, 0x3f)};
    octet_codes both = codes_load(behind + 2 * LINE_BYTES);
    return (struct six_bits){
        codes_or(codes_field(both, 0, 0x0f), codes_field(scales, -2, 0x30)),
        codes_or(codes_field(both, -4, 0x0f), codes_field(minimums, -2, 0x30)),
    };
}

/* Scales of block b of a group. Half lines and lines behind the codes are halved in turn: the octet is 8 rows of each. */
ALWAYS_INLINE struct scales load_scales(const int64_t type, const struct group *group, size_t b, struct six_bits *bits)
{
    const uint8_t *behind = group->tile + group->blocks * code_lines(type) * LINE_BYTES;
    const uint8_t *halves = behind + group->half * (HALF_LINE_BYTES / 2);
    struct scales found;
    switch (type) {
    case ES_Q4_K:
    case ES_Q5_K:
        if (b % 4 == 0)
            *bits = load_six_bits(behind + group->half * (LINE_BYTES / 2), b != 0);
        found.scale = octet_mul(octet_halves(halves + K_D_AT), octet_next_byte(&bits->scales));
        found.minimum = octet_mul(octet_halves(halves + K_DMIN_AT), octet_next_byte(&bits->minimums));
        return found;
    case ES_Q6_K: {
        octet d = octet_halves(halves + Q6_K_D_AT);
        octet_ints pairs = byte_pairs_load(halves + b * HALF_LINE_BYTES);
        found.scale = octet_mul(d, octet_first_of_pair(pairs));
        found.high = octet_mul(d, octet_second_of_pair(pairs));
        return found;
    }
    case ES_Q4_1:
    case ES_Q5_1: found.minimum = octet_halves(halves + (group->blocks + b) * HALF_LINE_BYTES); break;
    }
    found.scale = octet_halves(halves + b * HALF_LINE_BYTES);
    return found;
}

ALWAYS_INLINE octet_ints dot_block(const int64_t type, const octet_codes codes[8], const struct activation_block *x)
{
    switch (type) {
    case ES_Q4_0: return dot_4_bits(codes, x->q, x->minus8);
    case ES_Q5_0: return dot_5_bits(codes, x->q, 2 * x->minus8);
    case ES_Q5_1:
    case ES_Q5_K: return dot_5_bits(codes, x->q, 0);
    case ES_Q8_0: return dot_signed(codes, x->q, x->minus8);
    default: return dot_4_bits(codes, x->q, 0);
    }
}

/* One step of a row's chain, as level.h defines it. */
ALWAYS_INLINE octet add_block(const int64_t type, const octet_codes codes[8], const struct scales *own,
                              const struct activation_block *x, octet sum)
{
    if (type == ES_Q6_K) { /* the codes' offset is 32 */
        octet_ints low = dot_6_bits(codes, x->q, x->minus32_low);
        octet_ints high = dot_6_bits(codes + 4, x->q + 16, x->minus32_high);
        octet part = octet_fma(octet_from_ints(high), own->high, octet_mul(octet_from_ints(low), own->scale));
        return octet_fma_times(part, x->scale, sum);
    }
    sum = octet_fma(octet_from_ints(dot_block(type, codes, x)), octet_times(own->scale, x->scale), sum);
    if (type == ES_Q4_1 || type == ES_Q5_1)
        return octet_fma_times(own->minimum, x->scaled_sum, sum);
    if (type == ES_Q4_K || type == ES_Q5_K)
        return octet_fnma_times(own->minimum, x->scaled_sum, sum);
    return sum;
}

/* A group's share of the sums of `rows` inputs, to out[r]. Constant arguments make each call a loop of its own. */
ALWAYS_INLINE void add_group(const int64_t type, const int rows, const struct group *group, float (*out)[TILE_ROWS])
{
    const size_t code_bytes = code_lines(type) * LINE_BYTES;
    const uint8_t *codes_at = group->tile + group->half * (LINE_BYTES / 2);
    /* Each octet asks for half of a group, spread over its blocks. */
    const size_t share = block_bytes(type) / 2;
    const uint8_t *ahead = group->tile + AHEAD_OF_GROUP + group->half * group->blocks * share;
    struct six_bits bits = {0}; /* those of blocks 0 and 4 come with these */
    octet sum[FEW_ROWS];
    UNROLLED
    for (int r = 0; r < rows; r++)
        sum[r] = octet_load(out[r] + group->half * OCTET);
    for (size_t b = 0; b < group->blocks; b++) {
        octet_codes codes[8];
        unpack_codes(type, codes_at + b * code_bytes, codes);
        prefetch(ahead + b * share, share);
        struct scales own = load_scales(type, group, b, &bits);
        const struct activation_block *x = group->x + b;
        UNROLLED
        for (int r = 0; r < rows; r++, x += group->stride)
            sum[r] = add_block(type, codes, &own, x, sum[r]);
    }
    UNROLLED
    for (int r = 0; r < rows; r++)
        octet_store(out[r] + group->half * OCTET, sum[r]);
}

typedef void add_group_function(size_t rows, const struct group *group, float (*out)[TILE_ROWS]);

ALWAYS_INLINE void multiply_groups(const int64_t type, add_group_function *add, const uint8_t *tile,
                                   const struct activations *x, size_t first, size_t rows, float out[][TILE_ROWS])
{
    size_t blocks = x->columns / BLOCK, pass = rows_of_pass(rows);
    const struct activation_block *input = x->blocks + first * blocks;
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

#define DEFINE_BLOCKS(name, type)                                                                            \
    static void add_##name(size_t rows, const struct group *group, float (*out)[TILE_ROWS])                  \
    {                                                                                                        \
        EACH_COUNT(ADD_GROUP, type)                                                                          \
    }                                                                                                        \
    static void multiply_##name(const uint8_t *tile, const struct activations *x, size_t first, size_t rows, \
                                float out[][TILE_ROWS])                                                      \
    {                                                                                                        \
        multiply_groups(type, add_##name, tile, x, first, rows, out);                                        \
    }
#define ADD_GROUP(count, type) add_group(type, count, group, out);

DEFINE_BLOCKS(q4_0, ES_Q4_0)
DEFINE_BLOCKS(q4_1, ES_Q4_1)
DEFINE_BLOCKS(q5_0, ES_Q5_0)
DEFINE_BLOCKS(q5_1, ES_Q5_1)
DEFINE_BLOCKS(q8_0, ES_Q8_0)
DEFINE_BLOCKS(q4_k, ES_Q4_K)
DEFINE_BLOCKS(q5_k, ES_Q5_K)
DEFINE_BLOCKS(q6_k, ES_Q6_K)

#endif
