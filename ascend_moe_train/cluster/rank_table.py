"""The rank table of HCCL: which rank has which NPU of which host, by their addresses. Pure.

The form is that of version 1.0, as MindSpore's documentation of `rank_table_file` has it; no NPU has read one of ours.
"""

import ipaddress
from typing import Any

from ascend_moe_train.cluster.preflight.checks_npu import address_of
from ascend_moe_train.cluster.preflight.model import Answers, Seen
from ascend_moe_train.errors import ConfigError


def rank_table(seen: Seen) -> dict[str, Any]:
    """As JSON-able values: ranks in the order of the hosts, on each in the order of its NPUs.

    Raises ConfigError: a host that could not be asked, or an NPU without an address of its own.
    """
    if seen.errors:
        raise ConfigError(f"no rank table: {seen.errors[0]}")
    slots = seen.job.hosts.slots
    owners: dict[str, str] = {}
    servers = []
    for index, answers in enumerate(seen.answers):
        devices = []
        for number in range(slots):
            address = address_of(answers, number)
            own = f"NPU {number} of {answers.host.name}"
            if address is None:
                raise ConfigError(f"no rank table: {own} has no address (hccn_tool -i {number} -ip -g)")
            if (other := owners.setdefault(address, own)) != own:
                raise ConfigError(f"no rank table: {own} has the address {address}, as {other} does")
            rank = index * slots + number
            devices.append({"device_id": str(number), "device_ip": address, "rank_id": str(rank)})
        servers.append({"server_id": _server(answers), "device": devices, "host_nic_ip": "reserve"})
    return {"version": "1.0", "server_count": str(len(servers)), "server_list": servers, "status": "completed"}


def _server(answers: Answers) -> str:
    """The address of a host: what the hostfile has, or what the host itself finds for that name."""
    found = answers.facts("names").get(answers.host.address)
    for each in (answers.host.address, *(found if isinstance(found, list) else ())):
        try:
            return str(ipaddress.ip_address(each))
        except ValueError:
            continue
    raise ConfigError(f"no rank table: host {answers.host.name} has no address: write address= into the hostfile")
