"""What npu-smi and hccn_tool print, read without trust. Pure."""

import re
from dataclasses import dataclass

MAX_NPUS = 64

_WHOLE = re.compile(r"[0-9]{1,7}", re.ASCII)
_HBM = re.compile(r"([0-9]{1,7})\s*/\s*([0-9]{1,7})", re.ASCII)
_LINK = re.compile(r"link status:\s*([A-Za-z]{1,20})", re.ASCII)
_ADDRESS = re.compile(r"ipaddr:\s*([0-9A-Fa-f.:]{2,45})", re.ASCII)
_MASK = re.compile(r"netmask:\s*([0-9.]{7,15})", re.ASCII)
_TLS = re.compile(r"tls switch\[([01])\]", re.ASCII)
_CONF = re.compile(r"^address_([0-9]{1,3})=([0-9A-Fa-f.:]{2,45})\s*$", re.ASCII | re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Npu:
    """One chip of `npu-smi info`; HBM in MB, None where the table does not show it."""

    number: int
    name: str
    health: str
    hbm_used_mb: int | None = None
    hbm_mb: int | None = None


@dataclass(frozen=True, kw_only=True)
class NpuTable:
    """All of `npu-smi info`: chips, and process ids with the NPU that each runs on."""

    npus: tuple[Npu, ...]
    processes: tuple[tuple[int, int], ...]


def parse_npu_smi(text: str) -> NpuTable:
    """By the bars of the table, as its columns have other widths in other releases. Empty if nothing is known of it."""
    npus: list[Npu] = []
    processes: list[tuple[int, int]] = []
    in_processes = False
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        in_processes = in_processes or "Process id" in line
        words = cells[0].split()
        if len(cells) < 3 or not words or not _WHOLE.fullmatch(words[0]):
            continue
        if in_processes:
            if _WHOLE.fullmatch(cells[1]):
                processes.append((int(words[0]), int(cells[1])))
        elif len(words) > 1 and not _WHOLE.fullmatch(words[-1]) and len(npus) < MAX_NPUS:
            health = cells[1].split()
            npus.append(Npu(number=int(words[0]), name=words[-1][:20], health=health[0][:20] if health else ""))
        elif npus and (pairs := _HBM.findall(cells[2])):
            used_mb, total_mb = map(int, pairs[-1])
            last = npus[-1]
            npus[-1] = Npu(number=last.number, name=last.name, health=last.health, hbm_used_mb=used_mb, hbm_mb=total_mb)
    return NpuTable(npus=tuple(npus), processes=tuple(processes))


def link_status(text: str) -> str | None:
    """`UP` or `DOWN`, of `hccn_tool -link -g`."""
    match = _LINK.search(text)
    return match[1].upper() if match else None


def npu_address(text: str) -> tuple[str, str | None] | None:
    """Address and netmask, of `hccn_tool -ip -g`; None if none is set."""
    match, mask = _ADDRESS.search(text), _MASK.search(text)
    return (match[1], mask[1] if mask else None) if match else None


def tls_switch(text: str) -> str | None:
    """`on` or `off`, of `hccn_tool -tls -g`."""
    match = _TLS.search(text)
    return None if match is None else "on" if match[1] == "1" else "off"


def conf_addresses(text: str) -> dict[int, str]:
    """NPU -> address, of /etc/hccn.conf."""
    return {int(number): address for number, address in _CONF.findall(text)}
