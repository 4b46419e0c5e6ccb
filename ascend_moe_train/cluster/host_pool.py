"""Which hosts a job runs on: bad ones are left out, spares take their places, and both are remembered. Pure."""

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from ascend_moe_train.cluster.evidence import Failed
from ascend_moe_train.cluster.hostfile import Host
from ascend_moe_train.errors import ConfigError
from ascend_moe_train.part import Part

BAD_HOSTS = "bad-hosts.json"  # within the folder of logs
SUSPECT_AFTER = 2  # failures in a row that began on the same host
_MAX_BYTES = 4 * 2**20


class BadHost(Part):
    """A host that is left out, since when (UTC) and why."""

    name: str
    since: str
    why: str


class _BadHosts(Part):
    format_version: int
    hosts: tuple[BadHost, ...]


def read_bad_hosts(path: Path) -> tuple[BadHost, ...]:
    """Those of a list; none where there is no list. Raises ConfigError: it cannot be read, or is none of ours."""
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    try:
        found = _BadHosts.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{path}: is no list of bad hosts ({place}: {first['msg']}): remove it") from None
    return found.hosts


class HostPool:
    """The hosts of a job and its spares, from its first start to its last."""

    def __init__(self, hosts: Sequence[Host], num_spares: int, bad_list: Path) -> None:
        """The last `num_spares` are spares. Raises ConfigError: too many, or a list that is none."""
        if not 0 <= num_spares < len(hosts):
            raise ConfigError(f"--spares {num_spares}: of {len(hosts)} hosts, 0 to {len(hosts) - 1} can be spares")
        self.bad_list, self._bad = bad_list, list(read_bad_hosts(bad_list))
        known = {each.name for each in self._bad}
        self.size = len(hosts) - num_spares
        good = [host for host in hosts if host.name not in known]
        if not good:
            raise ConfigError(f"{bad_list}: all {len(hosts)} hosts are on it: remove those that are good again")
        self.left_out = [host.name for host in hosts if host.name in known]
        self.active, self._spares = good[: self.size], good[self.size :]
        self._suspect: tuple[str | None, int] = (None, 0)

    def after(self, failed: Failed) -> list[str]:
        """Takes in a failure; lines on hosts that are left out from now on, and what takes their places.

        Raises ConfigError: no host is left; OSError: the list cannot be written.
        """
        lines = [self._replace(name, "it was lost") for name in failed.lost]
        before, count = self._suspect
        self._suspect = (failed.host, count + 1 if failed.host == before else 1)
        if failed.host is not None and not failed.lost and self._suspect[1] >= SUSPECT_AFTER and self._spares:
            lines.append(self._replace(failed.host, f"{SUSPECT_AFTER} failures in a row began on it"))
            self._suspect = (None, 0)
        return lines

    def _replace(self, name: str, why: str) -> str:
        place = next(n for n, host in enumerate(self.active) if host.name == name)
        self._bad.append(BadHost(name=name, since=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), why=why))
        self._write()
        if self._spares:
            self.active[place] = self._spares.pop(0)
            return f"host {name} is left out ({why}; {self.bad_list}): {self.active[place].name} takes its place"
        del self.active[place]
        if not self.active:
            raise ConfigError(f"host {name} is left out ({why}), and no other is left")
        return f"host {name} is left out ({why}; {self.bad_list}), and there is no spare: {len(self.active)} are left"

    def _write(self) -> None:
        self.bad_list.parent.mkdir(parents=True, exist_ok=True)
        content = _BadHosts(format_version=1, hosts=tuple(self._bad)).model_dump(mode="json")
        aside = self.bad_list.with_name(f".{self.bad_list.name}.tmp")
        with aside.open("w") as file:
            file.write(json.dumps(content, indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
        aside.replace(self.bad_list)
