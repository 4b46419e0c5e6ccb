/* Causal attention within segments. A task takes one head and one block of queries, so that memory is that of BLOCK
 * rows of scores; keys that no query of the block may see are never touched. */
#include "common.h"

enum { BLOCK = 64 };

typedef struct {
    int64_t B, S, H, G, Z;
    float scale;
} Shape;

static Shape shape_of(const int64_t *q_BSHZ, const int64_t *k_BSGZ) {
    return (Shape){q_BSHZ[0], q_BSHZ[1], q_BSHZ[2], k_BSGZ[2], q_BSHZ[3], 1.0f / sqrtf((float)q_BSHZ[3])};
}

/* The first place at or before `place` that is in its segment. */
static int64_t segment_start(const int32_t *segment_S, int64_t place) {
    int64_t start = place;
    while (start > 0 && segment_S[start - 1] == segment_S[place]) start--;
    return start;
}

/* Scores of one query over keys [low, high] become probabilities, the rest of the `width` columns 0.
 * Returns the logsumexp of the scores. */
static float softmax_row(float *restrict row, int64_t low, int64_t high, int64_t width) {
    float top = row[low], sum = 0.0f;
#pragma omp simd reduction(max : top)
    for (int64_t k = low; k <= high; k++) top = row[k] > top ? row[k] : top;
#pragma omp simd reduction(+ : sum)
    for (int64_t k = low; k <= high; k++) {
        row[k] = fast_exp(row[k] - top);
        sum += row[k];
    }
    float inverse = 1.0f / sum;
    for (int64_t k = low; k <= high; k++) row[k] *= inverse;
    for (int64_t k = 0; k < low; k++) row[k] = 0.0f;
    for (int64_t k = high + 1; k < width; k++) row[k] = 0.0f;
    return top + logf(sum);
}

static int forward_block(Shape s, const float *q, const float *k, const float *v, const int32_t *segment_S, float *out,
                         float *log_sum_S, int64_t from) {
    int64_t rows = min_i64(BLOCK, s.S - from), first_key = segment_start(segment_S, from);
    int64_t keys = from + rows - first_key, ldq = s.H * s.Z, ldk = s.G * s.Z;
    float *p = scratch(0, (size_t)(BLOCK * s.S) * sizeof *p);
    if (!p) return KERNEL_NO_MEMORY;
    dnnl_sgemm('N', 'T', rows, keys, s.Z, s.scale, q + from * ldq, ldq, k + first_key * ldk, ldk, 0.0f, p, keys);
    int64_t low = 0;
    for (int64_t i = 0; i < rows; i++) {
        int64_t place = from + i;
        if (i > 0 && segment_S[place] != segment_S[place - 1]) low = place - first_key;
        log_sum_S[place] = softmax_row(p + i * keys, low, place - first_key, keys);
    }
    dnnl_sgemm('N', 'N', rows, s.Z, keys, 1.0f, p, keys, v + first_key * ldk, ldk, 0.0f, out + from * ldq, ldq);
    return KERNEL_OK;
}

/* q (B, S, H, Z), k (B, S, G, Z), v (B, S, G, Z), segment (B, S) int -> out (B, S, H, Z), logsumexp (B, H, S) */
KERNEL(attention) {
    const float *q = params[0], *k = params[1], *v = params[2];
    const int32_t *segment_BS = params[3];
    float *out = params[4], *log_sum = params[5];
    Shape s = shape_of(shapes[0], shapes[1]);
    int64_t blocks = ceil_div(s.S, BLOCK), heads = s.B * s.H;
    int failed = 0;
    /* the last blocks see the most keys: the longest tasks go first */
#pragma omp parallel for schedule(dynamic, 1) reduction(| : failed)
    for (int64_t i = 0; i < blocks * heads; i++) {
        int64_t from = (blocks - 1 - i / heads) * BLOCK, b = i % heads / s.H, h = i % s.H;
        int64_t query = (b * s.S * s.H + h) * s.Z, key = (b * s.S * s.G + h / (s.H / s.G)) * s.Z;
        failed |= forward_block(s, q + query, k + key, v + key, segment_BS + b * s.S, out + query,
                                log_sum + (b * s.H + h) * s.S, from);
    }
    return failed ? KERNEL_NO_MEMORY : KERNEL_OK;
}

typedef struct {
    const float *dout, *q, *out, *log_sum_S;
    float *dq;
} Query;

/* p from the scores in place, then ds from p and dp in dp's place. */
static void softmax_grad_row(float *restrict p, float *restrict dp, float log_sum, float dot, float scale, int64_t low,
                             int64_t high, int64_t width) {
    for (int64_t k = low; k <= high; k++) {
        p[k] = fast_exp(p[k] - log_sum);
        dp[k] = p[k] * (dp[k] - dot) * scale;
    }
    for (int64_t k = 0; k < low; k++) p[k] = dp[k] = 0.0f;
    for (int64_t k = high + 1; k < width; k++) p[k] = dp[k] = 0.0f;
}

static int backward_block(Shape s, Query at, const float *k, const float *v, const int32_t *segment_S, float *dk,
                          float *dv, int64_t from) {
    int64_t rows = min_i64(BLOCK, s.S - from), first_key = segment_start(segment_S, from);
    int64_t keys = from + rows - first_key, ldq = s.H * s.Z, ldk = s.G * s.Z;
    float *p = scratch(0, (size_t)(BLOCK * s.S) * sizeof *p), *dp = scratch(1, (size_t)(BLOCK * s.S) * sizeof *dp);
    if (!p || !dp) return KERNEL_NO_MEMORY;
    const float *q = at.q + from * ldq, *dout = at.dout + from * ldq, *out = at.out + from * ldq;
    const float *keys_at = k + first_key * ldk, *values_at = v + first_key * ldk;
    dnnl_sgemm('N', 'T', rows, keys, s.Z, s.scale, q, ldq, keys_at, ldk, 0.0f, p, keys);
    dnnl_sgemm('N', 'T', rows, keys, s.Z, 1.0f, dout, ldq, values_at, ldk, 0.0f, dp, keys);
    int64_t low = 0;
    for (int64_t i = 0; i < rows; i++) {
        int64_t place = from + i;
        if (i > 0 && segment_S[place] != segment_S[place - 1]) low = place - first_key;
        float dot = 0.0f;
#pragma omp simd reduction(+ : dot)
        for (int64_t z = 0; z < s.Z; z++) dot += dout[i * ldq + z] * out[i * ldq + z];
        softmax_grad_row(p + i * keys, dp + i * keys, at.log_sum_S[place], dot, s.scale, low, place - first_key, keys);
    }
    dnnl_sgemm('T', 'N', keys, s.Z, rows, 1.0f, p, keys, dout, ldq, 1.0f, dv + first_key * ldk, ldk);
    dnnl_sgemm('T', 'N', keys, s.Z, rows, 1.0f, dp, keys, q, ldq, 1.0f, dk + first_key * ldk, ldk);
    dnnl_sgemm('N', 'N', rows, s.Z, keys, 1.0f, dp, keys, keys_at, ldk, 0.0f, at.dq + from * ldq, ldq);
    return KERNEL_OK;
}

/* dout, q (B, S, H, Z), k, v (B, S, G, Z), segment (B, S) int, out (B, S, H, Z), logsumexp (B, H, S) -> dq, dk, dv
 * A task owns a key/value head of a sequence, because all of its queries add to the same dk and dv. */
KERNEL(attention_grad) {
    const float *dout = params[0], *q = params[1], *k = params[2], *v = params[3], *out = params[5], *log_sum = params[6];
    const int32_t *segment_BS = params[4];
    float *dq = params[7], *dk = params[8], *dv = params[9];
    Shape s = shape_of(shapes[1], shapes[2]);
    int64_t group = s.H / s.G;
    int failed = 0;
#pragma omp parallel for schedule(dynamic, 1) reduction(| : failed)
    for (int64_t i = 0; i < s.B * s.G; i++) {
        int64_t b = i / s.G, g = i % s.G, key = (b * s.S * s.G + g) * s.Z;
        for (int64_t place = 0; place < s.S; place++) {
            memset(dk + key + place * s.G * s.Z, 0, (size_t)s.Z * sizeof *dk);
            memset(dv + key + place * s.G * s.Z, 0, (size_t)s.Z * sizeof *dv);
        }
        for (int64_t h = g * group; h < (g + 1) * group; h++) {
            int64_t query = (b * s.S * s.H + h) * s.Z;
            Query at = {dout + query, q + query, out + query, log_sum + (b * s.H + h) * s.S, dq + query};
            for (int64_t from = 0; from < s.S; from += BLOCK) {
                failed |= backward_block(s, at, k + key, v + key, segment_BS + b * s.S, dk + key, dv + key, from);
            }
        }
    }
    return failed ? KERNEL_NO_MEMORY : KERNEL_OK;
}
