#pragma once
/* Quantised matrices as the kernels read them: tiles of 16 rows with interleaved numbers.

   A tile takes exactly the bytes of its rows; the last one may have fewer rows (`lanes`). In a tile
   every tensor is [units][lanes]. A unit of codes or planes is 32 bits of a row, two 16-bit halves:
   half p (0, 1) holds the columns p, p + 2, p + 4, ..., from its low bits on, which is what a product
   of pairs of columns takes at once. luceasync.models.quant.packed says what the numbers mean. */
#include "floats.h"
#include "threads.h"
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { TILE = 16, STEP = 32 };
enum { FP16, BF16, FP32, E8M0 };                /* of D and M */
enum { NO_SMALL, UINT8, INT8, E4M3 };           /* of s; of 8-bit codes, all but the first */
enum { NO_MINIMUM, OWN_MINIMUM, SCALE_MINIMUM }; /* there is no M; it has its own tensor; it is D */

typedef struct {
    int64_t num_rows, num_columns, group, supergroup, num_groups, num_supergroups;
    int bits, scale, small, minimum, has_small_minimums, divides, codes_kind, has_table;
    float zero;
    uint8_t *codes, *planes, *scales, *small_scales, *minimums, *small_minimums;
    float numbers[256];   /* value of each code */
    uint16_t halves[256]; /* the same in bfloat16, which is exact */
} Matrix;

static inline int64_t lanes_of(const Matrix *w, int64_t row) {
    int64_t left = w->num_rows - row;
    return left < TILE ? left : TILE;
}

static inline int scale_bytes(const Matrix *w) {
    return w->scale == FP32 ? 4 : w->scale == E8M0 ? 1 : 2;
}


static inline float of_e4m3(uint8_t byte) {
    if ((byte & 0x7f) == 0x7f) return of_bits(0x7fc00000);
    float size = of_bits((uint32_t)(byte & 0x7f) << 20) * 0x1p120f;
    return byte & 0x80 ? -size : size;
}

static inline float of_fp16(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7fff;
    if (rest >= 0x7c00) return of_bits(sign | 0x7f800000 | (rest & 0x3ff) << 13);
    if (rest < 0x400) return (sign ? -1.0f : 1.0f) * (float)rest * 0x1p-24f;
    return of_bits(sign | ((rest << 13) + 0x38000000));
}

static inline float of_e8m0(uint8_t byte) {
    return of_bits(byte < 2 ? 0x00200000u << byte : (uint32_t)(byte - 1) << 23);
}

static inline float real_at(const Matrix *w, const uint8_t *reals, int64_t place) {
    uint16_t half = 0;
    uint32_t bits = 0;
    if (w->scale == E8M0) return of_e8m0(reals[place]);
    if (w->scale == FP32) return memcpy(&bits, reals + 4 * place, 4), of_bits(bits);
    memcpy(&half, reals + 2 * place, 2);
    return w->scale == BF16 ? of_bits((uint32_t)half << 16) : of_fp16(half);
}

static inline float small_of(const Matrix *w, uint8_t byte) {
    return w->small == UINT8 ? (float)byte : w->small == INT8 ? (float)(int8_t)byte : of_e4m3(byte);
}

/* The low nibbles of the even bytes of v, side by side. */
static inline uint32_t even_nibbles(uint64_t v) {
    v &= 0x000f000f000f000f;
    v = (v | v >> 12) & 0x000000ff000000ff;
    return (uint32_t)((v | v >> 24) & 0xffff);
}

static inline uint32_t even_bits(uint32_t v) {
    v &= 0x55555555;
    v = (v | v >> 1) & 0x33333333;
    v = (v | v >> 2) & 0x0f0f0f0f;
    v = (v | v >> 4) & 0x00ff00ff;
    return (v | v >> 8) & 0xffff;
}

#if HAS_KERNELS
/* `code_units` for machines that have a kernel, 32 columns at once. */
__attribute__((target("ssse3"))) static void code_units_at_once(const Matrix *w, const uint8_t *row, uint32_t *units) {
    const __m128i order = _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
    const __m128i pairs = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
    const __m128i low = _mm_set1_epi8(15), sixteens = _mm_set1_epi16(1 | 16 << 8);
    const int64_t num_bytes = w->num_columns * (w->bits == 8 ? 8 : 4) / 8;
    for (int64_t i = 0; i < num_bytes; i += 16) {
        __m128i bytes = _mm_loadu_si128((const __m128i *)(row + i)), both = _mm_shuffle_epi8(bytes, order);
        if (w->bits != 8) { /* two codes that follow each other in a half become a byte */
            __m128i first = _mm_shuffle_epi8(_mm_and_si128(bytes, low), pairs);
            __m128i second = _mm_shuffle_epi8(_mm_and_si128(_mm_srli_epi16(bytes, 4), low), pairs);
            both = _mm_packus_epi16(_mm_maddubs_epi16(first, sixteens), _mm_maddubs_epi16(second, sixteens));
        }
        _mm_storeu_si128((__m128i *)(units + i / 4), both);
    }
}
#endif

/* The code units of one stored row. */
static void code_units(const Matrix *w, const uint8_t *row, uint32_t *units) {
#if HAS_KERNELS
    if (__builtin_cpu_supports("ssse3")) {
        code_units_at_once(w, row, units);
        return;
    }
#endif
    if (w->bits == 8) {
        for (int64_t i = 0; i < w->num_columns / 4; i++, row += 4)
            units[i] = row[0] | (uint32_t)row[2] << 8 | (uint32_t)row[1] << 16 | (uint32_t)row[3] << 24;
        return;
    }
    for (int64_t i = 0; i < w->num_columns / 8; i++) {
        uint64_t bytes;
        memcpy(&bytes, row + i / 4 * 16 + i % 2 * 8, 8);
        bytes = (i & 2 ? bytes >> 4 : bytes) & 0x0f0f0f0f0f0f0f0f;
        units[i] = even_nibbles(bytes) | even_nibbles(bytes >> 8) << 16;
    }
}

static void plane_units(const Matrix *w, const uint8_t *row, uint32_t *units) {
    int64_t num_bytes = w->num_columns / 8;
    if (w->bits == 5) {
        for (int64_t i = 0; i < num_bytes / 4; i++) {
            uint32_t v;
            memcpy(&v, row + 4 * i, 4);
            units[i] = even_bits(v) | even_bits(v >> 1) << 16;
        }
        return;
    }
    for (int64_t i = 0; i < num_bytes / 2; i++) {
        uint16_t low, high;
        memcpy(&low, row + 2 * i, 2);
        memcpy(&high, row + num_bytes + 2 * i, 2);
        uint32_t even = (low & 0x5555u) | (high & 0x5555u) << 1;
        units[i] = even | ((low >> 1 & 0x5555u) | (high & 0xaaaau)) << 16;
    }
}

/* Transpose items of `num_bytes` bytes: [lanes][count] -> [count][lanes]. */
static void turn(uint8_t *items, uint8_t *scratch, int64_t lanes, int64_t count, int64_t num_bytes) {
    memcpy(scratch, items, (size_t)(lanes * count * num_bytes));
    for (int64_t lane = 0; lane < lanes; lane++)
        for (int64_t i = 0; i < count; i++)
            memcpy(items + (i * lanes + lane) * num_bytes, scratch + (lane * count + i) * num_bytes, (size_t)num_bytes);
}

/* Rearrange stored rows as tiles, in place. Returns 0 if there is no memory for one more tile. */
static int interleave(Matrix *w, int64_t begin, int64_t end) {
    int64_t code_bytes = w->num_columns * (w->bits == 8 ? 8 : 4) / 8;
    int64_t plane_bytes = w->planes ? w->num_columns * (w->bits - 4) / 8 : 0;
    uint8_t *scratch = (uint8_t *)malloc((size_t)(TILE * (w->num_columns * 8 + 64)));
    uint32_t *units = (uint32_t *)malloc((size_t)(w->num_columns + 64));
    for (int64_t first = begin; scratch && units && first < end; first += TILE) {
        int64_t lanes = lanes_of(w, first);
        for (int part = 0; part < 2; part++) {
            int64_t num_bytes = part ? plane_bytes : code_bytes;
            if (!num_bytes) continue;
            uint8_t *place = (part ? w->planes : w->codes) + first * num_bytes;
            memcpy(scratch, place, (size_t)(lanes * num_bytes));
            for (int64_t lane = 0; lane < lanes; lane++) {
                (part ? plane_units : code_units)(w, scratch + lane * num_bytes, units);
                for (int64_t i = 0; i < num_bytes / 4; i++)
                    memcpy(place + (i * lanes + lane) * 4, units + i, 4);
            }
        }
        int64_t supers = w->num_supergroups, groups = w->num_groups, item = scale_bytes(w);
        turn(w->scales + first * supers * item, scratch, lanes, supers, item);
        if (w->minimums) turn(w->minimums + first * supers * item, scratch, lanes, supers, item);
        if (w->small_scales) turn(w->small_scales + first * groups, scratch, lanes, groups, 1);
        if (w->small_minimums) turn(w->small_minimums + first * groups, scratch, lanes, groups, 1);
    }
    int is_done = scratch && units;
    free(scratch);
    free(units);
    return is_done;
}

typedef struct {
    Matrix *w;
    int is_done;
} Rearrangement;

static void interleave_tiles(void *given, int64_t begin, int64_t end) {
    Rearrangement *all = (Rearrangement *)given;
    int64_t last = end * TILE < all->w->num_rows ? end * TILE : all->w->num_rows;
    if (!interleave(all->w, begin * TILE, last)) __atomic_store_n(&all->is_done, 0, __ATOMIC_RELAXED);
}

/* The same with all rows, in threads: a tile is rearranged within its own bytes. */
static int interleave_all(Matrix *w) {
    Rearrangement all = {w, 1};
    int64_t tiles = (w->num_rows + TILE - 1) / TILE;
    parallel_for(interleave_tiles, &all, tiles, 1 + tiles / 64);
    return all.is_done;
}

static inline uint32_t code_at(const Matrix *w, int64_t first, int64_t lanes, int64_t lane, int64_t column) {
    const int per_unit = w->bits == 8 ? 4 : 8, width = w->bits == 8 ? 8 : 4;
    const uint32_t *codes = (const uint32_t *)(w->codes + first * w->num_columns * width / 8);
    int64_t i = column % per_unit;
    uint32_t unit = codes[column / per_unit * lanes + lane];
    uint32_t code = unit >> (16 * (i & 1) + width * (i >> 1)) & (w->bits == 8 ? 255 : 15);
    if (w->planes) {
        int extra = w->bits - 4;
        const uint32_t *planes = (const uint32_t *)(w->planes + first * w->num_columns * extra / 8);
        int64_t j = column % (32 / extra);
        unit = planes[column / (32 / extra) * lanes + lane];
        code |= (unit >> (16 * (j & 1) + extra * (j >> 1)) & ((1u << extra) - 1)) << 4;
    }
    return code;
}

/* The numbers of one row, bit for bit those of luceasync.models.quant.packed.dequantise. */
static void row_numbers(const Matrix *w, int64_t row, float *to) {
    int64_t first = row / TILE * TILE, lanes = lanes_of(w, first), lane = row - first;
    for (int64_t g = 0; g < w->num_groups; g++) {
        int64_t super = first * w->num_supergroups + g * w->group / w->supergroup * lanes + lane;
        int64_t place = first * w->num_groups + g * lanes + lane;
        float scale = real_at(w, w->scales, super), minimum = scale;
        if (w->minimum == OWN_MINIMUM) minimum = real_at(w, w->minimums, super);
        if (w->has_small_minimums) minimum *= (float)w->small_minimums[place];
        if (w->small) {
            float small = small_of(w, w->small_scales[place]);
            scale = w->divides ? small / scale : scale * small;
        }
        int64_t end = (g + 1) * w->group < w->num_columns ? (g + 1) * w->group : w->num_columns;
        for (int64_t column = g * w->group; column < end; column++) {
            float number = scale * w->numbers[code_at(w, first, lanes, lane, column)];
            to[column] = w->minimum ? number - minimum : number;
        }
    }
}
