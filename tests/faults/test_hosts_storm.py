"""Twenty faults in a row, of random kinds at random moments, on one training over two hosts: nothing is lost beyond the
newest checkpoint, and the end is that of a run that nothing happened to."""

import os
import random
import secrets
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hosts_train import LabRun, cut_link, kill, kill_agent, lab_of, mend_link, ranks, stop_host, wake_host
from tests.lab import Lab, LabHost, why_not
from tests.small_run import metrics, newest_state

REASON = why_not()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(REASON is not None, reason=str(REASON))]

NUM_FAULTS = 20
NUM_SPARES = 22  # hosts are left out once they were lost, or two failures in a row began there
SETTINGS = ("run.steps=500", "checkpoint.keep=2")
SEED = "AMT_TEST_SEED"  # variable with that of a run to be had again
START_S = 8.0  # what a start takes at least, within which some faults come


def struck_rank(number: int) -> Callable[[Lab, LabHost, random.Random], None]:
    """A signal to one of a host's ranks."""

    def strike(lab: Lab, host: LabHost, chance: random.Random) -> None:
        kill(chance.choice(sorted(ranks(host).values())), number)

    return strike


KINDS: dict[str, Callable[[Lab, LabHost, random.Random], None]] = {
    "rank killed": struck_rank(signal.SIGKILL),
    "rank stopped": struck_rank(signal.SIGSTOP),
    "agent killed": lambda lab, host, chance: kill_agent(host),
    "link cut": lambda lab, host, chance: cut_link(lab, host),
    "host stopped": lambda lab, host, chance: stop_host(host),
}


def strike_once(run: LabRun, kind: str, chance: random.Random, fallen: list[LabHost]) -> None:
    """One fault, in the start or in some step; returns once it has been taken in. Hosts that fell before come back
    while others do their work."""
    while True:
        hosts, before = run.active(but=fallen), len(run.failures())
        if chance.random() < 0.2:
            moment = "start"
            time.sleep(chance.uniform(0.0, START_S))
        else:
            step = run.newest + chance.randint(1, 12)
            moment = f"step {step}"
            run.wait_for_step(step)
            time.sleep(chance.uniform(0.0, 0.05))
        if len(run.failures()) == before:
            break
        print(f"no fault of ours: {run.failures()[-1]['message']}")
    for host in fallen:
        mend_link(run.lab, host)
        wake_host(host)
    struck, newest = chance.choice(hosts), run.newest
    KINDS[kind](run.lab, struck, chance)
    if kind in ("link cut", "host stopped"):
        fallen.append(struck)
    while len(run.failures()) == before:
        run.pause()
    failure = run.failures()[before]
    print(f"{kind} on {struck.name}, {moment}: {failure['message']} (checkpoint {failure['checkpoint_step']})")
    assert (failure["checkpoint_step"] or 0) >= newest


def test_twenty_faults_in_a_row(tmp_path: Path, small_corpus: Path) -> None:
    seed = int(os.environ.get(SEED) or secrets.randbelow(10**6))
    print(f"{SEED}={seed}")
    chance = random.Random(seed)
    kinds = [*KINDS] * (NUM_FAULTS // len(KINDS))
    chance.shuffle(kinds)
    options = ("--spares", str(NUM_SPARES), "--restarts", str(NUM_FAULTS))
    fallen: list[LabHost] = []
    with lab_of(tmp_path / "lab", 2 + NUM_SPARES) as lab:
        with LabRun(lab, tmp_path / "struck", small_corpus, *SETTINGS, options=options) as run:
            for kind in kinds:
                strike_once(run, kind, chance, fallen)
            assert run.wait() == 0, run.said
        with LabRun(lab, tmp_path / "whole", small_corpus, *SETTINGS, options=options) as whole:
            assert whole.wait() == 0, whole.said
    assert len(run.failures()) >= NUM_FAULTS and whole.failures() == []
    run.assert_nothing_lost()
    assert metrics(run.run_dir) == metrics(whole.run_dir)
    assert newest_state(run.run_dir) == newest_state(whole.run_dir)
