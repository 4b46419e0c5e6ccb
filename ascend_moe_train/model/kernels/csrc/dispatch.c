/* Sorting tokens by expert, and the copies into and out of the expert buffer. */
#include "common.h"

#include <stdlib.h>

typedef struct {
    float gate;
    int32_t assignment;
} Candidate;

/* Larger gates first, the earlier assignment first among equals, NaN last. */
static int by_gate(const void *a, const void *b) {
    const Candidate *p = a, *q = b;
    int p_nan = p->gate != p->gate, q_nan = q->gate != q->gate;
    if (p_nan != q_nan) return p_nan - q_nan;
    if (p->gate > q->gate) return -1;
    if (p->gate < q->gate) return 1;
    return (p->assignment > q->assignment) - (p->assignment < q->assignment);
}

/* Mark with 1 the `capacity` assignments of each expert that have the largest gates. */
static int keep_largest(const int32_t *expert_N, const float *gate_N, const int64_t *start, int64_t N, int64_t E,
                        int64_t capacity, int32_t *kept_N) {
    Candidate *candidates = scratch(1, (size_t)N * sizeof *candidates);
    int64_t *next = scratch(2, (size_t)E * sizeof *next);
    if (!candidates || !next) return KERNEL_NO_MEMORY;
    memcpy(next, start, (size_t)E * sizeof *next);
    for (int64_t n = 0; n < N; n++) candidates[next[expert_N[n]]++] = (Candidate){gate_N[n], (int32_t)n};
    memset(kept_N, 0, (size_t)N * sizeof *kept_N);
    for (int64_t e = 0; e < E; e++) {
        Candidate *of_expert = candidates + start[e];
        int64_t count = start[e + 1] - start[e];
        if (count > capacity) qsort(of_expert, (size_t)count, sizeof *of_expert, by_gate);
        for (int64_t i = 0; i < min_i64(count, capacity); i++) kept_N[of_expert[i].assignment] = 1;
    }
    return KERNEL_OK;
}

/* Counts per expert, and with them where each expert begins. */
static int count(const int32_t *expert_N, int64_t N, int64_t E, int64_t *start) {
    memset(start, 0, (size_t)(E + 1) * sizeof *start);
    for (int64_t n = 0; n < N; n++) {
        if (expert_N[n] < 0 || expert_N[n] >= E) return KERNEL_BAD_INPUT;
        start[expert_N[n] + 1]++;
    }
    for (int64_t e = 0; e < E; e++) start[e + 1] += start[e];
    return KERNEL_OK;
}

/* expert (T, K) int, gate (T, K), options (2) int: capacity, whether by probability; (R) and (E) int for their shape
 * -> row (T, K) int, source (R) int, counts (E) int */
KERNEL(sort_by_expert) {
    const int32_t *expert_N = params[0], *options = params[2];
    int32_t *row_N = params[5], *source_R = params[6], *counts_E = params[7];
    int64_t N = shapes[0][0] * shapes[0][1], R = shapes[3][0], E = shapes[4][0], capacity = options[0];
    int64_t *start = scratch(0, (size_t)(E + 1) * sizeof *start), *next = scratch(2, (size_t)E * sizeof *next);
    if (!start || !next) return KERNEL_NO_MEMORY;
    int status = count(expert_N, N, E, start);
    int choose = options[1];
    if (status == KERNEL_OK && choose) status = keep_largest(expert_N, params[1], start, N, E, capacity, row_N);
    if (status != KERNEL_OK) return status;
    int64_t first = 0;
    for (int64_t e = 0; e < E; e++) {
        counts_E[e] = (int32_t)min_i64(start[e + 1] - start[e], capacity);
        next[e] = first;
        first += counts_E[e];
    }
    if (first > R) return KERNEL_BAD_INPUT;
    for (int64_t r = first; r < R; r++) source_R[r] = -1;
    /* rows left for each expert, in the place of where it begins */
    for (int64_t e = 0; e < E; e++) start[e] = counts_E[e];
    for (int64_t n = 0; n < N; n++) {
        int32_t e = expert_N[n];
        int kept = start[e] > 0 && (!choose || row_N[n]);
        row_N[n] = kept ? (int32_t)next[e] : -1;
        if (!kept) continue;
        source_R[next[e]++] = (int32_t)n;
        start[e]--;
    }
    return KERNEL_OK;
}

/* x (T, D), row (T, K) int, source (R) int -> (R, D) */
KERNEL(permute) {
    const float *x = params[0];
    const int32_t *source_R = params[2];
    float *out = params[3];
    int64_t D = shapes[0][1], K = shapes[1][1], R = shapes[2][0];
    size_t row_bytes = (size_t)D * sizeof *x;
#pragma omp parallel for schedule(dynamic, ROWS)
    for (int64_t r = 0; r < R; r++) {
        if (source_R[r] < 0) {
            memset(out + r * D, 0, row_bytes);
        } else {
            memcpy(out + r * D, x + source_R[r] / K * D, row_bytes);
        }
    }
    return KERNEL_OK;
}

/* dy (R, D), row (T, K) int -> dx (T, D) */
KERNEL(permute_dx) {
    const float *dy = params[0];
    const int32_t *row_N = params[1];
    float *dx = params[2];
    int64_t D = shapes[0][1], T = shapes[1][0], K = shapes[1][1];
#pragma omp parallel for schedule(dynamic, ROWS)
    for (int64_t t = 0; t < T; t++) {
        float *out = dx + t * D;
        int empty = 1;
        for (int64_t k = 0; k < K; k++) {
            if (row_N[t * K + k] < 0) continue;
            const float *in = dy + (int64_t)row_N[t * K + k] * D;
            if (empty) {
                memcpy(out, in, (size_t)D * sizeof *out);
            } else {
                for (int64_t d = 0; d < D; d++) out[d] += in[d];
            }
            empty = 0;
        }
        if (empty) memset(out, 0, (size_t)D * sizeof *out);
    }
    return KERNEL_OK;
}

/* y (R, D), gate (T, K), row (T, K) int, source (R) int (not read) -> (T, D) */
KERNEL(combine) {
    const float *y = params[0], *gate_N = params[1];
    const int32_t *row_N = params[2];
    float *result = params[4];
    int64_t D = shapes[0][1], T = shapes[1][0], K = shapes[1][1];
#pragma omp parallel for schedule(dynamic, ROWS)
    for (int64_t t = 0; t < T; t++) {
        float *out = result + t * D;
        int empty = 1;
        for (int64_t n = t * K; n < (t + 1) * K; n++) {
            if (row_N[n] < 0) continue;
            const float *in = y + (int64_t)row_N[n] * D;
            float gate = gate_N[n];
            if (empty) {
                for (int64_t d = 0; d < D; d++) out[d] = gate * in[d];
            } else {
                for (int64_t d = 0; d < D; d++) out[d] += gate * in[d];
            }
            empty = 0;
        }
        if (empty) memset(out, 0, (size_t)D * sizeof *out);
    }
    return KERNEL_OK;
}

/* dout (T, D), y (R, D), gate (T, K), row (T, K) int, source (R) int -> dy (R, D), dgate (T, K) */
KERNEL(combine_grad) {
    const float *dout = params[0], *y = params[1], *gate_N = params[2];
    const int32_t *row_N = params[3], *source_R = params[4];
    float *dy = params[5], *dgate_N = params[6];
    int64_t D = shapes[0][1], R = shapes[1][0], T = shapes[2][0], K = shapes[2][1];
    for (int64_t n = 0; n < T * K; n++) {
        if (row_N[n] < 0) dgate_N[n] = 0.0f;
    }
#pragma omp parallel for schedule(dynamic, ROWS)
    for (int64_t r = 0; r < R; r++) {
        float *restrict out = dy + r * D;
        int32_t n = source_R[r];
        if (n < 0) {
            memset(out, 0, (size_t)D * sizeof *out);
            continue;
        }
        const float *restrict in = dout + n / K * D, *restrict value = y + r * D;
        float gate = gate_N[n], dot = 0.0f;
#pragma omp simd reduction(+ : dot)
        for (int64_t d = 0; d < D; d++) {
            out[d] = gate * in[d];
            dot += in[d] * value[d];
        }
        dgate_N[n] = dot;
    }
    return KERNEL_OK;
}

/* token (T) int, w (V, D) -> (T, D) */
KERNEL(embed) {
    const int32_t *token_T = params[0];
    const float *w = params[1];
    float *out = params[2];
    int64_t T = shapes[0][0], V = shapes[1][0], D = shapes[1][1];
    for (int64_t t = 0; t < T; t++) {
        if (token_T[t] < 0 || token_T[t] >= V) return KERNEL_BAD_INPUT;
        memcpy(out + t * D, w + token_T[t] * D, (size_t)D * sizeof *out);
    }
    return KERNEL_OK;
}

/* dy (T, D), token (T) int, w (V, D) for its shape -> dw (V, D). A task owns a range of the
 * vocabulary and adds its tokens in their order. */
KERNEL(embed_dw) {
    const float *dy = params[0];
    const int32_t *token_T = params[1];
    float *dw = params[3];
    int64_t T = shapes[1][0], V = shapes[2][0], D = shapes[2][1];
    enum { RANGES = 64 };
    int bad = 0;
#pragma omp parallel for schedule(dynamic, 1) reduction(| : bad)
    for (int64_t i = 0; i < RANGES; i++) {
        int64_t first = V * i / RANGES, end = V * (i + 1) / RANGES;
        memset(dw + first * D, 0, (size_t)((end - first) * D) * sizeof *dw);
        for (int64_t t = 0; t < T; t++) {
            int32_t token = token_T[t];
            bad |= token < 0 || token >= V;
            if (token < first || token >= end) continue;
            for (int64_t d = 0; d < D; d++) dw[token * D + d] += dy[t * D + d];
        }
    }
    return bad ? KERNEL_BAD_INPUT : KERNEL_OK;
}
