/* Cutting the columns of a tensor into consecutive parts, and joining them again. */
#include "common.h"

enum { MOST_PARTS = 4 };

typedef struct {
    float *data;
    int64_t width, first;
} Part;

static void copy_rows(float *whole, const Part *parts, int num_parts, int64_t rows, int64_t width, int join) {
#pragma omp parallel for schedule(dynamic, ROWS)
    for (int64_t r = 0; r < rows; r++) {
        for (int i = 0; i < num_parts; i++) {
            float *inside = whole + r * width + parts[i].first, *outside = parts[i].data + r * parts[i].width;
            memcpy(join ? inside : outside, join ? outside : inside, (size_t)parts[i].width * sizeof *inside);
        }
    }
}

/* Parts from their tensors; returns how many columns they have together. */
static int64_t place_parts(Part *parts, int num_parts, void **params, int64_t **shapes, int ndim) {
    int64_t width = 0;
    for (int i = 0; i < num_parts; i++) {
        parts[i] = (Part){params[i], shapes[i][ndim - 1], width};
        width += parts[i].width;
    }
    return width;
}

/* x (..., F), the shapes of the parts as tensors (widths) -> the parts (..., width) */
KERNEL(split) {
    Part parts[MOST_PARTS];
    int num_parts = (num_params - 1) / 2, outputs = 1 + num_parts;
    if (num_parts > MOST_PARTS) return KERNEL_BAD_INPUT;
    int64_t width = place_parts(parts, num_parts, params + outputs, shapes + outputs, ndims[0]);
    if (width != shapes[0][ndims[0] - 1]) return KERNEL_BAD_INPUT;
    copy_rows(params[0], parts, num_parts, leading(shapes[0], ndims[0]), width, 0);
    return KERNEL_OK;
}

/* parts (..., width) -> x (..., F) */
KERNEL(join) {
    Part parts[MOST_PARTS];
    int num_parts = num_params - 1;
    if (num_parts > MOST_PARTS) return KERNEL_BAD_INPUT;
    int64_t width = place_parts(parts, num_parts, params, shapes, ndims[0]);
    copy_rows(params[num_parts], parts, num_parts, leading(shapes[0], ndims[0]), width, 1);
    return KERNEL_OK;
}
