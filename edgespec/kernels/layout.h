/* T16: the memory layout of weights, the same for every instruction set.
 *
 * A tile is 16 output rows times all columns, contiguous. Columns are taken in blocks of 32, blocks in groups of up
 * to 8 (256 columns, a K-quant's super-block). A group holds the blocks' code lines one after another, then their
 * scales, then their minimums: data of one kind is contiguous, and a full group is whole cache lines.
 *
 * A line is one dword of each of the 16 rows side by side, so lane i of every vector is row i. A block's 32 codes are
 * 8 dwords of 4 columns; what a dword of a line holds of them is the same for all types:
 *
 *   nibble line j of 4    low nibbles: the low 4 bits of dword j (columns 4j..); high nibbles: of dword 4+j (16+4j..)
 *   bit line, 1           bit j of each byte: bit 4 of dword j
 *   pair line h of 2      bits 2j, 2j+1 of each byte: bits 4 and 5 of dword 4h+j
 *   byte line j of 8      dword j, signed
 *
 *   type   lines of a block        then, for the group's blocks (a half line: two bytes of each row, a quarter: one)
 *   Q4_0   4 nibble                half line of scales each
 *   Q4_1   4 nibble                half line of scales each; half line of minimums each
 *   Q5_0   4 nibble, 1 bit         as Q4_0
 *   Q5_1   4 nibble, 1 bit         as Q4_1
 *   Q8_0   8 byte                  as Q4_0
 *   Q4_K   4 nibble                the file's 12 bytes of 6-bit scales and minimums as 3 lines; half lines d, dmin
 *   Q5_K   4 nibble, 1 bit         as Q4_K
 *   Q6_K   4 nibble, 2 pair        half line of pairs of signed bytes each, the scales of the block's two halves; half
 *                                  line d; half a line unused, so that groups stay whole cache lines
 *   Q3_K   1 bit, 2 pair           as Q6_K; bits 0 and 1 of a code are its pair, bit 2 the other
 *   IQ4_NL 4 nibble                as Q4_0; codes are indices into values_of(type), as are those of the following types
 *   MXFP4  4 nibble                quarter line of exponents each
 *   IQ4_XS, IQ3_S, IQ3_XXS: 4 nibble; quarter line of signed bytes each, the scales; line d, a float
 *   F16, BF16: 32 half lines, one for each column. F32: 32 lines.
 *
 * A tile has the file's values, without loss; most are the file's bits in another order. Q6_K grows by 1 %, Q3_K by 5
 * to 3.625 bits, IQ4_XS by 3, IQ3_S by 27 and IQ3_XXS by 43 to 4.375 bits: signs and indices of four magnitudes become
 * codes. Rows beyond the last are zeros with zero scales. */
#ifndef EDGESPEC_LAYOUT_H
#define EDGESPEC_LAYOUT_H

#include "edgespec_kernels.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the data of model files, which the kernels read, is little-endian"
#endif

enum { TILE_ROWS = 16, BLOCK = 32, GROUP_BLOCKS = 8, LINE_BYTES = 64, HALF_LINE_BYTES = 32, QUARTER_LINE_BYTES = 16 };

/* Offset of a K-quant's super-scales behind the group's code lines. */
enum { K_SCALE_LINES = 3, K_D_AT = K_SCALE_LINES * LINE_BYTES, K_DMIN_AT = K_D_AT + HALF_LINE_BYTES };
enum { Q6_K_D_AT = GROUP_BLOCKS * HALF_LINE_BYTES, TABLE_D_AT = GROUP_BLOCKS * QUARTER_LINE_BYTES };
enum { EXPONENT_NAN = 255 };

/* Whether codes are indices of values. */
static inline int has_table(int64_t type)
{
    return type == ES_IQ4_NL || type == ES_IQ4_XS || type == ES_MXFP4 || type == ES_IQ3_S || type == ES_IQ3_XXS;
}

/* Whether a block has one scale, a signed byte of a super-block. */
static inline int has_byte_scale(int64_t type)
{
    return type == ES_IQ4_XS || type == ES_IQ3_S || type == ES_IQ3_XXS;
}

/* Whether a block has two such scales. */
static inline int has_two_scales(int64_t type)
{
    return type == ES_Q3_K || type == ES_Q6_K;
}

/* Code lines of a block of 32 columns of a quantised type. */
static inline size_t code_lines(int64_t type)
{
    switch (type) {
    case ES_Q3_K: return 3;
    case ES_Q5_0:
    case ES_Q5_1:
    case ES_Q5_K: return 5;
    case ES_Q6_K: return 6;
    case ES_Q8_0: return 8;
    default: return 4;
    }
}

/* Bytes of a block of 32 columns in a tile, or its share of a group; 0 without a layout. */
static inline size_t block_bytes(int64_t type)
{
    switch (type) {
    case ES_Q4_0:
    case ES_Q5_0:
    case ES_Q8_0:
    case ES_IQ4_NL: return code_lines(type) * LINE_BYTES + HALF_LINE_BYTES;
    case ES_MXFP4: return code_lines(type) * LINE_BYTES + QUARTER_LINE_BYTES;
    case ES_Q4_1:
    case ES_Q5_1: return code_lines(type) * LINE_BYTES + 2 * HALF_LINE_BYTES;
    case ES_Q4_K:
    case ES_Q5_K: return code_lines(type) * LINE_BYTES + (K_DMIN_AT + HALF_LINE_BYTES) / GROUP_BLOCKS;
    case ES_Q3_K:
    case ES_Q6_K: return code_lines(type) * LINE_BYTES + (Q6_K_D_AT + 2 * HALF_LINE_BYTES) / GROUP_BLOCKS;
    case ES_IQ4_XS:
    case ES_IQ3_S:
    case ES_IQ3_XXS: return code_lines(type) * LINE_BYTES + (TABLE_D_AT + LINE_BYTES) / GROUP_BLOCKS;
    case ES_F16:
    case ES_BF16: return 32 * HALF_LINE_BYTES;
    case ES_F32: return 32 * LINE_BYTES;
    default: return 0;
    }
}

/* Columns that share one scale, or one set of scales, in the file: a row's length is a multiple of this. */
static inline int64_t file_block_columns(int64_t type)
{
    int is_super_block = type == ES_Q4_K || type == ES_Q5_K || has_two_scales(type) || has_byte_scale(type);
    return is_super_block ? GROUP_BLOCKS * BLOCK : BLOCK;
}

/* Bytes of these columns. */
static inline size_t file_block_bytes(int64_t type)
{
    switch (type) {
    case ES_Q4_0:
    case ES_IQ4_NL: return 2 + 16;
    case ES_MXFP4: return 1 + 16;
    case ES_Q4_1: return 2 + 2 + 16;
    case ES_Q5_0: return 2 + 4 + 16;
    case ES_Q5_1: return 2 + 2 + 4 + 16;
    case ES_Q8_0: return 2 + 32;
    case ES_Q4_K: return 2 + 2 + 12 + 128;
    case ES_Q5_K: return 2 + 2 + 12 + 32 + 128;
    case ES_Q6_K: return 128 + 64 + 16 + 2;
    case ES_Q3_K: return 32 + 64 + 12 + 2;
    case ES_IQ4_XS: return 2 + 2 + 4 + 128;
    case ES_IQ3_S: return 2 + 64 + 8 + 32 + 4;
    case ES_IQ3_XXS: return 2 + 64 + 32;
    case ES_F16:
    case ES_BF16: return 64;
    case ES_F32: return 128;
    default: return 0;
    }
}

static inline size_t file_row_bytes(int64_t type, int64_t columns)
{
    return (size_t)(columns / file_block_columns(type)) * file_block_bytes(type);
}

static inline int takes_quantised_input(int64_t type)
{
    return type != ES_F32 && type != ES_F16 && type != ES_BF16;
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
