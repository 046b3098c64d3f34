/* Sixteen floats, or sixteen int32, as one value: the vector that every reduction is defined on.
 *
 * The arithmetic of a level is written once, over these, and compiled for each instruction set. All of them round to
 * nearest even, none contracts, fma is one rounding, and lanes_sum adds in one fixed tree: so every build computes the
 * same bits. Each file that includes this is compiled with the flags of its own instruction set; all is static. */
#ifndef EDGESPEC_LANES_H
#define EDGESPEC_LANES_H

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "half.h"

#if FLT_EVAL_METHOD != 0
#error "float arithmetic must round to float"
#endif

enum { LANES = 16 };

#if defined(__AVX512F__) && defined(__AVX512DQ__)

#include <immintrin.h>

typedef __m512 lanes;
typedef __m512i lanes_int;

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
static inline lanes lanes_from_int(lanes_int x) { return _mm512_cvtepi32_ps(x); }
static inline lanes lanes_of_bits(lanes_int x) { return _mm512_castsi512_ps(x); }
static inline lanes_int lanes_bits(lanes x) { return _mm512_castps_si512(x); }
static inline lanes_int lanes_int_set(int32_t x) { return _mm512_set1_epi32(x); }
static inline lanes_int lanes_int_add(lanes_int a, lanes_int b) { return _mm512_add_epi32(a, b); }
static inline lanes_int lanes_int_and(lanes_int a, int32_t mask)
{
    return _mm512_and_si512(a, _mm512_set1_epi32(mask));
}
static inline lanes_int lanes_int_max(lanes_int a, lanes_int b) { return _mm512_max_epi32(a, b); }
static inline lanes_int lanes_int_shift_23(lanes_int a) { return _mm512_slli_epi32(a, 23); }
static inline int32_t lanes_int_sum(lanes_int a) { return _mm512_reduce_add_epi32(a); }
static inline int32_t lanes_int_largest(lanes_int a) { return _mm512_reduce_max_epi32(a); }
static inline void lanes_int_store_bytes(int8_t *to, lanes_int a)
{
    _mm_storeu_si128((__m128i *)to, _mm512_cvtepi32_epi8(a));
}
/* ((0+8)+(4+12)) + ((2+10)+(6+14)) and the like: halves onto halves, four times. */
static inline float lanes_sum(lanes a)
{
    __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

#else

typedef struct { float at[16]; } lanes;
typedef struct { int32_t at[16]; } lanes_int;

#define EACH_LANE for (int i = 0; i < LANES; i++)
#define LANES_OF(type, name, parameters, expression)   \
    static inline type name parameters                 \
    {                                                  \
        type y;                                        \
        EACH_LANE y.at[i] = expression;                \
        return y;                                      \
    }

LANES_OF(lanes, lanes_set, (float x), x)
LANES_OF(lanes, lanes_load, (const float *from), from[i])
LANES_OF(lanes, lanes_add, (lanes a, lanes b), a.at[i] + b.at[i])
LANES_OF(lanes, lanes_sub, (lanes a, lanes b), a.at[i] - b.at[i])
LANES_OF(lanes, lanes_mul, (lanes a, lanes b), a.at[i] * b.at[i])
LANES_OF(lanes, lanes_div, (lanes a, lanes b), a.at[i] / b.at[i])
LANES_OF(lanes, lanes_fma, (lanes a, lanes b, lanes c), fmaf(a.at[i], b.at[i], c.at[i]))
LANES_OF(lanes, lanes_max, (lanes a, lanes b), a.at[i] > b.at[i] ? a.at[i] : b.at[i])
LANES_OF(lanes, lanes_min, (lanes a, lanes b), a.at[i] < b.at[i] ? a.at[i] : b.at[i])
LANES_OF(lanes, lanes_zero_below, (lanes a, float limit, lanes b), a.at[i] < limit ? 0.0f : b.at[i])
LANES_OF(lanes, lanes_from_halves, (const uint16_t *from), half_to_float(from[i]))
LANES_OF(lanes, lanes_from_int, (lanes_int x), (float)x.at[i])
LANES_OF(lanes, lanes_of_bits, (lanes_int x), float_of_bits((uint32_t)x.at[i]))
LANES_OF(lanes_int, lanes_bits, (lanes x), (int32_t)bits_of_float(x.at[i]))
LANES_OF(lanes_int, lanes_int_set, (int32_t x), x)
LANES_OF(lanes_int, lanes_int_add, (lanes_int a, lanes_int b), (int32_t)((uint32_t)a.at[i] + (uint32_t)b.at[i]))
LANES_OF(lanes_int, lanes_int_and, (lanes_int a, int32_t mask), a.at[i] & mask)
LANES_OF(lanes_int, lanes_int_max, (lanes_int a, lanes_int b), a.at[i] > b.at[i] ? a.at[i] : b.at[i])
LANES_OF(lanes_int, lanes_int_shift_23, (lanes_int a), (int32_t)((uint32_t)a.at[i] << 23))

static inline void lanes_store(float *to, lanes x) { memcpy(to, x.at, sizeof x.at); }
static inline int lanes_any_above(lanes a, float limit)
{
    int any = 0;
    EACH_LANE any |= a.at[i] > limit;
    return any;
}
static inline int lanes_any_nan(lanes a)
{
    int any = 0;
    EACH_LANE any |= a.at[i] != a.at[i];
    return any;
}
static inline int32_t lanes_int_sum(lanes_int a)
{
    int32_t sum = 0;
    EACH_LANE sum += a.at[i];
    return sum;
}
static inline int32_t lanes_int_largest(lanes_int a)
{
    int32_t largest = a.at[0];
    EACH_LANE largest = a.at[i] > largest ? a.at[i] : largest;
    return largest;
}
static inline void lanes_int_store_bytes(int8_t *to, lanes_int a)
{
    EACH_LANE to[i] = (int8_t)a.at[i];
}
static inline float lanes_sum(lanes a)
{
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++)
            a.at[i] += a.at[i + half];
    return a.at[0];
}

#endif

/* The largest, which is exact in any order. Without NaN. */
static inline float lanes_largest(lanes a)
{
    float each[LANES];
    lanes_store(each, a);
    float largest = each[0];
    for (int i = 1; i < LANES; i++)
        largest = each[i] > largest ? each[i] : largest;
    return largest;
}

/* To the nearest integer, ties to even, for |x| < 2^22: adding 1.5 * 2^23 leaves no room for a fraction. */
#define LANES_ROUNDER 0x1.8p23f
static inline lanes_int lanes_round(lanes x)
{
    lanes shifted = lanes_add(x, lanes_set(LANES_ROUNDER));
    return lanes_int_add(lanes_bits(shifted), lanes_int_set(-0x4b400000));
}

/* e^x within 2 units in the last place; 0 below -87 (where floats become subnormal), e^88 above 88, NaN for NaN.
 *
 * x = n ln 2 + r with |r| <= ln 2 / 2, ln 2 in two parts (Cody and Waite 1980); the polynomial for e^r is the one of
 * the Cephes library's expf (Moshier 1989). */
static inline lanes lanes_exp(lanes x)
{
    /* The bound stands first, so that a NaN of the second operand comes through. */
    lanes bounded = lanes_max(lanes_set(-87.0f), lanes_min(lanes_set(88.0f), x));
    lanes shifted = lanes_fma(bounded, lanes_set(0x1.715476p+0f), lanes_set(LANES_ROUNDER));
    lanes n = lanes_sub(shifted, lanes_set(LANES_ROUNDER));
    lanes r = lanes_fma(n, lanes_set(-0x1.63p-1f), bounded);
    r = lanes_fma(n, lanes_set(0x1.bd0106p-13f), r);
    lanes p = lanes_set(1.9875691500e-4f);
    p = lanes_fma(p, r, lanes_set(1.3981999507e-3f));
    p = lanes_fma(p, r, lanes_set(8.3334519073e-3f));
    p = lanes_fma(p, r, lanes_set(4.1665795894e-2f));
    p = lanes_fma(p, r, lanes_set(1.6666665459e-1f));
    p = lanes_fma(p, r, lanes_set(5.0000001201e-1f));
    p = lanes_add(lanes_fma(p, lanes_mul(r, r), r), lanes_set(1.0f));
    /* The bits of `shifted` end in n; 127 is the bias of a float's exponent. */
    lanes_int power = lanes_int_add(lanes_bits(shifted), lanes_int_set(127 - 0x4b400000));
    return lanes_zero_below(x, -87.0f, lanes_mul(p, lanes_of_bits(lanes_int_shift_23(power))));
}

#endif
