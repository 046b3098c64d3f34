/* Which levels this processor and its operating system can run. */
#include <stddef.h>

#include "level.h"

#if defined(EDGESPEC_HAS_AVX512_VNNI)
#include <cpuid.h>

/* Bits of XCR0: the system saves xmm, ymm, and the three parts of AVX-512's state. Virtual machines may show an
 * instruction set in cpuid whose registers they do not save. */
enum { SAVED_STATE = 0xe6 };

static int runs_avx512_vnni(void)
{
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE) || !(c & bit_FMA) || !(c & bit_F16C) || !(c & bit_AVX))
        return 0;
    unsigned low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0)); /* faults without OSXSAVE */
    if ((low & SAVED_STATE) != SAVED_STATE)
        return 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d))
        return 0;
    const unsigned needed = bit_AVX2 | bit_AVX512F | bit_AVX512DQ | bit_AVX512BW | bit_AVX512VL;
    return (b & needed) == needed && (c & bit_AVX512VNNI);
}
#endif

const struct level *level_of(int64_t number)
{
    if (number == ES_PORTABLE)
        return &level_portable;
#if defined(EDGESPEC_HAS_AVX512_VNNI)
    if (number == ES_AVX512_VNNI && runs_avx512_vnni())
        return &level_avx512_vnni;
#endif
    return NULL;
}

int32_t es_best_level(void)
{
    int32_t number = ES_LEVELS - 1;
    while (!level_of(number))
        number--;
    return number;
}

const char *es_level_name(int32_t number)
{
    const struct level *level = level_of(number);
    return level ? level->name : NULL;
}

int32_t es_abi(void)
{
    return ES_ABI;
}
