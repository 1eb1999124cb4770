#pragma once
/* Attention of rows of one sequence over its keys and values in place: an online softmax, block by
   block (Milakov & Gimelshein, 2018; Dao, 2022), for AVX-512.

   A block is 64 keys. Keys, and then values, are transposed into registers of 16 lanes, and multiplied
   with every query that shares their head: 16 lanes of keys give scores, 16 lanes of dimensions give
   outputs. In bfloat16 a lane is a pair (of dimensions, of keys), in float32 one number; sums are
   float32. A row's result depends on its own keys alone, as blocks always begin at key 0. */
#include "floats.h"
#include "threads.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { BLOCK_KEYS = 64, BLOCK_QUERIES = 64, LANES = 16 };

typedef struct {
    const uint8_t *q, *keys, *values; /* [rows][heads][head_dim]; [places][kv_heads][head_dim] each */
    const int64_t *places;            /* of keys, in order; NULL: `first` and the following ones */
    uint8_t *out;                     /* like q */
    int64_t first, place_bytes, num_rows, begin, num_heads, num_kv_heads, head_dim;
    int64_t window;     /* the last keys of these that a row sees; 0: all */
    int64_t task_heads; /* kv heads that a thread takes at once */
    int is_bf16, has_failed;
} Attention; /* row r sees the first begin + r + 1 keys */

/* Scratch for the queries of one kv head. */
INLINE int64_t blocks_of(const Attention *a) {
    return (a->num_rows * (a->num_heads / a->num_kv_heads) + BLOCK_QUERIES - 1) / BLOCK_QUERIES;
}

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,f16c,fma")

typedef struct {
    int32_t *turned;             /* [registers][16]: transposed keys or values */
    int32_t *queries;            /* per head [units][queries][16]: a unit is 64 bytes of a row */
    float *seen;                 /* outputs so far, per head [dimensions / 16][queries][16] */
    float *scores;               /* [4][queries][16 keys] */
    int32_t *shares;             /* [units of keys][queries][16] */
    float *most, *total;         /* maximum and sum of weights, per head [queries] */
    int32_t *zeros;              /* one row */
    const uint8_t *key_rows[BLOCK_KEYS], *value_rows[BLOCK_KEYS];
    int64_t ahead;               /* usual distance to the next block, in bytes */
} Room;

/* Multiply 16 registers with the 16 numbers (or pairs) of each query. */
INLINE void meet(const int32_t *tile, const int32_t *x, float *sums, int64_t num_queries, const int is_bf16) {
    __m512i registers[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) registers[i] = _mm512_load_si512(tile + 16 * i);
    for (int64_t r = 0; r < num_queries; r++, x += 16, sums += 16) {
        __m512 first = _mm512_setzero_ps(), second = _mm512_setzero_ps();
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) {
            __m512i one = _mm512_set1_epi32(x[i]), other = _mm512_set1_epi32(x[i + 8]);
            if (is_bf16) {
                first = _mm512_dpbf16_ps(first, (__m512bh)registers[i], (__m512bh)one);
                second = _mm512_dpbf16_ps(second, (__m512bh)registers[i + 8], (__m512bh)other);
            } else {
                first = _mm512_fmadd_ps((__m512)registers[i], (__m512)one, first);
                second = _mm512_fmadd_ps((__m512)registers[i + 8], (__m512)other, second);
            }
        }
        _mm512_store_ps(sums, _mm512_add_ps(_mm512_load_ps(sums), _mm512_add_ps(first, second)));
    }
}

/* One step of a 16 x 16 transpose: exchange blocks of this many rows and columns. */
INLINE void turn_halves(__m512i *rows, const int half) {
    int32_t low[16], high[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
        low[i] = i & half ? 16 + (i ^ half) : i;
        high[i] = i & half ? 16 + i : i ^ half;
    }
    const __m512i to_low = _mm512_loadu_si512(low), to_high = _mm512_loadu_si512(high);
#pragma GCC unroll 8
    for (int pair = 0; pair < 8; pair++) {
        const int i = pair / half * 2 * half + pair % half;
        __m512i one = rows[i], other = rows[i + half];
        rows[i] = _mm512_permutex2var_epi32(one, to_low, other);
        rows[i + half] = _mm512_permutex2var_epi32(one, to_high, other);
    }
}

/* e^x for x <= 0, within 2 units in the last place. */
INLINE __m512 exp_16(__m512 x) {
    __m512 whole = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 8);
    __m512 rest = _mm512_fnmadd_ps(whole, _mm512_set1_ps(0.693359375f), x);
    rest = _mm512_fnmadd_ps(whole, _mm512_set1_ps(-2.12194440e-4f), rest);
    __m512 sum = _mm512_set1_ps(1.9875691500e-4f);
    const float terms[] = {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f, 1.0f, 1.0f};
#pragma GCC unroll 7
    for (int i = 0; i < 7; i++) sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(terms[i]));
    __m512 found = _mm512_scalef_ps(sum, whole);
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(-103.0f), _CMP_GT_OQ), found);
}

/* The rows of a block's keys and values, followed by rows of zeros. */
INLINE void find_rows(const Attention *a, Room *room, int64_t key, int64_t end, int64_t head, int item) {
    int64_t next = key + BLOCK_KEYS < end ? key + BLOCK_KEYS : key;
    room->ahead = a->places ? a->places[next] - a->places[key] : next - key;
    room->ahead *= a->place_bytes;
    for (int64_t i = 0; i < BLOCK_KEYS; i++) {
        int64_t at = key + i < end ? key + i : end - 1;
        int64_t offset = (a->places ? a->places[at] : a->first + at) * a->place_bytes + head * a->head_dim * item;
        room->key_rows[i] = key + i < end ? a->keys + offset : (const uint8_t *)room->zeros;
        room->value_rows[i] = key + i < end ? a->values + offset : (const uint8_t *)room->zeros;
    }
}

/* Transpose 64 bytes of 16 keys: one register for each number or pair. */
INLINE void turn_keys(const uint8_t *const *rows, int64_t ahead, int32_t *to, int64_t unit) {
    __m512i turned[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
        _mm_prefetch((const char *)rows[i] + 64 * unit + ahead, _MM_HINT_T1);
        turned[i] = _mm512_loadu_si512(rows[i] + 64 * unit);
    }
    turn_halves(turned, 8);
    turn_halves(turned, 4);
    turn_halves(turned, 2);
    turn_halves(turned, 1);
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) _mm512_store_si512(to + 16 * i, turned[i]);
}

/* Load 64 bytes of 16 values, or of 16 pairs of them, with two registers for each pair. */
INLINE void turn_values(const uint8_t *const *rows, int64_t ahead, int32_t *to, int64_t unit, const int is_bf16) {
    for (int i = 0; i < 16; i++) {
        for (int j = 0; j < (is_bf16 ? 2 : 1); j++)
            _mm_prefetch((const char *)rows[is_bf16 ? 2 * i + j : i] + 64 * unit + ahead, _MM_HINT_T1);
        if (!is_bf16) {
            _mm512_store_si512(to + 16 * i, _mm512_loadu_si512(rows[i] + 64 * unit));
            continue;
        }
        for (int half = 0; half < 2; half++) {
            const __m256i *one = (const __m256i *)(rows[2 * i] + 64 * unit) + half;
            const __m256i *other = (const __m256i *)(rows[2 * i + 1] + 64 * unit) + half;
            __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256(one));
            __m512i high = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(other)), 16);
            _mm512_store_si512(to + 256 * half + 16 * i, _mm512_or_si512(low, high));
        }
    }
}

/* Turn the scores of a block into weights; scale down earlier sums where the maximum grew. */
INLINE void share_out(const Attention *a, Room *room, int64_t key, int64_t row, int64_t group, int64_t num_queries,
                      const int is_bf16) {
    const __m512 scale = _mm512_set1_ps((float)(1.0 / sqrt((double)a->head_dim)));
    const __m512 nothing = _mm512_set1_ps(-INFINITY);
    for (int64_t r = 0; r < num_queries; r++) {
        int64_t left = a->begin + (row + r) / group + 1 - key, hidden = a->window ? left - a->window : 0;
        if (left <= 0 || hidden >= BLOCK_KEYS) { /* this query sees nothing of the block, others do */
            for (int i = 0; i < (is_bf16 ? 2 : 4); i++)
                _mm512_store_si512(room->shares + (i * num_queries + r) * 16, _mm512_setzero_si512());
            continue;
        }
        __m512 scores[4], most = nothing;
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            int64_t visible = left - 16 * i;
            __mmask16 mask = visible >= 16 ? 0xffff : visible <= 0 ? 0 : (__mmask16)((1u << visible) - 1);
            int64_t before = hidden - 16 * i;
            if (before > 0) mask &= before >= 16 ? 0 : (__mmask16)(0xffff << before);
            scores[i] = _mm512_mul_ps(_mm512_load_ps(room->scores + (i * num_queries + r) * 16), scale);
            scores[i] = _mm512_mask_mov_ps(nothing, mask, scores[i]);
            most = _mm512_max_ps(most, scores[i]);
        }
        float before = room->most[r], now = fmaxf(before, _mm512_reduce_max_ps(most));
        __m512 sum = _mm512_setzero_ps();
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            scores[i] = exp_16(_mm512_sub_ps(scores[i], _mm512_set1_ps(now)));
            sum = _mm512_add_ps(sum, scores[i]);
        }
        if (now > before) {
            float factor = before == -INFINITY ? 0.0f : exp_of(before - now);
            room->most[r] = now;
            room->total[r] *= factor;
            for (int64_t d = 0; d < a->head_dim / 16; d++) {
                float *seen = room->seen + (d * num_queries + r) * 16;
                _mm512_store_ps(seen, _mm512_mul_ps(_mm512_load_ps(seen), _mm512_set1_ps(factor)));
            }
        }
        room->total[r] += _mm512_reduce_add_ps(sum);
        for (int i = 0; i < (is_bf16 ? 2 : 4); i++) {
            __m512i to = is_bf16 ? (__m512i)_mm512_cvtne2ps_pbh(scores[2 * i + 1], scores[2 * i]) : (__m512i)scores[i];
            _mm512_store_si512(room->shares + (i * num_queries + r) * 16, to);
        }
    }
}

/* The part of the scratch that belongs to one head. */
INLINE Room room_of(const Attention *a, const Room *all, int64_t head, int64_t num_queries, int item) {
    Room room = *all;
    room.queries += head * num_queries * a->head_dim * item / 4;
    room.seen += head * num_queries * a->head_dim;
    room.most += head * num_queries;
    room.total += head * num_queries;
    return room;
}

INLINE void take_queries(const Attention *a, const Room *room, int64_t head, int64_t row, int64_t num_queries, int item) {
    const int64_t group = a->num_heads / a->num_kv_heads, units = a->head_dim * item / 64;
    for (int64_t r = 0; r < num_queries; r++) {
        int64_t place = (row + r) / group * a->num_heads + head * group + (row + r) % group;
        for (int64_t u = 0; u < units; u++)
            memcpy(room->queries + (u * num_queries + r) * 16, a->q + place * a->head_dim * item + 64 * u, 64);
        room->most[r] = -INFINITY, room->total[r] = 0.0f;
    }
    memset(room->seen, 0, (size_t)(num_queries * a->head_dim) * 4);
}

INLINE void see_block(const Attention *a, Room *room, int64_t key, int64_t end, int64_t head, int64_t row,
                      int64_t num_queries, const int is_bf16) {
    const int item = is_bf16 ? 2 : 4, lane = is_bf16 ? 2 : 1;
    const int64_t group = a->num_heads / a->num_kv_heads, units = a->head_dim * item / 64;
    find_rows(a, room, key, end, head, item);
    memset(room->scores, 0, (size_t)(num_queries * BLOCK_KEYS) * 4);
    for (int i = 0; i < 4; i++)
        for (int64_t u = 0; u < units; u++) {
            turn_keys(room->key_rows + 16 * i, room->ahead, room->turned, u);
            meet(room->turned, room->queries + u * num_queries * 16, room->scores + i * num_queries * 16, num_queries, is_bf16);
        }
    share_out(a, room, key, row, group, num_queries, is_bf16);
    for (int64_t i = 0; i < 4 / lane; i++)
        for (int64_t u = 0; u < units; u++) {
            turn_values(room->value_rows + 16 * lane * i, room->ahead, room->turned, u, is_bf16);
            for (int half = 0; half < lane; half++)
                meet(room->turned + 256 * half, room->shares + i * num_queries * 16,
                     room->seen + (u * lane + half) * num_queries * 16, num_queries, is_bf16);
        }
}

INLINE void put_seen(const Attention *a, const Room *room, int64_t head, int64_t row, int64_t num_queries, const int is_bf16) {
    const int64_t group = a->num_heads / a->num_kv_heads, item = is_bf16 ? 2 : 4;
    for (int64_t r = 0; r < num_queries; r++) {
        int64_t place = (row + r) / group * a->num_heads + head * group + (row + r) % group;
        for (int64_t d = 0; d < a->head_dim; d += 16) {
            const float *seen = room->seen + (d / 16 * num_queries + r) * 16;
            __m512 found = _mm512_div_ps(_mm512_load_ps(seen), _mm512_set1_ps(room->total[r]));
            uint8_t *to = a->out + (place * a->head_dim + d) * item;
            if (is_bf16) _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh(found));
            else _mm512_storeu_ps((float *)to, found);
        }
    }
}

/* Attend with queries [row, row + num_queries) of kv heads [head, end_head), where a row is one head of one
   row of q. A block of keys is read for all heads in turn, as they are adjacent in memory. */
INLINE void attend_queries(const Attention *a, const Room *all, int64_t head, int64_t end_head, int64_t row,
                           int64_t num_queries, const int is_bf16) {
    const int item = is_bf16 ? 2 : 4;
    const int64_t group = a->num_heads / a->num_kv_heads, end = a->begin + (row + num_queries - 1) / group + 1;
    const int64_t before = a->window ? a->begin + row / group + 1 - a->window : 0; /* the first query's window */
    const int64_t first = before > 0 ? before / BLOCK_KEYS * BLOCK_KEYS : 0;
    for (int64_t h = head; h < end_head; h++) {
        Room room = room_of(a, all, h - head, num_queries, item);
        take_queries(a, &room, h, row, num_queries, item);
    }
    for (int64_t key = first; key < end; key += BLOCK_KEYS)
        for (int64_t h = head; h < end_head; h++) {
            Room room = room_of(a, all, h - head, num_queries, item);
            see_block(a, &room, key, end, h, row, num_queries, is_bf16);
        }
    for (int64_t h = head; h < end_head; h++) {
        Room room = room_of(a, all, h - head, num_queries, item);
        put_seen(a, &room, h, row, num_queries, is_bf16);
    }
}

/* A task is a block of queries of `task_heads` kv heads. The last queries, which see most keys, come first. */
INLINE void attend_tasks(Attention *a, int64_t begin, int64_t end, const int is_bf16) {
    const int64_t per_head = a->num_rows * (a->num_heads / a->num_kv_heads), line = BLOCK_QUERIES * 4;
    const int64_t parts = (a->num_kv_heads + a->task_heads - 1) / a->task_heads;
    const int64_t sizes[] = {2048, line * a->head_dim, line * a->head_dim, line * BLOCK_KEYS, line * BLOCK_KEYS,
                             line, line, a->head_dim * 4};
    uint8_t *memory = NULL, *places[8];
    int64_t total = 0;
    for (int i = 0; i < 8; i++) total += sizes[i];
    if (posix_memalign((void **)&memory, 64, (size_t)total)) {
        a->has_failed = 1;
        return;
    }
    places[0] = memory;
    for (int i = 1; i < 8; i++) places[i] = places[i - 1] + sizes[i - 1];
    Room room = {(int32_t *)places[0], (int32_t *)places[1], (float *)places[2], (float *)places[3],
                 (int32_t *)places[4], (float *)places[5], (float *)places[6], (int32_t *)places[7], {0}, {0}, 0};
    memset(room.zeros, 0, (size_t)a->head_dim * 4);
    for (int64_t task = begin; task < end; task++) {
        int64_t row = (blocks_of(a) - 1 - task / parts) * BLOCK_QUERIES, left = per_head - row;
        int64_t head = task % parts * a->task_heads, end_head = head + a->task_heads;
        if (end_head > a->num_kv_heads) end_head = a->num_kv_heads;
        attend_queries(a, &room, head, end_head, row, left < BLOCK_QUERIES ? left : BLOCK_QUERIES, is_bf16);
    }
    free(memory);
}

static void attend_bf16(void *a, int64_t begin, int64_t end) { attend_tasks((Attention *)a, begin, end, 1); }
static void attend_floats(void *a, int64_t begin, int64_t end) { attend_tasks((Attention *)a, begin, end, 0); }
#pragma GCC pop_options

static int can_attend(void) {
    __builtin_cpu_init();
    /* Both dtypes are compiled for AVX512-BF16; other machines use torch. */
    return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512bf16");
}

/* Returns 0 if out of memory. */
static int attend(Attention *a) {
    int64_t per_head = a->num_rows * (a->num_heads / a->num_kv_heads), heads = a->num_kv_heads / parallel_width();
    if (heads > BLOCK_QUERIES / per_head) heads = BLOCK_QUERIES / per_head;
    a->task_heads = heads > 1 ? heads : 1;
    int64_t parts = (a->num_kv_heads + a->task_heads - 1) / a->task_heads;
    parallel_for(a->is_bf16 ? attend_bf16 : attend_floats, a, blocks_of(a) * parts, 1);
    return !a->has_failed;
}
#else
static int can_attend(void) { return 0; }
static int attend(Attention *a) { (void)a; return 0; }
#endif
