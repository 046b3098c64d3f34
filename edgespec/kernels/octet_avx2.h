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

enum { OCTETS_AT_ONCE = 2 }; /* 4 inputs with both: 8 chains in 16 registers, beside codes and activations */

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

/* Signed bytes. */
ALWAYS_INLINE octet_ints octet_bytes(const uint8_t *from)
{
    return _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from));
}
/* scale_of_exponent */
ALWAYS_INLINE octet octet_exponents(const uint8_t *from)
{
    __m128i exponents = _mm_subs_epu8(_mm_loadl_epi64((const __m128i *)from), _mm_set1_epi8(1));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu8_epi32(exponents), 23));
}

ALWAYS_INLINE octet_codes codes_load(const uint8_t *from) { return _mm256_loadu_si256((const __m256i *)from); }
/* Bytes shifted left, or right by -left, and masked: bits that a shift of 16 moves into the other byte are not kept. */
ALWAYS_INLINE octet_codes codes_field(octet_codes bytes, const int left, const int8_t mask)
{
    __m256i moved = left > 0 ? _mm256_slli_epi16(bytes, left) : _mm256_srli_epi16(bytes, -left);
    return _mm256_and_si256(moved, _mm256_set1_epi8(mask));
}
ALWAYS_INLINE octet_codes codes_or(octet_codes a, octet_codes b) { return _mm256_or_si256(a, b); }
ALWAYS_INLINE octet_codes table_load(const int8_t *values)
{
    return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)values));
}
/* The table's bytes with these numbers. */
ALWAYS_INLINE octet_codes codes_of(octet_codes table, octet_codes numbers)
{
    return _mm256_shuffle_epi8(table, numbers);
}
/* Byte 0 of each row's four, unsigned; the next one takes its place. */
ALWAYS_INLINE octet octet_next_byte(octet_codes *bytes)
{
    octet first = _mm256_cvtepi32_ps(_mm256_and_si256(*bytes, _mm256_set1_epi32(255)));
    *bytes = _mm256_srli_epi32(*bytes, 8);
    return first;
}

typedef __m256i octet_inputs; /* 4 consecutive activations, the same for every row */

/* The activations of dword j of a block. */
ALWAYS_INLINE octet_inputs inputs_load(const int8_t *q, const int j)
{
    int32_t dword;
    __builtin_memcpy(&dword, q + 4 * j, sizeof dword);
    return _mm256_set1_epi32(dword);
}

/* An unfinished dot product. */
struct octet_dot {
    octet_ints sum;
#if !defined(__AVXVNNI__)
    __m256i pairs; /* sums of products of two columns each, in 16 bits, not in `sum` yet */
#endif
};

ALWAYS_INLINE struct octet_dot dot_from(int32_t start)
{
    return (struct octet_dot){.sum = _mm256_set1_epi32(start)};
}

#if defined(__AVXVNNI__)

/* Signed codes with inverted sign bits are the codes plus 128, which this times minus8 subtracts again. */
enum { SIGNED_OFFSET = 16 };

ALWAYS_INLINE octet_codes codes_ready(const int bits, octet_codes codes)
{
    return bits == 8 ? _mm256_xor_si256(codes, _mm256_set1_epi8(-128)) : codes;
}

/* Dword j's products, of codes of `bits` bits. */
ALWAYS_INLINE void dot_add(const int bits, const int j, octet_codes codes, octet_inputs x, struct octet_dot *dot)
{
    (void)bits, (void)j;
    dot->sum = _mm256_dpbusd_avx_epi32(dot->sum, codes, x);
}

#else

/* Without this, GCC 12 turns a chain of sums into a tree, and needs three times the available registers for a block's
 * products. */
#define IN_ORDER(sum) __asm__("" : "+x"(sum))

enum { SIGNED_OFFSET = 0 };

ALWAYS_INLINE octet_codes codes_ready(const int bits, octet_codes codes)
{
    (void)bits;
    return codes;
}

/* Dword j's products, of codes of `bits` bits; those that fit are added in 16 bits. */
ALWAYS_INLINE void dot_add(const int bits, const int j, octet_codes codes, octet_inputs x, struct octet_dot *dot)
{
    const int held = bits == 4 ? 8 : bits == 5 ? 4 : bits == 6 ? 2 : 1;
    __m256i pairs = bits == 8 ? _mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(x, codes))
                              : _mm256_maddubs_epi16(codes, x);
    dot->pairs = j % held ? _mm256_add_epi16(dot->pairs, pairs) : pairs;
    IN_ORDER(dot->pairs);
    if (j % held == held - 1) {
        dot->sum = _mm256_add_epi32(dot->sum, _mm256_madd_epi16(dot->pairs, _mm256_set1_epi16(1)));
        IN_ORDER(dot->sum);
    }
}

#endif

ALWAYS_INLINE void prefetch(const uint8_t *from, size_t bytes)
{
    for (size_t at = 0; at < bytes; at += LINE_BYTES)
        _mm_prefetch((const char *)from + at, _MM_HINT_T0);
}

#endif
