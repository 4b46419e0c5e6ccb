"""Logs of runs that went well, with words in them that name faults: from a seed, in the forms of several programs."""

import random
from collections.abc import Callable

Draw = random.Random
MIN_STEPS, MAX_STEPS = 8, 60


def _megatron(draw: Draw, step: int, loss: float) -> str:
    return (
        f" iteration {step:8d}/     500 | consumed samples: {step * 64:12d} | elapsed time per iteration (ms): "
        f"{draw.uniform(900, 940):.1f} | learning rate: 1.0E-04 | global batch size:    64 | lm loss: {loss:.6E} | "
        f"loss scale: 1.0 | grad norm: {draw.uniform(0.9, 1.1):.3f} | number of skipped iterations:   0 | "
        "number of nan iterations:   0 |"
    )


def _mindformers(draw: Draw, step: int, loss: float) -> str:
    return (
        f"2026-03-01 10:00:{step % 60:02d},100 - mindformers[callback.py:500] - INFO - {{ Epoch:[  1/  1], "
        f"step:[{step:5d}/  500], loss: {loss:.3f}, per_step_time: {draw.randint(900, 940)}ms, lr: 1e-05, "
        "overflow cond: False, loss_scale: 1.0, global_norm: [1.01]"
    )


def _torchrun(draw: Draw, step: int, loss: float) -> str:
    rank = draw.randrange(8)
    return f"[rank{rank}]: step {step} loss {loss:.4f} error_rate={draw.choice(['0.0', '0'])} failed: 0 retries=0"


def _vllm(draw: Draw, step: int, loss: float) -> str:
    return (
        f"INFO 03-01 10:00:{step % 60:02d} [loggers.py:1] Avg throughput: {draw.uniform(90, 99):.1f} tokens/s, "
        f"Waiting: 0 reqs, errors: 0, aborted: 0, timeout=1800, loss-of-precision: {loss:.4f}"
    )


FORMS: tuple[Callable[[Draw, int, float], str], ...] = (_megatron, _mindformers, _torchrun, _vllm)

NOTES = (
    "no errors, no failures, 0 timeouts so far",
    "checkpoint saved: 0 errors, 0 skipped",
    "connect attempt 1 of 3: retry succeeded after a timeout of 5 s",
    '{"timeout": 1800, "max_errors": 0, "fail_fast": false}',
    "NCCL_TIMEOUT=1800 HCCL_CONNECT_TIMEOUT=600 on_error=none",
    "eval: mean_absolute_error: 0.0213, relative error: 1.2e-05",
    "RelativeError: 0.0012",
    "| metric | loss error | value |",
    "INFO: no fault found; memory check: out of memory: 0, corrupt samples: 0",
    "WARNING: option fast_path is not supported for this device, the slow one is used",
    "UserWarning: the checkpoint has a missing key 'extra', which is not needed",
    "[WARNING] ME(71:72,MainProcess):2026-03-01-10:00:00.100 [a.py:1] the value is invalid for CPU and is ignored",
    "[INFO] HCCL(71,python):2026-03-01-10:00:00.100.200 [a.cc:1] [71]HCCL_EXEC_TIMEOUT set by default to [1836]s",
    "[INFO] RUNTIME(71,python):2026-03-01-10:00:00.100.200 [a.cc:1] link down count 0, port down count 0",
    "2026-03-01 10:00:00 - INFO - health check of devices: ecc error 0, hardware fault 0",
    "test_out_of_memory PASSED, test_port_already_in_use PASSED",
    "nan_count=0 inf_count=0 overflow=0",
)


def healthy_log(seed: int) -> str:
    """The log of one run."""
    draw = random.Random(seed)
    form = FORMS[seed % len(FORMS)]
    lines = []
    for step in range(1, draw.randint(MIN_STEPS, MAX_STEPS)):
        loss = 10.0 / (1 + 0.05 * step) + draw.uniform(-0.01, 0.01)
        lines.append(form(draw, step, loss))
        if draw.random() < 0.3:
            lines.append(draw.choice(NOTES))
    return "\n".join([*lines, "training finished", ""])
