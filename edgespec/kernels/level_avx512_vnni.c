/* AVX-512 with VNNI: Zen 4 and later, Ice Lake and later. Compiled with those instructions enabled. */
#if defined(__AVX512VNNI__)

#include "multiply_avx512.h"
#include "multiply_avx512_pairs.h"
#include "quantise_avx512.h"
#include "row_attention.h"
#include "row_coarsen.h"
#include "row_delta.h"
#include "row_draw.h"
#include "row_kernels.h"

const struct level level_avx512_vnni = {
    .name = "avx512-vnni",
    .multiply = MULTIPLY_EVERY_TYPE,
    .multiply_pair =
        {
            [ES_Q4_0] = multiply_pair_q4_0,
            [ES_Q4_1] = multiply_pair_q4_1,
            [ES_Q5_0] = multiply_pair_q5_0,
            [ES_Q5_1] = multiply_pair_q5_1,
            [ES_Q8_0] = multiply_pair_q8_0,
            [ES_Q3_K] = multiply_pair_q3_k,
            [ES_Q4_K] = multiply_pair_q4_k,
            [ES_Q5_K] = multiply_pair_q5_k,
            [ES_Q6_K] = multiply_pair_q6_k,
            [ES_IQ3_XXS] = multiply_pair_iq3_xxs,
            [ES_IQ3_S] = multiply_pair_iq3_s,
            [ES_IQ4_NL] = multiply_pair_iq4_nl,
            [ES_IQ4_XS] = multiply_pair_iq4_xs,
            [ES_MXFP4] = multiply_pair_mxfp4,
        },
    EVERY_ROW_FUNCTION(quantise_by_sixteens),
};

#else
typedef int no_avx512_vnni; /* a translation unit may not be empty */
#endif
