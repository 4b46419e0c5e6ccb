/* Gradient norm and AdamW. */
#include "common.h"

enum { CHUNK = 1 << 14 };

/* x (...) -> sum of squares (1), in fp64 until the end */
KERNEL(square_sum) {
    const float *x = params[0];
    int64_t n = elements(shapes[0], ndims[0]), chunks = ceil_div(n, CHUNK);
    double *partial = scratch(0, (size_t)chunks * sizeof *partial), total = 0.0;
    if (!partial) return KERNEL_NO_MEMORY;
#pragma omp parallel for schedule(dynamic, 4) if (chunks > 1)
    for (int64_t c = 0; c < chunks; c++) {
        double sum = 0.0;
        int64_t end = min_i64(n, (c + 1) * CHUNK);
#pragma omp simd reduction(+ : sum)
        for (int64_t i = c * CHUNK; i < end; i++) sum += (double)x[i] * (double)x[i];
        partial[c] = sum;
    }
    for (int64_t c = 0; c < chunks; c++) total += partial[c];
    *(float *)params[1] = (float)total;
    return KERNEL_OK;
}

/* parameter, first moment, second moment (updated in place), gradient, scalars (8), decays (1) int -> token (1)
 * Loshchilov & Hutter, 2019. A scale that is not above 0 marks a skipped step, which changes nothing. */
KERNEL(adamw) {
    float *restrict p = params[0], *restrict first = params[1], *restrict second = params[2];
    const float *restrict grad = params[3], *s = params[4];
    float lr = s[0], beta1 = s[1], beta2 = s[2], one_minus_beta1 = s[3], one_minus_beta2 = s[4], eps = s[5];
    float scale = s[7];
    float decay = *(const int32_t *)params[5] ? s[6] : 0.0f;
    int64_t n = elements(shapes[0], ndims[0]), chunks = ceil_div(n, CHUNK);
    *(float *)params[6] = 0.0f;
    if (!(scale > 0.0f)) return KERNEL_OK;
#pragma omp parallel for schedule(dynamic, 4) if (chunks > 1)
    for (int64_t c = 0; c < chunks; c++) {
        int64_t end = min_i64(n, (c + 1) * CHUNK);
#pragma omp simd
        for (int64_t i = c * CHUNK; i < end; i++) {
            float g = grad[i] * scale;
            float m = beta1 * first[i] + one_minus_beta1 * g;
            float v = beta2 * second[i] + one_minus_beta2 * g * g;
            first[i] = m;
            second[i] = v;
            p[i] -= lr * m / (sqrtf(v) + eps) + decay * p[i];
        }
    }
    return KERNEL_OK;
}
