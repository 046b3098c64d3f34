/* What all products for AVX-512 VNNI share: from a block's code lines to unsigned bytes, and their dot products. */
#ifndef EDGESPEC_MULTIPLY_AVX512_CODES_H
#define EDGESPEC_MULTIPLY_AVX512_CODES_H

#include <immintrin.h>

#include "level.h"
#include "tables.h"
#include "unrolled.h"

/* Prefetch distance in bytes of tiles. On a Zen 5 server with two threads of Q4_K, 7 to 40 KB are equal; with 2 KB 8 rows
 * take 1.45 times as long, since computing does not hide the memory's latency. A small distance wastes little past a
 * thread's share. */
enum { PREFETCH_AHEAD = 8192 };

ALWAYS_INLINE void prefetch(const uint8_t *block, size_t bytes)
{
    for (size_t at = 0; at < bytes; at += LINE_BYTES)
        _mm_prefetch((const char *)block + PREFETCH_AHEAD + at, _MM_HINT_T0);
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

/* Adds the products of dwords first .. first + count - 1 of a block with each input to its dot product. A dword serves
 * all inputs before the next dword, which interleaves the chains and hides their latency: with 8 inputs 1.07 times as fast
 * as one input after another, from the caches of a Zen 5 server. */
ALWAYS_INLINE void dot_dwords(const int rows, const int first, const int count, const __m512i codes[8],
                              const struct activation_block *x, size_t stride, __m512i dot[PASS_ROWS])
{
    UNROLLED
    for (int j = first; j < first + count; j++) {
        UNROLLED
        for (int r = 0; r < rows; r++)
            dot[r] = dot4(dot[r], codes[j], x[r * stride].q + 4 * j);
    }
}

ALWAYS_INLINE __m512 load_halves(const uint8_t *from)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
}

/* codes | (bits & mask) */
ALWAYS_INLINE __m512i with_bits(__m512i codes, __m512i bits, __m512i mask)
{
    return _mm512_ternarylogic_epi32(codes, bits, mask, 0xf8);
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

/* Shifted left, or right by -left. Shifts of 16 bits move bits into other bytes, but not those that are used here. */
ALWAYS_INLINE __m512i moved_left(__m512i bytes, const int left)
{
    return left > 0 ? _mm512_slli_epi16(bytes, left) : _mm512_srli_epi16(bytes, -left);
}

/* Bit j of each byte becomes bit `to` of dword j. */
ALWAYS_INLINE void add_bits(const uint8_t *line, const int to, __m512i codes[8])
{
    const __m512i placed = _mm512_set1_epi8((char)(1 << to)), bits = _mm512_loadu_si512(line);
    UNROLLED
    for (int j = 0; j < 8; j++)
        codes[j] = with_bits(codes[j], moved_left(bits, to - j), placed);
}

/* Bits 2j and 2j+1 of each byte of line h become bits `to` and `to` + 1 of dword 4h+j. */
ALWAYS_INLINE void add_pairs(const uint8_t *lines, const int to, __m512i codes[8])
{
    const __m512i placed = _mm512_set1_epi8((char)(3 << to));
    UNROLLED
    for (int j = 0; j < 8; j++) {
        const __m512i pairs = _mm512_loadu_si512(lines + j / 4 * LINE_BYTES);
        codes[j] = with_bits(codes[j], moved_left(pairs, to - j % 4 * 2), placed);
    }
}

/* The values that codes are indices of, plus 128. */
ALWAYS_INLINE void look_up(const int64_t type, __m512i codes[8])
{
    const __m512i values = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)values_of(type)));
    const __m512i table = _mm512_xor_si512(values, _mm512_set1_epi8(-128)); /* inverting the sign bit adds 128 */
    UNROLLED
    for (int j = 0; j < 8; j++)
        codes[j] = _mm512_shuffle_epi8(table, codes[j]);
}

ALWAYS_INLINE void unpack_bytes(const uint8_t *lines, __m512i codes[8])
{
    UNROLLED
    for (int j = 0; j < 8; j++) /* inverting the sign bit adds 128 */
        codes[j] = _mm512_xor_si512(_mm512_loadu_si512(lines + j * LINE_BYTES), _mm512_set1_epi8(-128));
}

ALWAYS_INLINE void unpack_codes(const int64_t type, const uint8_t *lines, __m512i codes[8])
{
    if (type == ES_Q8_0) {
        unpack_bytes(lines, codes);
        return;
    }
    if (type == ES_Q3_K) {
        UNROLLED
        for (int j = 0; j < 8; j++)
            codes[j] = _mm512_setzero_si512();
        add_bits(lines, 2, codes);
        add_pairs(lines + LINE_BYTES, 0, codes);
        return;
    }
    unpack_nibbles(lines, codes);
    if (has_table(type))
        look_up(type, codes);
    if (code_lines(type) == 5)
        add_bits(lines + 4 * LINE_BYTES, 4, codes);
    if (type == ES_Q6_K)
        add_pairs(lines + 4 * LINE_BYTES, 4, codes);
}

/* The scale of block b of a group, of types that have one and no six bits. */
ALWAYS_INLINE __m512 load_scale(const int64_t type, const uint8_t *behind, size_t b)
{
    if (!has_byte_scale(type) && type != ES_MXFP4)
        return load_halves(behind + b * HALF_LINE_BYTES);
    __m128i bytes = _mm_loadu_si128((const __m128i *)(behind + b * QUARTER_LINE_BYTES));
    if (has_byte_scale(type))
        return _mm512_mul_ps(_mm512_loadu_ps(behind + TABLE_D_AT), _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)));
    bytes = _mm_subs_epu8(bytes, _mm_set1_epi8(1)); /* scale_of_exponent */
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu8_epi32(bytes), 23));
}

/* What the dot products of a block with an input start from: the codes' offset, of types without a minimum. */
ALWAYS_INLINE __m512i offset_of(const int64_t type, const struct activation_block *input)
{
    const __m512i minus8 = _mm512_set1_epi32(input->minus8);
    return _mm512_slli_epi32(minus8, type == ES_Q5_0 ? 1 : type == ES_Q8_0 || has_table(type) ? 4 : 0);
}

/* As above, of the block's first 16 columns or of its last. */
ALWAYS_INLINE __m512i half_offset_of(const int64_t type, const struct activation_block *input, const int high)
{
    const __m512i minus32 = _mm512_set1_epi32(high ? input->minus32_high : input->minus32_low);
    return type == ES_Q3_K ? _mm512_srai_epi32(minus32, 3) : minus32;
}

#endif
