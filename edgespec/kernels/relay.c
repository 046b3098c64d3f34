/* Converts the file's rows to tiles, and single rows to floats. */
#include <stdint.h>
#include <string.h>

#include "grids.h"
#include "half.h"
#include "layout.h"
#include "tables.h"

/* The structure of a quantised block of the file, as byte offsets. */
struct block_format {
    size_t halves_at, half_count;  /* a scale, and for some what belongs to their minimums */
    size_t six_bits_at;            /* 6-bit scales and minimums of Q4_K and Q5_K */
    size_t high_at;                /* bits above the fourth */
    size_t codes_at;
    int32_t offset;                /* weight = scale * (code - offset) ... */
};

static struct block_format format_of(int64_t type)
{
    switch (type) {
    case ES_Q4_0: return (struct block_format){.half_count = 1, .codes_at = 2, .offset = 8};
    case ES_Q4_1: return (struct block_format){.half_count = 2, .codes_at = 4};
    case ES_Q5_0: return (struct block_format){.half_count = 1, .high_at = 2, .codes_at = 6, .offset = 16};
    case ES_Q5_1: return (struct block_format){.half_count = 2, .high_at = 4, .codes_at = 8};
    case ES_Q4_K: return (struct block_format){.half_count = 2, .six_bits_at = 4, .codes_at = 16};
    case ES_Q5_K: return (struct block_format){.half_count = 2, .six_bits_at = 4, .high_at = 16, .codes_at = 48};
    case ES_Q6_K: return (struct block_format){.halves_at = 208, .half_count = 1, .high_at = 128, .offset = 32};
    case ES_Q3_K: return (struct block_format){.halves_at = 108, .half_count = 1, .codes_at = 32, .offset = 4};
    case ES_MXFP4: return (struct block_format){.codes_at = 1};
    case ES_IQ4_XS: return (struct block_format){.half_count = 1, .codes_at = 8};
    default: return (struct block_format){.half_count = 1, .codes_at = 2}; /* Q8_0, IQ4_NL, IQ3_S, IQ3_XXS */
    }
}

/* Places of scales, of signs, and in IQ3_S of the ninth bits of indices. IQ3_XXS has four signs and a scale in a dword. */
enum { Q6_K_SCALES_AT = 192, Q3_K_SCALES_AT = 96, IQ4_XS_SCALES_AT = 2, IQ3_XXS_SIGNS_AT = 66 };
enum { IQ3_S_HIGH_AT = 66, IQ3_S_SIGNS_AT = 74, IQ3_S_SCALES_AT = 106 };

static int is_k_quant(int64_t type)
{
    return file_block_columns(type) > BLOCK;
}

static uint32_t dword(const uint8_t *from)
{
    uint32_t value;
    memcpy(&value, from, sizeof value);
    return value;
}

static uint16_t half_at(const uint8_t *from)
{
    uint16_t value;
    memcpy(&value, from, sizeof value);
    return value;
}

/* Four bits to the lowest bit of four bytes each: the products do not overlap. */
static uint32_t spread(uint32_t bits)
{
    return (bits & 15u) * 0x00204081u & 0x01010101u;
}

/* The signs of columns 8i .. 8i + 7 of block b in IQ3, a bit each. IQ3_XXS leaves the last one out: their number is even. */
static uint32_t signs_of(int64_t type, const uint8_t *source, size_t b, size_t i)
{
    if (type == ES_IQ3_S)
        return source[IQ3_S_SIGNS_AT + 4 * b + i];
    uint32_t seven = dword(source + IQ3_XXS_SIGNS_AT + 4 * b) >> 7 * i & 127;
    return seven | (uint32_t)__builtin_parity(seven) << 7;
}

/* Codes of columns 4j .. 4j + 3 of block b in IQ3. */
static uint32_t grid_codes(int64_t type, const uint8_t *source, size_t b, size_t j)
{
    uint32_t index = source[2 + 8 * b + j];
    uint32_t four = type == ES_IQ3_S ? iq3_s_grid[index | (source[IQ3_S_HIGH_AT + b] >> j & 1u) << 8] : iq3_xxs_grid[index];
    uint32_t codes = (four & 7) | (four & 070) << 5 | (four & 0700) << 10 | (four & 07000) << 15;
    return codes | spread(signs_of(type, source, b, j / 2) >> j % 2 * 4) << 3;
}

/* The 32 codes of block b (0 but in a super-block of 8) of the file's block: dword j has columns 4j.. in its bytes. */
static void read_codes(int64_t type, const uint8_t *source, size_t b, uint32_t codes[8])
{
    const struct block_format format = format_of(type);
    const uint8_t *low = source + format.codes_at, *high = source + format.high_at;
    for (size_t j = 0; j < 8; j++)
        switch (type) {
        case ES_Q8_0: codes[j] = dword(low + 4 * j); break;
        case ES_Q4_K:
        case ES_Q5_K: /* columns 0..31 of a chunk of 64 are the low nibbles, 32..63 the high ones */
            codes[j] = dword(low + b / 2 * 32 + 4 * j) >> b % 2 * 4 & 0x0f0f0f0fu;
            if (type == ES_Q5_K)
                codes[j] |= (dword(high + 4 * j) >> b & 0x01010101u) << 4;
            break;
        case ES_IQ3_S:
        case ES_IQ3_XXS: codes[j] = grid_codes(type, source, b, j); break;
        case ES_IQ4_XS: codes[j] = dword(low + b * 16 + j % 4 * 4) >> j / 4 * 4 & 0x0f0f0f0fu; break;
        case ES_Q3_K: /* of 128 columns, 32 after 32 */
            codes[j] = dword(low + b / 4 * 32 + 4 * j) >> b % 4 * 2 & 0x03030303u;
            codes[j] |= (dword(high + 4 * j) >> b & 0x01010101u) << 2;
            break;
        case ES_Q6_K: /* as Q3_K */
            codes[j] = dword(low + b / 4 * 64 + b % 2 * 32 + 4 * j) >> b % 4 / 2 * 4 & 0x0f0f0f0fu;
            codes[j] |= (dword(high + b / 4 * 32 + 4 * j) >> b % 4 * 2 & 0x03030303u) << 4;
            break;
        default:
            codes[j] = dword(low + j % 4 * 4) >> j / 4 * 4 & 0x0f0f0f0fu;
            if (type == ES_Q5_0 || type == ES_Q5_1)
                codes[j] |= spread(dword(high) >> 4 * j) << 4;
            break;
        }
}

static void put_dword(uint8_t *lines, size_t line, size_t lane, uint32_t value)
{
    memcpy(lines + line * LINE_BYTES + lane * 4, &value, sizeof value);
}

/* A block's codes as lines; see layout.h. */
static void write_codes(int64_t type, const uint32_t codes[8], size_t lane, uint8_t *lines)
{
    if (type == ES_Q8_0) {
        for (size_t j = 0; j < 8; j++)
            put_dword(lines, j, lane, codes[j]);
        return;
    }
    const int bit = type == ES_Q3_K ? 2 : 4, pair = type == ES_Q3_K ? 0 : 4; /* where they begin in a code */
    uint32_t bits = 0, pairs[2] = {0, 0};
    for (size_t j = 0; j < 8; j++) {
        bits |= (codes[j] >> bit & 0x01010101u) << j;
        pairs[j / 4] |= (codes[j] >> pair & 0x03030303u) << j % 4 * 2;
    }
    size_t next = 0;
    for (size_t j = 0; j < 4 && type != ES_Q3_K; j++)
        put_dword(lines, next++, lane, (codes[j] & 0x0f0f0f0fu) | (codes[j + 4] & 0x0f0f0f0fu) << 4);
    if (code_lines(type) % 2)
        put_dword(lines, next++, lane, bits);
    if (has_two_scales(type)) {
        put_dword(lines, next++, lane, pairs[0]);
        put_dword(lines, next, lane, pairs[1]);
    }
}

static void put_half(uint8_t *half_lines, size_t line, size_t lane, uint16_t half)
{
    memcpy(half_lines + line * HALF_LINE_BYTES + lane * 2, &half, sizeof half);
}

/* Scale i of a super-block, a signed integer: of 32 columns, in Q3_K and Q6_K of 16. */
static int32_t small_scale(int64_t type, const uint8_t *source, size_t i)
{
    switch (type) {
    case ES_Q6_K: return (int8_t)source[Q6_K_SCALES_AT + i];
    case ES_Q3_K: {
        const uint8_t *low = source + Q3_K_SCALES_AT, *high = low + 8;
        return ((low[i % 8] >> i / 8 * 4 & 15) | (high[i % 4] >> i / 4 * 2 & 3) << 4) - 32;
    }
    case ES_IQ4_XS: {
        const uint8_t *high = source + IQ4_XS_SCALES_AT, *low = high + 2;
        return ((low[i / 2] >> i % 2 * 4 & 15) | (half_at(high) >> 2 * i & 3) << 4) - 32;
    }
    case ES_IQ3_S: return 2 * (source[IQ3_S_SCALES_AT + i / 2] >> i % 2 * 4 & 15) + 1;
    default: return 2 * (int32_t)(dword(source + IQ3_XXS_SIGNS_AT + 4 * i) >> 28) + 1;
    }
}

/* What these scales multiply: the super-block's half, for IQ3_XXS a quarter of it. */
static float super_scale(int64_t type, const uint8_t *source)
{
    float d = half_to_float(half_at(source + format_of(type).halves_at));
    return type == ES_IQ3_XXS ? 0.25f * d : d;
}

/* The data behind a super-block's code lines, except halves. */
static void write_k_scales(int64_t type, const uint8_t *source, size_t lane, uint8_t *behind)
{
    if (has_two_scales(type))
        for (size_t b = 0; b < GROUP_BLOCKS; b++) {
            uint32_t low = (uint8_t)small_scale(type, source, 2 * b), high = (uint8_t)small_scale(type, source, 2 * b + 1);
            put_half(behind, b, lane, (uint16_t)(low | high << 8));
        }
    else if (has_byte_scale(type)) {
        for (size_t b = 0; b < GROUP_BLOCKS; b++)
            behind[b * QUARTER_LINE_BYTES + lane] = (uint8_t)small_scale(type, source, b);
        put_dword(behind + TABLE_D_AT, 0, lane, bits_of_float(super_scale(type, source)));
    } else
        for (size_t line = 0; line < K_SCALE_LINES; line++)
            put_dword(behind, line, lane, dword(source + format_of(type).six_bits_at + 4 * line));
}

/* A row's share of a group of `here` blocks. Returns whether its scales are finite. */
static int relay_group(int64_t type, const uint8_t *source, size_t here, size_t lane, uint8_t *tile)
{
    const struct block_format format = format_of(type);
    uint8_t *behind = tile + here * code_lines(type) * LINE_BYTES;
    size_t d_at = has_two_scales(type) ? Q6_K_D_AT : is_k_quant(type) ? K_D_AT : 0;
    int finite = 1;
    for (size_t b = 0; b < here; b++) {
        uint32_t codes[8];
        read_codes(type, source, is_k_quant(type) ? b : 0, codes);
        write_codes(type, codes, lane, tile + b * code_lines(type) * LINE_BYTES);
        if (is_k_quant(type) && b)
            continue;
        for (size_t h = 0; h < format.half_count; h++) {
            uint16_t half = half_at(source + format.halves_at + 2 * h);
            finite &= (half & 0x7c00u) != 0x7c00u;
            if (!has_byte_scale(type))
                put_half(behind + d_at, is_k_quant(type) ? h : h * here + b, lane, half);
        }
        if (type == ES_MXFP4) {
            finite &= source[0] != EXPONENT_NAN;
            behind[b * QUARTER_LINE_BYTES + lane] = source[0];
        }
        if (is_k_quant(type))
            write_k_scales(type, source, lane, behind);
        else
            source += file_block_bytes(type);
    }
    return finite;
}

static int relay_row(int64_t type, const uint8_t *source, size_t blocks, size_t lane, uint8_t *tile)
{
    int finite = 1;
    for (size_t start = 0; start < blocks; start += GROUP_BLOCKS) {
        size_t here = blocks - start < GROUP_BLOCKS ? blocks - start : GROUP_BLOCKS;
        finite &= relay_group(type, source, here, lane, tile);
        source += file_row_bytes(type, (int64_t)here * BLOCK);
        tile += here * block_bytes(type);
    }
    return finite;
}

static void relay_floats(const uint8_t *source, size_t columns, size_t element_bytes, size_t lane, uint8_t *tile)
{
    for (size_t k = 0; k < columns; k++)
        memcpy(tile + (k * TILE_ROWS + lane) * element_bytes, source + k * element_bytes, element_bytes);
}

int64_t es_relaid_bytes(int64_t type, int64_t rows, int64_t columns)
{
    if (rows <= 0 || columns <= 0 || columns % file_block_columns(type))
        return 0;
    return (int64_t)(tile_count(rows) * tile_bytes(type, columns));
}

int64_t es_relay(int64_t type, const uint8_t *source, int64_t rows, int64_t columns, uint8_t *tiles)
{
    size_t blocks = (size_t)columns / BLOCK, row_bytes = file_row_bytes(type, columns);
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

/* Scale and minimum b of the eight in 12 bytes: 0 to 3 are whole, the upper two bits of 4 to 7 stand above those. */
static void read_six_bits(const uint8_t *bytes, size_t b, int32_t *scale, int32_t *minimum)
{
    if (b < 4) {
        *scale = bytes[b] & 63;
        *minimum = bytes[b + 4] & 63;
    } else {
        *scale = (bytes[b + 4] & 15) | bytes[b - 4] >> 6 << 4;
        *minimum = bytes[b + 4] >> 4 | bytes[b] >> 6 << 4;
    }
}

/* 32 floats of block b of the file's block of a quantised type. */
static void dequantise_block(int64_t type, const uint8_t *source, size_t b, float *y)
{
    const struct block_format format = format_of(type);
    float d = half_to_float(half_at(source + format.halves_at)), low = d, high = d, minimum = 0.0f;
    if (format.half_count == 2)
        minimum = half_to_float(half_at(source + format.halves_at + 2));
    if (format.six_bits_at) {
        int32_t scale, m;
        read_six_bits(source + format.six_bits_at, b, &scale, &m);
        low = high = d * (float)scale;
        minimum *= (float)-m;
    }
    if (has_two_scales(type)) {
        low = d * (float)small_scale(type, source, 2 * b);
        high = d * (float)small_scale(type, source, 2 * b + 1);
    }
    if (has_byte_scale(type))
        low = high = super_scale(type, source) * (float)small_scale(type, source, b);
    if (type == ES_MXFP4)
        low = high = scale_of_exponent(source[0]);
    uint32_t codes[8];
    read_codes(type, source, b, codes);
    for (size_t k = 0; k < BLOCK; k++) {
        int32_t code = (int32_t)(codes[k / 4] >> k % 4 * 8 & 255u);
        code = has_table(type) ? values_of(type)[code] : type == ES_Q8_0 ? (int8_t)code : code - format.offset;
        y[k] = (float)code * (k < 16 ? low : high);
        if (format.half_count == 2)
            y[k] += minimum;
    }
}

static float float_at(int64_t type, const uint8_t *row, size_t k)
{
    if (type == ES_F32)
        return float_of_bits(dword(row + 4 * k));
    uint16_t half = half_at(row + 2 * k);
    return type == ES_F16 ? half_to_float(half) : float_of_bits((uint32_t)half << 16);
}

int32_t es_dequantise(int64_t type, const uint8_t *row, int64_t columns, float *y)
{
    if (!file_block_bytes(type) || columns % file_block_columns(type))
        return ES_BAD_REQUEST;
    if (!takes_quantised_input(type)) {
        for (size_t k = 0; k < (size_t)columns; k++)
            y[k] = float_at(type, row, k);
        return ES_OK;
    }
    size_t own = (size_t)file_block_columns(type) / BLOCK;
    for (size_t block = 0; block < (size_t)columns / BLOCK; block++)
        dequantise_block(type, row + block / own * file_block_bytes(type), block % own, y + block * BLOCK);
    return ES_OK;
}
