/* AVX2 with FMA and F16C: Haswell and later, Zen and later. Compiled with those instructions enabled. */
#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

#include "multiply_floats.h"
#include "multiply_octets.h"
#include "row_attention.h"
#include "row_coarsen.h"
#include "row_delta.h"
#include "row_draw.h"
#include "row_kernels.h"
#include "row_quantise.h"

const struct level level_avx2 = {
    .name = "avx2",
    .multiply = MULTIPLY_EVERY_TYPE,
    EVERY_ROW_FUNCTION(quantise),
};

#else
typedef int no_avx2; /* a translation unit may not be empty */
#endif
