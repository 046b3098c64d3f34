/* Sixteen lanes as four registers of NEON. Included by lanes.h. */
#ifndef EDGESPEC_LANES_NEON_H
#define EDGESPEC_LANES_NEON_H

#include <arm_neon.h>
#include <stdint.h>

#include "unrolled.h"

typedef struct { float32x4_t at[4]; } lanes;
typedef struct { int32x4_t at[4]; } lanes_int;
enum { LANES_IN_REGISTERS = 8 }; /* 32 registers of 4 */

#define QUARTERS_OF(type, name, parameters, expression) \
    static inline type name parameters                  \
    {                                                   \
        type y;                                         \
        UNROLLED                                        \
        for (int i = 0; i < 4; i++)                     \
            y.at[i] = expression;                       \
        return y;                                       \
    }

QUARTERS_OF(lanes, lanes_set, (float x), vdupq_n_f32(x))
QUARTERS_OF(lanes, lanes_load, (const float *from), vld1q_f32(from + 4 * i))
QUARTERS_OF(lanes, lanes_add, (lanes a, lanes b), vaddq_f32(a.at[i], b.at[i]))
QUARTERS_OF(lanes, lanes_sub, (lanes a, lanes b), vsubq_f32(a.at[i], b.at[i]))
QUARTERS_OF(lanes, lanes_mul, (lanes a, lanes b), vmulq_f32(a.at[i], b.at[i]))
QUARTERS_OF(lanes, lanes_div, (lanes a, lanes b), vdivq_f32(a.at[i], b.at[i]))
QUARTERS_OF(lanes, lanes_fma, (lanes a, lanes b, lanes c), vfmaq_f32(c.at[i], a.at[i], b.at[i]))
/* a > b ? a : b, that is b if one is NaN, which vmaxq_f32 would pass on; and a < b ? a : b. */
QUARTERS_OF(lanes, lanes_max, (lanes a, lanes b), vbslq_f32(vcgtq_f32(a.at[i], b.at[i]), a.at[i], b.at[i]))
QUARTERS_OF(lanes, lanes_min, (lanes a, lanes b), vbslq_f32(vcltq_f32(a.at[i], b.at[i]), a.at[i], b.at[i]))
/* a < limit ? 0 : b */
QUARTERS_OF(lanes, lanes_zero_below, (lanes a, float limit, lanes b),
            vbslq_f32(vcltq_f32(a.at[i], vdupq_n_f32(limit)), vdupq_n_f32(0.0f), b.at[i]))
QUARTERS_OF(lanes, lanes_from_halves, (const uint16_t *from),
            vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from + 4 * i))))
/* A bfloat is the upper half of a float. */
QUARTERS_OF(lanes, lanes_from_bfloats, (const uint16_t *from),
            vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(from + 4 * i), 16)))
QUARTERS_OF(lanes, lanes_of_bits, (lanes_int x), vreinterpretq_f32_s32(x.at[i]))
QUARTERS_OF(lanes_int, lanes_bits, (lanes x), vreinterpretq_s32_f32(x.at[i]))
QUARTERS_OF(lanes_int, lanes_int_set, (int32_t x), vdupq_n_s32(x))
QUARTERS_OF(lanes_int, lanes_int_add, (lanes_int a, lanes_int b), vaddq_s32(a.at[i], b.at[i]))
QUARTERS_OF(lanes_int, lanes_int_and, (lanes_int a, int32_t mask), vandq_s32(a.at[i], vdupq_n_s32(mask)))
QUARTERS_OF(lanes_int, lanes_int_max, (lanes_int a, lanes_int b), vmaxq_s32(a.at[i], b.at[i]))
QUARTERS_OF(lanes_int, lanes_int_shift, (lanes_int a, int left), vshlq_s32(a.at[i], vdupq_n_s32(left)))

static inline void lanes_store(float *to, lanes x)
{
    UNROLLED
    for (int i = 0; i < 4; i++)
        vst1q_f32(to + 4 * i, x.at[i]);
}
static inline void lanes_to_halves(uint16_t *to, lanes x)
{
    UNROLLED
    for (int i = 0; i < 4; i++)
        vst1_u16(to + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(x.at[i])));
}
static inline int lanes_any(const uint32x4_t *where)
{
    uint32x4_t any = vorrq_u32(vorrq_u32(where[0], where[1]), vorrq_u32(where[2], where[3]));
    return vmaxvq_u32(any) != 0;
}
static inline int lanes_any_above(lanes a, float limit)
{
    uint32x4_t above[4];
    UNROLLED
    for (int i = 0; i < 4; i++)
        above[i] = vcgtq_f32(a.at[i], vdupq_n_f32(limit));
    return lanes_any(above);
}
static inline int lanes_any_nan(lanes a)
{
    uint32x4_t nan[4];
    UNROLLED
    for (int i = 0; i < 4; i++)
        nan[i] = vmvnq_u32(vceqq_f32(a.at[i], a.at[i]));
    return lanes_any(nan);
}
static inline int32_t lanes_int_sum(lanes_int a)
{
    return vaddvq_s32(vaddq_s32(vaddq_s32(a.at[0], a.at[1]), vaddq_s32(a.at[2], a.at[3])));
}
static inline int32_t lanes_int_largest(lanes_int a)
{
    return vmaxvq_s32(vmaxq_s32(vmaxq_s32(a.at[0], a.at[1]), vmaxq_s32(a.at[2], a.at[3])));
}
/* The lowest byte of each. */
static inline void lanes_int_store_bytes(int8_t *to, lanes_int a)
{
    int16x8_t low = vcombine_s16(vmovn_s32(a.at[0]), vmovn_s32(a.at[1]));
    int16x8_t high = vcombine_s16(vmovn_s32(a.at[2]), vmovn_s32(a.at[3]));
    vst1q_s8(to, vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
}
/* ((0+8)+(4+12)) + ((2+10)+(6+14)) etc.: halves onto halves, four times. */
static inline float lanes_sum(lanes a)
{
    float32x4_t four = vaddq_f32(vaddq_f32(a.at[0], a.at[2]), vaddq_f32(a.at[1], a.at[3]));
    float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}

#endif
