#pragma once
/* Products with quantised matrices: laying out rows of x for the kernels, dividing tiles among
   threads, and writing the sums. The instruction set is chosen at run time. */
#if defined(__x86_64__) && defined(__GNUC__)
#define HAS_KERNELS 1
#include <immintrin.h>
#else
#define HAS_KERNELS 0
#endif
#include "floats.h"
#include "quantised_tiles.h"
#include "threads.h"

enum { NO_KERNEL, AVX2, AVX512, AVX512_BF16 };
enum { MAX_ROWS = 128 }; /* of x that are multiplied with a tile while it is unpacked */
enum { FEW_ROWS = 4 };   /* up to so many, the product is bound by the memory bandwidth of tiles */

typedef struct {
    const Matrix *w;
    const uint8_t *x, *residual; /* [rows][columns], [rows][out] or NULL */
    uint8_t *out, *panels;       /* [rows][out]; x in steps of 32 columns, each [rows][32] */
    float *sums;                 /* of each 16 columns of x */
    const int32_t *rows;         /* the row of x that each row is; NULL: the same */
    int64_t num_rows, num_out;
    int64_t begin[2];            /* the rows of w that are multiplied begin here; of swiglu's ups */
    int is_bf16, kernel, is_swiglu;
} Product;

/* The sum of 16 numbers, in the order in which a vector register would add them. */
INLINE float sum_of_16(const float *x) {
    float some[8];
    for (int i = 0; i < 8; i++) some[i] = x[i] + x[i + 8];
    for (int i = 0; i < 4; i++) some[i] += some[i + 4];
    return (some[0] + some[2]) + (some[1] + some[3]);
}

/* Copy steps [begin, end) of x to where a kernel reads them, in blocks of MAX_ROWS rows. */
INLINE void lay_out(const Product *p, int64_t begin, int64_t end) {
    const int64_t columns = p->w->num_columns, item = p->kernel == AVX512_BF16 ? 2 : 4;
    for (int64_t first = 0; first < p->num_rows; first += MAX_ROWS) {
        int64_t rows = p->num_rows - first < MAX_ROWS ? p->num_rows - first : MAX_ROWS;
        for (int64_t step = begin; step < end; step++)
            for (int64_t m = 0; m < rows; m++) {
                int64_t row = p->rows ? p->rows[first + m] : first + m;
                int64_t from = row * columns + step * STEP, to = first * columns + (step * rows + m) * STEP;
                float numbers[STEP];
                if (p->is_bf16)
                    for (int i = 0; i < STEP; i++) numbers[i] = of_bf16(((const uint16_t *)p->x)[from + i]);
                else
                    memcpy(numbers, p->x + from * 4, sizeof numbers);
                memcpy(p->panels + to * item, item == 2 ? (const void *)(p->x + from * 2) : numbers, (size_t)(STEP * item));
                if (!p->w->minimum || item == 4) continue;
                for (int h = 0; h < 2; h++) p->sums[to / 16 + h] = sum_of_16(numbers + 16 * h);
            }
    }
}

/* Write 16 results of each row: sums, or silu(sums) * ups. */
INLINE void put_out(const Product *p, int64_t row, int64_t rows, int64_t first, const float *sums, const float *ups,
                    const int is_whole) {
    const int64_t left = p->num_out - first, lanes = is_whole || left > TILE ? TILE : left;
    for (int64_t m = 0; m < rows; m++, sums += TILE, ups += TILE) {
        int64_t place = (row + m) * p->num_out + first;
        float found[TILE];
        memcpy(found, sums, sizeof found);
        if (p->is_swiglu)
            for (int i = 0; i < TILE; i++) found[i] = silu_of(found[i]) * ups[i];
        if (p->is_bf16) {
            uint16_t *out = (uint16_t *)p->out + place;
            const uint16_t *residual = (const uint16_t *)p->residual + place;
            if (p->residual)
                for (int64_t i = 0; i < lanes; i++) found[i] += of_bf16(residual[i]);
            for (int64_t i = 0; i < lanes; i++) out[i] = to_bf16(found[i]);
        } else {
            float *out = (float *)p->out + place;
            const float *residual = (const float *)p->residual + place;
            if (p->residual)
                for (int64_t i = 0; i < lanes; i++) found[i] += residual[i];
            for (int64_t i = 0; i < lanes; i++) out[i] = found[i];
        }
    }
}

#if HAS_KERNELS
#include "quantised_scales.h"
#include "quantised_bf16.h"
#include "quantised_isa.h"

typedef void (*Multiply)(const Matrix *, const int64_t *, int, const void *, const float *, int64_t, float *const *);
static const Multiply MULTIPLY[] = {NULL, avx2_multiply, avx512_multiply, bf16_multiply};

/* Multiply rows [row, row + rows) of x with `count` tiles, which begin at rows first[0] and first[1]. */
INLINE void multiply(const Product *p, const int64_t *first, int count, int64_t row, int64_t rows, float *const *sums) {
    const int64_t columns = p->w->num_columns, item = p->kernel == AVX512_BF16 ? 2 : 4;
    for (int t = 0; t < count; t++) memset(sums[t], 0, (size_t)(rows * TILE) * 4);
    MULTIPLY[p->kernel](p->w, first, count, p->panels + row * columns * item, p->sums + row * columns / 16, rows, sums);
}

INLINE void put_tile(const Product *p, int64_t row, int64_t rows, int64_t first, const float *sums, const float *ups) {
    if (p->num_out - first >= TILE) put_out(p, row, rows, first, sums, ups, 1);
    else put_out(p, row, rows, first, sums, ups, 0);
}

/* For few rows: tiles one after the other in memory order, gates before ups. */
INLINE void tiles_in_turn(const Product *p, int64_t begin, int64_t end, float (*sums)[MAX_ROWS * TILE]) {
    const int64_t room = MAX_ROWS / FEW_ROWS, size = p->num_rows * TILE;
    for (int64_t first = begin; first < end; first += room) {
        const int64_t count = end - first < room ? end - first : room;
        for (int part = 0; part < (p->is_swiglu ? 2 : 1); part++)
            for (int64_t i = 0; i < count; i++) {
                const int64_t row = p->begin[part] + (first + i) * TILE;
                float *const to[] = {sums[part] + i * size};
                multiply(p, &row, 1, 0, p->num_rows, to);
            }
        for (int64_t i = 0; i < count; i++)
            put_tile(p, 0, p->num_rows, (first + i) * TILE, sums[0] + i * size, sums[1] + i * size);
    }
}

/* Tiles two at a time: neighbours, or a gate and its up. */
INLINE void product_tiles(const Product *p, int64_t begin, int64_t end) {
    float sums[2][MAX_ROWS * TILE] __attribute__((aligned(64)));
    float *const out[2] = {sums[0], sums[1]};
    if (p->num_rows <= FEW_ROWS) {
        tiles_in_turn(p, begin, end, sums);
        return;
    }
    const int64_t last = end * TILE < p->num_out ? end * TILE : p->num_out, step = p->is_swiglu ? TILE : 2 * TILE;
    for (int64_t first = begin * TILE; first < last; first += step)
        for (int64_t row = 0; row < p->num_rows; row += MAX_ROWS) {
            const int64_t rows = p->num_rows - row < MAX_ROWS ? p->num_rows - row : MAX_ROWS;
            const int64_t both[2] = {p->begin[0] + first, p->is_swiglu ? p->begin[1] + first : p->begin[0] + first + TILE};
            const int count = p->is_swiglu || first + TILE < last ? 2 : 1;
            multiply(p, both, count, row, rows, out);
            for (int t = 0; t < (p->is_swiglu ? 1 : count); t++)
                put_tile(p, row, rows, first + t * TILE, sums[t], sums[1]);
        }
}

#define TARGET_AVX2 __attribute__((target("avx2,fma,f16c")))
#define TARGET_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,f16c,fma,prefer-vector-width=512")))
TARGET_AVX2 static void avx2_tiles(void *p, int64_t begin, int64_t end) { product_tiles((Product *)p, begin, end); }
TARGET_AVX512 static void avx512_tiles(void *p, int64_t begin, int64_t end) { product_tiles((Product *)p, begin, end); }
TARGET_AVX2 static void lay_out_steps(void *p, int64_t begin, int64_t end) { lay_out((Product *)p, begin, end); }

static int best_kernel(void) {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("f16c"))
        return NO_KERNEL;
    if (!__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl"))
        return AVX2;
    return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi") ? AVX512_BF16 : AVX512;
}

/* Allocate where rows of x are laid out. Returns 0 if out of memory. */
static int make_room(Product *p) {
    const int64_t columns = p->w->num_columns;
    size_t num_bytes = (size_t)(p->num_rows * columns * 4), sum_bytes = (size_t)(p->num_rows * columns / 4);
    p->panels = (uint8_t *)aligned_alloc(64, (num_bytes + sum_bytes + 127) / 64 * 64);
    p->sums = (float *)(p->panels + (num_bytes + 63) / 64 * 64);
    return p->panels != NULL;
}

/* x @ w^T (+ residual), or silu(gate) * up of its two halves. Returns 0 if out of memory. */
static int product(Product *p) {
    const int64_t columns = p->w->num_columns, steps = columns / STEP;
    if (!make_room(p)) return 0;
    p->num_out = p->is_swiglu ? p->w->num_rows / 2 : p->w->num_rows;
    p->begin[0] = 0, p->begin[1] = p->num_out;
    parallel_for(lay_out_steps, p, steps, p->num_rows * columns > 1 << 16 ? 1 + steps / 16 : steps);
    int64_t tiles = (p->num_out + TILE - 1) / TILE;
    parallel_for(p->kernel == AVX2 ? avx2_tiles : avx512_tiles, p, tiles, 2 + tiles / 64 * 2);
    free(p->panels);
    return 1;
}

/* Products of different rows of x with different rows of one matrix. */
typedef struct {
    Product *each;
    int64_t tiles; /* of each */
} Products;

static void lay_out_products(void *given, int64_t begin, int64_t end) {
    const Products *all = (const Products *)given;
    for (int64_t i = begin; i < end; i++) lay_out_steps(&all->each[i], 0, all->each[i].w->num_columns / STEP);
}

/* Tiles [begin, end), counted through all products. */
INLINE void tiles_of_products(const Products *all, int64_t begin, int64_t end, Task task) {
    while (begin < end) {
        const int64_t first = begin % all->tiles, left = all->tiles - first;
        const int64_t count = end - begin < left ? end - begin : left;
        task(&all->each[begin / all->tiles], first, first + count);
        begin += count;
    }
}

static void avx2_products(void *all, int64_t begin, int64_t end) {
    tiles_of_products((const Products *)all, begin, end, avx2_tiles);
}

static void avx512_products(void *all, int64_t begin, int64_t end) {
    tiles_of_products((const Products *)all, begin, end, avx512_tiles);
}

/* For each expert the product of its rows [bounds[e], bounds[e + 1]) with its part of the matrix, which is
   [experts][num_out] rows, of swiglu first all gates, then all ups. Returns 0 if out of memory. */
static int product_of_experts(Product *p, const int32_t *bounds, int64_t num_experts) {
    const int64_t columns = p->w->num_columns, item = p->is_bf16 ? 2 : 4, laid = p->kernel == AVX512_BF16 ? 2 : 4;
    Products all = {(Product *)malloc((size_t)num_experts * sizeof(Product)), 0};
    const int is_done = all.each && make_room(p);
    int64_t count = 0;
    p->num_out = p->w->num_rows / num_experts / (p->is_swiglu ? 2 : 1);
    for (int64_t e = 0; is_done && e < num_experts; e++) {
        const int64_t first = bounds[e], rows = bounds[e + 1] - bounds[e];
        if (!rows) continue;
        Product *own = &all.each[count++];
        *own = *p;
        own->num_rows = rows;
        if (p->rows) own->rows += first;
        else own->x += first * columns * item;
        own->out += first * p->num_out * item;
        own->panels += first * columns * laid, own->sums += first * columns / 16;
        own->begin[0] = e * p->num_out, own->begin[1] = (num_experts + e) * p->num_out;
    }
    all.tiles = (p->num_out + TILE - 1) / TILE;
    if (is_done) {
        parallel_for(lay_out_products, &all, count, p->num_rows * columns > 1 << 16 ? 1 : count);
        const int64_t tiles = count * all.tiles;
        parallel_for(p->kernel == AVX2 ? avx2_products : avx512_products, &all, tiles, 2 + tiles / 64 * 2);
        free(p->panels);
    }
    free(all.each);
    return is_done;
}
#else
static int best_kernel(void) { return NO_KERNEL; }
static int product(Product *p) { (void)p; return 0; }
static int product_of_experts(Product *p, const int32_t *bounds, int64_t num_experts) {
    (void)p, (void)bounds, (void)num_experts;
    return 0;
}
#endif
