/* An operator that is a function of the host program, on the tensors' own memory. */
#include "common.h"

typedef int (*host_function)(int number, int num_params, void **params, int *ndims, int64_t **shapes,
                             const char **dtypes);

static host_function handler;

/* The one function that all calls go to. */
void set_host_function(host_function function);
void set_host_function(host_function function) { handler = function; }

/* number (1,), inputs ... -> outputs: the number says to the function which call this is. */
KERNEL(host_call) {
    if (!handler) return KERNEL_BAD_INPUT;
    return handler(((const int32_t *)params[0])[0], num_params, params, ndims, shapes, dtypes);
}
