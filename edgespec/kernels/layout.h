/* T16: how weights lie in memory, the same for every instruction set.
 *
 * A tile is 16 output rows times all columns, contiguous. Columns are taken in blocks of 32, blocks in groups of up
 * to 8 (256 columns, a K-quant's super-block). A group holds the blocks' code lines one after another, then their
 * scales, then their minimums: what one kind of load touches lies together, and a full group is whole cache lines.
 *
 * A code line is one dword of each of the 16 rows side by side, the dword being 4 consecutive bytes of the file's own
 * block. So a tile is the file's bytes transposed: the same size, nothing lost, and lane i of every vector is row i.
 *
 *   type   code lines of a block                          then, for each block
 *   Q4_0   4: low nibbles are columns 4j.., high 16+4j..   16 half scales
 *   Q4_1   4: the same                                     16 half scales; 16 half minimums
 *   Q8_0   8: columns 4j.., signed                         16 half scales
 *   F16    32 half lines of 32 bytes, one for each column
 *   F32    32 lines, one for each column
 *
 * K-quants fit the same frame: Q4_K is Q4_0's lines with 6-bit scales and minimums in bit planes and two super-scales
 * behind them, Q5_K has one plane of 8 lines more, Q6_K a 2-bit plane of 16 lines and signed scales for each 16. Only
 * block_bytes and the three files that say what a line means (relay.c, multiply_*.h) have to learn a type.
 *
 * Rows beyond the last are zeros with zero scales. */
#ifndef EDGESPEC_LAYOUT_H
#define EDGESPEC_LAYOUT_H

#include "edgespec_kernels.h"

enum { TILE_ROWS = 16, BLOCK = 32, GROUP_BLOCKS = 8, LINE_BYTES = 64, HALF_LINE_BYTES = 32 };

/* Bytes that a block of 32 columns takes in a tile; 0 for a type without a layout. */
static inline size_t block_bytes(int64_t type)
{
    switch (type) {
    case ES_Q4_0: return 4 * LINE_BYTES + HALF_LINE_BYTES;
    case ES_Q4_1: return 4 * LINE_BYTES + 2 * HALF_LINE_BYTES;
    case ES_Q8_0: return 8 * LINE_BYTES + HALF_LINE_BYTES;
    case ES_F16: return 32 * HALF_LINE_BYTES;
    case ES_F32: return 32 * LINE_BYTES;
    default: return 0;
    }
}

/* Bytes that 32 columns of one row take in the file. */
static inline size_t file_block_bytes(int64_t type)
{
    switch (type) {
    case ES_Q4_0: return 2 + 16;
    case ES_Q4_1: return 2 + 2 + 16;
    case ES_Q8_0: return 2 + 32;
    case ES_F16: return 64;
    case ES_F32: return 128;
    default: return 0;
    }
}

static inline int takes_quantised_input(int64_t type)
{
    return type != ES_F32 && type != ES_F16;
}

static inline size_t tile_bytes(int64_t type, int64_t columns)
{
    return (size_t)columns / BLOCK * block_bytes(type);
}

static inline size_t tile_count(int64_t rows)
{
    return ((size_t)rows + TILE_ROWS - 1) / TILE_ROWS;
}

#endif
