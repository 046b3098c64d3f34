/* AVX-512 with VNNI: Zen 4 and later, Ice Lake and later. Compiled with those instructions enabled. */
#if defined(__AVX512VNNI__)

#include "multiply_avx512.h"
#include "row_attention.h"
#include "row_kernels.h"

const struct level level_avx512_vnni = {
    .name = "avx512-vnni",
    .multiply = MULTIPLY_EVERY_TYPE,
    .normalise = normalise,
    .quantise = quantise,
    .swiglu = swiglu,
    .exponential = exponential,
    .attend = attend,
    .argmax = argmax,
};

#else
typedef int no_avx512_vnni; /* a translation unit may not be empty */
#endif
