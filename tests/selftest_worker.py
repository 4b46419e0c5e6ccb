"""A process of a selftest whose checks do what their names say: see tests/unit/test_selftest.py."""

import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

from ascend_moe_train.selftest.processes import asked_of, found_path
from ascend_moe_train.selftest.results import Finding, Notes, NotPossibleError


def behave(name: str) -> Finding:
    match name.split()[0]:
        case "good":
            return Finding(figures={"error": 1e-7})
        case "bad":
            return Finding(problems=["it is wrong", "and so is this"])
        case "raises":
            raise ValueError("of an\noperator")
        case "impossible":
            raise NotPossibleError("no such device")
        case "crash":
            print("about to crash", flush=True)
            os.kill(os.getpid(), signal.SIGSEGV)
        case "quit":
            print("error: I quit", file=sys.stderr)
            sys.exit(3)
    time.sleep(1000)
    return Finding()


def main(folder: Path) -> None:
    asked = asked_of(folder)
    if asked.get("says_nothing"):
        sys.exit("error: it cannot start")
    notes = Notes(found_path(folder, 0), asked["part"])
    for name in asked["checks"]:
        notes.check(name, partial(behave, name))
    if asked.get("fails_at_its_end"):
        os.abort()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
