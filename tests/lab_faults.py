"""Faults to put into the hosts of a lab, each with what a preflight has to say of it, and how to mend a host."""

import copy
import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import asyncssh

from tests.lab import Lab, LabHost, npu_address, npu_smi, outfit, tls

RUN_FILE = "/mnt/run.yaml"
RUN_TEXT = "run: {steps: 10}\n"
Inject = Callable[[Lab, LabHost], AbstractContextManager[object] | None]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """`inject` puts it into host `at`; the one finding is of `check` on that host, with these words."""

    name: str
    check: str
    inject: Inject
    found: str
    remedy: str
    at: int = 3
    job: dict[str, Any] = field(default_factory=dict)


def software(report: dict[str, Any], **versions: str) -> str:
    """A report with other versions."""
    other = copy.deepcopy(report)
    for part, version in versions.items():
        other["versions"][part]["version"] = version
    return json.dumps(other)


def mend(lab: Lab, host: LabHost, report: dict[str, object]) -> None:
    """Makes a host good, whatever was done to it."""
    host.space.run(
        f"for place in {' '.join(BOUND)}; do umount -q $place || true; done\n"
        "while ip rule del pref 100 2>/dev/null; do :; done\n"
        "ip route flush type blackhole\n"
        "ip link set eth0 mtu 9000\n"
        "echo 60000-60031 > /proc/sys/net/ipv4/ip_local_reserved_ports\n"
        f"hostname {host.name}\n"
        "mount -o remount,rw,size=64m /mnt\nmount -o remount,size=2g /dev/shm\nrm -rf /mnt/*\n"
        f"printf '%s' '{RUN_TEXT}' > {RUN_FILE}\n"
    )
    lab.switch.run(f"ip link set v{host.number} up\n")
    outfit(host, report)
    first = lab.hosts[0]
    keys = [lab.user_key, first.own_key]
    (host.folder / "authorized_keys").write_bytes(b"".join(key.export_public_key() for key in keys))
    lab.know_all()
    if host is first:
        host.write_key("root/.ssh/id_ed25519", host.own_key)
        (host.folder / "root" / ".ssh" / "known_hosts").write_text((lab.home / ".ssh" / "known_hosts").read_text())
    host.start_sshd()


BOUND = ("/sys/kernel/mm/transparent_hugepage/enabled",)


def shell(script: str) -> Inject:
    """A script inside the host."""
    return lambda lab, host: _nothing(host.space.run(script))


def text(name: str, content: str) -> Inject:
    """Another content of what a fake prints."""
    return lambda lab, host: host.text(name, content)


def tool(name: str, script: str) -> Inject:
    """Another fake."""
    return lambda lab, host: host.tool(name, script)


def report_with(change: Callable[[dict[str, Any]], str]) -> Inject:
    """Another report of its Python."""

    def inject(lab: Lab, host: LabHost) -> None:
        host.text("report.json", change(json.loads((host.folder / "report.json").read_text())))

    return inject


def listener(port: int) -> Inject:
    """Somebody who holds a port."""

    @contextmanager
    def inject(lab: Lab, host: LabHost) -> Iterator[None]:
        with host.space.entered():
            held = socket.create_server(("0.0.0.0", port))
        with held:
            yield

    return inject


def _nothing(done: object) -> None:
    return None


def _other_key(lab: Lab, host: LabHost) -> None:
    host.write_key("other_key", asyncssh.generate_private_key("ssh-ed25519"))
    host.start_sshd(key="other_key")


def _unknown_key(lab: Lab, host: LabHost) -> None:
    known = lab.home / ".ssh" / "known_hosts"
    known.write_text("".join(f"{line}\n" for line in known.read_text().splitlines() if host.address not in line))


def _denied(lab: Lab, host: LabHost) -> None:
    (host.folder / "authorized_keys").write_text("")


def _denied_between(lab: Lab, host: LabHost) -> None:
    (host.folder / "authorized_keys").write_bytes(lab.user_key.export_public_key())


def _few_files(lab: Lab, host: LabHost) -> None:
    assert host.sshd is not None
    host.space.run(f"prlimit --pid {host.sshd.pid} --nofile=1024:8192\n")


def _few_cores(lab: Lab, host: LabHost) -> None:
    assert host.sshd is not None
    os.sched_setaffinity(host.sshd.pid, {min(os.sched_getaffinity(0))})


def _no_python(lab: Lab, host: LabHost) -> None:
    (host.folder / "bin" / "amt-python").unlink()


def _twice(lab: Lab, host: LabHost) -> None:
    other = npu_address(1, 4)
    host.text("hccn/ip-4", f"ipaddr:{other}\nnetmask:255.255.0.0\n")
    conf = host.folder / "etc" / "hccn.conf"
    conf.write_text(conf.read_text().replace(npu_address(host.number, 4), other))


def _link_down(lab: Lab, host: LabHost) -> None:
    """Of an NPU; its neighbour in the ring then does not reach it."""
    host.text("hccn/link-5", "link status: DOWN\n")
    lab.hosts[host.number - 2].text("hccn/ping-5", "recv time out seq=0\n3 packets transmitted, 0 received\n")


def _misfit(report: dict[str, Any]) -> str:
    check = dict(report["checks"][2], verdict="wrong", found="CANN 9.0.0, driver 24.1.RC2", expected="one that lists")
    return json.dumps(report | {"checks": [check], "remedy": ""})


def _cover(name: str, content: str) -> Inject:
    return lambda lab, host: _nothing(
        host.space.run(f"printf '%s' '{content}' > {host.folder}/cover\nmount --bind {host.folder}/cover {name}\n")
    )


def injected(fault: Fault, lab: Lab) -> AbstractContextManager[object]:
    """With the fault in its host."""
    return fault.inject(lab, lab.hosts[fault.at - 1]) or nullcontext()


DCMI = "dcmi module initialize failed. ret is -8005"

FAULTS = (
    Fault(
        name="host unreachable",
        check="ssh",
        inject=lambda lab, host: _nothing(lab.switch.run(f"ip link set v{host.number} down\n")),
        found="",
        remedy="look",
    ),
    Fault(
        name="sshd down",
        check="ssh",
        inject=lambda lab, host: host.stop_sshd(),
        found="nothing listens",
        remedy="start sshd",
    ),
    Fault(
        name="wrong host key", check="ssh", inject=_other_key, found="not the one of known_hosts", remedy="remove the"
    ),
    Fault(name="unknown host key", check="ssh", inject=_unknown_key, found="not in known_hosts", remedy="fingerprint"),
    Fault(name="key not accepted", check="ssh", inject=_denied, found="none of your keys", remedy="authorized_keys"),
    Fault(
        name="first host not let in",
        check="ssh between",
        inject=_denied_between,
        found="to h3: ",
        remedy="authorized_keys",
        at=3,
        job={"ssh": "first"},
    ),
    Fault(
        name="link between two hosts cut",
        check="reach",
        inject=shell("ip route add blackhole 10.77.0.2/32"),
        found="between it and h2",
        remedy="route",
    ),
    Fault(name="MTU 1500", check="mtu", inject=shell("ip link set eth0 mtu 1500"), found="eth0 has 1500", remedy="MTU"),
    Fault(
        name="firewall",
        check="firewall",
        inject=shell("ip rule add pref 100 ipproto tcp sport 60000 blackhole"),
        found="port 60000 is not let through",
        remedy="open the port",
    ),
    Fault(name="port taken", check="ports", inject=listener(60_003), found="taken: 60003", remedy="end what listens"),
    Fault(
        name="port of the master taken",
        check="ports",
        inject=listener(8118),
        found="taken: 8118",
        remedy="--master-port",
        at=1,
    ),
    Fault(
        name="ports not reserved",
        check="reserved ports",
        inject=shell("echo > /proc/sys/net/ipv4/ip_local_reserved_ports"),
        found="60000 to 60031",
        remedy="reserve",
    ),
    Fault(
        name="clock 3 s off",
        check="clock",
        inject=tool("date", "exec /usr/bin/date -d '+3 seconds' \"$@\"\n"),
        found=" s ahead",
        remedy="chrony",
    ),
    Fault(
        name="no time source",
        check="time source",
        inject=tool("timedatectl", "echo no\n"),
        found="no time source",
        remedy="start chrony",
    ),
    Fault(
        name="disk full",
        check="disk",
        inject=shell("head -c 60000000 /dev/zero > /mnt/full"),
        found="MB free, 16.0 MB needed",
        remedy="make room",
    ),
    Fault(
        name="disk read-only",
        check="disk",
        inject=shell("mount -o remount,ro /mnt"),
        found="Read-only file system",
        remedy="mount another disk",
    ),
    Fault(
        name="little shared memory",
        check="shared memory",
        inject=shell("mount -o remount,size=64m /dev/shm"),
        found="free in /dev/shm",
        remedy="--shm-size",
    ),
    Fault(name="few files", check="limits", inject=_few_files, found="nofile 1,024, 4,096 wanted", remedy="nofile"),
    Fault(
        name="huge pages differ",
        check="huge pages",
        inject=_cover(BOUND[0], "always madvise [other]"),
        found="transparent other",
        remedy="as on the other hosts",
    ),
    Fault(name="fewer cores", check="hardware", inject=_few_cores, found="1 cores", remedy="cgroup"),
    Fault(
        name="hostname twice", check="hostname", inject=shell("hostname h1"), found="as h1 does", remedy="hostnamectl"
    ),
    Fault(
        name="other environment",
        check="environment",
        inject=lambda lab, host: host.start_sshd("HCCL_CONNECT_TIMEOUT=1800"),
        found="HCCL_CONNECT_TIMEOUT=1800, most hosts have (unset)",
        remedy="alike",
    ),
    Fault(
        name="an NPU missing",
        check="npus",
        inject=text("npu-smi.txt", npu_smi(range(7))),
        found="7 of 8 NPUs",
        remedy="lspci",
    ),
    Fault(
        name="driver dead",
        check="npus",
        inject=tool("npu-smi", f"echo '{DCMI}'\nexit 1\n"),
        found=DCMI,
        remedy="driver",
    ),
    Fault(
        name="an NPU ill",
        check="npu health",
        inject=text("npu-smi.txt", npu_smi(health={6: "Alarm"})),
        found="NPU 6 Alarm",
        remedy="reset",
    ),
    Fault(
        name="an NPU busy",
        check="npu idle",
        inject=text("npu-smi.txt", npu_smi(process=(2, 123456))),
        found="process 123456 on NPU 2",
        remedy="end it",
    ),
    Fault(
        name="an NPU held by a container",
        check="npu idle",
        inject=text("npu-smi.txt", npu_smi(hbm_mb={1: 30000})),
        found="NPU 1 holds 30,000 of 65,536 MB",
        remedy="docker",
    ),
    Fault(name="NPU link down", check="npu link", inject=_link_down, found="NPU 5 DOWN", remedy="fibre"),
    Fault(
        name="NPU without address",
        check="npu address",
        inject=text("hccn/ip-2", ""),
        found="NPU 2 has no",
        remedy="set",
    ),
    Fault(
        name="NPU with another address",
        check="npu address",
        inject=text("hccn/ip-2", "ipaddr:192.168.9.9\nnetmask:255.255.0.0\n"),
        found="says 192.168.3.12",
        remedy="as root",
    ),
    Fault(name="NPU address twice", check="npu address", inject=_twice, found="as NPU 4 of h1 does", remedy="as root"),
    Fault(
        name="other netmask",
        check="npu address",
        inject=text("hccn/ip-2", "ipaddr:192.168.3.12\nnetmask:255.255.255.0\n"),
        found="netmask 255.255.255.0",
        remedy="as root",
    ),
    Fault(name="TLS differs", check="npu tls", inject=text("hccn/tls-7", tls(7, 1)), found="on NPU 7", remedy="alike"),
    Fault(
        name="NPU not reached",
        check="npu ping",
        inject=text("hccn/ping-2", "recv time out seq=0\n3 packets transmitted, 0 received, 100.00% packet loss\n"),
        found="NPU 2 does not reach that of h4",
        remedy="VLAN",
    ),
    Fault(name="no Python", check="python", inject=_no_python, found="there is no amt-python", remedy="--python"),
    Fault(
        name="package missing",
        check="python",
        inject=tool("amt-python", "echo 'amt-python: No module named ascend_moe_train' >&2\nexit 1\n"),
        found="No module named",
        remedy="install it",
    ),
    Fault(
        name="other MindSpore",
        check="versions",
        inject=report_with(lambda report: software(report, mindspore="2.9.0")),
        found="mindspore 2.9.0, most hosts have",
        remedy="install what the other",
    ),
    Fault(
        name="other driver",
        check="versions",
        inject=report_with(lambda report: software(report, driver="24.1.rc2")),
        found="driver 24.1.rc2, most hosts have 25.0.rc1.1",
        remedy="install what the other",
    ),
    Fault(
        name="versions do not fit",
        check="versions fit",
        inject=report_with(_misfit),
        found="CANN with driver: CANN 9.0.0",
        remedy="install",
    ),
    Fault(
        name="other code",
        check="code",
        inject=report_with(lambda report: json.dumps(report | {"code": "0" * 64})),
        found="with other files (000000000000) than here",
        remedy="same version",
    ),
    Fault(
        name="other run file",
        check="run file",
        inject=shell(f"echo 'seed: 2' >> {RUN_FILE}"),
        found="another one than here",
        remedy="copy it",
    ),
    Fault(name="no run file", check="run file", inject=shell(f"rm {RUN_FILE}"), found="No such file", remedy="copy it"),
)
