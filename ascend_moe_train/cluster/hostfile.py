"""The hosts of a job: from a hostfile, one line a host.

    # comment
    192.168.1.[10-17] slots=8
    node[01-04] slots=8 user=train port=2222 nic=eth0 address=10.0.0.[1-4]
    2001:db8::7 slots=8

Pure. docs/hostfile.md has the whole format.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ascend_moe_train.cluster.host_words import (
    MAX_HOSTS,
    Place,
    expand,
    host_of,
    is_loopback,
    nic_of,
    shown,
    user_of,
    whole_of,
)
from ascend_moe_train.config_error import nearest
from ascend_moe_train.errors import ConfigError

MAX_BYTES = 4 * 2**20
MAX_LINE = 4_096  # characters
MAX_SLOTS = 1_024
KEYS = ("slots", "user", "port", "nic", "address")

_WORD = re.compile(r"[^ \t]+")


@dataclass(frozen=True, kw_only=True)
class Host:
    """One host. `address` is where it is reached, which is its name unless told; None is left to ssh's own
    configuration (user, port) or to the route (nic). `slots` are its NPUs, or its ranks where there are none."""

    name: str
    address: str
    slots: int
    user: str | None = None
    port: int | None = None
    nic: str | None = None
    place: str = field(default="", compare=False)  # where it was read, such as hosts:3:1

    @property
    def nic_variables(self) -> dict[str, str]:
        """What makes collectives go through its network card, if one was named. A name alone is a prefix to HCCL, so
        that eth1 would be eth10 too; to the others it is that card."""
        if self.nic is None:
            return {}
        return {"HCCL_SOCKET_IFNAME": f"={self.nic}", "UCX_NET_DEVICES": self.nic, "FI_TCP_IFACE": self.nic}


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """All hosts of a job in the order of their node ranks: at least one, each once, with the same number of slots, and
    no loopback address among several. Made by `together`."""

    hosts: tuple[Host, ...]
    source: str

    def __iter__(self) -> Iterator[Host]:
        return iter(self.hosts)

    def __len__(self) -> int:
        return len(self.hosts)

    @property
    def slots(self) -> int:
        """Of each host."""
        return self.hosts[0].slots

    @property
    def num_ranks(self) -> int:
        """Of all hosts."""
        return len(self.hosts) * self.slots


def read_hostfile(path: Path) -> Hosts:
    """Raises ConfigError: there is no such file, or what `parse_hostfile` raises."""
    if not path.exists():
        raise ConfigError(f"{path}: there is no such hostfile")
    if not path.is_file():  # a pipe might never end
        raise ConfigError(f"{path}: is no regular file, a hostfile is needed")
    with path.open("rb") as file:
        return parse_hostfile(file.read(MAX_BYTES + 1), str(path))


def parse_hostfile(content: bytes, source: str) -> Hosts:
    """Raises ConfigError with line and column: what cannot be read, or hosts that do not go together."""
    if len(content) > MAX_BYTES:
        raise ConfigError(f"{source}: longer than {MAX_BYTES:,} bytes, which no hostfile is")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        found = f"byte {content[error.start]:#04x} at offset {error.start}"
        raise ConfigError(f"{source}: not UTF-8 text: {found}") from None
    hosts: list[Host] = []
    for number, line in enumerate(text.split("\n"), start=1):
        place = Place(source=source, line=number)
        hosts += _line_hosts(line.removesuffix("\r"), place)
        if len(hosts) > MAX_HOSTS:
            raise place.error(f"more than {MAX_HOSTS:,} hosts")
    return together(hosts, source)


def together(hosts: Sequence[Host], source: str) -> Hosts:
    """Raises ConfigError: no host, one twice, unequal slots, or a loopback address among several."""
    if not hosts:
        raise ConfigError(f"{source}: there is no host in it: a line is such as 'node01 slots=8'")
    first = hosts[0]
    seen: dict[str, Host] = {}
    for host in hosts:
        for word in {host.name.lower(), host.address.lower()}:
            if (other := seen.setdefault(word, host)) is not host:
                raise ConfigError(f"{host.place}: {shown(word)} is there twice, first at {other.place}")
        if host.slots != first.slots:
            raise ConfigError(
                f"{host.place}: slots={host.slots}, and {first.place} has slots={first.slots}: "
                "all hosts need the same number"
            )
        if len(hosts) > 1 and is_loopback(host.address):
            raise ConfigError(
                f"{host.place}: {shown(host.address)} is a loopback address, which means another machine on each host: "
                "give the address that the other hosts reach it by"
            )
    return Hosts(hosts=tuple(hosts), source=source)


def hosts_of_names(names: Sequence[tuple[str, Place]], slots: int, source: str) -> Hosts:
    """Hosts that have no more than a name, such as those of a batch system. Raises ConfigError, as `parse_hostfile`."""
    hosts = []
    for word, place in names:
        name = host_of(word, place)
        hosts.append(Host(name=name, address=name, slots=slots, place=str(place)))
    return together(hosts, source)


def _line_hosts(line: str, place: Place) -> list[Host]:
    """The hosts of one line: none, one, or those of a range."""
    words = _words(line, place)
    if not words:
        return []
    (where, text), *settings = words
    user, at, host_text = text.rpartition("@")
    given = _settings(settings)
    if "slots" not in given:
        raise where.error(f"{shown(text)} has no slots=, the number of its NPUs (or of its ranks): such as slots=8")
    if at and "user" in given:
        raise given["user"][0].error(f"user= and {shown(user)} before '@': give one of both")
    if at:
        given["user"] = (where, user)
    where = where.further(len(user) + len(at))
    names = [host_of(word, where) for word in expand(host_text, where)]
    addresses = _addresses(given.get("address"), names)
    slots = _whole(given, "slots", MAX_SLOTS)
    assert slots is not None
    port = _whole(given, "port", 65_535)
    own_user = user_of(given["user"][1], given["user"][0]) if "user" in given else None
    nic = nic_of(given["nic"][1], given["nic"][0]) if "nic" in given else None
    return [
        Host(name=name, address=address, slots=slots, user=own_user, port=port, nic=nic, place=str(where))
        for name, address in zip(names, addresses, strict=True)
    ]


def _words(line: str, place: Place) -> list[tuple[Place, str]]:
    """The words before the comment. Raises ConfigError: a line too long, or characters that no word has."""
    if len(line) > MAX_LINE:
        raise place.error(f"{len(line):,} characters in one line: {MAX_LINE:,} at most")
    words = []
    for match in _WORD.finditer(line):
        if match[0].startswith("#"):
            break
        where = place.further(match.start())
        for index, character in enumerate(match[0]):
            if not ("!" <= character <= "~"):
                raise where.further(index).error(f"{character!a} is not allowed: only ASCII letters, digits and signs")
        words.append((where, match[0]))
    return words


def _settings(words: Sequence[tuple[Place, str]]) -> dict[str, tuple[Place, str]]:
    """What follows the host, with the place of each value."""
    given: dict[str, tuple[Place, str]] = {}
    for where, word in words:
        key, equals, value = word.partition("=")
        if not equals or key not in KEYS:
            close = nearest(key, KEYS)
            meant = (
                f"did you mean '{close}='?" if close else f"after a host stand {', '.join(f'{each}=' for each in KEYS)}"
            )
            raise where.error(f"{shown(word)} is not known: {meant}")
        if key in given:
            raise where.error(f"{key}= is there twice in one line")
        given[key] = (where.further(len(key) + 1), value)
    return given


def _addresses(given: tuple[Place, str] | None, names: Sequence[str]) -> list[str]:
    if given is None:
        return list(names)
    where, text = given
    addresses = [host_of(word, where) for word in expand(text, where)]
    if len(addresses) != len(names):
        raise where.error(f"{shown(text)} are {len(addresses)} addresses for {len(names)} hosts")
    return addresses


def _whole(given: dict[str, tuple[Place, str]], key: str, most: int) -> int | None:
    if key not in given:
        return None
    where, text = given[key]
    return whole_of(text, where, key, 1, most)
