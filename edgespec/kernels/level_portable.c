/* The level that runs everywhere. */
#define PORTABLE_LANES

#include "multiply_portable.h"
#include "row_attention.h"
#include "row_kernels.h"

const struct level level_portable = {
    .name = "portable",
    .multiply_q4_0 = multiply_q4_0,
    .multiply_q4_1 = multiply_q4_1,
    .multiply_q8_0 = multiply_q8_0,
    .multiply_f16 = multiply_f16,
    .multiply_f32 = multiply_f32,
    .normalise = normalise,
    .quantise = quantise,
    .swiglu = swiglu,
    .exponential = exponential,
    .attend = attend,
    .argmax = argmax,
};
