/* AVX2 and the dot products of AVX-VNNI: Alder Lake and later, Zen 5. Compiled with those instructions enabled. */
#if defined(__AVXVNNI__)

#include "multiply_floats.h"
#include "multiply_octets.h"
#include "row_attention.h"
#include "row_coarsen.h"
#include "row_delta.h"
#include "row_draw.h"
#include "row_kernels.h"
#include "row_quantise.h"

const struct level level_avx_vnni = {
    .name = "avx-vnni",
    .multiply = MULTIPLY_EVERY_TYPE,
    EVERY_ROW_FUNCTION(quantise),
};

#else
typedef int no_avx_vnni; /* a translation unit may not be empty */
#endif
