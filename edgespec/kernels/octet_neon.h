/* Eight rows of a tile as two registers of NEON, for multiply_octets.h. Lane r of sdot is row r, and 4 activations of a
 * register that holds 16 are named by their number: nothing is broadcast. Codes of up to 7 bits are signed bytes too. */
#ifndef EDGESPEC_OCTET_NEON_H
#define EDGESPEC_OCTET_NEON_H

#include <arm_neon.h>
#include <stdint.h>

#include "layout.h"
#include "unrolled.h"

typedef struct { float32x4_t low, high; } octet;    /* a float of each row */
typedef struct { int32x4_t low, high; } octet_ints; /* an int32 of each row */
typedef struct { int8x16_t low, high; } octet_codes; /* 4 consecutive codes of each row */

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
ALWAYS_INLINE octet octet_fma(octet a, octet b, octet c)
{
    return (octet){vfmaq_f32(c.low, a.low, b.low), vfmaq_f32(c.high, a.high, b.high)};
}
ALWAYS_INLINE octet octet_fma_times(octet a, float b, octet c)
{
    return (octet){vfmaq_n_f32(c.low, a.low, b), vfmaq_n_f32(c.high, a.high, b)};
}

ALWAYS_INLINE octet_codes codes_load(const uint8_t *from)
{
    return (octet_codes){vreinterpretq_s8_u8(vld1q_u8(from)), vreinterpretq_s8_u8(vld1q_u8(from + 16))};
}
ALWAYS_INLINE octet_codes codes_low_nibbles(octet_codes pairs)
{
    return (octet_codes){vandq_s8(pairs.low, vdupq_n_s8(15)), vandq_s8(pairs.high, vdupq_n_s8(15))};
}
ALWAYS_INLINE int8x16_t high_nibbles(int8x16_t pairs)
{
    return vreinterpretq_s8_u8(vshrq_n_u8(vreinterpretq_u8_s8(pairs), 4));
}
ALWAYS_INLINE octet_codes codes_high_nibbles(octet_codes pairs)
{
    return (octet_codes){high_nibbles(pairs.low), high_nibbles(pairs.high)};
}

/* sum + the dot product of 16 codes of each row with as many activations. The instruction takes a lane's number as a
 * constant, which a loop's counter is not. */
ALWAYS_INLINE octet_ints dot_16(const octet_codes codes[4], const int8_t *q, octet_ints sum)
{
    int8x16_t x = vld1q_s8(q);
    sum = (octet_ints){vdotq_laneq_s32(sum.low, codes[0].low, x, 0), vdotq_laneq_s32(sum.high, codes[0].high, x, 0)};
    sum = (octet_ints){vdotq_laneq_s32(sum.low, codes[1].low, x, 1), vdotq_laneq_s32(sum.high, codes[1].high, x, 1)};
    sum = (octet_ints){vdotq_laneq_s32(sum.low, codes[2].low, x, 2), vdotq_laneq_s32(sum.high, codes[2].high, x, 2)};
    return (octet_ints){vdotq_laneq_s32(sum.low, codes[3].low, x, 3), vdotq_laneq_s32(sum.high, codes[3].high, x, 3)};
}

ALWAYS_INLINE octet_ints dot_4_bits(const octet_codes codes[8], const int8_t *q, int32_t start)
{
    octet_ints sum = {vdupq_n_s32(start), vdupq_n_s32(start)};
    return dot_16(codes + 4, q + 16, dot_16(codes, q, sum));
}

ALWAYS_INLINE octet_ints dot_signed(const octet_codes codes[8], const int8_t *q, int32_t minus8)
{
    (void)minus8;
    return dot_4_bits(codes, q, 0);
}

ALWAYS_INLINE void prefetch(const uint8_t *from, size_t bytes)
{
    for (size_t at = 0; at < bytes; at += LINE_BYTES)
        __builtin_prefetch(from + at);
}

#endif
