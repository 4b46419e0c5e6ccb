"""When a host is given up: it is silent for longer than it may, in time that the launcher itself was awake."""

import socket
from collections.abc import Iterator

import pytest

from ascend_moe_train.cluster import hosts_hub
from ascend_moe_train.cluster.frames import Ready, Task, frame
from ascend_moe_train.cluster.hostfile import Host
from ascend_moe_train.cluster.hosts_hub import HostsHub
from ascend_moe_train.cluster.links import Link
from ascend_moe_train.cluster.member import Member

SILENCE_S = 10.0
HOST = Host(name="a", address="a", slots=2)
TASK = Task(
    version="1",
    world=2,
    first_rank=0,
    ranks=2,
    node=0,
    slots_by_node=(2,),
    module="m",
    arguments=(),
    starter="mpiexec",
    master="a",
    folder="/",
    log_folder="/logs",
    environment={},
    run_id="r",
    control="c",
    started_s=0.0,
    meet_s=1,
    silence_s=SILENCE_S,
)


class NoLines:
    def take(self, member: Member, text: str, *, is_error: bool) -> None:
        raise AssertionError(text)


class Clock:
    """What time it is for the hub."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(hosts_hub, "time", made)
    return made


@pytest.fixture
def ends(clock: Clock) -> Iterator[tuple[HostsHub, socket.socket]]:
    """A hub of one host, and what its agent has of the connection."""
    near, far = socket.socketpair()
    with far, near, HostsHub([Link(HOST, near)], [TASK], NoLines(), SILENCE_S) as hub:
        yield hub, far


def silent_for(hub: HostsHub, clock: Clock, turns: int) -> None:
    for _ in range(turns):
        clock.now_s += 1.0
        hub.poll(0.0)


def test_an_agent_that_is_being_started_may_be_silent(ends: tuple[HostsHub, socket.socket], clock: Clock) -> None:
    hub, far = ends
    silent_for(hub, clock, 50)
    assert not hub.lost
    far.sendall(frame(Ready(host="a", port=1)))
    silent_for(hub, clock, 10)
    assert not hub.lost
    silent_for(hub, clock, 2)
    assert [host.lost for host in hub.lost] == ["nothing was heard of it for 10 s"]
    ending = hub.members[1].ending
    assert ending is not None and ending.lost_with == "host a (nothing was heard of it for 10 s)"


def test_time_in_which_the_launcher_was_stopped_does_not_count(
    ends: tuple[HostsHub, socket.socket], clock: Clock
) -> None:
    hub, far = ends
    far.sendall(frame(Ready(host="a", port=1)))
    silent_for(hub, clock, 1)
    clock.now_s += 100.0
    hub.poll(0.0)
    assert not hub.lost
    silent_for(hub, clock, 9)
    assert not hub.lost
    silent_for(hub, clock, 2)
    assert [host.name for host in hub.lost] == ["a"]
