#include "common.h"

#include <stdlib.h>

static _Thread_local struct {
    void *memory;
    size_t bytes;
} slots[SCRATCH_SLOTS];

void *scratch(int slot, size_t bytes) {
    if (slots[slot].bytes < bytes) {
        free(slots[slot].memory);
        size_t rounded = (bytes + 4095) / 4096 * 4096;
        slots[slot].memory = aligned_alloc(4096, rounded);
        slots[slot].bytes = slots[slot].memory ? rounded : 0;
    }
    return slots[slot].memory;
}
