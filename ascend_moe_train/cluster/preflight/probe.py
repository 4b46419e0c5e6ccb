"""What runs on each host: it does the readings it is given, each with an end and a size, and prints them as JSON. Pure.

It is sent as it is to `python3 -I - REQUEST`, so it needs nothing but the standard library of Python 3.7. REQUEST is
JSON: `{"deadline_s": 20, "readings": {name: {"kind": ...}}}`. The reply has for each name `out`, a text, `code`, an
exit code or null, and `problem`, a text or null. No shell is started, and nothing is left on the host.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import hashlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

# beside PATH: where system tools and those of Ascend's driver are, which a session without a login shell may not have
FOLDERS = ["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/usr/local/Ascend/driver/tools"]
WORKERS = 8
BLOCK_BYTES = 2**20


def command(request: dict[str, Any]) -> dict[str, Any]:
    """The output of a program and its exit code; ended with all that it started when its time or size is over."""
    limit, timeout_s = request.get("most_bytes", 65536), request["timeout_s"]
    environment = dict(os.environ, LC_ALL="C")
    environment["PATH"] = os.pathsep.join([environment.get("PATH", ""), *FOLDERS])
    try:
        process = subprocess.Popen(
            request["words"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment,
        )
    except OSError as error:
        missing = error.errno == errno.ENOENT
        return reply(problem="not found" if missing else error.strerror or str(error))
    assert process.stdout is not None
    stdout = process.stdout
    late = threading.Event()

    def end() -> None:
        late.set()
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(timeout_s, end)
    timer.start()
    parts, size = [], 0
    try:
        for part in iter(lambda: os.read(stdout.fileno(), 65536), b""):
            size += len(part)
            if size > limit:
                end()
                break
            parts.append(part)
        process.wait()
    finally:
        timer.cancel()
        stdout.close()
    out = b"".join(parts).decode("utf-8", "replace")
    if size > limit:
        return reply(out, problem=f"more than {limit} bytes of output")
    if late.is_set():
        return reply(out, problem=f"no end within {timeout_s:g} s")
    return reply(out, process.returncode)


def file(request: dict[str, Any]) -> dict[str, Any]:
    """The text of a file."""
    limit = request.get("most_bytes", 65536)
    path = Path(request["path"])
    if path.exists() and not path.is_file():
        return reply(problem="is no regular file")
    with path.open("rb") as opened:
        content = opened.read(limit + 1)
    if len(content) > limit:
        return reply(problem=f"longer than {limit} bytes")
    return reply(content.decode("utf-8", "replace"), 0)


def digest(request: dict[str, Any]) -> dict[str, Any]:
    """The SHA-256 of a file."""
    total = hashlib.sha256()
    with Path(request["path"]).open("rb") as opened:
        for part in iter(lambda: opened.read(BLOCK_BYTES), b""):
            total.update(part)
    return reply(total.hexdigest(), 0)


def host(request: dict[str, Any]) -> dict[str, Any]:
    """What it is: names, sizes, limits, network cards, and variables whose names begin with `prefixes`."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    shared = os.statvfs("/dev/shm")
    limits: dict[str, int | None] = {}
    for name in ("NOFILE", "NPROC"):
        soft = resource.getrlimit(getattr(resource, "RLIMIT_" + name))[0]
        limits[name] = None if soft == resource.RLIM_INFINITY else soft
    mtus = {}
    for path in Path("/sys/class/net").glob("*/mtu"):
        with contextlib.suppress(OSError, ValueError):
            mtus[path.parent.name] = int(path.read_text())
    prefixes = tuple(request["prefixes"])
    found = {
        "hostname": socket.gethostname(),
        "machine": os.uname().machine,
        "kernel": os.uname().release,
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": pages,
        "shared_bytes": shared.f_blocks * shared.f_frsize,
        "shared_free_bytes": shared.f_bavail * shared.f_frsize,
        "limits": limits,
        "mtus": mtus,
        "devices": len(list(Path("/dev").glob("davinci[0-9]*"))),
        "environment": {name: value[:500] for name, value in os.environ.items() if name.startswith(prefixes)},
    }
    return reply(json.dumps(found), 0)


def ports(request: dict[str, Any]) -> dict[str, Any]:
    """Which of the ports from `first` to `last` are taken."""
    taken = []
    for port in range(request["first"], request["last"] + 1):
        for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
            try:
                opened = socket.socket(family)
            except OSError:  # a host without IPv6
                continue
            with opened:
                opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                try:
                    opened.bind((address, port))
                except OSError as error:
                    if error.errno == errno.EADDRINUSE:
                        taken.append(port)
                        break
    return reply(json.dumps(taken), 0)


def names(request: dict[str, Any]) -> dict[str, Any]:
    """The addresses that this host finds for each of some names."""
    found: dict[str, Any] = {}
    for name in request["names"]:
        try:
            found[name] = sorted({each[4][0] for each in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)})
        except OSError as error:
            found[name] = error.strerror or str(error)
    return reply(json.dumps(found), 0)


def connect(request: dict[str, Any]) -> dict[str, Any]:
    """What a host says to a connection: open, closed, or nothing within the time."""
    try:
        socket.create_connection((request["address"], request["port"]), request["timeout_s"]).close()
    except ConnectionRefusedError:
        return reply("closed", 0)
    except OSError as error:
        if error.errno in (None, errno.ETIMEDOUT):  # None is Python's own time-out, a class of its own before 3.10
            return reply("silent", 0)
        raise
    return reply("open", 0)


def listen(request: dict[str, Any]) -> dict[str, Any]:
    """Takes one connection: answers so many single bytes, then takes in what comes to its end."""
    family = socket.AF_INET6 if ":" in request["address"] else socket.AF_INET
    with socket.socket(family) as opened:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.settimeout(request["timeout_s"])
        opened.bind(("", request["port"]))
        opened.listen(1)
        peer, _ = opened.accept()
    with peer:
        peer.settimeout(request["timeout_s"])
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(request["pings"]):
            peer.sendall(peer.recv(1))
        size = 0
        start_s = time.monotonic()
        for part in iter(lambda: peer.recv(BLOCK_BYTES), b""):
            size += len(part)
        return reply(json.dumps({"bytes_per_s": size / max(time.monotonic() - start_s, 1e-9)}), 0)


def send(request: dict[str, Any]) -> dict[str, Any]:
    """The other side of `listen`: the quickest way of a byte there and back, then as much as goes in `send_s`."""
    end_s = time.monotonic() + request["timeout_s"]
    while True:
        try:
            peer = socket.create_connection((request["address"], request["port"]), 1)
            break
        except OSError:  # it may not listen yet
            if time.monotonic() > end_s:
                raise
            time.sleep(0.02)
    with peer:
        peer.settimeout(request["timeout_s"])
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        times = []
        for _ in range(request["pings"]):
            start_s = time.monotonic()
            peer.sendall(b"x")
            if not peer.recv(1):
                raise OSError("the other side ended")
            times.append(time.monotonic() - start_s)
        block = bytes(BLOCK_BYTES)
        end_s = time.monotonic() + request["send_s"]
        while time.monotonic() < end_s:
            peer.sendall(block)
    return reply(json.dumps({"latency_s": min(times) / 2}), 0)


def disk(request: dict[str, Any]) -> dict[str, Any]:
    """Room on the disk of a folder, or of the nearest above it that is there, and how fast it takes a file."""
    path = Path(request["path"])
    while not path.is_dir() and path != path.parent:
        path = path.parent
    room = os.statvfs(str(path))
    free_bytes = room.f_bavail * room.f_frsize
    found: dict[str, Any] = {"folder": str(path), "free_bytes": free_bytes, "bytes_per_s": None}
    size = min(request["write_bytes"], free_bytes // 2)
    if size >= BLOCK_BYTES:
        block = os.urandom(BLOCK_BYTES)
        start_s = time.monotonic()
        written = 0
        with tempfile.TemporaryFile(dir=str(path)) as opened:
            while written < size and time.monotonic() - start_s < request["timeout_s"]:
                opened.write(block)
                written += len(block)
            opened.flush()
            os.fsync(opened.fileno())
            found["bytes_per_s"] = written / max(time.monotonic() - start_s, 1e-9)
    return reply(json.dumps(found), 0)


KINDS = {
    "command": command,
    "file": file,
    "digest": digest,
    "host": host,
    "ports": ports,
    "names": names,
    "connect": connect,
    "listen": listen,
    "send": send,
    "disk": disk,
}


def reply(out: str = "", code: int | None = None, problem: str | None = None) -> dict[str, Any]:
    """One reading."""
    return {"out": out, "code": code, "problem": problem}


def read(request: dict[str, Any]) -> dict[str, Any]:
    """Does one reading, whatever it is."""
    try:
        return KINDS[request["kind"]](request)
    except OSError as error:
        return reply(problem=error.strerror or str(error))
    except Exception as error:  # a host must not go without the other readings
        return reply(problem=f"{type(error).__name__}: {error}")


def main() -> None:
    """Prints the reply; what is not done by the deadline is left out."""
    request = json.loads(sys.argv[1])
    workers = concurrent.futures.ThreadPoolExecutor(WORKERS)
    waiting = {name: workers.submit(read, each) for name, each in request["readings"].items()}
    concurrent.futures.wait(waiting.values(), request["deadline_s"])
    late = reply(problem=f"no end within {request['deadline_s']:g} s, with all others")
    done = {name: each.result() if each.done() else late for name, each in waiting.items()}
    sys.stdout.write(json.dumps({"readings": done}))
    sys.stdout.flush()
    os._exit(0)  # threads that hang, in a dead network disk for one, do not keep it


if __name__ == "__main__":
    main()
