"""Several hosts on one machine: each with network, mounts and name of its own, an sshd, and fake tools of Ascend.

A switch joins them, and the test's own thread can step into its network. Needs root and namespaces; nothing outside of
them is changed.
"""

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import asyncssh

SSHD = Path("/usr/sbin/sshd")
TOOLS = ("ip", "unshare", "nsenter", "ping", "mount", "prlimit")
SUBNET = "10.77.0"
HERE = f"{SUBNET}.254"
_CLONE_NEWNET = 0x40000000
_DEADLINE_S = 20
_libc = ctypes.CDLL(None, use_errno=True)

SSHD_CONFIG = """\
Port 22
ListenAddress 0.0.0.0
HostKey {folder}/host_key
PidFile none
UsePAM no
StrictModes no
PasswordAuthentication no
AuthorizedKeysFile {folder}/authorized_keys
MaxStartups 200
MaxSessions 50
SetEnv PATH={folder}/bin:/usr/sbin:/usr/bin:/sbin:/bin {environment}
"""

# Everything that a host has for itself, set up inside its namespaces.
SET_UP = """\
set -e
hostname {name}
ip link set lo up
ip link set eth0 mtu 9000 up
ip addr add {address}/24 dev eth0
mount -t sysfs sysfs /sys
mkdir -p {folder}/etc {folder}/etc.work {folder}/root {folder}/root.work {folder}/bin
mount -t tmpfs tmpfs /run
mkdir /run/sshd
mount -t tmpfs -o size=2g tmpfs /dev/shm
mount -t tmpfs -o size=64m tmpfs /mnt
mount -t overlay overlay -o lowerdir=/etc,upperdir={folder}/etc,workdir={folder}/etc.work /etc
mount -t overlay overlay -o lowerdir=/root,upperdir={folder}/root,workdir={folder}/root.work /root
rm -rf /root/.ssh /root/.bashrc /root/.profile
mkdir /root/.ssh
echo 60000-60031 > /proc/sys/net/ipv4/ip_local_reserved_ports
"""

# What of that, and of the network between hosts, a machine may not permit; a folder is $1.
TRY = """\
mount -t sysfs sysfs /sys
mkdir "$1/upper" "$1/work"
mount -t overlay overlay -o "lowerdir=/etc,upperdir=$1/upper,workdir=$1/work" /etc
ip link add bridge0 type bridge
ip link add one type veth peer name other
"""


def why_not() -> str | None:
    """Why this machine cannot have such hosts, None if it can."""
    if os.geteuid() != 0:
        return "needs root, for network namespaces"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None] + ([] if SSHD.exists() else [str(SSHD)])
    if missing:
        return f"not installed: {', '.join(missing)}"
    with tempfile.TemporaryDirectory() as folder:
        tried = subprocess.run(
            ["unshare", "-n", "-m", "-u", "sh", "-e", "-c", TRY, "sh", folder], capture_output=True, check=False
        )
    return None if tried.returncode == 0 else "namespaces, mounts or bridges are not permitted here"


class Namespace:
    """A process that holds namespaces until it is ended."""

    def __init__(self, *kinds: str) -> None:
        self._kinds = kinds
        self.process = subprocess.Popen(["unshare", *kinds, "sleep", "infinity"])
        end_s = time.monotonic() + _DEADLINE_S
        while not self._is_there() and time.monotonic() < end_s:
            time.sleep(0.002)

    def _is_there(self) -> bool:
        with contextlib.suppress(OSError):
            return Path(f"/proc/{self.process.pid}/comm").read_text() == "sleep\n"
        return False

    def inside(self, *words: str) -> list[str]:
        """The words of a command that runs in it."""
        return ["nsenter", "-t", str(self.process.pid), *self._kinds, "--", *words]

    def run(self, script: str) -> str:
        """Runs a fixed script of the test in it."""
        done = subprocess.run(self.inside("sh", "-e"), input=script, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{script}: {done.stderr}"
        return done.stdout

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """This thread, and those that it starts, in its network."""
        with Path(f"/proc/self/task/{threading.get_native_id()}/ns/net").open() as own:
            with Path(f"/proc/{self.process.pid}/ns/net").open() as other:
                assert _libc.setns(other.fileno(), _CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
            try:
                yield
            finally:
                assert _libc.setns(own.fileno(), _CLONE_NEWNET) == 0

    def end(self) -> None:
        """Ends it; what ran in it is to have ended before."""
        self.process.kill()
        self.process.wait()


class LabHost:
    """One host: its namespaces, its folder with fake tools, and its sshd."""

    def __init__(self, number: int, folder: Path, switch: Namespace, user_key: asyncssh.SSHKey) -> None:
        self.name = f"h{number}"
        self.number = number
        self.address = f"{SUBNET}.{number}"
        self.folder = folder / self.name
        self.folder.mkdir()
        self.space = Namespace("-n", "-m", "-u")
        switch.run(
            f"ip link add v{number} mtu 9000 type veth peer name eth0 netns {self.space.process.pid}\n"
            f"ip link set v{number} master br0 up\n"
        )
        self.space.run(SET_UP.format(name=self.name, address=self.address, folder=self.folder))
        self.host_key = asyncssh.generate_private_key("ssh-ed25519")
        self.own_key = asyncssh.generate_private_key("ssh-ed25519")
        self.write_key("host_key", self.host_key)
        (self.folder / "authorized_keys").write_bytes(user_key.export_public_key())
        self.sshd: subprocess.Popen[bytes] | None = None
        self.start_sshd()

    def processes(self, word: str) -> list[int]:
        """Those in its network that have this among the words of their commands."""
        here = Path(f"/proc/{self.space.process.pid}/ns/net").readlink()
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                is_here = entry.name.isdecimal() and (entry / "ns" / "net").readlink() == here
                if is_here and word in (entry / "cmdline").read_text().split("\0"):
                    found.append(int(entry.name))
        return found

    def write_key(self, name: str, key: asyncssh.SSHKey) -> None:
        """A private key, for this user only."""
        path = self.folder / name
        path.unlink(missing_ok=True)
        path.touch(mode=0o600)
        key.write_private_key(path)

    def start_sshd(self, environment: str = "", *, key: str = "host_key") -> None:
        """Starts it, anew if it runs, with more variables for its sessions."""
        self.stop_sshd()
        config = self.folder / "sshd_config"
        text = SSHD_CONFIG.format(folder=self.folder, environment=environment)
        config.write_text(text.replace(f"{self.folder}/host_key", f"{self.folder}/{key}"))
        words = self.space.inside("prlimit", "--nofile=8192", str(SSHD), "-D", "-e", "-f", str(config))
        with (self.folder / "sshd.log").open("ab") as log:
            self.sshd = subprocess.Popen(words, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        end_s = time.monotonic() + _DEADLINE_S
        listening = Path(f"/proc/{self.space.process.pid}/net/tcp")
        while ":0016 00000000:0000 0A" not in listening.read_text() and time.monotonic() < end_s:
            assert self.sshd.poll() is None, (self.folder / "sshd.log").read_text()
            time.sleep(0.005)

    def stop_sshd(self) -> None:
        """Ends it."""
        if self.sshd is not None:
            self.sshd.send_signal(signal.SIGTERM)
            self.sshd.wait()
            self.sshd = None

    def tool(self, name: str, script: str) -> None:
        """A fake program on the host's PATH."""
        path = self.folder / "bin" / name
        path.unlink(missing_ok=True)  # one that runs cannot be written
        path.write_text(f"#!/bin/sh\n{script}")
        path.chmod(0o755)

    def text(self, name: str, content: str) -> None:
        """A file of the host's folder, which fakes print."""
        (self.folder / name).parent.mkdir(exist_ok=True)
        (self.folder / name).write_text(content)


class Lab:
    """Some hosts around a switch, on which the test stands, and the user's ~/.ssh for them."""

    def __init__(self, folder: Path, num_hosts: int) -> None:
        self.folder = folder
        self.home = folder / "home"
        (self.home / ".ssh").mkdir(parents=True)
        user_key = asyncssh.generate_private_key("ssh-ed25519")
        user_key.write_private_key(self.home / ".ssh" / "id_ed25519")
        self.user_key = user_key
        self.switch = Namespace("-n")
        self.switch.run(
            "ip link set lo up\nip link add br0 type bridge\nip link set br0 mtu 9000 up\n"
            f"ip addr add {HERE}/24 dev br0\n"
        )
        self.hosts: list[LabHost] = []
        for number in range(1, num_hosts + 1):
            self.hosts.append(LabHost(number, folder, self.switch, user_key))
        self.know_all()

    def know_all(self) -> None:
        """Writes known_hosts, with the right key of every host."""
        lines = [f"{host.address} {host.host_key.export_public_key().decode()}" for host in self.hosts]
        (self.home / ".ssh" / "known_hosts").write_text("".join(lines))

    def hostfile(self, slots: int = 8) -> str:
        """The text of one."""
        return "".join(f"{host.name} slots={slots} address={host.address} user=root\n" for host in self.hosts)

    def close(self) -> None:
        """Ends everything that was started."""
        for host in self.hosts:
            host.stop_sshd()
            host.space.end()
        self.switch.end()


NPU_SMI = """\
+------------------------------------------------------------------------------------------------+
| npu-smi 25.0.rc1.1               Version: 25.0.rc1.1                                           |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
"""
RULE = "+===========================+===============+====================================================+\n"


def npu_smi(
    numbers: range | list[int] = range(8),
    *,
    health: dict[int, str] | None = None,
    process: tuple[int, int] | None = None,
    hbm_mb: dict[int, int] | None = None,
) -> str:
    """What `npu-smi info` prints (ascend-env.md, section 1)."""
    rows = "".join(
        f"| {number:<5} 910B2               | {(health or {}).get(number, 'OK'):<13} |"
        " 94.5        44                0    / 0             |\n"
        f"| 0                         | 0000:C{number}:00.0  |"
        f" 0           0    / 0          {(hbm_mb or {}).get(number, 3404):<5}/ 65536         |\n{RULE}"
        for number in numbers
    )
    head = "| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |\n"
    listed = "".join(f"| No running processes found in NPU {number:<48} |\n{RULE}" for number in numbers)
    if process is not None:
        number, identifier = process
        listed = f"| {number:<7} 0                 | {identifier:<13} | python                   | 30210            |\n"
    return NPU_SMI + rows + RULE + head + RULE + listed


def hccn_script(folder: Path) -> str:
    """A fake hccn_tool: it prints the file of its option and NPU."""
    return f'case "$3" in\n-ping) cat "{folder}/hccn/ping-$2" ;;\n*) cat "{folder}/hccn/${{3#-}}-$2" ;;\nesac\n'


def outfit(host: LabHost, report: dict[str, object], slots: int = 8) -> None:
    """Gives a host everything that a good one has."""
    host.text("npu-smi.txt", npu_smi())
    host.tool("npu-smi", f'cat "{host.folder}/npu-smi.txt"\n')
    host.tool("hccn_tool", hccn_script(host.folder))
    conf = ""
    for number in range(slots):
        address = npu_address(host.number, number)
        host.text(f"hccn/link-{number}", "link status: UP\n")
        host.text(f"hccn/ip-{number}", f"ipaddr:{address}\nnetmask:255.255.0.0\n")
        host.text(f"hccn/tls-{number}", tls(number, 0))
        host.text(
            f"hccn/ping-{number}", "recv seq=0,time=0.1ms\n3 packets transmitted, 3 received, 0.00% packet loss\n"
        )
        conf += f"address_{number}={address}\nnetmask_{number}=255.255.0.0\n"
    host.text("etc/hccn.conf", conf)
    host.tool("timedatectl", "echo yes\n")
    host.text("report.json", json.dumps(report))
    host.tool("amt-python", f'cat "{host.folder}/report.json"\n')
    (host.folder / "bin" / "date").unlink(missing_ok=True)


def npu_address(host: int, number: int) -> str:
    """Of an NPU of the lab."""
    return f"192.168.{host}.{10 + number}"


def tls(number: int, switch: int) -> str:
    """What `hccn_tool -tls -g` prints (ascend-env.md, section 1)."""
    return (
        f"dev_id:{number}, tls switch[{switch}](0:disable, 1:enable), tls preconfigured[1](0:non-preset, 1:preset), "
        "tls alarm time threshold[60]days\n"
    )
