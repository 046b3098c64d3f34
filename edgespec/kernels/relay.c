/* From the file's rows to tiles, and single rows to floats. */
#include <stdint.h>
#include <string.h>

#include "half.h"
#include "layout.h"

/* How a quantised block of the file is put together. */
struct block_format {
    size_t dwords;      /* of codes */
    size_t codes_at;    /* bytes into the block */
    size_t half_counts; /* halves before the codes: a scale, and a minimum for some */
};

static struct block_format format_of(int64_t type)
{
    switch (type) {
    case ES_Q4_0: return (struct block_format){.dwords = 4, .codes_at = 2, .half_counts = 1};
    case ES_Q4_1: return (struct block_format){.dwords = 4, .codes_at = 4, .half_counts = 2};
    default: return (struct block_format){.dwords = 8, .codes_at = 2, .half_counts = 1}; /* Q8_0 */
    }
}

int64_t es_relaid_bytes(int64_t type, int64_t rows, int64_t columns)
{
    if (rows <= 0 || columns <= 0 || columns % BLOCK)
        return 0;
    return (int64_t)(tile_count(rows) * tile_bytes(type, columns));
}

/* One row of a tile of quantised blocks. Returns whether all of its scales are finite. */
static int relay_row(int64_t type, const uint8_t *source, size_t blocks, size_t lane, uint8_t *tile)
{
    const struct block_format format = format_of(type);
    uint16_t exponents = 0;
    for (size_t start = 0; start < blocks; start += GROUP_BLOCKS) {
        size_t here = blocks - start < GROUP_BLOCKS ? blocks - start : GROUP_BLOCKS;
        uint8_t *halves = tile + here * format.dwords * LINE_BYTES;
        for (size_t b = 0; b < here; b++, source += file_block_bytes(type)) {
            for (size_t j = 0; j < format.dwords; j++)
                memcpy(tile + (b * format.dwords + j) * LINE_BYTES + lane * 4, source + format.codes_at + j * 4, 4);
            for (size_t h = 0; h < format.half_counts; h++) {
                uint16_t half;
                memcpy(&half, source + h * 2, sizeof half);
                exponents |= (half & 0x7c00u) == 0x7c00u;
                memcpy(halves + (h * here + b) * HALF_LINE_BYTES + lane * 2, &half, sizeof half);
            }
        }
        tile += here * block_bytes(type);
    }
    return exponents == 0;
}

static void relay_floats(const uint8_t *source, size_t columns, size_t element_bytes, size_t lane, uint8_t *tile)
{
    for (size_t k = 0; k < columns; k++)
        memcpy(tile + (k * TILE_ROWS + lane) * element_bytes, source + k * element_bytes, element_bytes);
}

int64_t es_relay(int64_t type, const uint8_t *source, int64_t rows, int64_t columns, uint8_t *tiles)
{
    size_t blocks = (size_t)columns / BLOCK, row_bytes = blocks * file_block_bytes(type);
    int64_t bad = -1;
    for (int64_t row = 0; row < rows; row++, source += row_bytes) {
        uint8_t *tile = tiles + (size_t)(row / TILE_ROWS) * tile_bytes(type, columns);
        size_t lane = (size_t)(row % TILE_ROWS);
        if (!takes_quantised_input(type))
            relay_floats(source, (size_t)columns, type == ES_F32 ? 4 : 2, lane, tile);
        else if (!relay_row(type, source, blocks, lane, tile) && bad < 0)
            bad = row;
    }
    return bad; /* rows beyond the last are zero already: the tiles are fresh pages */
}

int32_t es_dequantise(int64_t type, const uint8_t *row, int64_t columns, float *y)
{
    if (!file_block_bytes(type) || columns % BLOCK)
        return ES_BAD_REQUEST;
    for (int64_t start = 0; start < columns; start += BLOCK, row += file_block_bytes(type), y += BLOCK) {
        uint16_t halves[BLOCK];
        if (type == ES_F32) {
            memcpy(y, row, BLOCK * sizeof *y);
            continue;
        }
        memcpy(halves, row, type == ES_F16 ? sizeof halves : 4); /* the scale first, then a minimum or codes */
        float scale = half_to_float(halves[0]), minimum = half_to_float(halves[1]);
        for (int k = 0; k < BLOCK; k++) {
            int nibble = row[format_of(type).codes_at + k % 16] >> (k / 16 * 4) & 15;
            switch (type) {
            case ES_F16: y[k] = half_to_float(halves[k]); break;
            case ES_Q4_0: y[k] = (float)(nibble - 8) * scale; break;
            case ES_Q4_1: y[k] = (float)nibble * scale + minimum; break;
            case ES_Q8_0: y[k] = (float)(int8_t)row[2 + k] * scale; break;
            }
        }
    }
    return ES_OK;
}
