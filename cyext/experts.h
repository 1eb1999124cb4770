#pragma once
/* Routed experts apart from their products: scoring and choosing them, sorting rows by expert, and the weighted
   sums of their results. Sums are float32, in the order of a row's own choice. */
#include "floats.h"
#include "threads.h"

enum { PRODUCT_LANES = 16, PRODUCT_ROWS = 4 }; /* numbers in a register; rows beside each other */

typedef struct {
    const float *x, *matrix; /* [rows][width]; [outputs][width] */
    float *out;              /* [rows][outputs] */
    int64_t num_rows, num_outputs, width;
} FloatProduct;

typedef float Lanes __attribute__((vector_size(PRODUCT_LANES * 4)));

INLINE void take_lanes(Lanes *to, const float *from) { memcpy(to, from, sizeof *to); }

/* Rows [row, row + count) of x by one of the matrix, each in its own partial sums, which are added in the
   same order for any number of rows and every instruction set. */
INLINE void products_of(const FloatProduct *p, int64_t output, int64_t row, const int count) {
    Lanes even[PRODUCT_ROWS] = {{0}}, odd[PRODUCT_ROWS] = {{0}};
    const float *w = p->matrix + output * p->width, *x = p->x + row * p->width;
    const int64_t whole = p->width / (2 * PRODUCT_LANES) * 2 * PRODUCT_LANES, left = p->width - whole;
    for (int64_t i = 0; i < whole; i += 2 * PRODUCT_LANES) {
        Lanes first, second, own, next;
        take_lanes(&first, w + i), take_lanes(&second, w + i + PRODUCT_LANES);
        for (int m = 0; m < count; m++) {
            take_lanes(&own, x + m * p->width + i), take_lanes(&next, x + m * p->width + i + PRODUCT_LANES);
            even[m] += own * first;
            odd[m] += next * second;
        }
    }
    for (int m = 0; m < count; m++) {
        float each[PRODUCT_LANES];
        even[m] += odd[m];
        memcpy(each, &even[m], sizeof each);
        for (int64_t i = 0; i < left; i++) each[i % PRODUCT_LANES] += x[m * p->width + whole + i] * w[whole + i];
        for (int half = PRODUCT_LANES / 2; half; half /= 2)
            for (int j = 0; j < half; j++) each[j] += each[j + half];
        p->out[(row + m) * p->num_outputs + output] = each[0];
    }
}

INLINE void products(const FloatProduct *p, int64_t begin, int64_t end) {
    for (int64_t output = begin; output < end; output++) {
        int64_t row = 0;
        for (; row + PRODUCT_ROWS <= p->num_rows; row += PRODUCT_ROWS) products_of(p, output, row, PRODUCT_ROWS);
        for (; row < p->num_rows; row++) products_of(p, output, row, 1);
    }
}

static void plain_products(void *p, int64_t begin, int64_t end) { products((FloatProduct *)p, begin, end); }
#if defined(__x86_64__) && defined(__GNUC__)
__attribute__((target("avx2"))) static void fast_products(void *p, int64_t begin, int64_t end) {
    products((FloatProduct *)p, begin, end);
}
__attribute__((target("avx512f,prefer-vector-width=512"))) static void wide_products(void *p, int64_t begin,
                                                                                    int64_t end) {
    products((FloatProduct *)p, begin, end);
}
static Task products_task(void) {
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f")) return wide_products;
    return __builtin_cpu_supports("avx2") ? fast_products : plain_products;
}
#else
static Task products_task(void) { return plain_products; }
#endif

enum { NUMBERS_ALONE = 1 << 17 }; /* of a matrix, which are not worth a second thread */

static void multiply_all(FloatProduct *p) {
    int64_t outputs = NUMBERS_ALONE / (p->width * p->num_rows);
    parallel_for(products_task(), p, p->num_outputs, outputs > 1 ? outputs : 1);
}

typedef struct {
    const float *scores, *biases; /* [rows][experts]; [experts], added for the choice alone, or NULL */
    int64_t num_rows, num_experts, num_chosen;
    int32_t *chosen; /* [rows][chosen], the best first */
    float *weights;  /* [rows][chosen] */
    float scale;
    int is_normalised;
} Choosing;

/* The experts of one row with the largest scores; of equal ones those of lower number. */
static void choose_row(const Choosing *p, const float *scores, int32_t *chosen, float *weights) {
    int64_t count = 0;
    for (int64_t e = 0; e < p->num_experts; e++) {
        float rank = p->biases ? scores[e] + p->biases[e] : scores[e];
        if (count == p->num_chosen && !(rank > weights[count - 1])) continue;
        int64_t place = count < p->num_chosen ? count++ : count - 1;
        for (; place > 0 && rank > weights[place - 1]; place--)
            weights[place] = weights[place - 1], chosen[place] = chosen[place - 1];
        weights[place] = rank, chosen[place] = (int32_t)e;
    }
    float sum = 0.0f;
    for (int64_t j = 0; j < count; j++) sum += weights[j] = scores[chosen[j]];
    for (int64_t j = 0; j < count; j++) weights[j] = (p->is_normalised ? weights[j] / sum : weights[j]) * p->scale;
}

static void choose_rows(void *given, int64_t begin, int64_t end) {
    const Choosing *p = (const Choosing *)given;
    for (int64_t r = begin; r < end; r++)
        choose_row(p, p->scores + r * p->num_experts, p->chosen + r * p->num_chosen, p->weights + r * p->num_chosen);
}

static void choose_all(Choosing *p) { parallel_for(choose_rows, p, p->num_rows, 64); }

/* Sort choices by expert, stably. rows: of x, by place; places: of each choice; bounds: where the places of
   each expert begin. */
static void sort_choices(const int32_t *chosen, int64_t num_rows, int64_t num_chosen, int64_t num_experts,
                         int32_t *rows, int32_t *places, int32_t *bounds) {
    const int64_t count = num_rows * num_chosen;
    memset(bounds, 0, (size_t)(num_experts + 1) * 4);
    for (int64_t i = 0; i < count; i++) bounds[chosen[i]]++;
    int32_t total = 0;
    for (int64_t e = 0; e <= num_experts; e++) {
        int32_t own = bounds[e];
        bounds[e] = total, total += own;
    }
    for (int64_t i = 0; i < count; i++) { /* bounds run ahead, and are set back */
        int32_t place = bounds[chosen[i]]++;
        places[i] = place, rows[place] = (int32_t)(i / num_chosen);
    }
    for (int64_t e = num_experts; e > 0; e--) bounds[e] = bounds[e - 1];
    bounds[0] = 0;
}

typedef struct {
    const uint8_t *results, *base; /* [places][width]; [rows][width] */
    const int32_t *places;         /* [rows][chosen] */
    const float *weights;          /* [rows][chosen] */
    uint8_t *out;                  /* [rows][width] */
    int64_t num_rows, num_chosen, width;
    int is_bf16;
} WeightedSum;

enum { SUM_PART = 256 }; /* numbers of a row that are summed at once */

INLINE void add_part(const WeightedSum *p, int64_t row, int64_t first, int64_t count, const int is_bf16) {
    float sums[SUM_PART];
    const int64_t at = row * p->width + first;
    for (int64_t i = 0; i < count; i++)
        sums[i] = is_bf16 ? of_bf16(((const uint16_t *)p->base)[at + i]) : ((const float *)p->base)[at + i];
    for (int64_t j = 0; j < p->num_chosen; j++) {
        const int64_t from = (int64_t)p->places[row * p->num_chosen + j] * p->width + first;
        const float weight = p->weights[row * p->num_chosen + j];
        for (int64_t i = 0; i < count; i++)
            sums[i] += weight * (is_bf16 ? of_bf16(((const uint16_t *)p->results)[from + i])
                                         : ((const float *)p->results)[from + i]);
    }
    for (int64_t i = 0; i < count; i++)
        if (is_bf16) ((uint16_t *)p->out)[at + i] = to_bf16(sums[i]);
        else ((float *)p->out)[at + i] = sums[i];
}

/* Parts of rows [begin, end), counted through all rows. */
static void add_parts(void *given, int64_t begin, int64_t end) {
    const WeightedSum *p = (const WeightedSum *)given;
    const int64_t parts = (p->width + SUM_PART - 1) / SUM_PART;
    for (int64_t i = begin; i < end; i++) {
        const int64_t first = i % parts * SUM_PART, left = p->width - first;
        const int64_t count = left < SUM_PART ? left : SUM_PART;
        if (p->is_bf16) add_part(p, i / parts, first, count, 1);
        else add_part(p, i / parts, first, count, 0);
    }
}

static void add_all(WeightedSum *p) {
    parallel_for(add_parts, p, p->num_rows * ((p->width + SUM_PART - 1) / SUM_PART), 32);
}
