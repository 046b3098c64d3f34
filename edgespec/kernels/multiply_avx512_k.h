/* Products of K-quants for AVX-512 VNNI: super-blocks of 256 columns, with small integer scales for each 32 or 16. */
#ifndef EDGESPEC_MULTIPLY_AVX512_K_H
#define EDGESPEC_MULTIPLY_AVX512_K_H

#include "multiply_avx512_codes.h"

/* Four blocks' 6-bit scales and minimums, one byte each in a row's dword, the next one lowest. */
struct six_bits {
    __m512i scales, minimums;
};

ALWAYS_INLINE struct six_bits load_six_bits(const uint8_t *behind, int upper_four)
{
    const __m512i six = _mm512_set1_epi8(0x3f), four = _mm512_set1_epi8(0x0f), upper = _mm512_set1_epi8(0x30);
    __m512i scales = _mm512_loadu_si512(behind), minimums = _mm512_loadu_si512(behind + LINE_BYTES);
    if (!upper_four)
        return (struct six_bits){_mm512_and_si512(scales, six), _mm512_and_si512(minimums, six)};
    __m512i both = _mm512_loadu_si512(behind + 2 * LINE_BYTES);
    return (struct six_bits){
        with_bits(_mm512_and_si512(both, four), _mm512_srli_epi16(scales, 2), upper),
        with_bits(_mm512_and_si512(_mm512_srli_epi16(both, 4), four), _mm512_srli_epi16(minimums, 2), upper),
    };
}

/* The lowest byte of each dword, times d; shifts the next byte down. */
ALWAYS_INLINE __m512 next_scale(__m512i *bytes, __m512 d)
{
    __m512 scale = _mm512_mul_ps(d, _mm512_cvtepi32_ps(_mm512_and_si512(*bytes, _mm512_set1_epi32(255))));
    *bytes = _mm512_srli_epi32(*bytes, 8);
    return scale;
}

/* Q4_K and Q5_K. */
ALWAYS_INLINE void multiply_six_bits(const int64_t type, const int rows, const uint8_t *tile,
                                     const struct activation_block *x, size_t blocks, float out[][TILE_ROWS])
{
    const size_t code_bytes = code_lines(type) * LINE_BYTES;
    __m512 sum[PASS_ROWS];
    UNROLLED
    for (int r = 0; r < rows; r++)
        sum[r] = _mm512_setzero_ps();
    for (size_t start = 0; start < blocks; start += GROUP_BLOCKS) {
        const uint8_t *behind = tile + GROUP_BLOCKS * code_bytes;
        struct six_bits bits = load_six_bits(behind, 0);
        for (size_t b = 0; b < GROUP_BLOCKS; b++) {
            if (b == GROUP_BLOCKS / 2)
                bits = load_six_bits(behind, 1);
            __m512i codes[8];
            unpack_codes(type, tile + b * code_bytes, codes);
            prefetch(tile + b * block_bytes(type), block_bytes(type));
            __m512 scale = next_scale(&bits.scales, load_halves(behind + K_D_AT));
            __m512 minimum = next_scale(&bits.minimums, load_halves(behind + K_DMIN_AT));
            const struct activation_block *const input = x + start + b;
            __m512i dot[PASS_ROWS];
            UNROLLED
            for (int r = 0; r < rows; r++)
                dot[r] = _mm512_setzero_si512();
            dot_dwords(rows, 0, 8, codes, input, blocks, dot);
            UNROLLED
            for (int r = 0; r < rows; r++) {
                __m512 both = _mm512_mul_ps(scale, _mm512_set1_ps(input[r * blocks].scale));
                sum[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot[r]), both, sum[r]);
                sum[r] = _mm512_fnmadd_ps(minimum, _mm512_set1_ps(input[r * blocks].scaled_sum), sum[r]);
            }
        }
        tile += GROUP_BLOCKS * block_bytes(type);
    }
    UNROLLED
    for (int r = 0; r < rows; r++)
        _mm512_storeu_ps(out[r], sum[r]);
}

/* The scales of a block's first 16 columns and of its last. */
struct two_scales {
    __m512 low, high;
};

ALWAYS_INLINE struct two_scales load_two_scales(const uint8_t *behind, size_t b)
{
    __m512i pair = _mm512_cvtepi16_epi32(_mm256_loadu_si256((const __m256i *)(behind + b * HALF_LINE_BYTES)));
    __m512i low = _mm512_srai_epi32(_mm512_slli_epi32(pair, 24), 24), high = _mm512_srai_epi32(pair, 8);
    __m512 d = load_halves(behind + Q6_K_D_AT);
    return (struct two_scales){
        _mm512_mul_ps(d, _mm512_cvtepi32_ps(low)),
        _mm512_mul_ps(d, _mm512_cvtepi32_ps(high)),
    };
}

/* Q3_K and Q6_K. */
ALWAYS_INLINE void multiply_two_scales(const int64_t type, const int rows, const uint8_t *tile,
                                       const struct activation_block *x, size_t blocks, float out[][TILE_ROWS])
{
    const size_t code_bytes = code_lines(type) * LINE_BYTES;
    __m512 sum[PASS_ROWS];
    UNROLLED
    for (int r = 0; r < rows; r++)
        sum[r] = _mm512_setzero_ps();
    for (size_t start = 0; start < blocks; start += GROUP_BLOCKS) {
        const uint8_t *behind = tile + GROUP_BLOCKS * code_bytes;
        for (size_t b = 0; b < GROUP_BLOCKS; b++) {
            __m512i codes[8];
            unpack_codes(type, tile + b * code_bytes, codes);
            prefetch(tile + b * block_bytes(type), block_bytes(type));
            const struct two_scales d = load_two_scales(behind, b);
            const struct activation_block *const input = x + start + b;
            __m512i dot[PASS_ROWS];
            __m512 part[PASS_ROWS];
            UNROLLED
            for (int r = 0; r < rows; r++)
                dot[r] = half_offset_of(type, input + r * blocks, 0);
            dot_dwords(rows, 0, 4, codes, input, blocks, dot);
            UNROLLED
            for (int r = 0; r < rows; r++) {
                part[r] = _mm512_mul_ps(_mm512_cvtepi32_ps(dot[r]), d.low);
                dot[r] = half_offset_of(type, input + r * blocks, 1);
            }
            dot_dwords(rows, 4, 4, codes, input, blocks, dot);
            UNROLLED
            for (int r = 0; r < rows; r++) {
                part[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot[r]), d.high, part[r]);
                sum[r] = _mm512_fmadd_ps(part[r], _mm512_set1_ps(input[r * blocks].scale), sum[r]);
            }
        }
        tile += GROUP_BLOCKS * block_bytes(type);
    }
    UNROLLED
    for (int r = 0; r < rows; r++)
        _mm512_storeu_ps(out[r], sum[r]);
}

#endif
