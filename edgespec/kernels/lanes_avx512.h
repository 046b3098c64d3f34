/* Sixteen lanes as one register of AVX-512. Included by lanes.h. */
#ifndef EDGESPEC_LANES_AVX512_H
#define EDGESPEC_LANES_AVX512_H

#include <immintrin.h>
#include <stdint.h>

typedef __m512 lanes;
typedef __m512i lanes_int;
enum { LANES_IN_REGISTERS = 32 };

static inline lanes lanes_set(float x) { return _mm512_set1_ps(x); }
static inline lanes lanes_load(const float *from) { return _mm512_loadu_ps(from); }
static inline void lanes_store(float *to, lanes x) { _mm512_storeu_ps(to, x); }
static inline lanes lanes_add(lanes a, lanes b) { return _mm512_add_ps(a, b); }
static inline lanes lanes_sub(lanes a, lanes b) { return _mm512_sub_ps(a, b); }
static inline lanes lanes_mul(lanes a, lanes b) { return _mm512_mul_ps(a, b); }
static inline lanes lanes_div(lanes a, lanes b) { return _mm512_div_ps(a, b); }
static inline lanes lanes_fma(lanes a, lanes b, lanes c) { return _mm512_fmadd_ps(a, b, c); }
/* a > b ? a : b, that is b if one is NaN; and a < b ? a : b. */
static inline lanes lanes_max(lanes a, lanes b) { return _mm512_max_ps(a, b); }
static inline lanes lanes_min(lanes a, lanes b) { return _mm512_min_ps(a, b); }
/* a < limit ? 0 : b */
static inline lanes lanes_zero_below(lanes a, float limit, lanes b)
{
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, _mm512_set1_ps(limit), _CMP_NLT_UQ), b);
}
static inline int lanes_any_above(lanes a, float limit)
{
    return _mm512_cmp_ps_mask(a, _mm512_set1_ps(limit), _CMP_GT_OQ) != 0;
}
static inline int lanes_any_nan(lanes a) { return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q) != 0; }
static inline lanes lanes_from_halves(const uint16_t *from)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
}
static inline void lanes_to_halves(uint16_t *to, lanes x)
{
    _mm256_storeu_si256((__m256i *)to, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
/* A bfloat is the upper half of a float. */
static inline lanes lanes_from_bfloats(const uint16_t *from)
{
    __m512i upper = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(upper, 16));
}
static inline lanes lanes_of_bits(lanes_int x) { return _mm512_castsi512_ps(x); }
static inline lanes_int lanes_bits(lanes x) { return _mm512_castps_si512(x); }
static inline lanes_int lanes_int_set(int32_t x) { return _mm512_set1_epi32(x); }
static inline lanes_int lanes_int_add(lanes_int a, lanes_int b) { return _mm512_add_epi32(a, b); }
static inline lanes_int lanes_int_and(lanes_int a, int32_t mask)
{
    return _mm512_and_si512(a, _mm512_set1_epi32(mask));
}
static inline lanes_int lanes_int_max(lanes_int a, lanes_int b) { return _mm512_max_epi32(a, b); }
static inline lanes_int lanes_int_shift(lanes_int a, int left) { return _mm512_slli_epi32(a, (unsigned)left); }
static inline int32_t lanes_int_sum(lanes_int a) { return _mm512_reduce_add_epi32(a); }
static inline int32_t lanes_int_largest(lanes_int a) { return _mm512_reduce_max_epi32(a); }
static inline void lanes_int_store_bytes(int8_t *to, lanes_int a)
{
    _mm_storeu_si128((__m128i *)to, _mm512_cvtepi32_epi8(a));
}
#define LANES_LARGEST
static inline float lanes_largest(lanes a) { return _mm512_reduce_max_ps(a); }
/* ((0+8)+(4+12)) + ((2+10)+(6+14)) etc.: halves onto halves, four times. */
static inline float lanes_sum(lanes a)
{
    __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
/* lanes_sum of each, in the same order: the halves of two sit in one register, then a quarter of each. */
#define LANES_SUM_FOUR
static inline void lanes_sum_four(const lanes of[4], float sums[4])
{
    __m512 eights[2];
    for (int i = 0; i < 2; i++)
        eights[i] = _mm512_add_ps(_mm512_shuffle_f32x4(of[2 * i], of[2 * i + 1], 0x44),
                                  _mm512_shuffle_f32x4(of[2 * i], of[2 * i + 1], 0xee));
    __m512 fours = _mm512_add_ps(_mm512_shuffle_f32x4(eights[0], eights[1], 0x88),
                                 _mm512_shuffle_f32x4(eights[0], eights[1], 0xdd));
    __m512 twos = _mm512_add_ps(fours, _mm512_permute_ps(fours, 0xee));
    __m512 ones = _mm512_add_ps(twos, _mm512_permute_ps(twos, 0x55));
    _mm_storeu_ps(sums, _mm512_castps512_ps128(_mm512_maskz_compress_ps(0x1111, ones)));
}

#endif
