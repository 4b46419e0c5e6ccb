/* Matrix products over consecutive blocks of rows, one weight per block: the experts of a layer. */
#include "common.h"

/* The largest tasks that let a few threads end together: a thread packs what it multiplies anew for each. */
enum { BLOCK_ROWS = 256, GRADIENT_ROWS = 128, GRADIENT_COLUMNS = 512 };

typedef struct {
    int64_t expert, first, count;
} Task;

typedef struct {
    Task *tasks;
    int64_t num_tasks, used_rows;
    int status;
} Plan;

/* Cut each expert's rows into tasks of at most BLOCK_ROWS, the whole blocks before the rests, so that threads end
 * together. */
static Plan plan_rows(const int32_t *counts_E, int64_t E, int64_t R) {
    Plan plan = {scratch(0, (size_t)(R / BLOCK_ROWS + E + 1) * sizeof(Task)), 0, 0, KERNEL_OK};
    if (!plan.tasks) plan.status = KERNEL_NO_MEMORY;
    for (int64_t e = 0; e < E && plan.status == KERNEL_OK; e++) {
        if (counts_E[e] < 0 || plan.used_rows + counts_E[e] > R) plan.status = KERNEL_BAD_INPUT;
        plan.used_rows += counts_E[e];
    }
    for (int rest = 0; rest < 2 && plan.status == KERNEL_OK; rest++) {
        for (int64_t e = 0, row = 0; e < E; row += counts_E[e++]) {
            int64_t whole = counts_E[e] / BLOCK_ROWS * BLOCK_ROWS;
            for (int64_t i = 0; i < whole && !rest; i += BLOCK_ROWS)
                plan.tasks[plan.num_tasks++] = (Task){e, row + i, BLOCK_ROWS};
            if (rest && whole < counts_E[e]) plan.tasks[plan.num_tasks++] = (Task){e, row + whole, counts_E[e] - whole};
        }
    }
    return plan;
}

/* y[rows of e] = x[rows of e] op(w_e), where x has `in` columns and y has `out`; rows beyond the last expert are
 * zero. */
static int rows_times_weight(const float *x, const float *w, const int32_t *counts_E, float *y, int64_t R, int64_t E,
                             int64_t in, int64_t out, char transpose) {
    Plan plan = plan_rows(counts_E, E, R);
    if (plan.status != KERNEL_OK) return plan.status;
    int64_t ldw = transpose == 'T' ? in : out;
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t i = 0; i < plan.num_tasks; i++) {
        Task t = plan.tasks[i];
        dnnl_sgemm('N', transpose, t.count, out, in, 1.0f, x + t.first * in, in, w + t.expert * in * out, ldw, 0.0f,
                   y + t.first * out, out);
    }
    memset(y + plan.used_rows * out, 0, (size_t)((R - plan.used_rows) * out) * sizeof *y);
    return KERNEL_OK;
}

/* x (R, D), w (E, D, F), counts (E) -> y (R, F) */
KERNEL(grouped_matmul) {
    int64_t R = shapes[0][0], D = shapes[0][1], E = shapes[1][0], F = shapes[1][2];
    return rows_times_weight(params[0], params[1], params[2], params[3], R, E, D, F, 'N');
}

/* dy (R, F), w (E, D, F), counts (E) -> dx (R, D) */
KERNEL(grouped_matmul_dx) {
    int64_t R = shapes[0][0], F = shapes[0][1], E = shapes[1][0], D = shapes[1][1];
    return rows_times_weight(params[0], params[1], params[2], params[3], R, E, F, D, 'T');
}

/* x (R, D), dy (R, F), counts (E) -> dw (E, D, F) */
KERNEL(grouped_matmul_dw) {
    const float *x = params[0], *dy = params[1];
    const int32_t *counts_E = params[2];
    float *dw = params[3];
    int64_t D = shapes[0][1], F = shapes[1][1], E = shapes[2][0];
    int64_t down = ceil_div(D, GRADIENT_ROWS), across = ceil_div(F, GRADIENT_COLUMNS);
    int64_t *start = scratch(1, (size_t)(E + 1) * sizeof *start);
    if (!start) return KERNEL_NO_MEMORY;
    Plan plan = plan_rows(counts_E, E, shapes[0][0]);
    if (plan.status != KERNEL_OK) return plan.status;
    start[0] = 0;
    for (int64_t e = 0; e < E; e++) start[e + 1] = start[e] + counts_E[e];
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t i = 0; i < E * down * across; i++) {
        int64_t e = i / (down * across), row = i / across % down * GRADIENT_ROWS, column = i % across * GRADIENT_COLUMNS;
        int64_t rows = min_i64(GRADIENT_ROWS, D - row), columns = min_i64(GRADIENT_COLUMNS, F - column);
        int64_t first = start[e], count = start[e + 1] - first;
        float *out = dw + (e * D + row) * F + column;
        if (count == 0) {
            for (int64_t r = 0; r < rows; r++) memset(out + r * F, 0, (size_t)columns * sizeof *out);
        } else {
            dnnl_sgemm('T', 'N', rows, columns, count, 1.0f, x + first * D + row, D, dy + first * F + column, F, 0.0f,
                       out, F);
        }
    }
    return KERNEL_OK;
}
