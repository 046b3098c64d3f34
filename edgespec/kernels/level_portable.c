/* The level that runs everywhere. */
#define PORTABLE_LANES

#include "multiply_portable.h"
#include "row_attention.h"
#include "row_kernels.h"

const struct level level_portable = {
    .name = "portable",
    .multiply = MULTIPLY_EVERY_TYPE,
    .normalise = normalise,
    .quantise = quantise,
    .swiglu = swiglu,
    .geglu = geglu,
    .exponential = exponential,
    .attend = attend,
    .argmax = argmax,
};
