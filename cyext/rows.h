#pragma once
/* Row operations between products: RMS norms, and heads that are normed and rotated. Plain
   loops over 16 numbers, which become vectors of the instructions that they are compiled for. Sums are
   16 partial ones, added in the same order for every instruction set. */
#include "floats.h"
#include "threads.h"
#include <math.h>

typedef struct {
    const uint8_t *x;                       /* rows, `stride` numbers from one to the next */
    const float *weight, *key_weight;       /* of norms; NULL for none */
    const float *cos, *sin;                 /* [rows][rotary_dim / 2] */
    uint8_t *out, *keys;                    /* contiguous */
    int64_t num_rows, stride, dim, num_heads, num_kv_heads, rotary_dim;
    float eps;
    int is_bf16;
} Rows;

INLINE void take_numbers(const uint8_t *from, float *to, int64_t count, const int is_bf16) {
    if (is_bf16)
        for (int64_t i = 0; i < count; i++) to[i] = of_bf16(((const uint16_t *)from)[i]);
    else
        memcpy(to, from, (size_t)count * 4);
}

INLINE void put_numbers(const float *from, uint8_t *to, int64_t count, const int is_bf16) {
    if (is_bf16)
        for (int64_t i = 0; i < count; i++) ((uint16_t *)to)[i] = to_bf16(from[i]);
    else
        memcpy(to, from, (size_t)count * 4);
}

/* 1 / rms of a row of a multiple of 16 numbers. */
INLINE float inverse_rms(const float *x, int64_t count, float eps) {
    float sums[16] = {0};
    for (int64_t i = 0; i < count; i += 16)
        for (int j = 0; j < 16; j++) sums[j] += x[i + j] * x[i + j];
    for (int half = 8; half; half /= 2)
        for (int j = 0; j < half; j++) sums[j] += sums[j + half];
    return 1.0f / sqrtf(sums[0] / (float)count + eps);
}

INLINE void norm_row(float *x, const float *weight, int64_t count, float eps) {
    float scale = inverse_rms(x, count, eps);
    for (int64_t i = 0; i < count; i++) x[i] = x[i] * scale * weight[i];
}

enum { ROW_PART = 8192 }; /* numbers of a row that are kept on the stack */

INLINE void norm_rows(const Rows *p, int64_t begin, int64_t end) {
    float row[ROW_PART];
    const int64_t item = p->is_bf16 ? 2 : 4;
    for (int64_t r = begin; r < end; r++) {
        take_numbers(p->x + r * p->stride * item, row, p->dim, p->is_bf16);
        norm_row(row, p->weight, p->dim, p->eps);
        put_numbers(row, p->out + r * p->dim * item, p->dim, p->is_bf16);
    }
}

/* A head's halves of rotary_dim / 2 numbers are paired (neox). */
INLINE void turn_head(const Rows *p, const uint8_t *from, uint8_t *to, int64_t row, const float *weight) {
    float head[1024], turned[1024];
    const int64_t half = p->rotary_dim / 2;
    const float *cos = p->cos + row * half, *sin = p->sin + row * half;
    take_numbers(from, head, p->dim, p->is_bf16);
    if (weight) {
        norm_row(head, weight, p->dim, p->eps);
        if (p->is_bf16) /* the normed numbers are rounded before rotation */
            for (int64_t i = 0; i < p->dim; i++) head[i] = of_bf16(to_bf16(head[i]));
    }
    for (int64_t i = 0; i < half; i++) {
        turned[i] = head[i] * cos[i] - head[i + half] * sin[i];
        turned[i + half] = head[i + half] * cos[i] + head[i] * sin[i];
    }
    memcpy(turned + 2 * half, head + 2 * half, (size_t)(p->dim - 2 * half) * 4);
    put_numbers(turned, to, p->dim, p->is_bf16);
}

INLINE void turn_rows(const Rows *p, int64_t begin, int64_t end) {
    const int64_t bytes = p->dim * (p->is_bf16 ? 2 : 4), stride = p->stride * (p->is_bf16 ? 2 : 4);
    for (int64_t r = begin; r < end; r++) {
        const uint8_t *from = p->x + r * stride;
        for (int64_t h = 0; h < p->num_heads; h++, from += bytes)
            turn_head(p, from, p->out + (r * p->num_heads + h) * bytes, r, p->weight);
        for (int64_t h = 0; h < p->num_kv_heads; h++, from += bytes)
            turn_head(p, from, p->keys + (r * p->num_kv_heads + h) * bytes, r, p->key_weight);
    }
}

#if defined(__x86_64__) && defined(__GNUC__)
__attribute__((target("avx2,f16c"))) static void fast_norm(void *p, int64_t begin, int64_t end) {
    norm_rows((Rows *)p, begin, end);
}
__attribute__((target("avx2,f16c"))) static void fast_turn(void *p, int64_t begin, int64_t end) {
    turn_rows((Rows *)p, begin, end);
}
static int has_fast(void) { return __builtin_cpu_init(), __builtin_cpu_supports("avx2"); }
#else
static void fast_norm(void *p, int64_t begin, int64_t end) { norm_rows((Rows *)p, begin, end); }
static void fast_turn(void *p, int64_t begin, int64_t end) { turn_rows((Rows *)p, begin, end); }
static int has_fast(void) { return 0; }
#endif
static void plain_norm(void *p, int64_t begin, int64_t end) { norm_rows((Rows *)p, begin, end); }
static void plain_turn(void *p, int64_t begin, int64_t end) { turn_rows((Rows *)p, begin, end); }

enum { NUMBERS_ALONE = 1 << 14 }; /* fewer numbers are not worth a second thread */

static void over_rows(Task task, Rows *p, int64_t numbers_of_row) {
    int64_t rows = NUMBERS_ALONE / numbers_of_row;
    parallel_for(task, p, p->num_rows, rows > 1 ? rows : 1);
}

static void run_norm(Rows *p) { over_rows(has_fast() ? fast_norm : plain_norm, p, p->dim); }
static void run_turn(Rows *p) {
    over_rows(has_fast() ? fast_turn : plain_turn, p, p->dim * (p->num_heads + p->num_kv_heads));
}
