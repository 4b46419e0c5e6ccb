/* Causal attention within segments. A task takes one head and one block of queries, so that its memory is that of BLOCK
 * rows of scores; keys that no query of the block may see are never touched. */
#include "common.h"

/* Rows of scores are padded to LANES, so that loops over them have no rest. */
enum { BLOCK = 64, LANES = 16 };

typedef struct {
    int64_t B, S, H, G, Z, Y, window;
    float scale;
} Shape;

static Shape shape_of(const int64_t *q_BSHZ, const int64_t *v_BSGY, const int32_t *window) {
    float scale = 1.0f / sqrtf((float)q_BSHZ[3]);
    return (Shape){q_BSHZ[0], q_BSHZ[1], q_BSHZ[2], v_BSGY[2], q_BSHZ[3], v_BSGY[3], *window, scale};
}

/* A block of queries and the keys that they see: [first_key, first_key + keys). */
typedef struct {
    int64_t from, rows, first_key, keys, width;
} Block;

static Block block_at(Shape s, const int32_t *segment_S, int64_t from) {
    int64_t rows = min_i64(BLOCK, s.S - from), first = from;
    int64_t limit = max_i64(0, from - s.window + 1);
    while (first > limit && segment_S[first - 1] == segment_S[from]) first--;
    int64_t keys = from + rows - first;
    return (Block){from, rows, first, keys, ceil_div(keys, LANES) * LANES};
}

/* The first key, counted from the block's first, that query i sees; `previous` is that of query i - 1. */
static int64_t first_seen(Shape s, Block block, const int32_t *segment_S, int64_t i, int64_t previous) {
    int64_t place = block.from + i;
    if (i > 0 && segment_S[place] != segment_S[place - 1]) return place - block.first_key;
    return max_i64(previous, place - s.window + 1 - block.first_key);
}

/* Columns [begin, end) of a row: those seen, [low, high], widened to whole lanes. The rest of the row becomes 0, and
 * what widening added becomes -inf. */
typedef struct {
    int64_t begin, end;
} Span;

static Span mask_row(float *row, int64_t low, int64_t high, int64_t width) {
    Span span = {low / LANES * LANES, (high + LANES) / LANES * LANES};
    for (int64_t k = 0; k < span.begin; k++) row[k] = 0.0f;
    for (int64_t k = span.begin; k < low; k++) row[k] = -INFINITY;
    for (int64_t k = high + 1; k < span.end; k++) row[k] = -INFINITY;
    for (int64_t k = span.end; k < width; k++) row[k] = 0.0f;
    return span;
}

/* Scores in place become e^(score - top); returns their sum, the sink's share included. */
static float exp_row(float *restrict row, Span span, float sink, float *top_out) {
    float top = sink, sum = 0.0f;
#pragma omp simd reduction(max : top)
    for (int64_t k = span.begin; k < span.end; k++) top = row[k] > top ? row[k] : top;
#pragma omp simd reduction(+ : sum)
    for (int64_t k = span.begin; k < span.end; k++) {
        row[k] = fast_exp(row[k] - top);
        sum += row[k];
    }
    *top_out = top;
    return sum + fast_exp(sink - top);
}

static int forward_block(Shape s, const float *q, const float *k, const float *v, const int32_t *segment_S, float sink,
                         float *out, float *log_sum_S, int64_t from) {
    Block block = block_at(s, segment_S, from);
    int64_t ldq = s.H * s.Z, ldk = s.G * s.Z, ldv = s.G * s.Y, ldo = s.H * s.Y;
    float *p = scratch(0, (size_t)(BLOCK * (s.S + LANES)) * sizeof *p);
    if (!p) return KERNEL_NO_MEMORY;
    dnnl_sgemm('N', 'T', block.rows, block.keys, s.Z, s.scale, q + from * ldq, ldq, k + block.first_key * ldk, ldk,
               0.0f, p, block.width);
    float inverse[BLOCK];
    for (int64_t i = 0, low = 0; i < block.rows; i++) {
        float top, *row = p + i * block.width;
        low = first_seen(s, block, segment_S, i, low);
        Span span = mask_row(row, low, from + i - block.first_key, block.width);
        float sum = exp_row(row, span, sink, &top);
        inverse[i] = 1.0f / sum;
        log_sum_S[from + i] = top + logf(sum);
    }
    dnnl_sgemm('N', 'N', block.rows, s.Y, block.keys, 1.0f, p, block.width, v + block.first_key * ldv, ldv, 0.0f,
               out + from * ldo, ldo);
    for (int64_t i = 0; i < block.rows; i++) {
        for (int64_t y = 0; y < s.Y; y++) out[(from + i) * ldo + y] *= inverse[i];
    }
    return KERNEL_OK;
}

/* q (B, S, H, Z), k (B, S, G, Z), v (B, S, G, Y), segment (B, S) int, sink (H), window (1) int
 * -> out (B, S, H, Y), logsumexp of the scores (B, H, S). A sink of -inf is none. */
KERNEL(attention) {
    const float *q = params[0], *k = params[1], *v = params[2], *sink_H = params[4];
    const int32_t *segment_BS = params[3];
    float *out = params[6], *log_sum = params[7];
    Shape s = shape_of(shapes[0], shapes[2], params[5]);
    int64_t blocks = ceil_div(s.S, BLOCK), heads = s.B * s.H;
    int failed = 0;
    /* the last blocks see the most keys: the longest tasks go first */
#pragma omp parallel for schedule(dynamic, 1) reduction(| : failed)
    for (int64_t i = 0; i < blocks * heads; i++) {
        int64_t from = (blocks - 1 - i / heads) * BLOCK, b = i % heads / s.H, h = i % s.H, group = h / (s.H / s.G);
        failed |= forward_block(s, q + (b * s.S * s.H + h) * s.Z, k + (b * s.S * s.G + group) * s.Z,
                                v + (b * s.S * s.G + group) * s.Y, segment_BS + b * s.S, sink_H[h],
                                out + (b * s.S * s.H + h) * s.Y, log_sum + (b * s.H + h) * s.S, from);
    }
    return failed ? KERNEL_NO_MEMORY : KERNEL_OK;
}

/* One query head of one sequence, and where its gradients go. */
typedef struct {
    const float *dout, *q, *k, *v, *out, *log_sum_S;
    const int32_t *segment_S;
    float *dq, *dk, *dv;
    float sink;
} Head;

/* Scores and dp in place become p and the gradient of the scores. */
static void softmax_grad_row(float *restrict p, float *restrict dp, Span span, float log_sum, float dot, float scale) {
#pragma omp simd
    for (int64_t k = span.begin; k < span.end; k++) {
        p[k] = fast_exp(p[k] - log_sum);
        dp[k] = p[k] * (dp[k] - dot) * scale;
    }
}

/* Adds the block's part to dk and dv, writes its rows of dq, and returns its part of the sink's gradient. */
static float backward_block(Shape s, Head at, int64_t from, float *p, float *dp) {
    Block block = block_at(s, at.segment_S, from);
    int64_t ldq = s.H * s.Z, ldk = s.G * s.Z, ldv = s.G * s.Y, ldo = s.H * s.Y, width = block.width;
    const float *q = at.q + from * ldq, *dout = at.dout + from * ldo, *out = at.out + from * ldo;
    const float *k = at.k + block.first_key * ldk, *v = at.v + block.first_key * ldv;
    float dsink = 0.0f;
    dnnl_sgemm('N', 'T', block.rows, block.keys, s.Z, s.scale, q, ldq, k, ldk, 0.0f, p, width);
    dnnl_sgemm('N', 'T', block.rows, block.keys, s.Y, 1.0f, dout, ldo, v, ldv, 0.0f, dp, width);
    for (int64_t i = 0, low = 0; i < block.rows; i++) {
        float dot = 0.0f, log_sum = at.log_sum_S[from + i];
#pragma omp simd reduction(+ : dot)
        for (int64_t y = 0; y < s.Y; y++) dot += dout[i * ldo + y] * out[i * ldo + y];
        low = first_seen(s, block, at.segment_S, i, low);
        int64_t high = from + i - block.first_key;
        Span span = mask_row(p + i * width, low, high, width);
        for (int64_t j = 0; j < low; j++) dp[i * width + j] = 0.0f;
        for (int64_t j = high + 1; j < width; j++) dp[i * width + j] = 0.0f;
        softmax_grad_row(p + i * width, dp + i * width, span, log_sum, dot, s.scale);
        dsink -= fast_exp(at.sink - log_sum) * dot;
    }
    dnnl_sgemm('T', 'N', block.keys, s.Y, block.rows, 1.0f, p, width, dout, ldo, 1.0f,
               at.dv + block.first_key * ldv, ldv);
    dnnl_sgemm('T', 'N', block.keys, s.Z, block.rows, 1.0f, dp, width, q, ldq, 1.0f,
               at.dk + block.first_key * ldk, ldk);
    dnnl_sgemm('N', 'N', block.rows, s.Z, block.keys, 1.0f, dp, width, k, ldk, 0.0f, at.dq + from * ldq, ldq);
    return dsink;
}

static void clear_columns(float *x, int64_t rows, int64_t columns, int64_t ld) {
    for (int64_t r = 0; r < rows; r++) memset(x + r * ld, 0, (size_t)columns * sizeof *x);
}

/* dout (B, S, H, Y), q, k, v, segment, sink, window as above, out (B, S, H, Y), logsumexp (B, H, S)
 * -> dq, dk, dv, dsink (H), and room for its parts (B, H)
 * A task owns a key/value head of a sequence, because all of its queries add to the same dk and dv. */
KERNEL(attention_grad) {
    const float *dout = params[0], *q = params[1], *k = params[2], *v = params[3], *sink_H = params[5];
    const float *out = params[7], *log_sum = params[8];
    const int32_t *segment_BS = params[4];
    float *dq = params[9], *dk = params[10], *dv = params[11], *dsink_H = params[12], *dsink_BH = params[13];
    Shape s = shape_of(shapes[1], shapes[3], params[6]);
    int64_t group = s.H / s.G;
    int failed = 0;
#pragma omp parallel for schedule(dynamic, 1) reduction(| : failed)
    for (int64_t i = 0; i < s.B * s.G; i++) {
        int64_t b = i / s.G, g = i % s.G, key = (b * s.S * s.G + g) * s.Z, value = (b * s.S * s.G + g) * s.Y;
        size_t bytes = (size_t)(BLOCK * (s.S + LANES)) * sizeof(float);
        float *p = scratch(0, bytes), *dp = scratch(1, bytes);
        failed |= !p || !dp;
        if (!p || !dp) continue;
        clear_columns(dk + key, s.S, s.Z, s.G * s.Z);
        clear_columns(dv + value, s.S, s.Y, s.G * s.Y);
        for (int64_t h = g * group; h < (g + 1) * group; h++) {
            int64_t query = (b * s.S * s.H + h) * s.Z, result = (b * s.S * s.H + h) * s.Y;
            Head at = {dout + result, q + query,  k + key,  v + value,  out + result, log_sum + (b * s.H + h) * s.S,
                       segment_BS + b * s.S, dq + query, dk + key, dv + value, sink_H[h]};
            float dsink = 0.0f;
            for (int64_t from = 0; from < s.S; from += BLOCK) dsink += backward_block(s, at, from, p, dp);
            dsink_BH[b * s.H + h] = dsink;
        }
    }
    for (int64_t h = 0; h < s.H; h++) {
        dsink_H[h] = 0.0f;
        for (int64_t b = 0; b < s.B; b++) dsink_H[h] += dsink_BH[b * s.H + h];
    }
    return failed ? KERNEL_NO_MEMORY : KERNEL_OK;
}
