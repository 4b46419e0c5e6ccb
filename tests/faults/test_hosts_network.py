"""Ranks on two hosts with a network of their own, reached by SSH: a link is cut, and both ends notice."""

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts_stand_in import SILENCE_S, SLOTS, launcher_command
from tests.lab import Lab, why_not
from tests.launched import environment
from tests.stand_in import RANK, ROOT, TIMEOUT_S

REASON = why_not()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(REASON is not None, reason=str(REASON))]


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    made = Lab(tmp_path, 2)
    try:
        yield made
    finally:
        made.close()


def test_a_cut_link_ends_the_ranks_on_both_sides(lab: Lab, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    addresses = {host.name: host.address for host in lab.hosts}
    command = launcher_command(run_dir, addresses, RANK, json.dumps([str(run_dir), 10**6, []]))
    own = {**environment(), "HOME": str(lab.home)}
    own.pop("SSH_AUTH_SOCK", None)
    with (tmp_path / "said").open("w") as said:
        process = subprocess.Popen(
            lab.switch.inside(*command), cwd=ROOT, env=own, stdin=subprocess.DEVNULL, stdout=said, stderr=said
        )
    try:
        end_s = time.monotonic() + TIMEOUT_S
        while not all((run_dir / f"rank-{rank}").exists() for rank in range(2 * SLOTS)):
            assert process.poll() is None and time.monotonic() < end_s, (tmp_path / "said").read_text()
            time.sleep(0.02)
        far = lab.hosts[1]
        assert len(far.processes(RANK)) >= SLOTS
        far.space.run("ip link set eth0 down\n")
        assert process.wait(TIMEOUT_S) == 1
        end_s = time.monotonic() + SILENCE_S + TIMEOUT_S
        while far.processes(RANK) and time.monotonic() < end_s:
            time.sleep(0.1)
        assert far.processes(RANK) == lab.hosts[0].processes(RANK) == []
    finally:
        process.kill()
        process.wait()
    assert f"was lost, with host h2 (nothing was heard of it for {SILENCE_S:g} s)" in (tmp_path / "said").read_text()
    failed = json.loads((run_dir / "failed.json").read_text())
    assert failed["host"] == "h2" and failed["lost"] == ["h2"]
