/* Products of quantised weights for instruction sets whose registers hold 8 rows or fewer: a tile is two octets.
 *
 * octet_avx2.h and octet_neon.h define an octet and its dot product; this file has the shared computation. A block's codes
 * are unpacked dword by dword, and each dword serves up to 4 inputs before the next: that makes 8 interleaved chains of dot
 * products, which hide each other's latency. With AVX2 they are of 4 inputs with both octets, which loads activations once
 * for both; with NEON of one octet, which takes two registers, since two octets would not fit. Tiles are processed a group
 * at a time with all inputs, so that only the first input reads memory; the sums are kept in `out` between groups, without
 * rounding. */
#ifndef EDGESPEC_MULTIPLY_OCTETS_H
#define EDGESPEC_MULTIPLY_OCTETS_H

#include <string.h>

#include "level.h"
#include "multiply_passes.h"
#include "tables.h"
#include "unrolled.h"

#if defined(__aarch64__)
#include "octet_neon.h"
#else
#include "octet_avx2.h"
#endif

enum { OCTET = TILE_ROWS / 2 };

/* Prefetch distance in bytes; measured as for AVX-512. */
enum { AHEAD_OF_GROUP = 8192 };

/* A group of blocks, OCTETS_AT_ONCE octets of them, and its inputs. */
struct group {
    const uint8_t *tile; /* where the group begins */
    size_t blocks;
    size_t octet;                     /* the first of the tile's two */
    const struct activation_block *x; /* of the first input */
    size_t stride;                    /* blocks from one input to the next */
};

/* The factor of a block's dot products, and what is added or, for K-quants, subtracted. */
struct scales {
    octet scale; /* Q3_K, Q6_K: of the first 16 columns */
    octet high;  /* Q3_K, Q6_K: of the last 16 */
    octet minimum;
};

/* Four blocks' 6-bit scales and minimums, a byte for each; the next one is byte 0. */
struct six_bits {
    octet_codes scales, minimums;
};

/* Bits of a code. Q3_K's count as 5: four dwords of them are the half of a block that has one scale. */
ALWAYS_INLINE int code_bits(const int64_t type)
{
    if (type == ES_Q8_0 || has_table(type))
        return 8;
    return type == ES_Q6_K ? 6 : code_lines(type) == 5 || type == ES_Q3_K ? 5 : 4;
}

/* Dword j of a block's codes without their offset; see layout.h. */
ALWAYS_INLINE octet_codes unpack_dword(const int64_t type, const uint8_t *lines, const int j)
{
    if (type == ES_Q8_0)
        return codes_ready(8, codes_load(lines + j * LINE_BYTES));
    if (type == ES_Q3_K) {
        octet_codes pairs = codes_load(lines + (1 + j / 4) * LINE_BYTES);
        return codes_or(codes_field(pairs, j % 4 * -2, 0x03), codes_field(codes_load(lines), 2 - j, 0x04));
    }
    octet_codes codes = codes_field(codes_load(lines + j % 4 * LINE_BYTES), j < 4 ? 0 : -4, 0x0f);
    if (has_table(type))
        return codes_of(codes_ready(8, table_load(values_of(type))), codes);
    if (code_lines(type) == 5)
        codes = codes_or(codes, codes_field(codes_load(lines + 4 * LINE_BYTES), 4 - j, 0x10));
    if (type == ES_Q6_K)
        codes = codes_or(codes, codes_field(codes_load(lines + (4 + j / 4) * LINE_BYTES), 4 - j % 4 * 2, 0x30));
    return codes;
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

/* An octet's scales of block b of a group. Half lines and lines behind the codes are halved in turn: the octet is 8 rows
 * of each. */
ALWAYS_INLINE struct scales load_scales(const int64_t type, const struct group *group, size_t octet_number, size_t b,
                                        struct six_bits *bits)
{
    const uint8_t *behind = group->tile + group->blocks * code_lines(type) * LINE_BYTES;
    const uint8_t *halves = behind + octet_number * (HALF_LINE_BYTES / 2);
    struct scales found;
    switch (type) {
    case ES_Q4_K:
    case ES_Q5_K:
        if (b % 4 == 0)
            *bits = load_six_bits(behind + octet_number * (LINE_BYTES / 2), b != 0);
        found.scale = octet_mul(octet_halves(halves + K_D_AT), octet_next_byte(&bits->scales));
        found.minimum = octet_mul(octet_halves(halves + K_DMIN_AT), octet_next_byte(&bits->minimums));
        return found;
    case ES_Q3_K:
    case ES_Q6_K: {
        octet d = octet_halves(halves + Q6_K_D_AT);
        octet_ints pairs = byte_pairs_load(halves + b * HALF_LINE_BYTES);
        found.scale = octet_mul(d, octet_first_of_pair(pairs));
        found.high = octet_mul(d, octet_second_of_pair(pairs));
        return found;
    }
    case ES_IQ4_XS:
    case ES_IQ3_S:
    case ES_IQ3_XXS: {
        const uint8_t *scales = behind + octet_number * (QUARTER_LINE_BYTES / 2), *d = behind + TABLE_D_AT;
        octet own = octet_load((const float *)(const void *)(d + octet_number * (LINE_BYTES / 2)));
        found.scale = octet_mul(own, octet_from_ints(octet_bytes(scales + b * QUARTER_LINE_BYTES)));
        return found;
    }
    case ES_MXFP4:
        found.scale = octet_exponents(behind + octet_number * (QUARTER_LINE_BYTES / 2) + b * QUARTER_LINE_BYTES);
        return found;
    case ES_Q4_1:
    case ES_Q5_1: found.minimum = octet_halves(halves + (group->blocks + b) * HALF_LINE_BYTES); break;
    }
    found.scale = octet_halves(halves + b * HALF_LINE_BYTES);
    return found;
}

/* What a block's dot product starts from: the codes' offset. Of two halves, the one that dword j begins. */
ALWAYS_INLINE int32_t offset_of(const int64_t type, const struct activation_block *x, const int j)
{
    switch (type) {
    case ES_Q4_0: return x->minus8;
    case ES_Q5_0: return 2 * x->minus8;
    case ES_Q3_K: return (j ? x->minus32_high : x->minus32_low) / 8;
    case ES_Q6_K: return j ? x->minus32_high : x->minus32_low;
    default: return code_bits(type) == 8 ? SIGNED_OFFSET * x->minus8 : 0;
    }
}

/* Dot products of dwords first .. first + count - 1 of a block with `rows` inputs. */
ALWAYS_INLINE void dot_dwords(const int64_t type, const int rows, const int first, const int count,
                              const uint8_t *lines, const struct activation_block *x, size_t stride,
                              octet dots[FEW_ROWS][OCTETS_AT_ONCE])
{
    struct octet_dot dot[FEW_ROWS][OCTETS_AT_ONCE];
    UNROLLED
    for (int r = 0; r < rows; r++)
        UNROLLED
        for (int o = 0; o < OCTETS_AT_ONCE; o++)
            dot[r][o] = dot_from(offset_of(type, x + r * stride, first));
    UNROLLED
    for (int j = first; j < first + count; j++) {
        octet_codes codes[OCTETS_AT_ONCE];
        UNROLLED
        for (int o = 0; o < OCTETS_AT_ONCE; o++)
            codes[o] = unpack_dword(type, lines + o * (LINE_BYTES / 2), j);
        UNROLLED
        for (int r = 0; r < rows; r++) {
            const octet_inputs four = inputs_load(x[r * stride].q, j);
            UNROLLED
            for (int o = 0; o < OCTETS_AT_ONCE; o++)
                dot_add(code_bits(type), j, codes[o], four, &dot[r][o]);
        }
    }
    UNROLLED
    for (int r = 0; r < rows; r++)
        UNROLLED
        for (int o = 0; o < OCTETS_AT_ONCE; o++)
            dots[r][o] = octet_from_ints(dot[r][o].sum);
}

/* One step of the chains of `rows` inputs, as level.h defines it. */
ALWAYS_INLINE void add_block(const int64_t type, const int rows, const uint8_t *lines,
                             const struct scales own[OCTETS_AT_ONCE], const struct activation_block *x, size_t stride,
                             octet sum[FEW_ROWS][OCTETS_AT_ONCE])
{
    octet dots[FEW_ROWS][OCTETS_AT_ONCE], part[FEW_ROWS][OCTETS_AT_ONCE];
    dot_dwords(type, rows, 0, has_two_scales(type) ? 4 : 8, lines, x, stride, dots);
    if (has_two_scales(type)) {
        UNROLLED
        for (int r = 0; r < rows; r++)
            UNROLLED
            for (int o = 0; o < OCTETS_AT_ONCE; o++)
                part[r][o] = octet_mul(dots[r][o], own[o].scale);
        dot_dwords(type, rows, 4, 4, lines, x, stride, dots);
    }
    UNROLLED
    for (int r = 0; r < rows; r++) {
        const struct activation_block *const input = x + r * stride;
        UNROLLED
        for (int o = 0; o < OCTETS_AT_ONCE; o++) {
            if (has_two_scales(type)) {
                part[r][o] = octet_fma(dots[r][o], own[o].high, part[r][o]);
                sum[r][o] = octet_fma_times(part[r][o], input->scale, sum[r][o]);
                continue;
            }
            sum[r][o] = octet_fma(dots[r][o], octet_times(own[o].scale, input->scale), sum[r][o]);
            if (type == ES_Q4_1 || type == ES_Q5_1)
                sum[r][o] = octet_fma_times(own[o].minimum, input->scaled_sum, sum[r][o]);
            if (type == ES_Q4_K || type == ES_Q5_K)
                sum[r][o] = octet_fnma_times(own[o].minimum, input->scaled_sum, sum[r][o]);
        }
    }
}

/* A group's share of the sums of `rows` inputs, to out[r]. Constant arguments give each call a specialised loop. */
ALWAYS_INLINE void add_group(const int64_t type, const int rows, const struct group *group, float (*out)[TILE_ROWS])
{
    const size_t code_bytes = code_lines(type) * LINE_BYTES;
    const uint8_t *codes_at = group->tile + group->octet * (LINE_BYTES / 2);
    /* Each call prefetches its octets' part of a group, spread over the blocks. */
    const size_t share = block_bytes(type) * OCTETS_AT_ONCE / 2;
    const uint8_t *ahead = group->tile + AHEAD_OF_GROUP + group->octet * group->blocks * share;
    struct six_bits bits[OCTETS_AT_ONCE] = {0}; /* those of blocks 0 and 4 come with these */
    octet sum[FEW_ROWS][OCTETS_AT_ONCE];
    UNROLLED
    for (int r = 0; r < rows; r++)
        UNROLLED
        for (int o = 0; o < OCTETS_AT_ONCE; o++)
            sum[r][o] = octet_load(out[r] + (group->octet + o) * OCTET);
    for (size_t b = 0; b < group->blocks; b++) {
        struct scales own[OCTETS_AT_ONCE];
        prefetch(ahead + b * share, share);
        UNROLLED
        for (int o = 0; o < OCTETS_AT_ONCE; o++)
            own[o] = load_scales(type, group, group->octet + o, b, &bits[o]);
        add_block(type, rows, codes_at + b * code_bytes, own, group->x + b, group->stride, sum);
    }
    UNROLLED
    for (int r = 0; r < rows; r++)
        UNROLLED
        for (int o = 0; o < OCTETS_AT_ONCE; o++)
            octet_store(out[r] + (group->octet + o) * OCTET, sum[r][o]);
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
        for (size_t first_octet = 0; first_octet < 2; first_octet += OCTETS_AT_ONCE)
            for (size_t r = 0; r < rows; r += pass) {
                const struct group group = {tile, here, first_octet, input + r * blocks + start, blocks};
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
DEFINE_BLOCKS(q3_k, ES_Q3_K)
DEFINE_BLOCKS(q4_k, ES_Q4_K)
DEFINE_BLOCKS(q5_k, ES_Q5_K)
DEFINE_BLOCKS(q6_k, ES_Q6_K)
DEFINE_BLOCKS(iq3_xxs, ES_IQ3_XXS)
DEFINE_BLOCKS(iq3_s, ES_IQ3_S)
DEFINE_BLOCKS(iq4_nl, ES_IQ4_NL)
DEFINE_BLOCKS(iq4_xs, ES_IQ4_XS)
DEFINE_BLOCKS(mxfp4, ES_MXFP4)

#endif
