"""How long a preflight of many hosts takes, and what it needs: simulated hosts behind one SSH server of this machine.

    python -m benchmarks.preflight [--hosts 1000]

Every host is an address of 127.0.0.0/8. The server, a process of its own, answers each session over SSH as a good host
with 8 NPUs would, half a second after it was asked; no probe runs. The client is the preflight as it is: known_hosts, a
key, all readings, all judgements. Memory is the largest resident size of the client's process, files are the most that
it had open. The peer is the same with one session at a time, for so many hosts as are said. Writes preflight.json and
preflight.md.
"""

import argparse
import asyncio
import json
import os
import resource
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import asyncssh

from ascend_moe_train.cluster.hostfile import Host, Hosts
from ascend_moe_train.cluster.preflight.model import Job
from ascend_moe_train.cluster.preflight.run import ask_all, judge_all
from ascend_moe_train.cluster.remote import Limits
from benchmarks.report import Row, machine, write_results
from tests.lab import npu_smi, tls

PORT = 2022
ANSWER_S = 0.5
CODE = "0" * 64
FACTS = {
    "machine": "aarch64",
    "kernel": "5.10",
    "cores": 192,
    "memory_bytes": 2**41,
    "shared_bytes": 2**40,
    "shared_free_bytes": 2**40,
    "limits": {"NOFILE": 65_536, "NPROC": None},
    "mtus": {"lo": 65_536, "eth0": 9000},
    "devices": 8,
    "environment": {"HCCL_CONNECT_TIMEOUT": "600"},
}
VERSIONS = {part: {"version": "1"} for part in ("python", "mindspore", "cann", "driver", "firmware")}


def answer(address: str, name: str, request: dict[str, Any]) -> dict[str, Any]:
    """What a good host gives for one reading."""
    kind, words = request["kind"], request.get("words", [""])
    out: object = {"host": FACTS | {"hostname": f"host-{address}"}, "ports": []}.get(kind, "")
    if kind == "connect":
        out = "closed"
    elif kind == "names":
        out = {each: [each] for each in request["names"]}
    elif kind == "disk":
        out = {"folder": request["path"], "free_bytes": 2**45, "bytes_per_s": 1e9}
    elif kind == "file":
        out = {"range": "32768 60999", "reserved": "60000-60031", "thp": "[always]", "hugepages": "0"}.get(name, "")
    elif words[0] == "npu-smi":
        out = npu_smi()
    elif words[0] == "timedatectl":
        out = "yes"
    elif words[0] == "hccn_tool":
        own = ".".join(address.split(".")[2:])
        out = {"-link": "link status: UP", "-ip": f"ipaddr:10.{words[2]}.{own}\nnetmask:255.0.0.0"}.get(
            words[3], tls(0, 0) if words[3] == "-tls" else "3 packets transmitted, 3 received"
        )
    elif name == "software":
        out = {"versions": VERSIONS, "checks": [], "package": "1", "code": CODE}
    return {"out": out if isinstance(out, str) else json.dumps(out), "code": 0, "problem": None}


async def serve(folder: Path) -> None:
    """Answers until it is ended."""

    async def handle(process: asyncssh.SSHServerProcess[bytes]) -> None:
        words = shlex.split(process.command or "")
        await process.stdin.read()
        if words[0] == "date":
            process.stdout.write(b"%.9f\n" % time.time())
        else:
            await asyncio.sleep(ANSWER_S)
            address = process.get_extra_info("sockname")[0]
            asked = json.loads(words[-1])["readings"]
            readings = {name: answer(address, name, each) for name, each in asked.items()}
            process.stdout.write(json.dumps({"readings": readings}).encode())
        process.exit(0)

    await asyncssh.listen(
        "",
        PORT,
        server_host_keys=[str(folder / "host_key")],
        authorized_client_keys=str(folder / "authorized_keys"),
        process_factory=handle,
        encoding=None,
        backlog=1000,
    )
    print("ready", flush=True)
    await asyncio.Event().wait()


def measure(num_hosts: int, sessions: int) -> Row:
    """One preflight, in this process."""
    hosts = [f"127.{1 + number // 62_500}.{number // 250 % 250}.{1 + number % 250}" for number in range(num_hosts)]
    job = Job(
        hosts=Hosts(
            hosts=tuple(Host(name=each, address=each, slots=8, user="me", port=PORT) for each in hosts),
            source="made up",
        ),
        python="/usr/bin/python3",
        master_port=8118,
        code=CODE,
        folder="/mnt",
    )
    most_files = 0

    def count(done: int, of: int) -> None:
        nonlocal most_files
        most_files = max(most_files, sum(1 for _ in Path("/proc/self/fd").iterdir()))

    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    verdict = judge_all(asyncio.run(ask_all(job, Limits(sessions=sessions, connect_s=30), count)))
    took_s, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
    # the names check has no fault to find: addresses of this benchmark are loopback addresses
    findings = [each for check, each in verdict.findings if check.name != "names"]
    assert not findings, [each.found for each in findings[:3]]
    assert len(verdict.seen.answers) == num_hosts
    return {
        "hosts": f"{num_hosts:,}",
        "sessions at once": sessions,
        "seconds": f"{took_s:.1f}",
        "hosts a second": f"{num_hosts / took_s:.1f}",
        "client's CPU, s": f"{cpu_s:.1f}",
        "memory, MB": f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3:,.0f}",
        "files": most_files,
    }


def main() -> None:
    """Measures, prints and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, default=1000)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--one", type=int, nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve is not None:
        asyncio.run(serve(asked.serve))
    if asked.one is not None:
        print(json.dumps(measure(*asked.one)))
        return
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / ".ssh").mkdir()
        host_key, user_key = (asyncssh.generate_private_key("ssh-ed25519") for _ in range(2))
        host_key.write_private_key(folder / "host_key")
        user_key.write_private_key(folder / ".ssh" / "id_ed25519")
        (folder / "authorized_keys").write_bytes(user_key.export_public_key())
        (folder / ".ssh" / "known_hosts").write_text(f"[127.*]:{PORT} {host_key.export_public_key().decode()}")
        own = [sys.executable, "-m", "benchmarks.preflight"]
        environment = {each: value for each, value in os.environ.items() if each != "SSH_AUTH_SOCK"}
        server = subprocess.Popen([*own, "--serve", name], stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == "ready\n"
            for num_hosts, sessions in ((asked.hosts // 4, 64), (asked.hosts, 64), (asked.hosts // 50, 1)):
                done = subprocess.run(
                    [*own, "--one", str(num_hosts), str(sessions)],
                    stdout=subprocess.PIPE,
                    text=True,
                    check=True,
                    env=environment | {"HOME": name},
                )
                rows.append(json.loads(done.stdout))
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait()
    load = f"Load of the machine at the end: {os.getloadavg()[0]:.1f} on {len(os.sched_getaffinity(0))} cores."
    path = Path(__file__).with_suffix("")
    write_results(path, "Preflight of many hosts", __doc__.partition("\n\n")[2], rows, [load], machine())


if __name__ == "__main__":
    main()
