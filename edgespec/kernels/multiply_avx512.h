/* Products for AVX-512 VNNI: lane i is row i of a tile, vpdpbusd multiplies 4 codes of each row by 4 activations.
 *
 * A block's codes are unpacked once, to unsigned bytes, and serve up to 8 inputs; the offset that makes them unsigned
 * is where a dot product starts. Each input then costs 8 dot products, a convert, a multiply and an fma. */
#ifndef EDGESPEC_MULTIPLY_AVX512_H
#define EDGESPEC_MULTIPLY_AVX512_H

#include <immintrin.h>

#include "level.h"
#include "unrolled.h"

/* A block's share of the next group, asked for 1 to 4 KiB before it is needed: past the end of a page, where processors'
 * own prefetching stops, and well before memory's 100 ns are over. */
ALWAYS_INLINE void prefetch(const uint8_t *from, size_t bytes)
{
    for (size_t at = 0; at < bytes; at += LINE_BYTES)
        _mm_prefetch((const char *)from + at, _MM_HINT_T0);
}

/* sum += dot product of each row's 4 codes with the 4 activations at `four`. */
ALWAYS_INLINE __m512i dot4(__m512i sum, __m512i codes, const int8_t *four)
{
#if defined(__GNUC__) && !defined(__clang__)
    /* GCC 12 spends a load on every broadcast, which vpdpbusd itself could do. */
    typedef struct { int8_t at[4]; } four_bytes;
    __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(codes), "m"(*(const four_bytes *)four));
    return sum;
#else
    int32_t dword;
    __builtin_memcpy(&dword, four, sizeof dword);
    return _mm512_dpbusd_epi32(sum, codes, _mm512_set1_epi32(dword));
#endif
}

ALWAYS_INLINE __m512 load_halves(const uint8_t *from)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
}

ALWAYS_INLINE void unpack_nibbles(const uint8_t *lines, __m512i codes[8])
{
    const __m512i low = _mm512_set1_epi8(15);
    UNROLLED
    for (int j = 0; j < 4; j++) {
        __m512i pairs = _mm512_loadu_si512(lines + j * LINE_BYTES);
        codes[j] = _mm512_and_si512(pairs, low);
        codes[j + 4] = _mm512_and_si512(_mm512_srli_epi16(pairs, 4), low);
    }
}

ALWAYS_INLINE void unpack_bytes(const uint8_t *lines, __m512i codes[8])
{
    UNROLLED
    for (int j = 0; j < 8; j++) /* two's complement with its sign turned is the value plus 128 */
        codes[j] = _mm512_xor_si512(_mm512_loadu_si512(lines + j * LINE_BYTES), _mm512_set1_epi8(-128));
}

/* Constant arguments make each call below a loop of its own, with all sums in registers. */
ALWAYS_INLINE void multiply_blocks(const int64_t type, const int rows, const uint8_t *tile,
                                   const struct activation_block *x, size_t blocks, float out[][TILE_ROWS])
{
    const int lines = type == ES_Q8_0 ? 8 : 4;
    __m512 sum[PASS_ROWS];
    UNROLLED
    for (int r = 0; r < rows; r++)
        sum[r] = _mm512_setzero_ps();
    for (size_t start = 0; start < blocks; start += GROUP_BLOCKS) {
        size_t here = blocks - start < GROUP_BLOCKS ? blocks - start : GROUP_BLOCKS;
        const uint8_t *codes_at = tile, *scales_at = tile + here * lines * LINE_BYTES;
        for (size_t b = 0; b < here; b++) {
            __m512i codes[8];
            if (type == ES_Q8_0)
                unpack_bytes(codes_at, codes);
            else
                unpack_nibbles(codes_at, codes);
            prefetch(tile + (here + b) * block_bytes(type), block_bytes(type));
            __m512 scale = load_halves(scales_at), minimum = _mm512_setzero_ps();
            if (type == ES_Q4_1)
                minimum = load_halves(scales_at + here * HALF_LINE_BYTES);
            const struct activation_block *input = x + start + b;
            UNROLLED
            for (int r = 0; r < rows; r++, input += blocks) {
                __m512i dot = _mm512_setzero_si512();
                if (type == ES_Q4_0)
                    dot = _mm512_set1_epi32(input->minus8);
                if (type == ES_Q8_0)
                    dot = _mm512_slli_epi32(_mm512_set1_epi32(input->minus8), 4);
                UNROLLED
                for (int j = 0; j < 8; j++)
                    dot = dot4(dot, codes[j], input->q + 4 * j);
                __m512 both = _mm512_mul_ps(scale, _mm512_set1_ps(input->scale));
                sum[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), both, sum[r]);
                if (type == ES_Q4_1)
                    sum[r] = _mm512_fmadd_ps(minimum, _mm512_set1_ps(input->scaled_sum), sum[r]);
            }
            codes_at += lines * LINE_BYTES;
            scales_at += HALF_LINE_BYTES;
        }
        tile += here * block_bytes(type);
    }
    UNROLLED
    for (int r = 0; r < rows; r++)
        _mm512_storeu_ps(out[r], sum[r]);
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
        __m512 weights = type == ES_F32 ? _mm512_loadu_ps(tile) : load_halves(tile);
        UNROLLED
        for (int r = 0; r < rows; r++)
            sum[r] = _mm512_fmadd_ps(weights, _mm512_set1_ps(x[r * columns + k]), sum[r]);
    }
    UNROLLED
    for (int r = 0; r < rows; r++)
        _mm512_storeu_ps(out[r], sum[r]);
}

#define EACH_COUNT(call) \
    switch (rows) {      \
    case 1: call(1);     \
    case 2: call(2);     \
    case 3: call(3);     \
    case 4: call(4);     \
    case 5: call(5);     \
    case 6: call(6);     \
    case 7: call(7);     \
    case 8: call(8);     \
    }

#define DEFINE_BLOCKS(name, type)                                                                              \
    static void name(const uint8_t *tile, const struct activations *x, size_t first, size_t rows,              \
                     float out[][TILE_ROWS])                                                                   \
    {                                                                                                          \
        size_t blocks = x->columns / BLOCK;                                                                    \
        const struct activation_block *input = x->blocks + first * blocks;                                     \
        EACH_COUNT(CALL_##type)                                                                                \
    }
#define CALL_BLOCKS(type, count) multiply_blocks(type, count, tile, input, blocks, out); break
#define CALL_ES_Q4_0(count) CALL_BLOCKS(ES_Q4_0, count)
#define CALL_ES_Q4_1(count) CALL_BLOCKS(ES_Q4_1, count)
#define CALL_ES_Q8_0(count) CALL_BLOCKS(ES_Q8_0, count)

DEFINE_BLOCKS(multiply_q4_0, ES_Q4_0)
DEFINE_BLOCKS(multiply_q4_1, ES_Q4_1)
DEFINE_BLOCKS(multiply_q8_0, ES_Q8_0)

#define DEFINE_FLOATS(name, type)                                                                              \
    static void name(const uint8_t *tile, const struct activations *x, size_t first, size_t rows,              \
                     float out[][TILE_ROWS])                                                                   \
    {                                                                                                          \
        size_t columns = x->columns;                                                                           \
        const float *input = x->floats + first * columns;                                                      \
        EACH_COUNT(CALL_##type)                                                                                \
    }
#define CALL_FLOATS(type, count) multiply_floats(type, count, tile, input, columns, out); break
#define CALL_ES_F16(count) CALL_FLOATS(ES_F16, count)
#define CALL_ES_F32(count) CALL_FLOATS(ES_F32, count)

DEFINE_FLOATS(multiply_f16, ES_F16)
DEFINE_FLOATS(multiply_f32, ES_F32)

#endif
