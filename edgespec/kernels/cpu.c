/* Which levels this processor and its operating system can run. */
#include <stdatomic.h>
#include <stddef.h>

#include "level.h"

#if defined(__x86_64__)
#include <cpuid.h>

/* Bits of XCR0: the system saves xmm and ymm, and the three parts of AVX-512's state as well. Virtual machines may show
 * an instruction set in cpuid whose registers they do not save. */
enum { SAVED_YMM = 0x06, SAVED_ZMM = 0xe6 };

struct features {
    unsigned saved;                  /* XCR0; 0 where it cannot be read */
    unsigned leaf_1_ecx;             /* cpuid's results, 0 for a missing leaf */
    unsigned leaf_7_ebx, leaf_7_ecx;
    unsigned leaf_7_1_eax;
};

static struct features features_here(void)
{
    struct features found = {0};
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE))
        return found;
    found.leaf_1_ecx = c;
    unsigned high;
    __asm__("xgetbv" : "=a"(found.saved), "=d"(high) : "c"(0)); /* faults without OSXSAVE */
    unsigned subleaves = 0;
    if (__get_cpuid_count(7, 0, &subleaves, &found.leaf_7_ebx, &found.leaf_7_ecx, &d) && subleaves >= 1 &&
        __get_cpuid_count(7, 1, &a, &b, &c, &d))
        found.leaf_7_1_eax = a;
    return found;
}

static int has_all(unsigned found, unsigned needed)
{
    return (found & needed) == needed;
}

static int has_avx2(const struct features *here)
{
    return has_all(here->saved, SAVED_YMM) && has_all(here->leaf_1_ecx, bit_AVX | bit_FMA | bit_F16C) &&
           has_all(here->leaf_7_ebx, bit_AVX2);
}

static bool runs(int64_t level)
{
    const struct features here = features_here();
    const unsigned avx_vnni = 1u << 4; /* older headers lack the name */
    switch (level) {
    case ES_AVX2: return has_avx2(&here);
    case ES_AVX_VNNI: return has_avx2(&here) && has_all(here.leaf_7_1_eax, avx_vnni);
    case ES_AVX512_VNNI:
        return has_avx2(&here) && has_all(here.saved, SAVED_ZMM) &&
               has_all(here.leaf_7_ebx, bit_AVX512F | bit_AVX512DQ | bit_AVX512BW | bit_AVX512VL) &&
               has_all(here.leaf_7_ecx, bit_AVX512VNNI);
    default: return 0;
    }
}
#elif defined(__aarch64__) && defined(__APPLE__)
static bool runs(int64_t level)
{
    return level == ES_NEON_DOTPROD; /* every Mac with such a processor has it */
}
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>

static bool runs(int64_t level)
{
    const unsigned long dotprod = 1ul << 20; /* HWCAP_ASIMDDP */
    return level == ES_NEON_DOTPROD && (getauxval(AT_HWCAP) & dotprod);
}
#elif defined(__aarch64__) && defined(_WIN32)
#define WIN32_LEAN_AND_MEAN
#include <windows.h>

static bool runs(int64_t level)
{
    const DWORD dot_products = 43; /* PF_ARM_V82_DP_INSTRUCTIONS_AVAILABLE, which older headers do not name */
    return level == ES_NEON_DOTPROD && IsProcessorFeaturePresent(dot_products);
}
#else
static bool runs(int64_t level)
{
    (void)level;
    return 0;
}
#endif

static const struct level *level_built(int64_t number)
{
    switch (number) {
    case ES_PORTABLE: return &level_portable;
#if defined(EDGESPEC_HAS_AVX2)
    case ES_AVX2: return &level_avx2;
#endif
#if defined(EDGESPEC_HAS_AVX_VNNI)
    case ES_AVX_VNNI: return &level_avx_vnni;
#endif
#if defined(EDGESPEC_HAS_AVX512_VNNI)
    case ES_AVX512_VNNI: return &level_avx512_vnni;
#endif
#if defined(EDGESPEC_HAS_NEON_DOTPROD)
    case ES_NEON_DOTPROD: return &level_neon_dotprod;
#endif
    default: return NULL;
    }
}

bool es_level_runs(int32_t number)
{
    /* Cached, since every draw needs it and cpuid takes 10 us in a virtual machine. */
    enum { UNKNOWN, NO, YES };
    static atomic_int known[ES_LEVELS];
    if (number < 0 || number >= ES_LEVELS)
        return false;
    int answer = atomic_load_explicit(&known[number], memory_order_relaxed);
    if (answer == UNKNOWN) {
        answer = number == ES_PORTABLE || runs(number) ? YES : NO;
        atomic_store_explicit(&known[number], answer, memory_order_relaxed);
    }
    return answer == YES;
}

const struct level *level_of(int64_t number)
{
    const struct level *level = level_built(number);
    return level && es_level_runs((int32_t)number) ? level : NULL;
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
