"""What may stand in a hostfile for a host, a user, a network card or a number, and where a mistake is. Pure.

Every word that passes is made of characters that mean nothing to a shell, and none begins with a dash.
"""

import ipaddress
import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from ascend_moe_train.errors import ConfigError

MAX_HOSTS = 16_384
MAX_NAME = 253  # characters of a host name (RFC 1035)
MAX_SHOWN = 60  # characters of an offending value

_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?", re.ASCII)
# getaddrinfo takes names that end so for IPv4 addresses: 127.1, 0x7f000001, 2130706433
_NUMERIC_LABEL = re.compile(r"[0-9]+|0[xX][0-9A-Fa-f]*", re.ASCII)
_USER = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,31}", re.ASCII)
_NIC = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,14}", re.ASCII)  # the kernel's IFNAMSIZ
_WHOLE = re.compile(r"[0-9]{1,9}", re.ASCII)
_PIECE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", re.ASCII)
_LOOPBACK_NAMES = frozenset(
    {"localhost", "localhost.localdomain", "localhost4", "localhost6", "ip6-localhost", "ip6-loopback"}
)


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a word stands: a file with line and column, both from 1, or an environment variable without a line."""

    source: str
    line: int | None = None
    column: int = 1

    def __str__(self) -> str:
        return (
            f"{self.source}, column {self.column}" if self.line is None else f"{self.source}:{self.line}:{self.column}"
        )

    def further(self, characters: int) -> "Place":
        """So many characters to the right."""
        return Place(source=self.source, line=self.line, column=self.column + characters)

    def error(self, what: str) -> ConfigError:
        """What is wrong here."""
        return ConfigError(f"{self}: {what}")


def shown(word: str) -> str:
    """A word in quotes, printable and short enough for a message."""
    return ascii(word if len(word) <= MAX_SHOWN else f"{word[: MAX_SHOWN - 3]}...")


def is_loopback(address: str) -> bool:
    """Whether an address or a name means the machine that asks."""
    plain = address.lower().rstrip(".")
    try:
        found = ipaddress.ip_address(plain)
    except ValueError:
        return plain in _LOOPBACK_NAMES or plain.endswith(".localhost")
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return (mapped or found).is_loopback


def host_of(word: str, place: Place) -> str:
    """A name as it is, an address in its usual spelling. Raises ConfigError: neither of both."""
    if ":" in word or word.startswith("["):
        return _ipv6(word, place)
    if _NUMERIC_LABEL.fullmatch(word.rpartition(".")[2]):
        return _ipv4(word, place)
    if len(word) > MAX_NAME:
        raise place.error(f"{shown(word)} is no host: {len(word)} characters, {MAX_NAME} at most")
    if not all(map(_LABEL.fullmatch, word.split("."))):
        raise place.error(
            f"{shown(word)} is no host: a name has letters, digits, '-' and '_' between dots, no '-' at either end"
        )
    return word


def user_of(word: str, place: Place) -> str:
    """Raises ConfigError: not a user's name."""
    return _matching(_USER, word, place, "is no user: up to 32 letters, digits, '_', '-' and '.', a letter first")


def nic_of(word: str, place: Place) -> str:
    """Raises ConfigError: not the name of a network card."""
    return _matching(_NIC, word, place, "is no network card: such as eth0, up to 15 letters, digits, '_', '-' and '.'")


def whole_of(word: str, place: Place, name: str, least: int, most: int) -> int:
    """Raises ConfigError: not a whole number from `least` to `most`."""
    if not (_WHOLE.fullmatch(word) and least <= int(word) <= most):
        raise place.error(f"{name}={shown(word)[1:-1]} is not allowed: must be a whole number from {least} to {most}")
    return int(word)


def expand(word: str, place: Place, most: int = MAX_HOSTS) -> list[str]:
    """`node[01-03,7].a` as node01.a, node02.a, node03.a, node7.a; several ranges in all combinations, the last fastest.

    Raises ConfigError: a range that cannot be read, or more than `most` words."""
    if word.startswith("[") and ":" in word:
        return [word]
    parts: list[str | list[tuple[int, int, int]]] = []
    at = 0
    while at < len(word):
        opened = word.find("[", at)
        if opened < 0:
            parts.append(word[at:])
            break
        closed = word.find("]", opened)
        if closed < 0:
            raise place.further(opened).error(f"'[' without ']' in {shown(word)}")
        parts += [word[at:opened], _pieces(word, opened + 1, closed, place)]
        at = closed + 1
    num_words = prod(_size(part) for part in parts)
    if num_words > most:
        raise place.error(f"{shown(word)} are {num_words:,} hosts: {most:,} at most")
    return ["".join(each) for each in _combinations(parts)]


def _pieces(word: str, start: int, end: int, place: Place) -> list[tuple[int, int, int]]:
    """What stands between brackets: first and last number and the width to pad to, each."""
    pieces = []
    for text in word[start:end].split(","):
        match = _PIECE.fullmatch(text)
        if match is None:
            raise place.further(start).error(f"{shown(text)} is no range: such as [10-17] or [01-04,8]")
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first):
            raise place.further(start).error(f"{shown(text)} is no range: {last} is less than {first}")
        pieces.append((int(first), int(last), len(first) if first.startswith("0") else 0))
        start += len(text) + 1
    return pieces


def _size(part: str | list[tuple[int, int, int]]) -> int:
    return 1 if isinstance(part, str) else sum(last - first + 1 for first, last, _ in part)


def _combinations(parts: list[str | list[tuple[int, int, int]]]) -> Iterator[list[str]]:
    if not parts:
        yield []
        return
    for before in _combinations(parts[:-1]):
        if isinstance(parts[-1], str):
            yield [*before, parts[-1]]
        else:
            for first, last, width in parts[-1]:
                yield from ([*before, f"{number:0{width}}"] for number in range(first, last + 1))


def _ipv4(word: str, place: Place) -> str:
    try:
        address = ipaddress.IPv4Address(word)
    except ValueError:
        raise place.error(
            f"{shown(word)} is no host: not an IPv4 address, and the name of a host ends otherwise"
        ) from None
    return _usable(address, place)


def _ipv6(word: str, place: Place) -> str:
    plain = word[1:-1] if word.startswith("[") and word.endswith("]") else word
    if "%" in plain:
        raise place.error(f"{shown(word)}: a zone ('%') is known to one host only: give another address of that host")
    try:
        address = ipaddress.IPv6Address(plain)
    except ValueError:
        name, _, number = word.rpartition(":")
        if _WHOLE.fullmatch(number) and ":" not in name and not name.startswith("["):
            raise place.error(f"{shown(word)}: what follows ':' is written port={number} or slots={number}") from None
        raise place.error(f"{shown(word)} is no host: not an IPv6 address, and no name has ':', '[' or ']'") from None
    return _usable(address, place)


def _usable(address: ipaddress.IPv4Address | ipaddress.IPv6Address, place: Place) -> str:
    if address.is_unspecified or address.is_multicast or str(address) == "255.255.255.255":
        raise place.error(f"{shown(str(address))} is no host: it does not mean a single one")
    return str(address)


def _matching(pattern: re.Pattern[str], word: str, place: Place, what: str) -> str:
    if not pattern.fullmatch(word):
        raise place.error(f"{shown(word)} {what}")
    return word
