#pragma once
/* Blocks of GGUF files as tensors: bits are moved, nothing is computed. The blocks are those of
   ggml-quants.h, the tensors those of luceasync.models.quant.packed; ggml.py says the same in torch. */
#include "threads.h"
#include <stdint.h>
#include <string.h>

enum { PLAIN, Q4_K, Q5_K, Q6_K };

typedef struct {
    int kind, scale_bytes, has_minimum, plane_bytes, code_bytes; /* of PLAIN: 1 or 2, .., 0 or 4, 16 or 32 */
    int64_t num_rows, num_blocks;                                /* blocks of a row */
    const uint8_t *blocks;
    uint8_t *codes, *planes, *scales, *small_scales, *minimums, *small_minimums;
} Unpacking;

static inline uint64_t word_at(const uint8_t *from) {
    uint64_t word;
    memcpy(&word, from, 8);
    return word;
}

static inline void put_word(uint8_t *to, uint64_t word) { memcpy(to, &word, 8); }

/* 32 codes of 4 bits, the low or the high half of each byte: those in a byte become 16 columns apart. */
static inline void pair_halves(uint8_t *to, const uint8_t *from, int is_high) {
    const uint64_t low = 0x0f0f0f0f0f0f0f0f;
    for (int i = 0; i < 16; i += 8) {
        uint64_t first = word_at(from + i), second = word_at(from + 16 + i);
        put_word(to + i, is_high ? (first >> 4 & low) | (second & ~low) : (first & low) | (second & low) << 4);
    }
}

/* Byte b of the result has bit b of each of eight bytes. */
static inline uint64_t turned(uint64_t x) {
    uint64_t swapped = (x ^ x >> 7) & 0x00aa00aa00aa00aa;
    x ^= swapped ^ swapped << 7;
    swapped = (x ^ x >> 14) & 0x0000cccc0000cccc;
    x ^= swapped ^ swapped << 14;
    swapped = (x ^ x >> 28) & 0x00000000f0f0f0f0;
    return x ^ swapped ^ swapped << 28;
}

/* Sizes are written out: a copy of a size that is known is an instruction or two. */
static inline void unpack_plain(const Unpacking *u, const uint8_t *block, int64_t at) {
    if (u->scale_bytes == 2) memcpy(u->scales + 2 * at, block, 2);
    else u->scales[at] = *block;
    block += u->scale_bytes;
    if (u->has_minimum) { /* ggml adds it, we subtract */
        memcpy(u->minimums + 2 * at, block, 2);
        u->minimums[2 * at + 1] ^= 0x80;
        block += 2;
    }
    if (u->plane_bytes) {
        memcpy(u->planes + 4 * at, block, 4);
        block += 4;
    }
    if (u->code_bytes == 32) memcpy(u->codes + 32 * at, block, 32);
    else memcpy(u->codes + 16 * at, block, 16);
}

/* Q4_K and Q5_K, 256 columns. */
static void unpack_k(const Unpacking *u, const uint8_t *block, int64_t at) {
    memcpy(u->scales + 2 * at, block, 2);
    memcpy(u->minimums + 2 * at, block + 2, 2);
    const uint8_t *six = block + 4, *codes = block + 16;
    uint8_t *scales = u->small_scales + 8 * at, *minimums = u->small_minimums + 8 * at;
    for (int i = 0; i < 4; i++) {
        scales[i] = six[i] & 63;
        minimums[i] = six[4 + i] & 63;
        scales[4 + i] = (six[8 + i] & 15) | (six[i] >> 2 & 48);
        minimums[4 + i] = six[8 + i] >> 4 | (six[4 + i] >> 2 & 48);
    }
    if (u->kind == Q5_K) {
        for (int j = 0; j < 4; j++) {
            uint64_t bits = turned(word_at(codes + 8 * j));
            for (int b = 0; b < 8; b++) u->planes[32 * at + 4 * b + j] = (uint8_t)(bits >> 8 * b);
        }
        codes += 32;
    }
    for (int i = 0; i < 8; i++) pair_halves(u->codes + 128 * at + 16 * i, codes + i / 2 * 32, i & 1);
}

/* 256 columns; `planes` has two rows that are `width` bytes apart. */
static void unpack_q6_k(const Unpacking *u, const uint8_t *block, int64_t at, uint8_t *planes, int64_t width) {
    for (int half = 0; half < 2; half++) {
        const uint8_t *codes = block + 64 * half, *high = block + 128 + 32 * half;
        for (int quarter = 0; quarter < 4; quarter++)
            pair_halves(u->codes + 128 * at + 64 * half + 16 * quarter, codes + 32 * (quarter & 1), quarter >> 1);
        for (int j = 0; j < 4; j++) { /* bits of a byte are of four quarters, two each */
            uint64_t bits = turned(word_at(high + 8 * j));
            for (int b = 0; b < 8; b++)
                planes[(b & 1) * width + 16 * half + 4 * (b >> 1) + j] = (uint8_t)(bits >> 8 * b);
        }
    }
    memcpy(u->small_scales + 16 * at, block + 192, 16);
    memcpy(u->scales + 2 * at, block + 208, 2);
}

static void unpack_rows(void *given, int64_t begin, int64_t end) {
    const Unpacking *u = (const Unpacking *)given;
    static const int block_bytes[] = {0, 144, 176, 210};
    int64_t plain_bytes = u->scale_bytes + 2 * u->has_minimum + u->plane_bytes + u->code_bytes;
    int64_t step = u->kind == PLAIN ? plain_bytes : block_bytes[u->kind];
    for (int64_t row = begin; row < end; row++)
        for (int64_t i = 0; i < u->num_blocks; i++) {
            int64_t at = row * u->num_blocks + i;
            const uint8_t *block = u->blocks + at * step;
            if (u->kind == PLAIN) unpack_plain(u, block, at);
            else if (u->kind == Q6_K)
                unpack_q6_k(u, block, at, u->planes + row * u->num_blocks * 64 + i * 32, u->num_blocks * 32);
            else unpack_k(u, block, at);
        }
}

static void unpack_all(Unpacking *u) { parallel_for(unpack_rows, u, u->num_rows, 1 + u->num_rows / 64); }
