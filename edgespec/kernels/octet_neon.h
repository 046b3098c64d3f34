/* Eight rows of a tile as two registers of NEON, for multiply_octets.h. Lane r of sdot is row r, and 4 activations of a
 * register that holds 16 are named by their number: nothing is broadcast. Codes of up to 7 bits are signed bytes too. */
#ifndef EDGESPEC_OCTET_NEON_H
#define EDGESPEC_OCTET_NEON_H

#include <arm_neon.h>
#include <stdint.h>

#include "layout.h"
#include "unrolled.h"

enum { OCTETS_AT_ONCE = 1 }; /* 4 inputs: 8 chains, and their sums, in 32 registers */

typedef struct { float32x4_t low, high; } octet;      /* a float of each row */
typedef struct { int32x4_t low, high; } octet_ints;   /* an int32 of each row */
typedef struct { uint8x16_t low, high; } octet_codes; /* 4 consecutive codes of each row */

ALWAYS_INLINE octet octet_load(const float *from) { return (octet){vld1q_f32(from), vld1q_f32(from + 4)}; }
ALWAYS_INLINE void octet_store(float *to, octet x)
{
    vst1q_f32(to, x.low);
    vst1q_f32(to + 4, x.high);
}
ALWAYS_INLINE octet octet_halves(const uint8_t *from)
{
    float16x8_t halves = vreinterpretq_f16_u8(vld1q_u8(from));
    return (octet){vcvt_f32_f16(vget_low_f16(halves)), vcvt_high_f32_f16(halves)};
}
ALWAYS_INLINE octet octet_from_ints(octet_ints x) { return (octet){vcvtq_f32_s32(x.low), vcvtq_f32_s32(x.high)}; }
ALWAYS_INLINE octet octet_times(octet a, float b) { return (octet){vmulq_n_f32(a.low, b), vmulq_n_f32(a.high, b)}; }
ALWAYS_INLINE octet octet_mul(octet a, octet b) { return (octet){vmulq_f32(a.low, b.low), vmulq_f32(a.high, b.high)}; }
ALWAYS_INLINE octet octet_fma(octet a, octet b, octet c)
{
    return (octet){vfmaq_f32(c.low, a.low, b.low), vfmaq_f32(c.high, a.high, b.high)};
}
ALWAYS_INLINE octet octet_fma_times(octet a, float b, octet c)
{
    return (octet){vfmaq_n_f32(c.low, a.low, b), vfmaq_n_f32(c.high, a.high, b)};
}

/* c - a * b, rounded once */
ALWAYS_INLINE octet octet_fnma_times(octet a, float b, octet c)
{
    return (octet){vfmsq_n_f32(c.low, a.low, b), vfmsq_n_f32(c.high, a.high, b)};
}
/* Signed bytes 0 and 1 of each row. */
ALWAYS_INLINE octet_ints byte_pairs_load(const uint8_t *from)
{
    int16x8_t pairs = vreinterpretq_s16_u8(vld1q_u8(from));
    return (octet_ints){vmovl_s16(vget_low_s16(pairs)), vmovl_high_s16(pairs)};
}
ALWAYS_INLINE octet octet_first_of_pair(octet_ints pairs)
{
    return (octet){vcvtq_f32_s32(vshrq_n_s32(vshlq_n_s32(pairs.low, 24), 24)),
                   vcvtq_f32_s32(vshrq_n_s32(vshlq_n_s32(pairs.high, 24), 24))};
}
ALWAYS_INLINE octet octet_second_of_pair(octet_ints pairs)
{
    return (octet){vcvtq_f32_s32(vshrq_n_s32(pairs.low, 8)), vcvtq_f32_s32(vshrq_n_s32(pairs.high, 8))};
}

/* Signed bytes. */
ALWAYS_INLINE octet_ints octet_bytes(const uint8_t *from)
{
    int16x8_t bytes = vmovl_s8(vreinterpret_s8_u8(vld1_u8(from)));
    return (octet_ints){vmovl_s16(vget_low_s16(bytes)), vmovl_high_s16(bytes)};
}
/* scale_of_exponent */
ALWAYS_INLINE octet octet_exponents(const uint8_t *from)
{
    uint16x8_t exponents = vmovl_u8(vqsub_u8(vld1_u8(from), vdup_n_u8(1)));
    return (octet){vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(vget_low_u16(exponents)), 23)),
                   vreinterpretq_f32_u32(vshlq_n_u32(vmovl_high_u16(exponents), 23))};
}

ALWAYS_INLINE octet_codes codes_load(const uint8_t *from)
{
    return (octet_codes){vld1q_u8(from), vld1q_u8(from + 16)};
}
/* The instructions take shifts as constants, which a loop's counter is not. */
ALWAYS_INLINE uint8x16_t moved_left(uint8x16_t bytes, const int left)
{
    switch (left) {
    case 4: return vshlq_n_u8(bytes, 4);
    case 3: return vshlq_n_u8(bytes, 3);
    case 2: return vshlq_n_u8(bytes, 2);
    case 1: return vshlq_n_u8(bytes, 1);
    case -1: return vshrq_n_u8(bytes, 1);
    case -2: return vshrq_n_u8(bytes, 2);
    case -3: return vshrq_n_u8(bytes, 3);
    case -4: return vshrq_n_u8(bytes, 4);
    case -5: return vshrq_n_u8(bytes, 5);
    case -6: return vshrq_n_u8(bytes, 6);
    default: return bytes;
    }
}
/* Bytes shifted left, or right by -left, and masked. */
ALWAYS_INLINE octet_codes codes_field(octet_codes bytes, const int left, const int8_t mask)
{
    const uint8x16_t kept = vdupq_n_u8((uint8_t)mask);
    return (octet_codes){vandq_u8(moved_left(bytes.low, left), kept), vandq_u8(moved_left(bytes.high, left), kept)};
}
ALWAYS_INLINE octet_codes codes_or(octet_codes a, octet_codes b)
{
    return (octet_codes){vorrq_u8(a.low, b.low), vorrq_u8(a.high, b.high)};
}
ALWAYS_INLINE octet_codes table_load(const int8_t *values)
{
    uint8x16_t table = vreinterpretq_u8_s8(vld1q_s8(values));
    return (octet_codes){table, table};
}
/* The table's bytes with these numbers. */
ALWAYS_INLINE octet_codes codes_of(octet_codes table, octet_codes numbers)
{
    return (octet_codes){vqtbl1q_u8(table.low, numbers.low), vqtbl1q_u8(table.high, numbers.high)};
}
ALWAYS_INLINE float32x4_t first_bytes(uint8x16_t bytes)
{
    return vcvtq_f32_u32(vandq_u32(vreinterpretq_u32_u8(bytes), vdupq_n_u32(255)));
}
ALWAYS_INLINE uint8x16_t later_bytes(uint8x16_t bytes)
{
    return vreinterpretq_u8_u32(vshrq_n_u32(vreinterpretq_u32_u8(bytes), 8));
}
/* Byte 0 of each row's four, unsigned; the next one takes its place. */
ALWAYS_INLINE octet octet_next_byte(octet_codes *bytes)
{
    octet first = {first_bytes(bytes->low), first_bytes(bytes->high)};
    *bytes = (octet_codes){later_bytes(bytes->low), later_bytes(bytes->high)};
    return first;
}

typedef int8x16_t octet_inputs; /* 16 activations, 4 of which a dot product names by their number */

/* The activations that include dword j of a block. */
ALWAYS_INLINE octet_inputs inputs_load(const int8_t *q, const int j) { return vld1q_s8(q + j / 4 * 16); }

/* An unfinished dot product. */
struct octet_dot {
    octet_ints sum;
};

ALWAYS_INLINE struct octet_dot dot_from(int32_t start)
{
    return (struct octet_dot){{vdupq_n_s32(start), vdupq_n_s32(start)}};
}

enum { SIGNED_OFFSET = 0 };

ALWAYS_INLINE octet_codes codes_ready(const int bits, octet_codes codes)
{
    (void)bits;
    return codes;
}

/* Four products more for each row. `lane` says which of x, as a constant. */
#define DOT_LANE(sum, codes, x, lane)                                                        \
    (octet_ints){vdotq_laneq_s32((sum).low, vreinterpretq_s8_u8((codes).low), x, lane),      \
                 vdotq_laneq_s32((sum).high, vreinterpretq_s8_u8((codes).high), x, lane)}

/* Dword j's products. The instruction takes the lane as a constant, which a loop's counter is not. */
ALWAYS_INLINE void dot_add(const int bits, const int j, octet_codes codes, octet_inputs x, struct octet_dot *dot)
{
    (void)bits;
    switch (j % 4) {
    case 0: dot->sum = DOT_LANE(dot->sum, codes, x, 0); break;
    case 1: dot->sum = DOT_LANE(dot->sum, codes, x, 1); break;
    case 2: dot->sum = DOT_LANE(dot->sum, codes, x, 2); break;
    default: dot->sum = DOT_LANE(dot->sum, codes, x, 3); break;
    }
}

ALWAYS_INLINE void prefetch(const uint8_t *from, size_t bytes)
{
    for (size_t at = 0; at < bytes; at += LINE_BYTES)
        __builtin_prefetch(from + at);
}

#endif
