"""Runs of the real trainer that go well, with whatever they warn of: `python -m tests.healthy_runs FOLDER COUNT`.

Many in one process, each with settings of its own from its number: FOLDER/runs/<number> gets what `amt train` prints
and what a run leaves behind. A run that is stopped and goes on is two logs. With GLOG_v=2, MindSpore's warnings are
among them.
"""

import contextlib
import gc
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ascend_moe_train.cli.main import main as amt
from ascend_moe_train.config import load_run
from ascend_moe_train.errors import UserError
from tests.adapted import weights, write_weights
from tests.launched import launched
from tests.small_run import make_corpus, write_run

POLL_S = 0.01
LONG = 110  # steps after which drifts and routers are looked at
EVERY_LAUNCH = 25  # one run in so many is of two ranks
STOPPED = (0, 128 + signal.SIGTERM)  # a short run may end before the signal comes

# Each run has one of each: the first is what most have, and what compiles soonest.
CHOICES: tuple[tuple[tuple[str, ...], ...], ...] = (
    (
        (),
        ("run.precision=fp16",),
        ("run.precision=fp16", "loss_scale.init=3.3e+07"),  # overflows until it is small enough
        ("run.precision=fp16", "loss_scale.window=3"),  # and again, each time that it has grown
    ),
    (
        (),
        ("model.moe.capacity_factor=null",),
        ("model.moe.capacity_factor=1.25", "model.moe.drop_policy=probability"),
        ("model.moe.capacity_factor=2.0",),
    ),
    ((), ("model.moe.z_loss_coef=0.0",), ("model.moe.aux_loss_scope=batch", "model.moe.jitter=0.0")),
    ((), ("model.moe.num_experts=8", "model.moe.top_k=3"), ("model.moe.score=sigmoid",)),
    (
        (),
        ("guard.spike_action=off",),
        ("guard.spike_action=skip", "guard.spike_window=8", "guard.spike_sigma=2"),
        ("guard.spike_action=warn", "guard.spike_window=8", "guard.spike_sigma=0.5"),
        ("guard.nonfinite_action=rewind",),
        ("guard.straggler_factor=null",),
    ),
    (("data.valid=[]",), (), ("run.eval_every=4",)),
    ((), ("checkpoint.every=3", "checkpoint.keep=1"), ("checkpoint.asynchronous=false",)),
    (("batch.micro_sequences=4",), (), ("batch.micro_sequences=1",), ("batch.global_sequences=8",)),
    ((), ("optim.schedule=wsd",), ("optim.schedule=linear", "optim.clip_norm=null"), ("optim.warmup_steps=0",)),
    ((), ("profile.steps=3:5",)),
    ((), ("run.tensorboard=true",)),
    ((), ("run.log_every=1",), ("run.log_comm=false",)),
    ((), ("run.sample_prompt=the router",)),
    ((), ("data.seq_len=32",), ("data.reset_attention=false",)),
    ((), ("run.time_limit_s=600", "run.time_reserve_s=1")),
    ((), ("recompute.policy=selective",), ("recompute.policy=full",)),
    ((), ("run.peak_flops_per_s=null",)),
)
LORA = ("lora.r=2", "lora.alpha=4.0", "lora.targets=[attn.qkv, experts.w2]")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How a run is made. `stop_after` is the step after which SIGTERM comes, None without one."""

    overrides: tuple[str, ...]
    stop_after: int | None
    starts_from_weights: bool
    has_adapters: bool
    as_json: bool
    num_ranks: int
    is_asked_again: bool


def setting(number: int) -> Setting:
    """That of a run, from its number alone."""
    draw = random.Random(number)
    steps = LONG if draw.random() < 0.1 else draw.randint(8, 16)
    chosen = [override for choice in CHOICES for override in _one(draw, choice)]
    num_ranks = 2 if number % EVERY_LAUNCH == EVERY_LAUNCH - 1 else 1
    return Setting(
        overrides=(f"run.steps={steps}", f"run.seed={number}", *chosen),
        stop_after=draw.randint(2, 5) if num_ranks == 1 and draw.random() < 0.25 else None,
        starts_from_weights=draw.random() < 0.2,
        has_adapters=draw.random() < 0.5,
        as_json=draw.random() < 0.1,
        num_ranks=num_ranks,
        is_asked_again=draw.random() < 0.5,
    )


def _one(draw: random.Random, choice: tuple[tuple[str, ...], ...]) -> tuple[str, ...]:
    return choice[0] if draw.random() < 0.6 else draw.choice(choice)


def make(folder: Path, corpus: Path, number: int) -> int:
    """The run of a number, in a folder of its own; how many logs it wrote. AssertionError: it did not go well."""
    folder.mkdir(parents=True)
    run_yaml, how = write_run(folder, corpus), setting(number)
    overrides = [*how.overrides, *(_from_weights(folder, run_yaml, how) if how.starts_from_weights else ())]
    if how.num_ranks > 1:
        launched(how.num_ranks, run_yaml, *overrides, "batch.global_sequences=8", told_in=folder / "console.log")
        return 1
    words = [word for override in overrides for word in ("--set", override)]
    words += ["--json"] if how.as_json else []
    for count in (1, 2):
        with _printed_to(folder / f"console-{count}.log"), _stopping(folder, how.stop_after if count == 1 else None):
            code = amt(["train", str(run_yaml), *words])
        assert code in (STOPPED if count == 1 and how.stop_after is not None else (0,)), f"{folder}: exit code {code}"
        if code == 0:
            return count + _once_more(folder, how)
        words += ["--set", "run.eval_every=5", "--set", "optim.lr=9e-3"]  # noted as changed since the checkpoint
    raise AssertionError(f"{folder}: did not come to its end")


def _once_more(folder: Path, how: Setting) -> int:
    """Asks a run that is finished to train, as people do; how many logs that makes."""
    if not how.is_asked_again:
        return 0
    with _printed_to(folder / "console-again.log"):
        assert amt(["train", str(folder / "run" / "config.yaml")]) == 0
    return 1


def _from_weights(folder: Path, run_yaml: Path, how: Setting) -> list[str]:
    """Overrides by which a run starts from a checkpoint of random weights, and may train adapters alone."""
    model = load_run(run_yaml, how.overrides).model
    write_weights(folder / "base", model, weights(model))
    adapters = LORA if how.has_adapters else ()
    return [f"run.init_from={folder}/base", *adapters]


@contextlib.contextmanager
def _printed_to(path: Path) -> Iterator[None]:
    """What this process prints goes to a file, that of C++ too."""
    with path.open("ab", buffering=0) as file:
        sys.stdout.flush()
        sys.stderr.flush()
        kept = [os.dup(1), os.dup(2)]
        try:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, old in enumerate(kept, 1):
                os.dup2(old, number)
                os.close(old)


@contextlib.contextmanager
def _stopping(folder: Path, after: int | None) -> Iterator[None]:
    """SIGTERM once that step is in the metrics; none comes after the end."""
    ended = threading.Event()
    path = folder / "run" / "metrics.jsonl"

    def wait() -> None:
        while not ended.wait(POLL_S):
            if path.exists() and path.read_bytes().count(b'"kind":"step"') >= (after or 0):
                os.kill(os.getpid(), signal.SIGTERM)
                return

    if after is None:
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)  # one that comes too late ends nothing
    thread = threading.Thread(target=wait)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        signal.signal(signal.SIGTERM, before)


def main(arguments: list[str]) -> int:
    """Makes runs from a number on until there are so many logs. FOLDER/good.txt has those that went well, with how many
    logs each wrote."""
    folder, count = Path(arguments[0]), int(arguments[1])
    first = int(arguments[2]) if len(arguments) > 2 else 0
    corpus = make_corpus(folder / f"texts-{first}-{os.getpid()}")
    num_logs, number, since_s = 0, first, time.monotonic()
    while num_logs < count:
        try:
            made = make(folder / "runs" / str(number), corpus, number)
            num_logs += made
            with (folder / "good.txt").open("a") as file:
                file.write(f"{number} {made}\n")
        except (AssertionError, UserError) as error:
            print(f"{number}: {error}", flush=True)
        number += 1
        gc.collect()  # compiled graphs are in cycles
        print(f"{number} runs, {num_logs} logs, {time.monotonic() - since_s:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
