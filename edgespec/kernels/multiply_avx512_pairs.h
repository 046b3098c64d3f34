/* Products of many inputs for AVX-512 VNNI: two tiles at a time, unpacked once.
 *
 * The two pipes that multiply are the limit: 8 dot products, a multiply and two fma for each input and block. All other
 * work avoids those pipes and stays below two loads a cycle: codes are unpacked once for all inputs, to lines that stay in
 * the first-level cache, and four broadcast activations serve both tiles. The pipes never wait: 16 chains of dot products,
 * of 8 inputs with both tiles (Q3_K and Q6_K: of 4, with both halves of a block), are interleaved line by line, so that a chain's
 * next link is issued when its previous one is done. One input after another took 1.28 times as long on an Intel Emerald
 * Rapids server, since a processor cannot look ahead that far. */
#ifndef EDGESPEC_MULTIPLY_AVX512_PAIRS_H
#define EDGESPEC_MULTIPLY_AVX512_PAIRS_H

#include <string.h>

#include "multiply_avx512_codes.h"
#include "multiply_avx512_k.h"

/* Inputs at a time: two chains each fill half the registers, and their sums go through memory. 6, with all sums in
 * registers, took 1.04 times as long. Q6_K has four chains to an input: 8 inputs, one half of a block after the other, took
 * 1.16 times as long. Blocks unpacked at a time: 20 KiB of a first-level cache of 32 or 48. */
enum { PAIR_ROWS = 8, HALVES_ROWS = 4, OPEN_BLOCKS = 2 * GROUP_BLOCKS };

/* A block of a tile as unsigned bytes and floats. */
struct open_block {
    uint8_t codes[8][LINE_BYTES];
    float scale[TILE_ROWS];
    float other[TILE_ROWS]; /* the minimum, as it is added; Q3_K, Q6_K: the scale of the last 16 columns */
} __attribute__((aligned(64)));

ALWAYS_INLINE int is_six_bits(const int64_t type)
{
    return type == ES_Q4_K || type == ES_Q5_K;
}

ALWAYS_INLINE int with_minimum(const int64_t type)
{
    return type == ES_Q4_1 || type == ES_Q5_1 || is_six_bits(type);
}

ALWAYS_INLINE void open_group(const int64_t type, const uint8_t *group, size_t here, struct open_block *to)
{
    const size_t code_bytes = code_lines(type) * LINE_BYTES;
    const uint8_t *behind = group + here * code_bytes;
    struct six_bits bits = {_mm512_setzero_si512(), _mm512_setzero_si512()};
    for (size_t b = 0; b < here; b++, to++) {
        __m512i codes[8];
        unpack_codes(type, group + b * code_bytes, codes);
        UNROLLED
        for (int j = 0; j < 8; j++)
            _mm512_store_si512(to->codes[j], codes[j]);
        __m512 scale, other = _mm512_setzero_ps();
        if (is_six_bits(type)) {
            if (b % (GROUP_BLOCKS / 2) == 0)
                bits = load_six_bits(behind, b > 0);
            scale = next_scale(&bits.scales, load_halves(behind + K_D_AT));
            other = next_scale(&bits.minimums, load_halves(behind + K_DMIN_AT));
            other = _mm512_xor_ps(other, _mm512_set1_ps(-0.0f));
        } else if (has_two_scales(type)) {
            struct two_scales two = load_two_scales(behind, b);
            scale = two.low;
            other = two.high;
        } else {
            scale = load_scale(type, behind, b);
            if (with_minimum(type))
                other = load_halves(behind + (here + b) * HALF_LINE_BYTES);
        }
        _mm512_store_ps(to->scale, scale);
        _mm512_store_ps(to->other, other);
    }
}

/* dot[t] += dot products of line j of both tiles' codes with four activations. */
ALWAYS_INLINE void dot_line(const struct open_block *const at[2], const int j, const int8_t *four, __m512i dot[2])
{
    int32_t dword;
    __builtin_memcpy(&dword, four, sizeof dword);
    const __m512i every = _mm512_set1_epi32(dword);
    UNROLLED
    for (int t = 0; t < 2; t++)
        dot[t] = _mm512_dpbusd_epi32(dot[t], _mm512_load_si512(at[t]->codes[j]), every);
}

/* One block of `rows` inputs, for both tiles: the second tile's block is OPEN_BLOCKS behind. */
ALWAYS_INLINE void add_open_block(const int64_t type, const int rows, const struct open_block *open,
                                  const struct activation_block *x, size_t stride, __m512 sum[][2])
{
    const struct open_block *const at[2] = {open, open + OPEN_BLOCKS};
    __m512i dot[PAIR_ROWS][2];
    UNROLLED
    for (int r = 0; r < rows; r++)
        dot[r][0] = dot[r][1] = with_minimum(type) ? _mm512_setzero_si512() : offset_of(type, x + r * stride);
    UNROLLED
    for (int j = 0; j < 8; j++) {
        UNROLLED
        for (int r = 0; r < rows; r++)
            dot_line(at, j, x[r * stride].q + 4 * j, dot[r]);
    }
    UNROLLED
    for (int r = 0; r < rows; r++) {
        const __m512 x_scale = _mm512_set1_ps(x[r * stride].scale), x_sum = _mm512_set1_ps(x[r * stride].scaled_sum);
        UNROLLED
        for (int t = 0; t < 2; t++) {
            __m512 both = _mm512_mul_ps(_mm512_load_ps(at[t]->scale), x_scale);
            sum[r][t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot[r][t]), both, sum[r][t]);
            if (with_minimum(type))
                sum[r][t] = _mm512_fmadd_ps(_mm512_load_ps(at[t]->other), x_sum, sum[r][t]);
        }
    }
}

/* As above for Q3_K and Q6_K, which have a scale for each half of a block, and so twice the chains. */
ALWAYS_INLINE void add_open_halves(const int64_t type, const int rows, const struct open_block *open,
                                   const struct activation_block *x, size_t stride, __m512 sum[][2])
{
    const struct open_block *const at[2] = {open, open + OPEN_BLOCKS};
    __m512i low[HALVES_ROWS][2], high[HALVES_ROWS][2];
    UNROLLED
    for (int r = 0; r < rows; r++) {
        low[r][0] = low[r][1] = half_offset_of(type, x + r * stride, 0);
        high[r][0] = high[r][1] = half_offset_of(type, x + r * stride, 1);
    }
    UNROLLED
    for (int j = 0; j < 4; j++) {
        UNROLLED
        for (int r = 0; r < rows; r++)
            dot_line(at, j, x[r * stride].q + 4 * j, low[r]);
        UNROLLED
        for (int r = 0; r < rows; r++)
            dot_line(at, j + 4, x[r * stride].q + 16 + 4 * j, high[r]);
    }
    UNROLLED
    for (int r = 0; r < rows; r++) {
        const __m512 x_scale = _mm512_set1_ps(x[r * stride].scale);
        UNROLLED
        for (int t = 0; t < 2; t++) {
            __m512 part = _mm512_mul_ps(_mm512_cvtepi32_ps(low[r][t]), _mm512_load_ps(at[t]->scale));
            part = _mm512_fmadd_ps(_mm512_cvtepi32_ps(high[r][t]), _mm512_load_ps(at[t]->other), part);
            sum[r][t] = _mm512_fmadd_ps(part, x_scale, sum[r][t]);
        }
    }
}

/* Adds `count` opened blocks to the sums of `rows` inputs, which are `stride` blocks apart. */
ALWAYS_INLINE void add_open_blocks(const int64_t type, const int rows, const struct open_block *open, size_t count,
                                   const struct activation_block *x, size_t stride, float (*out)[2][TILE_ROWS])
{
    __m512 sum[PAIR_ROWS][2];
    UNROLLED
    for (int r = 0; r < rows; r++) {
        sum[r][0] = _mm512_loadu_ps(out[r][0]);
        sum[r][1] = _mm512_loadu_ps(out[r][1]);
    }
    for (size_t b = 0; b < count; b++)
        if (has_two_scales(type))
            add_open_halves(type, rows, open + b, x + b, stride, sum);
        else
            add_open_block(type, rows, open + b, x + b, stride, sum);
    UNROLLED
    for (int r = 0; r < rows; r++) {
        _mm512_storeu_ps(out[r][0], sum[r][0]);
        _mm512_storeu_ps(out[r][1], sum[r][1]);
    }
}

/* Prefetches part `part` of `parts` of a tile's next blocks: a processor cannot have all of them in flight. */
ALWAYS_INLINE void prefetch_part(const uint8_t *from, size_t bytes, size_t part, size_t parts)
{
    size_t lines = bytes / LINE_BYTES, end = lines * (part + 1) / parts;
    for (size_t line = lines * part / parts; line < end; line++)
        _mm_prefetch((const char *)from + line * LINE_BYTES, _MM_HINT_T0);
}

/* See multiply_pair_function. */
ALWAYS_INLINE void multiply_open_pair(const int64_t type, const uint8_t *const tiles[2], const struct activations *x,
                                      size_t first, size_t rows, float (*out)[2][TILE_ROWS])
{
    struct open_block open[2 * OPEN_BLOCKS];
    const size_t most = has_two_scales(type) ? HALVES_ROWS : PAIR_ROWS;
    const size_t blocks = x->columns / BLOCK, passes = (rows + most - 1) / most;
    const size_t open_bytes = OPEN_BLOCKS * block_bytes(type);
    memset(out, 0, rows * sizeof *out);
    for (size_t start = 0; start < blocks; start += OPEN_BLOCKS) {
        size_t count = blocks - start < OPEN_BLOCKS ? blocks - start : OPEN_BLOCKS;
        const uint8_t *at[2] = {tiles[0] + start * block_bytes(type), tiles[1] + start * block_bytes(type)};
        for (size_t t = 0; t < 2; t++)
            for (size_t b = 0; b < count; b += GROUP_BLOCKS)
                open_group(type, at[t] + b * block_bytes(type), count - b < GROUP_BLOCKS ? count - b : GROUP_BLOCKS,
                           open + t * OPEN_BLOCKS + b);
        for (size_t pass = 0; pass < passes; pass++) {
            /* Behind a tile's last blocks are the first ones of the likely next tile. */
            prefetch_part(at[0] + count * block_bytes(type), open_bytes, pass, passes);
            prefetch_part(at[1] + count * block_bytes(type), open_bytes, pass, passes);
            size_t r = rows * pass / passes;
            const struct activation_block *input = x->blocks + (first + r) * blocks + start;
            switch (rows * (pass + 1) / passes - r) {
/* A specialised function for each constant count; counts above `most` do not occur. */
#define ADD(n) \
    case n: add_open_blocks(type, n <= most ? n : 1, open, count, input, blocks, out + r); break;
                ADD(1) ADD(2) ADD(3) ADD(4) ADD(5) ADD(6) ADD(7) ADD(8)
#undef ADD
            }
        }
    }
}

#define DEFINE_PAIR(name, type)                                                                                \
    static void multiply_pair_##name(const uint8_t *const tiles[2], const struct activations *x, size_t first, \
                                     size_t rows, float (*out)[2][TILE_ROWS])                                  \
    {                                                                                                          \
        multiply_open_pair(type, tiles, x, first, rows, out);                                                  \
    }

DEFINE_PAIR(q4_0, ES_Q4_0)
DEFINE_PAIR(q4_1, ES_Q4_1)
DEFINE_PAIR(q5_0, ES_Q5_0)
DEFINE_PAIR(q5_1, ES_Q5_1)
DEFINE_PAIR(q8_0, ES_Q8_0)
DEFINE_PAIR(q3_k, ES_Q3_K)
DEFINE_PAIR(q4_k, ES_Q4_K)
DEFINE_PAIR(q5_k, ES_Q5_K)
DEFINE_PAIR(q6_k, ES_Q6_K)
DEFINE_PAIR(iq3_xxs, ES_IQ3_XXS)
DEFINE_PAIR(iq3_s, ES_IQ3_S)
DEFINE_PAIR(iq4_nl, ES_IQ4_NL)
DEFINE_PAIR(iq4_xs, ES_IQ4_XS)
DEFINE_PAIR(mxfp4, ES_MXFP4)

#endif
