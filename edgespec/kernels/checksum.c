/* A checksum against damage, not against malice, as fast as memory is read. */
#include <string.h>

#include "edgespec_kernels.h"

/* This many parallel sums hide the latency of a multiplication. */
enum { SUMS = 8, ROTATION = 31 };

/* 2^64 over the golden ratio, and over the square root of 3: odd, with irregular bits. */
static const uint64_t FOR_WORDS = 0x9e3779b97f4a7c15u, FOR_SUMS = 0x93cd3a2c8198e269u;

/* Invertible in both arguments: a single different word makes every later sum differ. A multiplication spreads bits
 * upwards only, so a rotation brings the high ones down. Each word is multiplied before it is added (as in xxHash,
 * Collet 2012): otherwise a changed bit in the next word could cancel a changed bit. */
static inline uint64_t mixed(uint64_t sum, uint64_t word)
{
    sum += word * FOR_WORDS;
    return (sum << ROTATION | sum >> (64 - ROTATION)) * FOR_SUMS;
}

uint64_t es_checksum(const uint8_t *bytes, int64_t length)
{
    uint64_t sums[SUMS], words[SUMS];
    for (int i = 0; i < SUMS; i++)
        sums[i] = FOR_SUMS * (uint64_t)(i + 1);
    size_t left = (size_t)length;
    for (; left >= sizeof words; left -= sizeof words, bytes += sizeof words) {
        memcpy(words, bytes, sizeof words);
        for (int i = 0; i < SUMS; i++)
            sums[i] = mixed(sums[i], words[i]);
    }
    memset(words, 0, sizeof words);
    memcpy(words, bytes, left);
    uint64_t all = (uint64_t)length;
    for (int i = 0; i < SUMS; i++)
        all = mixed(all, mixed(sums[i], words[i]));
    return all;
}
