/* What every kernel file shares: the calling convention of MindSpore's ahead-of-time operators, exp, scratch memory.
 *
 * Shape letters: see ../protocol.py. Every kernel gives the same bits for any number of threads: a task owns its
 * outputs, and sums over tasks have a fixed number of parts added in a fixed order. Non-finite inputs reach the
 * outputs. */
#ifndef ASCEND_MOE_TRAIN_COMMON_H
#define ASCEND_MOE_TRAIN_COMMON_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* MindSpore passes the inputs, then the outputs, as raw pointers; a result other than 0 is a failed operator. */
#define KERNEL(name)                                                                                       \
    int name(int num_params, void **params, int *ndims, int64_t **shapes, const char **dtypes, void *stream, \
             void *extra);                                                                                 \
    int name(__attribute__((unused)) int num_params, void **params, __attribute__((unused)) int *ndims,   \
             __attribute__((unused)) int64_t **shapes, __attribute__((unused)) const char **dtypes,       \
             __attribute__((unused)) void *stream, __attribute__((unused)) void *extra)

enum { KERNEL_OK = 0, KERNEL_BAD_INPUT = 1, KERNEL_NO_MEMORY = 2 };

/* Row-major C = alpha op(A) op(B) + beta C on the calling thread, from the oneDNN that MindSpore ships. */
extern int dnnl_sgemm(char transa, char transb, int64_t M, int64_t N, int64_t K, float alpha, const float *A,
                      int64_t lda, const float *B, int64_t ldb, float beta, float *C, int64_t ldc);

static inline int64_t elements(const int64_t *shape, int ndim) {
    int64_t n = 1;
    for (int i = 0; i < ndim; i++) n *= shape[i];
    return n;
}

/* Elements in all dimensions but the last: rows, if the last are columns. */
static inline int64_t leading(const int64_t *shape, int ndim) { return elements(shape, ndim - 1); }

static inline int64_t min_i64(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t max_i64(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* Memory of the calling thread that lives until the thread ends and keeps its contents only until the next call with
 * the same slot. NULL when there is none. */
enum { SCRATCH_SLOTS = 4 };
void *scratch(int slot, size_t bytes);

/* Rows that a thread takes at a time: enough to pay for taking them, few enough that threads end together. */
enum { ROWS = 16 };

static inline float bits_as_float(uint32_t bits) {
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

static inline uint32_t float_as_bits(float f) {
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    return bits;
}

/* e^x to 2 units in the last place, written so that loops over it vectorise (coefficients: Cephes expf).
 * Results below 2.4e-38 are 0, +inf above 88.7, NaN stays NaN. */
static inline float fast_exp(float x) {
    const float lowest = -86.6f, highest = 88.72283f, round_magic = 12582912.0f;
    float c = x < lowest ? lowest : x;
    c = c > highest ? highest : c;
    float shifted = c * 1.44269504088896341f + round_magic;
    float n = shifted - round_magic;
    float r = (c - n * 0.693359375f) - n * -2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    /* 2^(n - 1) and a factor 2, because 2^128 has no float */
    float scale = bits_as_float((float_as_bits(shifted) << 23) + (126u << 23));
    float y = p * scale * 2.0f;
    y = x < lowest ? 0.0f : y;
    return x > highest ? INFINITY : y;
}

#endif
