/* Products for AVX-512 VNNI: lane i is row i of a tile, vpdpbusd multiplies 4 codes of each row by 4 activations.
 *
 * A block's codes are unpacked once, to unsigned bytes, and serve up to 8 inputs; the offset that makes them unsigned
 * is where a dot product starts. Each input then costs 8 dot products, a convert, a multiply and an fma. */
#ifndef EDGESPEC_MULTIPLY_AVX512_H
#define EDGESPEC_MULTIPLY_AVX512_H

#include "multiply_avx512_codes.h"
#include "multiply_avx512_k.h"

/* Constant arguments give each call below a specialised loop, with all sums in registers. */
ALWAYS_INLINE void multiply_blocks(const int64_t type, const int rows, const uint8_t *tile,
                                   const struct activation_block *x, size_t blocks, float out[][TILE_ROWS])
{
    const size_t code_bytes = code_lines(type) * LINE_BYTES;
    const int has_minimum = type == ES_Q4_1 || type == ES_Q5_1;
    __m512 sum[PASS_ROWS];
    UNROLLED
    for (int r = 0; r < rows; r++)
        sum[r] = _mm512_setzero_ps();
    for (size_t start = 0; start < blocks; start += GROUP_BLOCKS) {
        size_t here = blocks - start < GROUP_BLOCKS ? blocks - start : GROUP_BLOCKS;
        const uint8_t *behind = tile + here * code_bytes;
        for (size_t b = 0; b < here; b++) {
            __m512i codes[8];
            unpack_codes(type, tile + b * code_bytes, codes);
            prefetch(tile + b * block_bytes(type), block_bytes(type));
            __m512 scale = load_scale(type, behind, b), minimum = _mm512_setzero_ps();
            if (has_minimum)
                minimum = load_halves(behind + (here + b) * HALF_LINE_BYTES);
            const struct activation_block *const input = x + start + b;
            __m512i dot[PASS_ROWS];
            UNROLLED
            for (int r = 0; r < rows; r++)
                dot[r] = has_minimum ? _mm512_setzero_si512() : offset_of(type, input + r * blocks);
            dot_dwords(rows, 0, 8, codes, input, blocks, dot);
            UNROLLED
            for (int r = 0; r < rows; r++) {
                __m512 both = _mm512_mul_ps(scale, _mm512_set1_ps(input[r * blocks].scale));
                sum[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot[r]), both, sum[r]);
                if (has_minimum)
                    sum[r] = _mm512_fmadd_ps(minimum, _mm512_set1_ps(input[r * blocks].scaled_sum), sum[r]);
            }
        }
        tile += here * block_bytes(type);
    }
    UNROLLED
    for (int r = 0; r < rows; r++)
        _mm512_storeu_ps(out[r], sum[r]);
}

ALWAYS_INLINE __m512 load_weights(const int64_t type, const uint8_t *line)
{
    if (type == ES_F32)
        return _mm512_loadu_ps(line);
    if (type == ES_F16)
        return load_halves(line);
    __m512i upper = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)line));
    return _mm512_castsi512_ps(_mm512_slli_epi32(upper, 16));
}

ALWAYS_INLINE void multiply_floats(const int64_t type, const int rows, const uint8_t *tile, const float *x,
                                   size_t columns, float out[][TILE_ROWS])
{
    const size_t line_bytes = type == ES_F32 ? LINE_BYTES : HALF_LINE_BYTES;
    __m512 sum[PASS_ROWS];
    UNROLLED
    for (int r = 0; r < rows; r++)
        sum[r] = _mm512_setzero_ps();
    for (size_t k = 0; k < columns; k++, tile += line_bytes) {
        __m512 weights = load_weights(type, tile);
        UNROLLED
        for (int r = 0; r < rows; r++)
            sum[r] = _mm512_fmadd_ps(weights, _mm512_set1_ps(x[r * columns + k]), sum[r]);
    }
    UNROLLED
    for (int r = 0; r < rows; r++)
        _mm512_storeu_ps(out[r], sum[r]);
}

/* A function of multiply_function's type over one of the loops above, compiled for each count of rows. */
#define DEFINE_PRODUCT(name, how, type, input, length)                                            \
    static void name(const uint8_t *tile, const struct activations *x, size_t first, size_t rows, \
                     float out[][TILE_ROWS])                                                      \
    {                                                                                             \
        switch (rows) {                                                                           \
        case 1: how(type, 1, tile, input, length, out); break;                                    \
        case 2: how(type, 2, tile, input, length, out); break;                                    \
        case 3: how(type, 3, tile, input, length, out); break;                                    \
        case 4: how(type, 4, tile, input, length, out); break;                                    \
        case 5: how(type, 5, tile, input, length, out); break;                                    \
        case 6: how(type, 6, tile, input, length, out); break;                                    \
        case 7: how(type, 7, tile, input, length, out); break;                                    \
        case 8: how(type, 8, tile, input, length, out); break;                                    \
        }                                                                                         \
    }
#define DEFINE_QUANTISED(name, how, type) \
    DEFINE_PRODUCT(name, how, type, x->blocks + first * (x->columns / BLOCK), x->columns / BLOCK)
#define DEFINE_FLOATS(name, type) \
    DEFINE_PRODUCT(name, multiply_floats, type, x->floats + first * x->columns, x->columns)

DEFINE_QUANTISED(multiply_q4_0, multiply_blocks, ES_Q4_0)
DEFINE_QUANTISED(multiply_q4_1, multiply_blocks, ES_Q4_1)
DEFINE_QUANTISED(multiply_q5_0, multiply_blocks, ES_Q5_0)
DEFINE_QUANTISED(multiply_q5_1, multiply_blocks, ES_Q5_1)
DEFINE_QUANTISED(multiply_q8_0, multiply_blocks, ES_Q8_0)
DEFINE_QUANTISED(multiply_q3_k, multiply_two_scales, ES_Q3_K)
DEFINE_QUANTISED(multiply_q4_k, multiply_six_bits, ES_Q4_K)
DEFINE_QUANTISED(multiply_q5_k, multiply_six_bits, ES_Q5_K)
DEFINE_QUANTISED(multiply_q6_k, multiply_two_scales, ES_Q6_K)
DEFINE_QUANTISED(multiply_iq3_xxs, multiply_blocks, ES_IQ3_XXS)
DEFINE_QUANTISED(multiply_iq3_s, multiply_blocks, ES_IQ3_S)
DEFINE_QUANTISED(multiply_iq4_nl, multiply_blocks, ES_IQ4_NL)
DEFINE_QUANTISED(multiply_iq4_xs, multiply_blocks, ES_IQ4_XS)
DEFINE_QUANTISED(multiply_mxfp4, multiply_blocks, ES_MXFP4)
DEFINE_FLOATS(multiply_f32, ES_F32)
DEFINE_FLOATS(multiply_f16, ES_F16)
DEFINE_FLOATS(multiply_bf16, ES_BF16)

#endif
