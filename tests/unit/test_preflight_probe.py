"""What runs on hosts for a preflight."""

import ast
import json
import socket
import subprocess
import sys
from pathlib import Path

from ascend_moe_train.cluster.preflight import probe
from ascend_moe_train.cluster.preflight.model import (
    Reading,
    read_reply,
)
from ascend_moe_train.cluster.preflight.self_report import code_digest, self_report


def test_two_probes_measure_their_link() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"address": "127.0.0.1", "port": port, "timeout_s": 8, "pings": 5}
    both = probed({"a": {"kind": "listen", **shared}, "b": {"kind": "send", "send_s": 0.05, **shared}})
    assert json.loads(both["a"].out)["bytes_per_s"] > 0
    assert json.loads(both["b"].out)["latency_s"] > 0


def probed(requests: dict[str, object], deadline_s: float = 20) -> dict[str, Reading]:
    request = json.dumps({"deadline_s": deadline_s, "readings": requests})
    source = Path(probe.__file__).read_bytes()
    done = subprocess.run([sys.executable, "-I", "-", request], input=source, capture_output=True, check=True)
    found = read_reply(done.stdout)
    assert found is not None
    return dict(found)


def test_the_probe_reads_what_it_is_asked(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("text")
    found = probed(
        {
            "words": {"kind": "command", "words": ["echo", "$(id)", "; x"], "timeout_s": 5},
            "code": {"kind": "command", "words": ["false"], "timeout_s": 5},
            "missing": {"kind": "command", "words": ["no-such-program"], "timeout_s": 5},
            "late": {"kind": "command", "words": ["sleep", "60"], "timeout_s": 0.2},
            "long": {"kind": "command", "words": ["yes"], "timeout_s": 20, "most_bytes": 1000},
            "file": {"kind": "file", "path": str(tmp_path / "a")},
            "folder": {"kind": "file", "path": str(tmp_path)},
            "digest": {"kind": "digest", "path": str(tmp_path / "none")},
            "disk": {"kind": "disk", "path": str(tmp_path / "x" / "y"), "write_bytes": 2**20, "timeout_s": 5},
            "names": {"kind": "names", "names": ["127.0.0.1", "no-such-host.invalid"]},
            "wrong": {"kind": "disk"},
        }
    )
    assert found["words"] == Reading(out="$(id) ; x\n", code=0, problem=None)
    assert found["code"].code == 1
    assert found["missing"].is_missing
    assert found["late"].problem == "no end within 0.2 s"
    assert found["long"].problem == "more than 1000 bytes of output"
    assert found["file"].out == "text"
    assert found["folder"].problem == "is no regular file"
    assert found["digest"].problem == "No such file or directory"
    disk = json.loads(found["disk"].out)
    assert disk["folder"] == str(tmp_path)
    assert disk["bytes_per_s"] > 0
    assert [each.name for each in tmp_path.iterdir()] == ["a"]
    assert json.loads(found["names"].out)["127.0.0.1"] == ["127.0.0.1"]
    assert found["wrong"].problem is not None
    assert found["wrong"].problem.startswith("KeyError")


def test_the_probe_has_a_deadline() -> None:
    found = probed({"a": {"kind": "command", "words": ["sleep", "3"], "timeout_s": 3}}, deadline_s=0.2)
    assert found["a"].problem == "no end within 0.2 s, with all others"


def test_the_probe_runs_on_old_pythons() -> None:
    tree = ast.parse(Path(probe.__file__).read_text(), feature_version=(3, 7))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert {name.partition(".")[0] for name in imported} <= sys.stdlib_module_names


def test_a_python_reports_itself() -> None:
    report = self_report()
    assert report["code"] == code_digest()
    assert json.loads(json.dumps(report))["versions"]["python"]["version"]
