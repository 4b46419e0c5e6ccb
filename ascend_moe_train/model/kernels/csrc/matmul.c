/* Products with one weight. A task owns a tile of the result. */
#include "common.h"

/* The largest tiles that give each of a few threads several: a thread packs what it multiplies anew for each. A weight's
 * gradient has a long sum and few rows. */
enum { TILE_ROWS = 256, TILE_COLUMNS = 1024, GRADIENT_ROWS = 64, GRADIENT_COLUMNS = 512 };

/* One of the factors as it lies in memory: whether it is used transposed, and the elements of its rows. */
typedef struct {
    const float *at;
    char transpose;
    int64_t ld;
} Factor;

/* c (M, N) = op(a) op(b), with a sum over K. */
static void product(Factor a, Factor b, int64_t M, int64_t N, int64_t K, float *c, int64_t rows, int64_t columns) {
    int64_t across = ceil_div(N, columns), tiles = ceil_div(M, rows) * across;
#pragma omp parallel for schedule(dynamic, 1) if (tiles > 1)
    for (int64_t i = 0; i < tiles; i++) {
        int64_t row = i / across * rows, column = i % across * columns;
        dnnl_sgemm(a.transpose, b.transpose, min_i64(rows, M - row), min_i64(columns, N - column), K, 1.0f,
                   a.at + (a.transpose == 'T' ? row : row * a.ld), a.ld,
                   b.at + (b.transpose == 'T' ? column * b.ld : column), b.ld, 0.0f, c + row * N + column, N);
    }
}

/* x (T, D), w (F, D) -> y (T, F) */
KERNEL(matmul) {
    int64_t T = shapes[0][0], D = shapes[0][1], F = shapes[1][0];
    product((Factor){params[0], 'N', D}, (Factor){params[1], 'T', D}, T, F, D, params[2], TILE_ROWS, TILE_COLUMNS);
    return KERNEL_OK;
}

/* dy (T, F), w (F, D) -> dx (T, D) */
KERNEL(matmul_dx) {
    int64_t T = shapes[0][0], F = shapes[0][1], D = shapes[1][1];
    product((Factor){params[0], 'N', F}, (Factor){params[1], 'N', D}, T, D, F, params[2], TILE_ROWS, TILE_COLUMNS);
    return KERNEL_OK;
}

/* dy (T, F), x (T, D) -> dw (F, D) */
KERNEL(matmul_dw) {
    int64_t T = shapes[0][0], F = shapes[0][1], D = shapes[1][1];
    product((Factor){params[0], 'T', F}, (Factor){params[1], 'N', D}, F, D, T, params[2], GRADIENT_ROWS,
            GRADIENT_COLUMNS);
    return KERNEL_OK;
}
