"""Sessions over SSH: whom they trust, what they send, and that everything has an end."""

import asyncio
import resource
import shlex
from collections.abc import Awaitable, Callable
from pathlib import Path

import asyncssh
import pytest

from ascend_moe_train.cluster.hostfile import Host
from ascend_moe_train.cluster.remote import Answer, Limits, RemoteError, Session, on_each, quoted, session
from tests.ssh_server import Handler, Home, say_command, say_nothing


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    return Home(tmp_path, monkeypatch)


def host_at(port: int, name: str = "n1", address: str = "127.0.0.1") -> Host:
    return Host(name=name, address=address, slots=8, user="me", port=port)


def serve(home: Home, handler: Handler, work: Callable[[int], Awaitable[object]], *, known: bool = True) -> object:
    async def whole() -> object:
        async with home.serve(handler) as port:
            if known:
                home.know(f"[127.0.0.1]:{port}")
            return await work(port)

    return asyncio.run(whole())


async def run(port: int, *words: str, timeout_s: float = 10, most_bytes: int = 1000, given: bytes = b"") -> Answer:
    async with session(host_at(port)) as opened:
        return await opened.run(words, timeout_s=timeout_s, most_bytes=most_bytes, given=given)


def refused(home: Home, *, known: bool = False, handler: Handler = say_command) -> RemoteError:
    with pytest.raises(RemoteError) as raised:
        serve(home, handler, lambda port: run(port, "true"), known=known)
    assert str(raised.value).startswith("host n1: ")
    assert str(raised.value).isprintable()
    return raised.value


def test_words_arrive_as_they_are(home: Home) -> None:
    words = ["echo", "a b", "$(reboot)", "`id`", "; rm -rf /", "'", '"', "\\", "*", "é", ""]
    answer = serve(home, say_command, lambda port: run(port, *words, given=b"input"))
    assert isinstance(answer, Answer)
    command, _, given = answer.stdout.partition(b"|")
    assert shlex.split(command.decode()) == words
    assert (given, answer.stderr, answer.exit_code) == (b"input", b"err", 3)


@pytest.mark.parametrize("words", [[], ["a\nb"], ["a", "\x00"], ["\x7f"], ["a\r"]])
def test_words_on_which_shells_differ_are_not_sent(words: list[str]) -> None:
    with pytest.raises(ValueError, match="not the words of a command"):
        quoted(words)


def test_an_unknown_key_is_not_accepted(home: Home) -> None:
    error = refused(home)
    assert error.reason == "unknown key"
    assert not (home.ssh / "known_hosts").exists()


def test_another_key_is_not_accepted(home: Home) -> None:
    other = asyncssh.generate_private_key("ssh-ed25519")

    async def work(port: int) -> Answer:
        home.know(f"[127.0.0.1]:{port}", other)
        return await run(port, "true")

    with pytest.raises(RemoteError) as raised:
        serve(home, say_command, work, known=False)
    assert raised.value.reason == "changed key"


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("UserKnownHostsFile none", "unchecked key"),
        ("UserKnownHostsFile /dev/null\nStrictHostKeyChecking no", "unknown key"),
        ("StrictHostKeyChecking accept-new", "unknown key"),
    ],
)
def test_configuration_does_not_turn_the_check_off(home: Home, setting: str, reason: str) -> None:
    (home.ssh / "config").write_text(f"{setting}\n")
    assert refused(home).reason == reason


def test_known_hosts_may_be_elsewhere(home: Home) -> None:
    (home.ssh / "config").write_text(f"UserKnownHostsFile {home.ssh / 'mine'}\n")

    async def work(port: int) -> Answer:
        (home.ssh / "known_hosts").rename(home.ssh / "mine")
        return await run(port, "true")

    answer = serve(home, say_command, work)
    assert isinstance(answer, Answer)


def test_commands_of_the_configuration_are_not_sent(home: Home) -> None:
    (home.ssh / "config").write_text("RemoteCommand reboot\nSendEnv HOME\nForwardAgent yes\nRequestTTY force\n")
    answer = serve(home, say_command, lambda port: run(port, "true"))
    assert isinstance(answer, Answer)
    assert answer.stdout == b"true|"


@pytest.mark.parametrize(
    ("setting", "cipher"),
    [("", "aes256-gcm@openssh.com"), ("Ciphers aes128-ctr,chacha20-poly1305@openssh.com", "aes128-ctr")],
)
def test_the_quickest_cipher_of_those_allowed(home: Home, setting: str, cipher: str) -> None:
    (home.ssh / "config").write_text(f"{setting}\n")

    async def used(port: int) -> object:
        async with session(host_at(port)) as opened:
            return opened.connection.get_extra_info("send_cipher")

    assert serve(home, say_command, used) == cipher


def test_keys_that_do_not_fit_are_named(home: Home) -> None:
    asyncssh.generate_private_key("ssh-ed25519").write_private_key(home.ssh / "id_ed25519")
    error = refused(home, known=True)
    assert error.reason == "denied"
    assert "lets me in" in error.detail


def test_nobody_there(home: Home) -> None:
    async def work(port: int) -> Answer:
        return await run(port + 1, "true")

    with pytest.raises(RemoteError) as raised:
        serve(home, say_command, work)
    assert raised.value.reason == "refused"


def test_a_name_without_an_address(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with session(host_at(22, address="no-such-host.invalid")):
            pass

    with pytest.raises(RemoteError) as raised:
        asyncio.run(work())
    assert raised.value.reason == "unresolved"


def test_a_server_that_says_nothing(home: Home) -> None:
    async def work() -> None:
        server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
        async with server, session(host_at(server.sockets[0].getsockname()[1]), Limits(connect_s=0.2)):
            pass

    with pytest.raises(RemoteError, match=r"does not answer within 0\.2 s") as raised:
        asyncio.run(work())
    assert raised.value.reason == "silent"


def test_a_server_that_is_none(home: Home) -> None:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail \x1b[2J\r\n" * 5000)
        writer.close()

    async def work() -> None:
        server = await asyncio.start_server(greet, "127.0.0.1", 0)
        async with server, session(host_at(server.sockets[0].getsockname()[1])):
            pass

    with pytest.raises(RemoteError) as raised:
        asyncio.run(work())
    assert raised.value.reason == "broken"
    assert str(raised.value).isprintable()


def test_a_command_has_an_end(home: Home) -> None:
    with pytest.raises(RemoteError, match=r"sleep did not end within 0\.2 s"):
        serve(home, say_nothing, lambda port: run(port, "sleep", timeout_s=0.2))


def test_an_output_has_a_size(home: Home) -> None:
    async def flood(process: asyncssh.SSHServerProcess[bytes]) -> None:
        while not process.stdout.is_closing():
            process.stdout.write(b"x" * 10_000)
            await process.stdout.drain()

    with pytest.raises(RemoteError, match="said more than 1,000 bytes"):
        serve(home, flood, lambda port: run(port, "yes"))


def test_a_connection_that_ends(home: Home) -> None:
    async def cut(process: asyncssh.SSHServerProcess[bytes]) -> None:
        process.get_extra_info("connection").abort()

    with pytest.raises(RemoteError) as raised:
        serve(home, cut, lambda port: run(port, "true"))
    assert raised.value.reason == "broken"


def test_hosts_are_asked_side_by_side_and_bounded(home: Home) -> None:
    now = most = 0

    async def count(opened: Session) -> str:
        nonlocal now, most
        now, most = now + 1, max(most, now + 1)
        await opened.run(["true"], timeout_s=10)
        await asyncio.sleep(0.01)
        now -= 1
        return opened.host.name

    async def work(port: int) -> list[str | RemoteError]:
        hosts = [host_at(port, f"n{number}") for number in range(6)]
        return await on_each([*hosts, host_at(port + 1, "none")], count, Limits(sessions=3))

    found = serve(home, say_command, work)
    assert isinstance(found, list)
    assert found[:6] == [f"n{number}" for number in range(6)]
    assert isinstance(found[6], RemoteError)
    assert most == 3


def test_sessions_fit_the_files_that_may_be_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (168, 4096))
    assert Limits().sessions_now == 10
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (20, 4096))
    assert Limits().sessions_now == 1
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (resource.RLIM_INFINITY, 4096))
    assert Limits().sessions_now == 64
