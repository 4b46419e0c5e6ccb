"""One rank whose kernels are timed: those of the library, each behind a function that takes its time.

The functions are C, generated and compiled here, so that what they add is two readings of a clock. Each kernel belongs
to a part of the step; what is outside of all is MindSpore's own: all operators of the router, sums of the residual
stream, scheduling, and Python.
"""

import ctypes
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from ascend_moe_train.cluster.rank import progress, unlink_shared_memory
from ascend_moe_train.config import load_run
from ascend_moe_train.model.kernels import build
from ascend_moe_train.parallel.mpi import MpiComm
from benchmarks.ranks_orders import Order, Reply, serve
from benchmarks.ranks_train import RUN, Layout

PARTS: Mapping[str, tuple[str, ...]] = {
    "products of experts": ("grouped_matmul", "grouped_matmul_dx", "grouped_matmul_dw"),
    "products with one weight": ("matmul", "matmul_dx", "matmul_dw"),
    "attention": ("attention", "attention_grad"),
    "sort, permute, combine": ("sort_by_expert", "permute", "permute_dx", "combine", "combine_grad"),
    "activation of experts": ("swiglu", "swiglu_grad"),
    "norms, rotation, splits": ("rms_norm", "rms_norm_grad", "rope", "rope_grad", "split", "join"),
    "embedding and loss": ("embed", "embed_dw", "cross_entropy", "cross_entropy_grad"),
    "norm of gradients": ("square_sum",),
    "AdamW": ("adamw",),
}
OUTSIDE = "MindSpore's own: router, sums, scheduling"
KERNELS = [kernel for kernels in PARTS.values() for kernel in kernels]
HEAD = """#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <time.h>
typedef int (*Kernel)(int, void **, int *, int64_t **, const char **, void *, void *);
static Kernel real[%d];
double seconds[%d];
static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}
"""
TIMED = """int %s(int n, void **params, int *ndims, int64_t **shapes, const char **dtypes, void *stream, void *extra) {
    double start = now();
    int status = real[%d](n, params, ndims, shapes, dtypes, stream, extra);
    seconds[%d] += now() - start;
    return status;
}
"""


def timed_library(folder: Path) -> Path:
    """A library with the same kernels, which adds up the seconds of each in its array `seconds`."""
    library, count = str(build.library()), len(KERNELS)
    lines = [HEAD % (count, count)]
    lines += [TIMED % (kernel, i, i) for i, kernel in enumerate(KERNELS)]
    lines.append("__attribute__((constructor)) static void load(void) {\n")
    lines.append(f'    void *library = dlopen("{library}", RTLD_NOW | RTLD_LOCAL);\n')
    lines += [f'    real[{i}] = (Kernel)dlsym(library, "{kernel}");\n' for i, kernel in enumerate(KERNELS)]
    source, found = folder / "timed.c", folder / "timed.so"
    source.write_text("".join([*lines, "}\n"]))
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", str(found), str(source), "-ldl"], check=True)
    return found


def main(path: str) -> None:
    """Serves until the benchmark is done."""
    comm = MpiComm()
    unlink_shared_memory()
    progress().phase("step")
    with tempfile.TemporaryDirectory() as name:
        timed = timed_library(Path(name))
        build.library = lambda: timed
        seconds = (ctypes.c_double * len(KERNELS)).in_dll(ctypes.CDLL(str(timed)), "seconds")
        layout = cache(lambda *overrides: Layout(load_run(RUN, overrides), comm))

        def obey(order: Order) -> Reply:
            chosen = layout(*order["overrides"])
            before = dict(zip(KERNELS, seconds, strict=True))
            reply = chosen.run(order["steps"])
            took_s = {kernel: now_s - before[kernel] for kernel, now_s in zip(KERNELS, seconds, strict=True)}
            parts_s = {part: sum(took_s[kernel] for kernel in kernels) for part, kernels in PARTS.items()}
            parts_s[OUTSIDE] = sum(reply["step_s"]) - sum(parts_s.values())
            return reply | {"parts_s": parts_s}

        serve(path, comm.rank, {"rank": comm.rank}, obey)
    progress().phase("done")


if __name__ == "__main__":
    main(sys.argv[1])
