/* Products of float32 rows with a tile. Included once for each instruction set, with

   NAME(name) what its functions are called      LANES  numbers in a register
   V, VI      registers of floats, of integers   units(pointer, count), scale(...), number_of(...)

   16 columns of LANES rows become 16 registers, which every row of x is multiplied with in turn; the
   order of summation does not depend on the number of rows of x. */

/* Columns of half `half` of step `step`, in the order of columns. */
INLINE void NAME(columns)(V *columns, const Matrix *w, const uint8_t *codes, const uint8_t *planes, int64_t unit,
                          int64_t lanes, int64_t lane, const int bits, const int has_table) {
    const int width = bits == 8 ? 8 : 4, per_unit = 32 / width, extra = bits - 4;
    const int64_t left = lanes - lane;
    for (int b = 0; b < 16 / per_unit; b++) {
        VI code = NAME(units)(codes + (((unit * 16 / per_unit) + b) * lanes + lane) * 4, left);
        for (int i = 0; i < per_unit; i++) {
            const int column = b * per_unit + i;
            VI own = NAME(right)(code, 16 * (i & 1) + width * (i >> 1));
            if (bits == 8) {
                columns[column] = NAME(of_byte)(w, own);
                continue;
            }
            own = NAME(and)(own, 15);
            if (bits > 4) {
                const int of_both = bits == 5 ? 32 : 16;
                int64_t place = unit * 16 / of_both;
                VI bit = NAME(units)(planes + (place * lanes + lane) * 4, left);
                int j = bits == 5 ? (int)(unit % 2) * 16 + column : column;
                VI moved = NAME(right_by)(bit, 16 * (j & 1) + extra * (j >> 1));
                own = NAME(or)(own, NAME(left)(NAME(and)(moved, (1 << extra) - 1), 4));
            }
            columns[column] = has_table ? NAME(of_table)(w, own) : NAME(of_integer)(w, own);
        }
    }
}

/* Adds the products to out, float32 [rows][16]. x: per step [rows][32] float32. */
INLINE void NAME(tile)(const Matrix *w, int64_t first, const float *x, int64_t num_rows, float *out,
                       const int bits, const int has_table, const int has_minimum) {
    const int64_t lanes = lanes_of(w, first), stride = w->num_columns;
    const uint8_t *codes = w->codes + first * stride * (bits == 8 ? 8 : 4) / 8;
    const uint8_t *planes = bits > 4 && bits < 8 ? w->planes + first * stride * (bits - 4) / 8 : NULL;
    for (int64_t lane = 0; lane < lanes; lane += LANES) {
        Scales at = scales_begin(w, first, lanes);
        V columns[16];
        for (int64_t unit = 0; unit < stride / 16; unit++, scales_next(&at, 16)) {
            NAME(columns)(columns, w, codes, planes, unit, lanes, lane, bits, has_table);
            V minimum, scale = NAME(scale)(&at, lane, &minimum, has_minimum);
            if (has_minimum) /* subtract here: two large sums would cancel otherwise */
                for (int i = 0; i < 16; i++) columns[i] = NAME(sub)(NAME(mul)(columns[i], scale), minimum);
            const float *row = x + unit / 2 * num_rows * 32 + unit % 2 * 16;
            for (int64_t m = 0; m < num_rows; m++, row += 32) {
                V even = NAME(mul)(columns[0], NAME(all)(row[0])), odd = NAME(mul)(columns[1], NAME(all)(row[1]));
                for (int i = 2; i < 16; i += 2) {
                    even = NAME(fma)(columns[i], NAME(all)(row[i]), even);
                    odd = NAME(fma)(columns[i + 1], NAME(all)(row[i + 1]), odd);
                }
                V total = NAME(load)(out + 16 * m + lane);
                total = has_minimum ? NAME(add)(NAME(add)(even, odd), total)
                                    : NAME(fma)(scale, NAME(add)(even, odd), total);
                NAME(store)(out + 16 * m + lane, total);
            }
        }
    }
}

#define FLOAT_KIND(bits, has_table, has_minimum)                                                  \
    case (bits) * 4 + (has_table) * 2 + (has_minimum):                                           \
        NAME(tile)(w, first[t], (const float *)x, num_rows, out[t], bits, has_table, has_minimum); \
        break;

static void NAME(multiply)(const Matrix *w, const int64_t *first, int count, const void *x, const float *sums,
                           int64_t num_rows, float *const *out) {
    (void)sums; /* of columns: only other kernels need them */
    for (int t = 0; t < count; t++) switch (w->bits * 4 + (w->has_table != 0) * 2 + (w->minimum != NO_MINIMUM)) {
        FLOAT_KIND(4, 0, 0) FLOAT_KIND(4, 0, 1) FLOAT_KIND(4, 1, 0) FLOAT_KIND(4, 1, 1)
        FLOAT_KIND(5, 0, 0) FLOAT_KIND(5, 0, 1) FLOAT_KIND(6, 0, 0) FLOAT_KIND(6, 0, 1)
        FLOAT_KIND(8, 0, 0) FLOAT_KIND(8, 0, 1)
    }
}
#undef FLOAT_KIND
