/* SwiGLU (Shazeer, 2020), shared by the operator of its own and the experts'. A row of h is [gate (F), up (F)]. */
#ifndef ASCEND_MOE_TRAIN_SWIGLU_H
#define ASCEND_MOE_TRAIN_SWIGLU_H

#include "common.h"

typedef struct {
    float result, dgate, dup;
} Swiglu;

/* silu(gate) * up, and its gradients for `grad`. */
static inline Swiglu swiglu_at(float gate, float up, float grad) {
    float sigmoid = 1.0f / (1.0f + fast_exp(-gate)), silu = gate * sigmoid;
    return (Swiglu){silu * up, grad * up * (sigmoid + silu * (1.0f - sigmoid)), grad * silu};
}

static inline void swiglu_rows(const float *h, float *y, int64_t rows, int64_t F) {
    for (int64_t r = 0; r < rows; r++) {
        const float *restrict gate = h + r * 2 * F, *restrict up = gate + F;
        float *restrict out = y + r * F;
#pragma omp simd
        for (int64_t f = 0; f < F; f++) out[f] = swiglu_at(gate[f], up[f], 0.0f).result;
    }
}

static inline void swiglu_grad_rows(const float *dy, const float *h, float *dh, int64_t rows, int64_t F) {
    for (int64_t r = 0; r < rows; r++) {
        const float *restrict gate = h + r * 2 * F, *restrict up = gate + F, *restrict grad = dy + r * F;
        float *restrict dgate = dh + r * 2 * F, *restrict dup = dgate + F;
#pragma omp simd
        for (int64_t f = 0; f < F; f++) {
            Swiglu at = swiglu_at(gate[f], up[f], grad[f]);
            dgate[f] = at.dgate;
            dup[f] = at.dup;
        }
    }
}

/* The gradient, and the result again. */
static inline void swiglu_both_rows(const float *dy, const float *h, float *dh, float *y, int64_t rows, int64_t F) {
    for (int64_t r = 0; r < rows; r++) {
        const float *restrict gate = h + r * 2 * F, *restrict up = gate + F, *restrict grad = dy + r * F;
        float *restrict dgate = dh + r * 2 * F, *restrict dup = dgate + F, *restrict out = y + r * F;
#pragma omp simd
        for (int64_t f = 0; f < F; f++) {
            Swiglu at = swiglu_at(gate[f], up[f], grad[f]);
            dgate[f] = at.dgate;
            dup[f] = at.dup;
            out[f] = at.result;
        }
    }
}

#endif
