"""How long a preflight takes to find each of the faults of `tests/lab_faults.py`, and what else it finds.

    python -m benchmarks.preflight_faults

Four hosts on this machine (`tests/lab.py`: network namespaces, sshd, fake tools of Ascend). The first row is the
cluster as it is when nothing is wrong. Seconds are those from the start of the preflight to its verdict, without
putting the fault in. Found are the hosts and checks of all findings. Needs root. Writes preflight_faults.json and .md.
"""

import os
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

from benchmarks.report import Row, machine, write_results
from tests.lab import Lab, why_not
from tests.lab_faults import FAULTS, mend
from tests.lab_preflight import preflight, report, with_fault

NUM_HOSTS = 4


def row(lab: Lab, name: str, **job: object) -> Row:
    """One preflight."""
    start_s = time.perf_counter()
    verdict = preflight(lab, **job)
    took_s = time.perf_counter() - start_s
    found = [f"{outcome.host} {check.name}: {outcome.found}" for check, outcome in verdict.findings]
    return {"fault": name, "seconds": f"{took_s:.1f}", "found": "; ".join(found) or "nothing"}


def main() -> None:
    """Measures, prints and writes the table."""
    if (reason := why_not()) is not None:
        sys.exit(f"preflight_faults: {reason}")
    with tempfile.TemporaryDirectory() as name, mock.patch.dict(os.environ):
        os.environ.pop("SSH_AUTH_SOCK", None)
        lab = Lab(Path(name), NUM_HOSTS)
        os.environ["HOME"] = str(lab.home)
        try:
            for host in lab.hosts:
                mend(lab, host, report())
            rows = [row(lab, "none")]
            for fault in FAULTS:
                with with_fault(lab, fault):
                    rows.append(row(lab, f"{fault.name} (h{fault.at})", **fault.job))
        finally:
            lab.close()
    slowest = max(rows, key=lambda each: float(each["seconds"]))
    note = f"{len(FAULTS)} faults; the slowest verdict took {slowest['seconds']} s ({slowest['fault']})."
    path = Path(__file__).with_suffix("")
    write_results(path, "Faults of a preflight", __doc__.partition("\n\n")[2], rows, [note], machine())


if __name__ == "__main__":
    main()
