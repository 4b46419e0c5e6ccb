"""What stands in capitals in a remedy, put in where the logs say it: paths, packages, ports, processes, ranks. Pure.

What comes from a log is put into a command only if it is made of characters that no shell takes for anything else.
"""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from types import MappingProxyType

from ascend_moe_train.doctor.clock import shown_time
from ascend_moe_train.doctor.event import Event, Evidence
from ascend_moe_train.doctor.hypothesis import Hypothesis
from ascend_moe_train.doctor.rule import Remedy

# PATH_NAMED_ABOVE and the like; N is the number of ranks, and so is the 64 of an example's cluster
_NAMES = re.compile(r"\b(?:[A-Z][A-Z_]{2,}|ID|CHIP|N)\b|\b64(?=x910B)")
_SAFE_PATH = r"/[\w.\-+@%,]{1,100}(?:/[\w.\-+@%,]{1,100}){0,24}"
_QUOTED_PATH = re.compile(rf"['\"\[](?P<path>{_SAFE_PATH})/?['\"\]]")
_PATH = re.compile(rf"(?:^|[\s=:(])(?P<path>{_SAFE_PATH})")
_PACKAGE = re.compile(r"No module named ['\"]?(?P<name>\w{1,60})")
_LIBRARY = re.compile(r"\b(?P<name>lib[\w.+\-]{1,80}\.so(?:\.\d{1,4}){0,3})\b(?P<missing>: cannot open)?")
_VARIABLE = re.compile(
    r"\b(?P<name>(?:HCCL|ASCEND|NCCL|TORCH|GLOO|MS|ACL|NPU|PYTORCH|CUDA|OMP|RANK|MASTER|DEVICE|GLOG)_[A-Z][A-Z0-9_]{1,50})\b"
)
_ADDRESS = re.compile(r"\b(?P<ip>\d{1,3}(?:\.\d{1,3}){3})\b(?:[:/ %\w]{0,12}?[:\[](?P<port>\d{2,5})\b)?")
_PORT = re.compile(r"(?i)\bports?\b[^\d\n]{0,12}(?P<port>\d{2,5})\b")
# Modules that come in packages of another name.
_PACKAGES: Mapping[str, str] = MappingProxyType(
    {"cv2": "opencv-python", "PIL": "pillow", "yaml": "pyyaml", "sklearn": "scikit-learn", "google": "protobuf"}
)


def filled_remedy(remedy: Remedy, names: Mapping[str, str]) -> Remedy:
    """A remedy with what is known put in; what is not stays in capitals."""
    do = _NAMES.sub(lambda found: names.get(found[0], found[0]), remedy.do)
    return Remedy.model_construct(do=do, en=remedy.en, zh=remedy.zh, prevents=remedy.prevents)


def names_of(cause: Hypothesis, evidence: Evidence) -> dict[str, str]:
    """What is known for a cause, by the names that remedies have for it."""
    texts = [event.text for event in cause.events]
    names = dict(_of_lines(texts))
    names |= _of_ranks(cause, evidence)
    start_s = [each.first.seconds for each in evidence.sources if each.first is not None and each.first.kind == "full"]
    if start_s:
        names["START_OF_RUN"] = shown_time(min(start_s))
    return names


def _of_lines(texts: Sequence[str]) -> Iterator[tuple[str, str]]:
    """From the lines that are quoted; of several the first."""
    if (found := _first(_QUOTED_PATH, texts) or _first(_PATH, texts)) is not None:
        path = found["path"].rstrip(".,")
        yield "PATH_NAMED_ABOVE", path
        yield "RUN_DIR", str(PurePosixPath(path).parent)  # of what could not be written, which may not be there
        yield "CHECKPOINT", path
    if (found := _first(_PACKAGE, texts)) is not None:
        yield "MISSING_PACKAGE", _PACKAGES.get(found["name"], found["name"])
    if (library := _library(texts)) is not None:
        yield "LIBRARY_NAMED_ABOVE", library
    if (found := _first(_VARIABLE, texts)) is not None:
        yield "VARIABLE_NAMED_ABOVE", found["name"]
    address = _first(_ADDRESS, texts)
    if address is not None:
        yield "MASTER_IP", address["ip"]
    port = _first(_PORT, texts) or (address if address is not None and address["port"] else None)
    if port is not None:
        yield "PORT", port["port"]


def _library(texts: Sequence[str]) -> str | None:
    """The one that is missing, where a line names others too."""
    found = [each for text in texts for each in _LIBRARY.finditer(text)]
    missing = [each for each in found if each["missing"]]
    return next((each["name"] for each in missing or found), None)


def _first(pattern: re.Pattern[str], texts: Sequence[str]) -> re.Match[str] | None:
    return next((found for text in texts if (found := pattern.search(text)) is not None), None)


def _of_ranks(cause: Hypothesis, evidence: Evidence) -> Iterator[tuple[str, str]]:
    """The log, process and device of the rank at fault, and how many ranks there are."""
    sources = evidence.by_rank.get(cause.ranks[0], ()) if cause.ranks else ()
    source = sources[0].name if sources else cause.events[0].place.source if cause.events else None
    if source is not None:
        yield "LOG_OF_THAT_RANK", shlex.quote(source)
    pids = {rank: pid for pid, rank in evidence.pids.items()}
    if cause.ranks and cause.ranks[0] in pids:
        yield "PID", str(pids[cause.ranks[0]])
    device = next((number for event in cause.events if (number := _device(event)) is not None), None)
    if device is not None:
        yield "ID", str(device)
        yield "CHIP", "0"
    if evidence.ranks and evidence.ranks == tuple(range(len(evidence.ranks))):
        yield "N", str(len(evidence.ranks))
        yield "64", str(len(evidence.ranks))


def _device(event: Event) -> int | None:
    """The card that a line is about, or whose it is."""
    said = event.value("device")
    return said if said is not None else event.actor.device
