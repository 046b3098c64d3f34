/* NEON with dot products: Cortex-A76 and later, every Apple M. Compiled with those instructions enabled. */
#if defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD)

#include "multiply_floats.h"
#include "multiply_octets.h"
#include "row_attention.h"
#include "row_coarsen.h"
#include "row_delta.h"
#include "row_draw.h"
#include "row_kernels.h"
#include "row_quantise.h"

const struct level level_neon_dotprod = {
    .name = "neon-dotprod",
    .multiply = MULTIPLY_EVERY_TYPE,
    EVERY_ROW_FUNCTION(quantise),
};

#else
typedef int no_neon_dotprod; /* a translation unit may not be empty */
#endif
