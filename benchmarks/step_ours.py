"""Times the training step of the demo model on random tokens: one JSON line. Runs in the project's environment."""

import json
import os
import resource
import statistics
import sys
import time

# read while MindSpore is imported: see ascend_moe_train/cli/environment.py
os.environ.setdefault("GLOG_v", "3")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import math

import numpy as np

from ascend_moe_train.data.loader import Batch
from ascend_moe_train.model.counts import training_flops_per_token
from ascend_moe_train.model.kernels.select import choose
from ascend_moe_train.model.transformer import Transformer
from ascend_moe_train.optim.adamw import AdamW, step_factors
from ascend_moe_train.optim.config import OptimConfig
from ascend_moe_train.presets import demo
from ascend_moe_train.train.session import set_device
from ascend_moe_train.train.step import TrainStep

SEQUENCES, SEQ_LEN = 8, 256


def main(kernels_name: str, steps: int) -> None:
    """Prints median step time, tokens/s, model FLOP/s and peak memory of `steps` steps after two that warm up."""
    config = demo()
    kernels = choose(set_device("cpu"), kernels_name)
    model = Transformer(config, kernels, SEQ_LEN)
    model.initialize(seed=1)
    optim = OptimConfig()
    step = TrainStep(model, AdamW(model.weights(), optim, kernels), num_micro=1)
    random = np.random.default_rng(0)
    seconds = []
    for i in range(steps + 2):
        window = random.integers(0, config.vocab_size, (SEQUENCES, SEQ_LEN + 1)).astype(np.int32)
        zeros = np.zeros((SEQUENCES, SEQ_LEN), np.int32)
        position = np.tile(np.arange(SEQ_LEN, dtype=np.int32), (SEQUENCES, 1))
        batch = Batch(tokens_BS=window[:, :-1], targets_BS=window[:, 1:], segment_BS=zeros, position_BS=position)
        start_s = time.perf_counter()
        step(batch, i, np.array([*step_factors(optim, 1e-4, i + 1), 1.0, math.inf]))
        seconds.append(time.perf_counter() - start_s)
    median_s = statistics.median(seconds[2:])
    tokens = SEQUENCES * SEQ_LEN
    figures = {
        "name": f"ours, {kernels.name} kernels",
        "step_s": median_s,
        "tokens_per_s": tokens / median_s,
        "flops_per_s": tokens / median_s * training_flops_per_token(config, SEQ_LEN),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
