/* RMSNorm, rotary embedding and SwiGLU. */
#include "common.h"

/* x (..., D), w (D), eps (1) -> y (..., D), inverse root mean square (rows) */
KERNEL(rms_norm) {
    const float *x = params[0], *w = params[1];
    float eps = *(const float *)params[2];
    float *y = params[3], *inverse = params[4];
    int64_t rows = leading(shapes[0], ndims[0]), D = shapes[1][0];
#pragma omp parallel for schedule(dynamic, ROWS)
    for (int64_t r = 0; r < rows; r++) {
        const float *restrict in = x + r * D;
        float *restrict out = y + r * D;
        float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (int64_t d = 0; d < D; d++) sum += in[d] * in[d];
        float scale = 1.0f / sqrtf(sum / (float)D + eps);
        for (int64_t d = 0; d < D; d++) out[d] = in[d] * scale * w[d];
        inverse[r] = scale;
    }
    return KERNEL_OK;
}

enum { NORM_PARTS = 32 };

/* dy (..., D), x (..., D), w (D), inverse (rows) -> dx (..., D), dw (D) */
KERNEL(rms_norm_grad) {
    const float *dy = params[0], *x = params[1], *w = params[2], *inverse = params[3];
    float *dx = params[4], *dw = params[5];
    int64_t rows = leading(shapes[1], ndims[1]), D = shapes[2][0];
    float *partial = scratch(0, (size_t)(NORM_PARTS * D) * sizeof *partial);
    if (!partial) return KERNEL_NO_MEMORY;
    memset(partial, 0, (size_t)(NORM_PARTS * D) * sizeof *partial);
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t part = 0; part < NORM_PARTS; part++) {
        float *restrict sum_D = partial + part * D;
        for (int64_t r = rows * part / NORM_PARTS; r < rows * (part + 1) / NORM_PARTS; r++) {
            const float *restrict in = x + r * D, *restrict grad = dy + r * D;
            float *restrict out = dx + r * D;
            float scale = inverse[r], dot = 0.0f;
#pragma omp simd reduction(+ : dot)
            for (int64_t d = 0; d < D; d++) {
                dot += grad[d] * w[d] * in[d];
                sum_D[d] += grad[d] * in[d] * scale;
            }
            float back = dot * scale * scale / (float)D;
            for (int64_t d = 0; d < D; d++) out[d] = scale * (grad[d] * w[d] - in[d] * back);
        }
    }
    memset(dw, 0, (size_t)D * sizeof *dw);
    for (int64_t part = 0; part < NORM_PARTS; part++) {
        for (int64_t d = 0; d < D; d++) dw[d] += partial[part * D + d];
    }
    return KERNEL_OK;
}

static void rotate(const float *x, const float *cos_, const float *sin_, float *y, int64_t places, int64_t H, int64_t Z,
                   float direction) {
    int64_t half = Z / 2;
#pragma omp parallel for schedule(dynamic, ROWS)
    for (int64_t place = 0; place < places; place++) {
        const float *restrict c = cos_ + place * half, *restrict s = sin_ + place * half;
        for (int64_t i = place * H; i < (place + 1) * H; i++) {
            const float *restrict a = x + i * Z, *restrict b = a + half;
            float *restrict out_a = y + i * Z, *restrict out_b = out_a + half;
#pragma omp simd
            for (int64_t z = 0; z < half; z++) {
                float sine = direction * s[z];
                out_a[z] = a[z] * c[z] - b[z] * sine;
                out_b[z] = b[z] * c[z] + a[z] * sine;
            }
        }
    }
}

/* x (B, S, H, Z), cos (B, S, Z/2), sin (B, S, Z/2) -> (B, S, H, Z) */
KERNEL(rope) {
    rotate(params[0], params[1], params[2], params[3], shapes[0][0] * shapes[0][1], shapes[0][2], shapes[0][3], 1.0f);
    return KERNEL_OK;
}

/* The transpose of a rotation turns the other way. */
KERNEL(rope_grad) {
    rotate(params[0], params[1], params[2], params[3], shapes[0][0] * shapes[0][1], shapes[0][2], shapes[0][3], -1.0f);
    return KERNEL_OK;
}

/* h (R, 2F) -> silu(left half) * right half (R, F) */
KERNEL(swiglu) {
    const float *h = params[0];
    float *y = params[1];
    int64_t R = leading(shapes[0], ndims[0]), F = shapes[0][ndims[0] - 1] / 2;
#pragma omp parallel for schedule(dynamic, ROWS)
    for (int64_t r = 0; r < R; r++) {
        const float *restrict gate = h + r * 2 * F, *restrict up = gate + F;
        float *restrict out = y + r * F;
#pragma omp simd
        for (int64_t f = 0; f < F; f++) out[f] = gate[f] / (1.0f + fast_exp(-gate[f])) * up[f];
    }
    return KERNEL_OK;
}

/* dy (R, F), h (R, 2F) -> dh (R, 2F) */
KERNEL(swiglu_grad) {
    const float *dy = params[0], *h = params[1];
    float *dh = params[2];
    int64_t R = leading(shapes[1], ndims[1]), F = shapes[1][ndims[1] - 1] / 2;
#pragma omp parallel for schedule(dynamic, ROWS)
    for (int64_t r = 0; r < R; r++) {
        const float *restrict gate = h + r * 2 * F, *restrict up = gate + F, *restrict grad = dy + r * F;
        float *restrict dgate = dh + r * 2 * F, *restrict dup = dgate + F;
#pragma omp simd
        for (int64_t f = 0; f < F; f++) {
            float sigmoid = 1.0f / (1.0f + fast_exp(-gate[f])), silu = gate[f] * sigmoid;
            dgate[f] = grad[f] * up[f] * (sigmoid + silu * (1.0f - sigmoid));
            dup[f] = grad[f] * silu;
        }
    }
    return KERNEL_OK;
}
