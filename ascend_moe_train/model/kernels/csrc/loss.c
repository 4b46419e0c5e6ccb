/* Softmax cross-entropy over the vocabulary. */
#include "common.h"

/* logits (T, V), target (T) int, -1 for places that do not count -> loss (T), logsumexp (T) */
KERNEL(cross_entropy) {
    const float *logits = params[0];
    const int32_t *target_T = params[1];
    float *loss_T = params[2], *log_sum_T = params[3];
    int64_t T = shapes[0][0], V = shapes[0][1];
    int bad = 0;
#pragma omp parallel for schedule(dynamic, ROWS) reduction(| : bad)
    for (int64_t t = 0; t < T; t++) {
        const float *restrict x = logits + t * V;
        float top = x[0], sum = 0.0f;
#pragma omp simd reduction(max : top)
        for (int64_t v = 0; v < V; v++) top = x[v] > top ? x[v] : top;
#pragma omp simd reduction(+ : sum)
        for (int64_t v = 0; v < V; v++) sum += fast_exp(x[v] - top);
        log_sum_T[t] = logf(sum) + top;
        int32_t target = target_T[t];
        bad |= target >= V;
        int32_t index = target < 0 || target >= V ? 0 : target;
        /* as in the portable kernel, a non-finite place is seen even where it does not count */
        loss_T[t] = (log_sum_T[t] - x[index]) * (target >= 0 ? 1.0f : 0.0f);
    }
    return bad ? KERNEL_BAD_INPUT : KERNEL_OK;
}

/* dloss (T), logits (T, V), target (T) int, logsumexp (T) -> dlogits (T, V) */
KERNEL(cross_entropy_grad) {
    const float *dloss_T = params[0], *logits = params[1], *log_sum_T = params[3];
    const int32_t *target_T = params[2];
    float *dlogits = params[4];
    int64_t T = shapes[1][0], V = shapes[1][1];
#pragma omp parallel for schedule(dynamic, ROWS)
    for (int64_t t = 0; t < T; t++) {
        const float *restrict x = logits + t * V;
        float *restrict dx = dlogits + t * V;
        float log_sum = log_sum_T[t], grad = target_T[t] < 0 ? 0.0f : dloss_T[t];
        for (int64_t v = 0; v < V; v++) dx[v] = fast_exp(x[v] - log_sum) * grad;
        if (target_T[t] >= 0) dx[target_T[t]] -= grad;
    }
    return KERNEL_OK;
}
