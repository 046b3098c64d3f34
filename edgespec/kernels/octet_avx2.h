/* Eight rows of a tile as one register of AVX2, for multiply_octets.h.
 *
 * vpmaddubsw multiplies unsigned by signed bytes and adds two products to 16 bits. These hold 8 such sums of 4-bit
 * codes, 4 of 5-bit and 2 of 6-bit ones: 2 * 15 * 127 * 8 = 30480, 2 * 31 * 127 * 4 = 31496, 2 * 63 * 127 * 2 = 32004.
 * One of 8-bit weights fits, 2 * 128 * 127 = 32512, when their signs are moved to the activations, which are never
 * -128. AVX-VNNI's vpdpbusd adds four products to 32 bits. */
#ifndef EDGESPEC_OCTET_AVX2_H
#define EDGESPEC_OCTET_AVX2_H

#include <immintrin.h>
#include <stdint.h>

#include "layout.h"
#include "unrolled.h"

typedef __m256 octet;        /* a float of each row */
typedef __m256i octet_ints;  /* an int32 of each row */
typedef __m256i octet_codes; /* 4 consecutive codes of each row */

ALWAYS_INLINE octet octet_load(const float *from) { return _mm256_loadu_ps(from); }
ALWAYS_INLINE void octet_store(float *to, octet x) { _mm256_storeu_ps(to, x); }
ALWAYS_INLINE octet octet_halves(const uint8_t *from)
{
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
}
ALWAYS_INLINE octet octet_from_ints(octet_ints x) { return _mm256_cvtepi32_ps(x); }
ALWAYS_INLINE octet octet_times(octet a, float b) { return _mm256_mul_ps(a, _mm256_set1_ps(b)); }
ALWAYS_INLINE octet octet_fma(octet a, octet b, octet c) { return _mm256_fmadd_ps(a, b, c); }
ALWAYS_INLINE octet octet_mul(octet a, octet b) { return _mm256_mul_ps(a, b); }
ALWAYS_INLINE octet octet_fma_times(octet a, float b, octet c) { return _mm256_fmadd_ps(a, _mm256_set1_ps(b), c); }
/* c - a * b, rounded once */
ALWAYS_INLINE octet octet_fnma_times(octet a, float b, octet c) { return _mm256_fnmadd_ps(a, _mm256_set1_ps(b), c); }
/* Signed bytes 0 and 1 of each row. */
ALWAYS_INLINE octet_ints byte_pairs_load(const uint8_t *from)
{
    return _mm256_cvtepi16_epi32(_mm_loadu_si128((const __m128i *)from));
}
ALWAYS_INLINE octet octet_first_of_pair(octet_ints pairs)
{
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(pairs, 24), 24));
}
ALWAYS_INLINE octet octet_second_of_pair(octet_ints pairs)
{
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(pairs, 8));
}

ALWAYS_INLINE octet_codes codes_load(const uint8_t *from) { return _mm256_loadu_si256((const __m256i *)from); }
/* Bytes shifted left, or right by -left, and masked: bits that a shift of 16 moves into the other byte are not kept. */
ALWAYS_INLINE octet_codes codes_field(octet_codes bytes, const int left, const int8_t mask)
{
    __m256i moved = left > 0 ? _mm256_slli_epi16(bytes, left) : _mm256_srli_epi16(bytes, -left);
    return _mm256_and_si256(moved, _mm256_set1_epi8(mask));
}
ALWAYS_INLINE octet_codes codes_or(octet_codes a, octet_codes b) { return _mm256_or_si256(a, b); }
/* Byte 0 of each row's four, unsigned; the next one takes its place. */
ALWAYS_INLINE octet octet_next_byte(octet_codes *bytes)
{
    octet first = _mm256_cvtepi32_ps(_mm256_and_si256(*bytes, _mm256_set1_epi32(255)));
    *bytes = _mm256_srli_epi32(*bytes, 8);
    return first;
}

ALWAYS_INLINE __m256i four_of(const int8_t *q)
{
    int32_t dword;
    __builtin_memcpy(&dword, q, sizeof dword);
    return _mm256_set1_epi32(dword);
}

#if defined(__AVXVNNI__)

/* start + the dot product of `count` times 4 codes of each row with as many activations. */
ALWAYS_INLINE octet_ints dot_unsigned(const int count, const octet_codes *codes, const int8_t *q, octet_ints sum)
{
    UNROLLED
    for (int j = 0; j < count; j++)
        sum = _mm256_dpbusd_avx_epi32(sum, codes[j], four_of(q + 4 * j));
    return sum;
}

ALWAYS_INLINE octet_ints dot_4_bits(const octet_codes codes[8], const int8_t *q, int32_t start)
{
    return dot_unsigned(8, codes, q, _mm256_set1_epi32(start));
}
ALWAYS_INLINE octet_ints dot_5_bits(const octet_codes codes[8], const int8_t *q, int32_t start)
{
    return dot_unsigned(8, codes, q, _mm256_set1_epi32(start));
}
/* Of 16 columns. */
ALWAYS_INLINE octet_ints dot_6_bits(const octet_codes codes[4], const int8_t *q, int32_t start)
{
    return dot_unsigned(4, codes, q, _mm256_set1_epi32(start));
}

/* Two's complement with its sign turned is the value plus 128, which 16 * minus8 takes away again. */
ALWAYS_INLINE octet_ints dot_signed(const octet_codes codes[8], const int8_t *q, int32_t minus8)
{
    octet_codes biased[8];
    UNROLLED
    for (int j = 0; j < 8; j++)
        biased[j] = _mm256_xor_si256(codes[j], _mm256_set1_epi8(-128));
    return dot_unsigned(8, biased, q, _mm256_slli_epi32(_mm256_set1_epi32(minus8), 4));
}

#else

/* Sums of 2, 4, 8 and 16 products in 16 bits, added in a tree: a chain's latency would show. */
ALWAYS_INLINE __m256i pairs_of_1(const octet_codes *codes, const int8_t *q)
{
    return _mm256_maddubs_epi16(codes[0], four_of(q));
}
ALWAYS_INLINE __m256i pairs_of_2(const octet_codes *codes, const int8_t *q)
{
    return _mm256_add_epi16(pairs_of_1(codes, q), pairs_of_1(codes + 1, q + 4));
}
ALWAYS_INLINE __m256i pairs_of_4(const octet_codes *codes, const int8_t *q)
{
    return _mm256_add_epi16(pairs_of_2(codes, q), pairs_of_2(codes + 2, q + 8));
}
ALWAYS_INLINE __m256i pairs_of_8(const octet_codes *codes, const int8_t *q)
{
    return _mm256_add_epi16(pairs_of_4(codes, q), pairs_of_4(codes + 4, q + 16));
}
ALWAYS_INLINE octet_ints widened(__m256i pairs) { return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)); }

ALWAYS_INLINE octet_ints dot_4_bits(const octet_codes codes[8], const int8_t *q, int32_t start)
{
    return _mm256_add_epi32(widened(pairs_of_8(codes, q)), _mm256_set1_epi32(start));
}
ALWAYS_INLINE octet_ints dot_5_bits(const octet_codes codes[8], const int8_t *q, int32_t start)
{
    __m256i sum = _mm256_add_epi32(widened(pairs_of_4(codes, q)), widened(pairs_of_4(codes + 4, q + 16)));
    return _mm256_add_epi32(sum, _mm256_set1_epi32(start));
}
/* Of 16 columns. */
ALWAYS_INLINE octet_ints dot_6_bits(const octet_codes codes[4], const int8_t *q, int32_t start)
{
    __m256i sum = _mm256_add_epi32(widened(pairs_of_2(codes, q)), widened(pairs_of_2(codes + 2, q + 8)));
    return _mm256_add_epi32(sum, _mm256_set1_epi32(start));
}

ALWAYS_INLINE octet_ints dot_signed(const octet_codes codes[8], const int8_t *q, int32_t minus8)
{
    (void)minus8;
    octet_ints sum = _mm256_setzero_si256();
    UNROLLED
    for (int j = 0; j < 8; j++) {
        __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(codes[j]), _mm256_sign_epi8(four_of(q + 4 * j), codes[j]));
        sum = _mm256_add_epi32(sum, widened(pairs));
    }
    return sum;
}

#endif

ALWAYS_INLINE void prefetch(const uint8_t *from, size_t bytes)
{
    for (size_t at = 0; at < bytes; at += LINE_BYTES)
        _mm_prefetch((const char *)from + at, _MM_HINT_T0);
}

#endif
