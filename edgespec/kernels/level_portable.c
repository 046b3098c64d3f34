/* The level that runs everywhere. */
#define PORTABLE_LANES

#include "multiply_portable.h"
#include "row_attention.h"
#include "row_coarsen.h"
#include "row_delta.h"
#include "row_draw.h"
#include "row_kernels.h"
#include "row_quantise.h"

const struct level level_portable = {
    .name = "portable",
    .multiply = MULTIPLY_EVERY_TYPE,
    EVERY_ROW_FUNCTION(quantise),
};
