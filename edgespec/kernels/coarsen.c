/* Requantises weights of any type to Q4_0, for drafters, whose scores may be less precise. */
#include "float_mode.h"
#include "level.h"

int64_t es_coarsen(int64_t type, const uint8_t *source, int64_t rows, int64_t columns, uint8_t *to, int32_t number)
{
    const struct level *level = level_of(number);
    const int64_t together = file_block_columns(type);
    const size_t blocks = (size_t)together / BLOCK;
    int64_t bad = -1;
    if (!level || !file_block_bytes(type) || columns % together)
        return 0;
    unsigned mode = float_mode_set();
    for (int64_t row = 0; row < rows; row++)
        for (int64_t column = 0; column < columns; column += together) {
            float x[GROUP_BLOCKS * BLOCK];
            (void)es_dequantise(type, source, together, x);
            if (!level->coarsen(x, blocks, to) && bad < 0)
                bad = row;
            source += file_block_bytes(type);
            to += blocks * file_block_bytes(ES_Q4_0);
        }
    float_mode_restore(mode);
    return bad;
}
