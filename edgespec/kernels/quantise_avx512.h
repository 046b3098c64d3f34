/* Quantising for AVX-512: sixteen blocks at a time, turned so that lane b is block b.
 *
 * A block's largest value, its sums and the choice of its scale then take as many operations for sixteen blocks as for
 * one, which mostly waits for sums across lanes. The bits are those of row_quantise.h, operation by operation. */
#ifndef EDGESPEC_QUANTISE_AVX512_H
#define EDGESPEC_QUANTISE_AVX512_H

#include <stddef.h>

#include "row_quantise.h"

/* In each quarter of the registers, the 4 by 4 matrix of their dwords transposed. */
ALWAYS_INLINE void transpose_quarters(const __m512i row[4], __m512i column[4])
{
    __m512i first_low = _mm512_unpacklo_epi32(row[0], row[1]), first_high = _mm512_unpackhi_epi32(row[0], row[1]);
    __m512i last_low = _mm512_unpacklo_epi32(row[2], row[3]), last_high = _mm512_unpackhi_epi32(row[2], row[3]);
    column[0] = _mm512_unpacklo_epi64(first_low, last_low);
    column[1] = _mm512_unpackhi_epi64(first_low, last_low);
    column[2] = _mm512_unpacklo_epi64(first_high, last_high);
    column[3] = _mm512_unpackhi_epi64(first_high, last_high);
}

/* Four elements of sixteen blocks, those of block b in lane b. */
ALWAYS_INLINE void load_columns(const float *x, __m512 column[4])
{
    __m512i row[4], turned[4];
    UNROLLED
    for (int i = 0; i < 4; i++) {
        __m512 four = _mm512_castps128_ps512(_mm_loadu_ps(x + i * BLOCK));
        four = _mm512_insertf32x4(four, _mm_loadu_ps(x + (i + 4) * BLOCK), 1);
        four = _mm512_insertf32x4(four, _mm_loadu_ps(x + (i + 8) * BLOCK), 2);
        row[i] = lanes_bits(_mm512_insertf32x4(four, _mm_loadu_ps(x + (i + 12) * BLOCK), 3));
    }
    transpose_quarters(row, turned);
    UNROLLED
    for (int i = 0; i < 4; i++)
        column[i] = lanes_of_bits(turned[i]);
}

/* The squared errors of elements k and k + 16. */
ALWAYS_INLINE __m512 squares_of(const __m512 column[BLOCK], int k, __m512 inverse)
{
    __m512 low = missed(column[k], inverse), high = missed(column[k + 16], inverse);
    return _mm512_fmadd_ps(low, low, _mm512_mul_ps(high, high));
}

/* All of them, added in the order of lanes_sum. */
ALWAYS_INLINE __m512 all_squares(const __m512 column[BLOCK], __m512 inverse)
{
    __m512 four[4];
    UNROLLED
    for (int k = 0; k < 4; k++) {
        __m512 outer = _mm512_add_ps(squares_of(column, k, inverse), squares_of(column, k + 8, inverse));
        __m512 inner = _mm512_add_ps(squares_of(column, k + 4, inverse), squares_of(column, k + 12, inverse));
        four[k] = _mm512_add_ps(outer, inner);
    }
    return _mm512_add_ps(_mm512_add_ps(four[0], four[2]), _mm512_add_ps(four[1], four[3]));
}

/* The lowest bytes of four dwords as one. */
ALWAYS_INLINE __m512i join_bytes(const __m512i each[4])
{
    const __m512i byte = _mm512_set1_epi32(0xff), word = _mm512_set1_epi32(0xffff);
    enum { CHOSEN = 0xca }; /* of two, the first where the mask in front of them has a bit */
    __m512i low = _mm512_ternarylogic_epi32(byte, each[0], _mm512_slli_epi32(each[1], 8), CHOSEN);
    __m512i high = _mm512_ternarylogic_epi32(byte, each[2], _mm512_slli_epi32(each[3], 8), CHOSEN);
    return _mm512_ternarylogic_epi32(word, low, _mm512_slli_epi32(high, 16), CHOSEN);
}

/* Four dwords of each block, dword i of block b from lane b of four[i], to `byte` bytes behind each block's start. */
ALWAYS_INLINE void put_dwords(struct activation_block *to, size_t apart, size_t byte, const __m512i four[4])
{
    __m512i row[4];
    transpose_quarters(four, row);
    UNROLLED
    for (size_t i = 0; i < 4; i++) {
        char *block = (char *)(to + i * apart) + byte;
        size_t next = 4 * apart * sizeof *to;
        _mm_storeu_si128((__m128i *)block, _mm512_castsi512_si128(row[i]));
        _mm_storeu_si128((__m128i *)(block + next), _mm512_extracti32x4_epi32(row[i], 1));
        _mm_storeu_si128((__m128i *)(block + 2 * next), _mm512_extracti32x4_epi32(row[i], 2));
        _mm_storeu_si128((__m128i *)(block + 3 * next), _mm512_extracti32x4_epi32(row[i], 3));
    }
}

/* For each block, the first top with the least squared error. */
ALWAYS_INLINE __m512 best_tops(const __m512 column[BLOCK], __m512 largest)
{
    __m512 best = _mm512_setzero_ps();
    __m512i least = _mm512_set1_epi32(-1);
    for (int i = 0; i < TOPS; i++) {
        const __m512 top = _mm512_set1_ps(tops[i]), unit = _mm512_set1_ps(1.0f / (tops[i] * tops[i]));
        __m512i squares = lanes_bits(_mm512_mul_ps(all_squares(column, _mm512_div_ps(top, largest)), unit));
        __mmask16 better = _mm512_cmplt_epu32_mask(squares, least);
        least = _mm512_mask_mov_epi32(least, better, squares);
        best = _mm512_mask_mov_ps(best, better, top);
    }
    return best;
}

/* scale_of */
ALWAYS_INLINE __m512 scales_of(__m512 exact)
{
    __m512i bits = lanes_bits(exact), odd = lanes_int_and(_mm512_srli_epi32(bits, 13), 1);
    return lanes_of_bits(lanes_int_and(lanes_int_add(bits, lanes_int_add(odd, lanes_int_set(0xfff))), ~0x1fff));
}

static inline void quantise_sixteen(const float *x, struct activation_block *to, size_t apart)
{
    __m512 column[BLOCK];
    __m512i sizes = _mm512_setzero_si512();
    for (int k = 0; k < BLOCK; k += 4) {
        load_columns(x + k, column + k);
        UNROLLED
        for (int i = 0; i < 4; i++)
            sizes = lanes_int_max(sizes, lanes_int_and(lanes_bits(column[k + i]), 0x7fffffff));
    }
    const __m512 largest = lanes_of_bits(sizes), top = best_tops(column, largest), inverse = _mm512_div_ps(top, largest);
    const __mmask16 finite = _mm512_cmp_ps_mask(largest, _mm512_set1_ps(FLT_MAX), _CMP_LE_OQ);
    const __mmask16 usable =
        _mm512_mask_cmp_ps_mask(finite, largest, _mm512_set1_ps(tops[0] * LEAST_SCALE), _CMP_GE_OQ);
    const __m512 without = _mm512_mask_mov_ps(_mm512_set1_ps(NAN), finite, _mm512_setzero_ps());
    const __m512 scale = _mm512_mask_mov_ps(without, usable, scales_of(_mm512_div_ps(largest, top)));

    /* Rounded products end in the code's bits (lanes_rounded_product); the bits before them cancel in the sums. */
    __m512i sum[2];
    for (int half = 0; half < 2; half++) {
        __m512i codes[4];
        sum[half] = _mm512_maskz_set1_epi32(usable, (int32_t)(-16u * LANES_ROUNDER_BITS));
        UNROLLED
        for (int j = 0; j < 4; j++) {
            __m512i code[4];
            UNROLLED
            for (int i = 0; i < 4; i++) {
                code[i] = lanes_bits(_mm512_maskz_fmadd_ps(usable, column[half * 16 + j * 4 + i], inverse,
                                                           _mm512_set1_ps(LANES_ROUNDER)));
                sum[half] = lanes_int_add(sum[half], code[i]);
            }
            codes[j] = join_bytes(code);
        }
        put_dwords(to, apart, offsetof(struct activation_block, q) + (size_t)half * 16, codes);
    }
    const __m512i zero = _mm512_setzero_si512(), both = lanes_int_add(sum[0], sum[1]);
    const __m512i head[4] = {
        lanes_bits(scale),
        lanes_bits(_mm512_mask_mul_ps(without, usable, scale, _mm512_cvtepi32_ps(both))),
        _mm512_sub_epi32(zero, lanes_int_shift(both, 3)),
        _mm512_sub_epi32(zero, lanes_int_shift(sum[0], 5)),
    };
    put_dwords(to, apart, 0, head);
    int32_t high[16];
    _mm512_storeu_si512(high, _mm512_sub_epi32(zero, lanes_int_shift(sum[1], 5)));
    for (size_t b = 0; b < 16; b++)
        to[b * apart].minus32_high = high[b];
}

static void quantise_by_sixteens(const float *x, size_t blocks, struct activation_block *to, size_t apart)
{
    const size_t whole = blocks / 16 * 16;
    for (size_t b = 0; b < whole; b += 16)
        quantise_sixteen(x + b * BLOCK, to + b * apart, apart);
    if (whole < blocks)
        quantise(x + whole * BLOCK, blocks - whole, to + whole * apart, apart);
}

#endif
