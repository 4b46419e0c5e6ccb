/* Causal attention within segments, or to any range of keys. A task takes one head and one block of queries, so that its memory is that of BLOCK
 * rows of scores; keys that no query of the block may see are never touched. */
#include "common.h"

/* Rows of scores are padded to LANES, so that loops over them have no rest. */
enum { BLOCK = 64, LANES = 16 };

/* The logarithm of a sum of nothing, finite so that parts can be put together. */
static const float NOTHING_SEEN = -1e30f;

/* S queries, J keys. */
typedef struct {
    int64_t B, S, J, H, G, Z, Y;
    float scale;
} Shape;

static Shape shape_of(const int64_t *q_BSHZ, const int64_t *v_BJGY) {
    float scale = 1.0f / sqrtf((float)q_BSHZ[3]);
    return (Shape){q_BSHZ[0], q_BSHZ[1], v_BJGY[1], q_BSHZ[2], v_BJGY[2], q_BSHZ[3], v_BJGY[3], scale};
}

/* Which keys the queries of a sequence see: those of their segment, up to their own and `window` at most; or, where
 * `segment_S` is NULL, from `first_S` to before `past_S`, neither of which falls. */
typedef struct {
    const int32_t *segment_S;
    int64_t window;
    const int32_t *first_S, *past_S;
} Seen;

static Seen seen_at(Seen all, int64_t sequence, int64_t S) {
    if (all.segment_S) return (Seen){all.segment_S + sequence * S, all.window, NULL, NULL};
    return (Seen){NULL, 0, all.first_S + sequence * S, all.past_S + sequence * S};
}

/* A block of queries and the keys that they see: [first_key, first_key + keys), of which query i sees [low, high]. */
typedef struct {
    int64_t from, rows, first_key, keys, width;
    int64_t low[BLOCK], high[BLOCK];
} Block;

static Block block_at(Shape s, Seen seen, int64_t from) {
    Block block = {.from = from, .rows = min_i64(BLOCK, s.S - from)};
    int64_t last = from + block.rows - 1, first, past;
    if (seen.segment_S) {
        int64_t limit = max_i64(0, from - seen.window + 1);
        for (first = from; first > limit && seen.segment_S[first - 1] == seen.segment_S[from];) first--;
        past = last + 1;
    } else {
        first = seen.first_S[from];
        past = seen.past_S[last];
    }
    block.first_key = first;
    block.keys = max_i64(0, past - first);
    block.width = ceil_div(block.keys, LANES) * LANES;
    for (int64_t i = 0, low = first; i < block.rows; i++) {
        int64_t place = from + i, high = place;
        if (!seen.segment_S) {
            low = seen.first_S[place];
            high = seen.past_S[place] - 1;
        } else if (i > 0 && seen.segment_S[place] != seen.segment_S[place - 1]) {
            low = place;
        } else {
            low = max_i64(low, place - seen.window + 1);
        }
        block.low[i] = low - first;
        block.high[i] = high - first;
    }
    return block;
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

/* One query head of one sequence, and where its results go. */
typedef struct {
    const float *q, *k, *v;
    float *out, *log_sum_S;
    Seen seen;
    float sink;
} Head;

static int forward_block(Shape s, Head at, int64_t from) {
    Block block = block_at(s, at.seen, from);
    int64_t ldq = s.H * s.Z, ldk = s.G * s.Z, ldv = s.G * s.Y, ldo = s.H * s.Y;
    const float *k = at.k + block.first_key * ldk, *v = at.v + block.first_key * ldv;
    float *p = scratch(0, (size_t)(BLOCK * (s.J + LANES)) * sizeof *p), *out = at.out + from * ldo, inverse[BLOCK];
    if (!p) return KERNEL_NO_MEMORY;
    if (block.keys) {
        dnnl_sgemm('N', 'T', block.rows, block.keys, s.Z, s.scale, at.q + from * ldq, ldq, k, ldk, 0.0f, p,
                   block.width);
    }
    for (int64_t i = 0; i < block.rows; i++) {
        float top, *row = p + i * block.width;
        if (block.high[i] < block.low[i]) {
            for (int64_t j = 0; j < block.width; j++) row[j] = 0.0f;
            inverse[i] = 0.0f;
            at.log_sum_S[from + i] = NOTHING_SEEN;
            continue;
        }
        Span span = mask_row(row, block.low[i], block.high[i], block.width);
        float sum = exp_row(row, span, at.sink, &top);
        inverse[i] = 1.0f / sum;
        at.log_sum_S[from + i] = top + logf(sum);
    }
    if (block.keys) {
        dnnl_sgemm('N', 'N', block.rows, s.Y, block.keys, 1.0f, p, block.width, v, ldv, 0.0f, out, ldo);
    }
    for (int64_t i = 0; i < block.rows; i++) {
        for (int64_t y = 0; y < s.Y; y++) out[i * ldo + y] = block.keys ? out[i * ldo + y] * inverse[i] : 0.0f;
    }
    return KERNEL_OK;
}

/* All heads; sink_H is NULL if there are none. */
static int forward(Shape s, const float *q, const float *k, const float *v, Seen seen, const float *sink_H, float *out,
                   float *log_sum) {
    int64_t blocks = ceil_div(s.S, BLOCK), heads = s.B * s.H;
    int failed = 0;
    /* the last blocks see the most keys: the longest tasks go first */
#pragma omp parallel for schedule(dynamic, 1) reduction(| : failed)
    for (int64_t i = 0; i < blocks * heads; i++) {
        int64_t from = (blocks - 1 - i / heads) * BLOCK, b = i % heads / s.H, h = i % s.H, group = h / (s.H / s.G);
        Head at = {q + (b * s.S * s.H + h) * s.Z,   k + (b * s.J * s.G + group) * s.Z,
                   v + (b * s.J * s.G + group) * s.Y, out + (b * s.S * s.H + h) * s.Y,
                   log_sum + (b * s.H + h) * s.S,   seen_at(seen, b, s.S),
                   sink_H ? sink_H[h] : -INFINITY};
        failed |= forward_block(s, at, from);
    }
    return failed ? KERNEL_NO_MEMORY : KERNEL_OK;
}

/* q (B, S, H, Z), k (B, S, G, Z), v (B, S, G, Y), segment (B, S) int, sink (H), window (1) int
 * -> out (B, S, H, Y), logsumexp of the scores (B, H, S). A sink of -inf is none. */
KERNEL(attention) {
    Seen seen = {.segment_S = params[3], .window = *(const int32_t *)params[5]};
    return forward(shape_of(shapes[0], shapes[2]), params[0], params[1], params[2], seen, params[4], params[6],
                   params[7]);
}

/* q (B, S, H, Z), k (B, J, G, Z), v (B, J, G, Y), first and past (B, S) int -> as above. */
KERNEL(attention_part) {
    Seen seen = {.first_S = params[3], .past_S = params[4]};
    return forward(shape_of(shapes[0], shapes[2]), params[0], params[1], params[2], seen, NULL, params[5], params[6]);
}

static void clear_columns(float *x, int64_t rows, int64_t columns, int64_t ld) {
    for (int64_t r = 0; r < rows; r++) memset(x + r * ld, 0, (size_t)columns * sizeof *x);
}

/* Scores and dp in place become p and the gradient of the scores. */
static void softmax_grad_row(float *restrict p, float *restrict dp, Span span, float log_sum, float dot, float scale) {
#pragma omp simd
    for (int64_t k = span.begin; k < span.end; k++) {
        p[k] = fast_exp(p[k] - log_sum);
        dp[k] = p[k] * (dp[k] - dot) * scale;
    }
}

/* One query head of one sequence, what its gradients are made of, and where they go. `dot_S` is the product of `out`
 * and `dout`, computed where it is NULL. */
typedef struct {
    const float *dout, *out, *dot_S, *log_sum_S, *q, *k, *v;
    Seen seen;
    float sink;
    float *dq, *dk, *dv;
} HeadGrad;

/* Adds the block's part to dk and dv, writes its rows of dq, and returns its part of the sink's gradient. */
static float backward_block(Shape s, HeadGrad at, int64_t from, float *p, float *dp) {
    Block block = block_at(s, at.seen, from);
    int64_t ldq = s.H * s.Z, ldk = s.G * s.Z, ldv = s.G * s.Y, ldo = s.H * s.Y, width = block.width;
    const float *q = at.q + from * ldq, *dout = at.dout + from * ldo;
    const float *k = at.k + block.first_key * ldk, *v = at.v + block.first_key * ldv;
    float dsink = 0.0f, *dq = at.dq + from * ldq;
    if (!block.keys) {
        clear_columns(dq, block.rows, s.Z, ldq);
        return dsink;
    }
    dnnl_sgemm('N', 'T', block.rows, block.keys, s.Z, s.scale, q, ldq, k, ldk, 0.0f, p, width);
    dnnl_sgemm('N', 'T', block.rows, block.keys, s.Y, 1.0f, dout, ldo, v, ldv, 0.0f, dp, width);
    for (int64_t i = 0; i < block.rows; i++) {
        float dot = 0.0f, log_sum = at.log_sum_S[from + i];
        if (at.dot_S) {
            dot = at.dot_S[from + i];
        } else {
            const float *out = at.out + (from + i) * ldo;
#pragma omp simd reduction(+ : dot)
            for (int64_t y = 0; y < s.Y; y++) dot += dout[i * ldo + y] * out[y];
        }
        int64_t low = block.low[i], high = block.high[i];
        if (high < low) {
            for (int64_t j = 0; j < width; j++) p[i * width + j] = dp[i * width + j] = 0.0f;
            continue;
        }
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
    dnnl_sgemm('N', 'N', block.rows, s.Z, block.keys, 1.0f, dp, width, k, ldk, 0.0f, dq, ldq);
    return dsink;
}

/* All heads, from those of the first. dsink_BH is NULL if there are no sinks. */
static int backward(Shape s, HeadGrad first, const float *sink_H, float *dsink_BH) {
    int64_t group = s.H / s.G;
    int failed = 0;
    /* a task owns a key/value head of a sequence, because all of its queries add to the same dk and dv */
#pragma omp parallel for schedule(dynamic, 1) reduction(| : failed)
    for (int64_t i = 0; i < s.B * s.G; i++) {
        int64_t b = i / s.G, g = i % s.G, key = (b * s.J * s.G + g) * s.Z, value = (b * s.J * s.G + g) * s.Y;
        size_t bytes = (size_t)(BLOCK * (s.J + LANES)) * sizeof(float);
        float *p = scratch(0, bytes), *dp = scratch(1, bytes);
        failed |= !p || !dp;
        if (!p || !dp) continue;
        clear_columns(first.dk + key, s.J, s.Z, s.G * s.Z);
        clear_columns(first.dv + value, s.J, s.Y, s.G * s.Y);
        for (int64_t h = g * group; h < (g + 1) * group; h++) {
            int64_t query = (b * s.S * s.H + h) * s.Z, result = (b * s.S * s.H + h) * s.Y, row = (b * s.H + h) * s.S;
            HeadGrad at = {.dout = first.dout + result,
                           .out = first.out ? first.out + result : NULL,
                           .dot_S = first.dot_S ? first.dot_S + row : NULL,
                           .log_sum_S = first.log_sum_S + row,
                           .q = first.q + query,
                           .k = first.k + key,
                           .v = first.v + value,
                           .seen = seen_at(first.seen, b, s.S),
                           .sink = sink_H ? sink_H[h] : -INFINITY,
                           .dq = first.dq + query,
                           .dk = first.dk + key,
                           .dv = first.dv + value};
            float dsink = 0.0f;
            for (int64_t from = 0; from < s.S; from += BLOCK) dsink += backward_block(s, at, from, p, dp);
            if (dsink_BH) dsink_BH[b * s.H + h] = dsink;
        }
    }
    return failed ? KERNEL_NO_MEMORY : KERNEL_OK;
}

/* dout (B, S, H, Y), q, k, v, segment, sink, window as above, out (B, S, H, Y), logsumexp (B, H, S)
 * -> dq, dk, dv, dsink (H), and room for its parts (B, H) */
KERNEL(attention_grad) {
    Shape s = shape_of(shapes[1], shapes[3]);
    HeadGrad first = {.dout = params[0],
                      .q = params[1],
                      .k = params[2],
                      .v = params[3],
                      .seen = {.segment_S = params[4], .window = *(const int32_t *)params[6]},
                      .out = params[7],
                      .log_sum_S = params[8],
                      .dq = params[9],
                      .dk = params[10],
                      .dv = params[11]};
    float *dsink_H = params[12], *dsink_BH = params[13];
    int failed = backward(s, first, params[5], dsink_BH);
    for (int64_t h = 0; h < s.H; h++) {
        dsink_H[h] = 0.0f;
        for (int64_t b = 0; b < s.B; b++) dsink_H[h] += dsink_BH[b * s.H + h];
    }
    return failed;
}

/* dout (B, S, H, Y), its product with the output of all parts and logsumexp of all scores (B, H, S), q, k, v, first
 * and past as above -> dq, dk, dv */
KERNEL(attention_part_grad) {
    HeadGrad first = {.dout = params[0],
                      .dot_S = params[1],
                      .log_sum_S = params[2],
                      .q = params[3],
                      .k = params[4],
                      .v = params[5],
                      .seen = {.first_S = params[6], .past_S = params[7]},
                      .dq = params[8],
                      .dk = params[9],
                      .dv = params[10]};
    return backward(shape_of(shapes[3], shapes[5]), first, NULL, NULL);
}
