"""`amt launch` with ranks in which something goes wrong, said by FAULT in their environment, and what the doctor kept.

`python -m tests.faulty launch ...` is the launcher; this module is its ranks' program as well: the trainer, or
stand-ins of it that only take steps together.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

from ascend_moe_train.cluster import msrun, variables
from ascend_moe_train.doctor.reading import VERDICT_NAME
from tests.launched import DEADLINE_S, environment
from tests.mistakes import AT_START, MISTAKES, Fault
from tests.stand_in import GO, ROOT

FAULT = "FAULT"
MODULE = "tests.faulty"
STEPS = 1000
STAND_IN_S = 3.0  # the deadline of a stand-in's step


@dataclass(frozen=True, kw_only=True)
class Failed:
    """How a launch ended, and the verdict that the launcher kept, as JSON."""

    code: int
    errors: str
    verdict: Mapping[str, Any]

    @property
    def cause(self) -> Mapping[str, Any]:
        """The root cause of the verdict."""
        found = self.verdict["cause"]
        assert isinstance(found, dict)
        return found


def launched(num_ranks: int, run_yaml: Path, fault: Fault, *overrides: str, starter: str = "mpiexec") -> Failed:
    """Launches with a fault, a stand-in's where `fault` says `stand_in`, to the end that it has."""
    settings = [word for override in overrides for word in ("--set", override)]
    if "stand_in" in fault:
        (run_yaml.parent / GO).touch()
        settings += ["--set", f"parallel.deadlines.step_s={STAND_IN_S}"]
    how = ["launch", "--ranks", str(num_ranks), "--starter", starter, "train", str(run_yaml), *settings, "--json"]
    done = subprocess.run(
        [sys.executable, "-m", MODULE, *how],
        cwd=ROOT,
        env={**environment(), FAULT: json.dumps({"folder": str(run_yaml.parent), **fault})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        timeout=DEADLINE_S,
    )
    kept = run_yaml.parent / "run" / "logs" / VERDICT_NAME
    verdict = json.loads(kept.read_text()) if kept.exists() else {}
    return Failed(code=done.returncode, errors=done.stderr, verdict=verdict)


@contextlib.contextmanager
def taken_port() -> Iterator[int]:
    """A port of this machine at which somebody else listens."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


def _launcher(fault: Fault, words: list[str]) -> NoReturn:
    from ascend_moe_train.cli import launch_starts
    from ascend_moe_train.cli.main import run

    sys.argv = ["amt", *words]
    port = fault.get("scheduler_port")
    with (
        patch.object(launch_starts, "RANK_MODULE", MODULE),
        patch.object(msrun, "free_port", lambda: port) if port is not None else contextlib.nullcontext(),
    ):
        run()
    raise AssertionError("the command line ends its process")


def _rank(fault: Fault, words: list[str]) -> int:
    from ascend_moe_train.cli import rank_main
    from ascend_moe_train.cluster.as_rank import as_rank
    from tests import rank_faults, stand_in

    if "stand_in" in fault:
        given = [dict(each) for each in (fault, fault.get("then", {})) if each.get("what", "skew") not in AT_START]

        def steps() -> tuple[int, str | None]:
            stand_in.main(fault["folder"], STEPS, given)
            return 0, None

        return as_rank(steps)
    if os.environ[variables.RANK] == str(fault.get("rank")) and "set" in fault:
        words = [words[0], "--set", fault["set"], *words[1:]]
    return rank_faults.main(fault, words) if "phase" in fault else rank_main.main(words)


def _main() -> int:
    given: Fault = json.loads(os.environ[FAULT])
    if variables.RANK not in os.environ:
        _launcher(given, sys.argv[1:])
    if os.environ[variables.RANK] == str(given.get("rank")) and given.get("what") in AT_START:
        MISTAKES[given["what"]](given)
    return _rank(given, sys.argv[1:])


if __name__ == "__main__":
    sys.exit(_main())
