/* Sixteen lanes as two registers of AVX2. Included by lanes.h. */
#ifndef EDGESPEC_LANES_AVX2_H
#define EDGESPEC_LANES_AVX2_H

#include <immintrin.h>
#include <stdint.h>

typedef struct { __m256 low, high; } lanes;
typedef struct { __m256i low, high; } lanes_int;
enum { LANES_IN_REGISTERS = 8 }; /* 16 registers of 8 */

static inline lanes lanes_set(float x) { return (lanes){_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
static inline lanes lanes_load(const float *from)
{
    return (lanes){_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)};
}
static inline void lanes_store(float *to, lanes x)
{
    _mm256_storeu_ps(to, x.low);
    _mm256_storeu_ps(to + 8, x.high);
}
static inline lanes lanes_add(lanes a, lanes b)
{
    return (lanes){_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)};
}
static inline lanes lanes_sub(lanes a, lanes b)
{
    return (lanes){_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)};
}
static inline lanes lanes_mul(lanes a, lanes b)
{
    return (lanes){_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)};
}
static inline lanes lanes_div(lanes a, lanes b)
{
    return (lanes){_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)};
}
static inline lanes lanes_fma(lanes a, lanes b, lanes c)
{
    return (lanes){_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
/* a > b ? a : b, that is b if one is NaN; and a < b ? a : b. */
static inline lanes lanes_max(lanes a, lanes b)
{
    return (lanes){_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)};
}
static inline lanes lanes_min(lanes a, lanes b)
{
    return (lanes){_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)};
}
/* a < limit ? 0 : b */
static inline lanes lanes_zero_below(lanes a, float limit, lanes b)
{
    __m256 least = _mm256_set1_ps(limit);
    return (lanes){_mm256_and_ps(_mm256_cmp_ps(a.low, least, _CMP_NLT_UQ), b.low),
                   _mm256_and_ps(_mm256_cmp_ps(a.high, least, _CMP_NLT_UQ), b.high)};
}
static inline int lanes_any_above(lanes a, float limit)
{
    __m256 most = _mm256_set1_ps(limit);
    return _mm256_movemask_ps(
               _mm256_or_ps(_mm256_cmp_ps(a.low, most, _CMP_GT_OQ), _mm256_cmp_ps(a.high, most, _CMP_GT_OQ))) != 0;
}
static inline int lanes_any_nan(lanes a)
{
    return _mm256_movemask_ps(_mm256_cmp_ps(a.low, a.high, _CMP_UNORD_Q)) != 0; /* unordered if either is NaN */
}
static inline lanes lanes_from_halves(const uint16_t *from)
{
    return (lanes){_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from)),
                   _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + 8)))};
}
static inline void lanes_to_halves(uint16_t *to, lanes x)
{
    _mm_storeu_si128((__m128i *)to, _mm256_cvtps_ph(x.low, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128((__m128i *)(to + 8), _mm256_cvtps_ph(x.high, _MM_FROUND_TO_NEAREST_INT));
}
/* A bfloat is the upper half of a float. */
static inline __m256 eight_from_bfloats(const uint16_t *from)
{
    __m256i upper = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from));
    return _mm256_castsi256_ps(_mm256_slli_epi32(upper, 16));
}
static inline lanes lanes_from_bfloats(const uint16_t *from)
{
    return (lanes){eight_from_bfloats(from), eight_from_bfloats(from + 8)};
}
static inline lanes lanes_of_bits(lanes_int x)
{
    return (lanes){_mm256_castsi256_ps(x.low), _mm256_castsi256_ps(x.high)};
}
static inline lanes_int lanes_bits(lanes x)
{
    return (lanes_int){_mm256_castps_si256(x.low), _mm256_castps_si256(x.high)};
}
static inline lanes_int lanes_int_set(int32_t x)
{
    return (lanes_int){_mm256_set1_epi32(x), _mm256_set1_epi32(x)};
}
static inline lanes_int lanes_int_add(lanes_int a, lanes_int b)
{
    return (lanes_int){_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)};
}
static inline lanes_int lanes_int_and(lanes_int a, int32_t mask)
{
    return (lanes_int){_mm256_and_si256(a.low, _mm256_set1_epi32(mask)),
                       _mm256_and_si256(a.high, _mm256_set1_epi32(mask))};
}
static inline lanes_int lanes_int_max(lanes_int a, lanes_int b)
{
    return (lanes_int){_mm256_max_epi32(a.low, b.low), _mm256_max_epi32(a.high, b.high)};
}
static inline lanes_int lanes_int_shift(lanes_int a, int left)
{
    return (lanes_int){_mm256_slli_epi32(a.low, left), _mm256_slli_epi32(a.high, left)};
}
static inline int32_t lanes_int_sum(lanes_int a)
{
    __m256i eight = _mm256_add_epi32(a.low, a.high);
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    __m128i two = _mm_add_epi32(four, _mm_unpackhi_epi64(four, four));
    return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 1)));
}
static inline int32_t lanes_int_largest(lanes_int a)
{
    __m256i eight = _mm256_max_epi32(a.low, a.high);
    __m128i four = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    __m128i two = _mm_max_epi32(four, _mm_unpackhi_epi64(four, four));
    return _mm_cvtsi128_si32(_mm_max_epi32(two, _mm_shuffle_epi32(two, 1)));
}
/* The lowest byte of each. */
static inline void lanes_int_store_bytes(int8_t *to, lanes_int a)
{
    const __m256i lowest = _mm256_set1_epi32(255);
    /* Packing takes four of one and four of the other, twice; none saturates, since all are bytes without sign. */
    __m256i words = _mm256_packus_epi32(_mm256_and_si256(a.low, lowest), _mm256_and_si256(a.high, lowest));
    words = _mm256_permute4x64_epi64(words, _MM_SHUFFLE(3, 1, 2, 0));
    _mm_storeu_si128((__m128i *)to,
                     _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}
/* ((0+8)+(4+12)) + ((2+10)+(6+14)) etc.: halves onto halves, four times. */
static inline float lanes_sum(lanes a)
{
    __m256 eight = _mm256_add_ps(a.low, a.high);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

#endif
