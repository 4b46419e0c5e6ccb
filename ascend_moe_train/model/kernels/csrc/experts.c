/* The experts of a layer: products over consecutive blocks of rows, one weight per block, and the whole SwiGLU
 * feed-forward of each expert, in which a block's rows stay in the cache from the first product to the last. */
#include "common.h"
#include "swiglu.h"

enum { BLOCK_ROWS = 128, BLOCK_COLUMNS = 128 };

typedef struct {
    int64_t expert, first, count;
} Task;

typedef struct {
    Task *tasks;
    int64_t num_tasks, used_rows;
    int status;
} Plan;

/* Cut each expert's rows into tasks of at most BLOCK_ROWS, the whole blocks before the rests, so that threads end together. */
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

/* y[rows of e] = x[rows of e] op(w_e), where x has `in` columns and y has `out`; rows beyond the last expert are zero. */
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

typedef struct {
    const float *x, *dy;
    float *dw;
    int64_t in, out;
} WeightGradient;

/* Rows [first, first + BLOCK_COLUMNS) of an expert's weight gradient, from its rows [start, end) of x and dy. */
static void weight_gradient_block(WeightGradient g, int64_t expert, int64_t start, int64_t end, int64_t first) {
    int64_t height = min_i64(BLOCK_COLUMNS, g.in - first);
    float *out = g.dw + (expert * g.in + first) * g.out;
    if (start == end) {
        memset(out, 0, (size_t)(height * g.out) * sizeof *out);
    } else {
        dnnl_sgemm('T', 'N', height, g.out, end - start, 1.0f, g.x + start * g.in + first, g.in, g.dy + start * g.out,
                   g.out, 0.0f, out, g.out);
    }
}

/* dw_e = x[rows of e]^T dy[rows of e] for one or two weights of the same experts; the counts are known to be good. */
static int weight_gradients(const WeightGradient *gradients, int num_gradients, const int32_t *counts_E, int64_t E) {
    int64_t *start = scratch(0, (size_t)(E + 1) * sizeof *start);
    if (!start) return KERNEL_NO_MEMORY;
    start[0] = 0;
    for (int64_t e = 0; e < E; e++) start[e + 1] = start[e] + counts_E[e];
    int64_t first_blocks = ceil_div(gradients[0].in, BLOCK_COLUMNS);
    int64_t blocks = first_blocks + (num_gradients > 1 ? ceil_div(gradients[1].in, BLOCK_COLUMNS) : 0);
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t i = 0; i < E * blocks; i++) {
        int64_t e = i % E, block = i / E;
        if (block < first_blocks) {
            weight_gradient_block(gradients[0], e, start[e], start[e + 1], block * BLOCK_COLUMNS);
        } else {
            weight_gradient_block(gradients[1], e, start[e], start[e + 1], (block - first_blocks) * BLOCK_COLUMNS);
        }
    }
    return KERNEL_OK;
}

/* x (R, D), dy (R, F), counts (E) -> dw (E, D, F) */
KERNEL(grouped_matmul_dw) {
    WeightGradient gradient = {params[0], params[1], params[3], shapes[0][1], shapes[1][1]};
    Plan plan = plan_rows(params[2], shapes[2][0], shapes[0][0]);
    if (plan.status != KERNEL_OK) return plan.status;
    return weight_gradients(&gradient, 1, params[2], shapes[2][0]);
}

/* x (R, D), w13 (E, D, 2F), w2 (E, F, D), counts (E) -> y (R, D), h = x w13 (R, 2F) */
KERNEL(expert_ffn) {
    const float *x = params[0], *w13 = params[1], *w2 = params[2];
    float *y = params[4], *h = params[5];
    int64_t R = shapes[0][0], D = shapes[0][1], E = shapes[2][0], F = shapes[2][1];
    Plan plan = plan_rows(params[3], E, R);
    if (plan.status != KERNEL_OK) return plan.status;
    int failed = 0;
#pragma omp parallel for schedule(dynamic, 1) reduction(| : failed)
    for (int64_t i = 0; i < plan.num_tasks; i++) {
        Task t = plan.tasks[i];
        float *act = scratch(1, (size_t)(BLOCK_ROWS * F) * sizeof *act), *h_t = h + t.first * 2 * F;
        failed |= !act;
        if (!act) continue;
        dnnl_sgemm('N', 'N', t.count, 2 * F, D, 1.0f, x + t.first * D, D, w13 + t.expert * D * 2 * F, 2 * F, 0.0f, h_t,
                   2 * F);
        swiglu_rows(h_t, act, t.count, F);
        dnnl_sgemm('N', 'N', t.count, D, F, 1.0f, act, F, w2 + t.expert * F * D, D, 0.0f, y + t.first * D, D);
    }
    memset(y + plan.used_rows * D, 0, (size_t)((R - plan.used_rows) * D) * sizeof *y);
    memset(h + plan.used_rows * 2 * F, 0, (size_t)((R - plan.used_rows) * 2 * F) * sizeof *h);
    return failed ? KERNEL_NO_MEMORY : KERNEL_OK;
}

/* dy (R, D), x (R, D), w13 (E, D, 2F), w2 (E, F, D), counts (E), h (R, 2F)
 * -> dx (R, D), dw13, dw2, and room for dh (R, 2F) and the activations again (R, F) */
KERNEL(expert_ffn_grad) {
    const float *dy = params[0], *x = params[1], *w13 = params[2], *w2 = params[3], *h = params[5];
    float *dx = params[6], *dh = params[9], *act = params[10];
    int64_t R = shapes[0][0], D = shapes[0][1], E = shapes[3][0], F = shapes[3][1];
    Plan plan = plan_rows(params[4], E, R);
    if (plan.status != KERNEL_OK) return plan.status;
    int failed = 0;
#pragma omp parallel for schedule(dynamic, 1) reduction(| : failed)
    for (int64_t i = 0; i < plan.num_tasks; i++) {
        Task t = plan.tasks[i];
        float *dact = scratch(1, (size_t)(BLOCK_ROWS * F) * sizeof *dact), *dh_t = dh + t.first * 2 * F;
        failed |= !dact;
        if (!dact) continue;
        dnnl_sgemm('N', 'T', t.count, F, D, 1.0f, dy + t.first * D, D, w2 + t.expert * F * D, D, 0.0f, dact, F);
        swiglu_both_rows(dact, h + t.first * 2 * F, dh_t, act + t.first * F, t.count, F);
        dnnl_sgemm('N', 'T', t.count, D, 2 * F, 1.0f, dh_t, 2 * F, w13 + t.expert * D * 2 * F, 2 * F, 0.0f,
                   dx + t.first * D, D);
    }
    if (failed) return KERNEL_NO_MEMORY;
    memset(dx + plan.used_rows * D, 0, (size_t)((R - plan.used_rows) * D) * sizeof *dx);
    WeightGradient gradients[] = {{x, dh, params[7], D, 2 * F}, {act, dy, params[8], F, D}};
    return weight_gradients(gradients, 2, params[4], E);
}
