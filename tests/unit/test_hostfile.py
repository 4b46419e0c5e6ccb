"""Hostfiles: what is read, and that what cannot be used is refused in one line with its place."""

import string
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ascend_moe_train.cluster.host_words import MAX_HOSTS, Place, expand, host_of, is_loopback
from ascend_moe_train.cluster.hostfile import MAX_BYTES, MAX_LINE, Host, Hosts, parse_hostfile, read_hostfile
from ascend_moe_train.errors import ConfigError

HERE = Place(source="x")
SHELL_SIGNS = set(" \t\n\r;|&$`<>(){}[]*?!#~'\"\\%=,@/+^")


def parse(text: str) -> Hosts:
    return parse_hostfile(text.encode(), "hosts")


def complaint(text: str | bytes) -> str:
    with pytest.raises(ConfigError) as raised:
        parse_hostfile(text if isinstance(text, bytes) else text.encode(), "hosts")
    message = str(raised.value)
    assert message.startswith("hosts:")
    assert message.isprintable()
    assert len(message) < 400
    return message.removeprefix("hosts:")


def test_a_line_is_a_host() -> None:
    hosts = parse(
        "# 注释\n\n  node01\tslots=8 # 1st\r\ntrain@Node02.example slots=8 port=2222 nic=eth0.7 address=10.0.0.2\n"
    )
    assert hosts == Hosts(
        hosts=(
            Host(name="node01", address="node01", slots=8),
            Host(name="Node02.example", address="10.0.0.2", slots=8, user="train", port=2222, nic="eth0.7"),
        ),
        source="hosts",
    )
    assert [host.place for host in hosts] == ["hosts:3:3", "hosts:4:7"]
    assert (len(hosts), hosts.slots, hosts.num_ranks) == (2, 8, 16)


def test_a_byte_order_mark_is_no_name() -> None:
    assert [host.name for host in parse("\ufeffa slots=1")] == ["a"]


def test_ipv6_is_read_in_every_spelling() -> None:
    hosts = parse("2001:DB8:0::7 slots=8\n[2001:db8::8] slots=8\nuser@2001:db8::9 slots=8")
    assert [host.address for host in hosts] == ["2001:db8::7", "2001:db8::8", "2001:db8::9"]


def test_ranges_are_spread() -> None:
    hosts = parse("192.168.1.[10-12] slots=8\nr[1-2]n[08-10,7] slots=8 address=10.[1-2].0.[1-4]")
    assert [host.name for host in hosts] == [
        *("192.168.1.10", "192.168.1.11", "192.168.1.12"),
        *("r1n08", "r1n09", "r1n10", "r1n7", "r2n08", "r2n09", "r2n10", "r2n7"),
    ]
    assert [host.address for host in hosts][3:] == [f"10.{r}.0.{n}" for r in (1, 2) for n in (1, 2, 3, 4)]


@pytest.mark.parametrize(
    ("text", "where", "words"),
    [
        ("", " ", "no host in it"),
        ("# nothing\n", " ", "no host in it"),
        ("a slots=8\n  b", "2:3", "has no slots="),
        ("a slots=8 slot=4", "1:11", "did you mean 'slots='?"),
        ("a slots=8 zebra", "1:11", "after a host stand slots=, user=, port=, nic=, address="),
        ("a slots=8 slots=8", "1:11", "slots= is there twice"),
        ("a slots=0", "1:9", "slots=0 is not allowed: must be a whole number from 1 to 1024"),
        ("a slots=-1", "1:9", "slots=-1 is not allowed"),
        ("a slots=8.5", "1:9", "slots=8.5"),
        ("a slots=", "1:9", "slots= is not allowed"),
        ("a slots=99999999999999999999", "1:9", "1 to 1024"),
        ("a slots=8 port=65536", "1:16", "1 to 65535"),
        ("a slots=8 user=-oProxyCommand=x", "1:16", "is no user"),
        ("-oProxyCommand=x@a slots=8", "1:1", "is no user"),
        ("u@a slots=8 user=v", "1:18", "give one of both"),
        ("@a slots=8", "1:1", "is no user"),
        ("a slots=8 nic=averylongcardname0", "1:15", "is no network card"),
        ("a slots=8 nic=", "1:15", "is no network card"),
        ("a slots=8 address=", "1:19", "is no host"),
        ("a[1-2] slots=8 address=b", "1:24", "1 addresses for 2 hosts"),
        ("-v slots=8", "1:1", "no '-' at either end"),
        ("a- slots=8", "1:1", "no '-' at either end"),
        ("a..b slots=8", "1:1", "is no host"),
        (f"{'a' * 64} slots=8", "1:1", "is no host"),
        (f"{'a.' * 127}b slots=8", "1:1", "255 characters, 253 at most"),
        ("192.168.1.300 slots=8", "1:1", "not an IPv4 address"),
        ("127.1 slots=8", "1:1", "not an IPv4 address"),
        ("0x7f000001 slots=8", "1:1", "not an IPv4 address"),
        ("2130706433 slots=8", "1:1", "not an IPv4 address"),
        ("fe80::1%eth0 slots=8", "1:1", "a zone ('%')"),
        ("2001:db8::g slots=8", "1:1", "not an IPv6 address"),
        ("a:8 slots=8", "1:1", "port=8 or slots=8"),
        ("0.0.0.0 slots=8", "1:1", "does not mean a single one"),
        ("ff02::1 slots=8", "1:1", "does not mean a single one"),
        ("a[1-3 slots=8", "1:2", "'[' without ']'"),
        ("a1-3] slots=8", "1:1", "is no host"),
        ("a[] slots=8", "1:3", "is no range"),
        ("a[1-2,x] slots=8", "1:7", "is no range"),
        ("a[3-1] slots=8", "1:3", "1 is less than 3"),
        ("a[[1-2]] slots=8", "1:3", "is no range"),
        ("a[0-99999999] slots=8", "1:1", "100,000,000 hosts: 16,384 at most"),
        ("a[1-999999999][1-999999999] slots=8", "1:1", "16,384 at most"),
        ("a slots=8\nb slots=8\nA slots=8", "3:1", "'a' is there twice, first at hosts:1:1"),
        ("a slots=8 address=10.0.0.1\n10.0.0.1 slots=8", "2:1", "is there twice"),
        ("::1:2 slots=8\n0::0:1:2 slots=8", "2:1", "is there twice"),
        ("a[1-2,2] slots=8", "1:1", "is there twice"),
        ("a slots=8\nb slots=4", "2:1", "slots=4, and hosts:1:1 has slots=8"),
        ("a slots=8\nlocalhost slots=8", "2:1", "loopback"),
        ("a slots=8\nb slots=8 address=127.0.0.3", "2:1", "loopback"),
        ("a slots=8\n::ffff:127.0.0.1 slots=8", "2:1", "loopback"),
        ("a slots=8\n::1 slots=8", "2:1", "loopback"),
        ("a slots=8; rm -rf /", "1:12", "'rm' is not known"),
        ("a slots=8;rm", "1:9", "slots=8;rm is not allowed"),
        ("a; slots=8", "1:1", "is no host"),
        ("$(reboot) slots=8", "1:1", "is no host"),
        ("`reboot` slots=8", "1:1", "is no host"),
        ("a slots=8 user=$(id)", "1:16", "is no user"),
        ("a&&b slots=8", "1:1", "is no host"),
        ("a\x00b slots=8", "1:2", "'\\x00' is not allowed"),
        ("a\x0bb slots=8", "1:2", "'\\x0b' is not allowed"),
        ("a\x1b[2Jb slots=8", "1:2", "'\\x1b' is not allowed"),
        ("a\u2028b slots=8", "1:2", "'\\u2028' is not allowed"),
        ("узел slots=8", "1:1", "only ASCII"),
        (f"a slots=8 {'b' * MAX_LINE}", "1:1", "4,096 at most"),
    ],
)
def test_mistakes_are_named_with_line_and_column(text: str, where: str, words: str) -> None:
    found = complaint(text)
    assert found.startswith(where if where == " " else f"{where}: ")
    assert words in found


def test_bytes_that_are_no_text_are_refused() -> None:
    assert "not UTF-8 text: byte 0xff at offset 2" in complaint(b"a \xff slots=8")


def test_sizes_are_bounded() -> None:
    assert "longer than" in complaint(b"#" * (MAX_BYTES + 1))
    assert f":{MAX_HOSTS + 1}:1: more than 16,384 hosts" in ":" + complaint(
        "".join(f"h{number} slots=8\n" for number in range(100_000))
    )
    assert len(parse(f"h[1-{MAX_HOSTS}] slots=8")) == MAX_HOSTS


def test_one_host_may_be_this_one() -> None:
    assert parse("localhost slots=2").num_ranks == 2


@pytest.mark.parametrize(
    "address", ["LOCALHOST", "localhost.", "a.localhost", "127.255.0.9", "::1", "::ffff:127.0.0.9"]
)
def test_loopback_is_known(address: str) -> None:
    assert is_loopback(address)


@pytest.mark.parametrize("address", ["node1", "10.0.0.1", "2001:db8::1", "localhost2", "mylocalhost"])
def test_others_are_not_loopback(address: str) -> None:
    assert not is_loopback(address)


def test_files_are_read(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("a slots=8\n")
    assert [host.place for host in read_hostfile(file)] == [f"{file}:1:1"]
    with pytest.raises(ConfigError, match="no such hostfile"):
        read_hostfile(tmp_path / "none")
    with pytest.raises(ConfigError, match="no regular file"):
        read_hostfile(tmp_path)


@settings(deadline=None)
@given(st.text(alphabet=string.printable + "é\u2028\x00[]-,.:=", max_size=60))
def test_whatever_passes_is_inert(text: str) -> None:
    """All words of a host that was let through are free of signs that mean something to a shell or to ssh."""
    try:
        hosts = parse(text)
    except ConfigError as error:
        assert str(error).isprintable()
        return
    for host in hosts:
        for word in filter(None, [host.name, host.address, host.user, host.nic]):
            assert not word.startswith("-")
            assert not SHELL_SIGNS & set(word)
            assert word.isascii()


@given(st.text(alphabet="a1-_.:[]@;$(", min_size=1, max_size=12))
def test_hosts_are_inert(word: str) -> None:
    try:
        host = host_of(word, HERE)
    except ConfigError:
        return
    assert not host.startswith("-")
    assert not SHELL_SIGNS & set(host)


@given(st.integers(0, 200), st.integers(0, 20), st.sampled_from([0, 3]))
def test_a_range_has_all_its_numbers(first: int, more: int, width: int) -> None:
    last = first + more
    words = expand(f"n[{first:0{width}}-{last:0{width}}].x", HERE)
    padded = width if f"{first:0{width}}".startswith("0") else 0
    assert words == [f"n{number:0{padded}}.x" for number in range(first, last + 1)]


def test_a_network_card_is_named_to_each_library_in_its_own_way() -> None:
    with_nic, without = parse("a slots=1 nic=eth1\nb slots=1\n")
    assert with_nic.nic_variables == {
        "HCCL_SOCKET_IFNAME": "=eth1",
        "UCX_NET_DEVICES": "eth1",
        "FI_TCP_IFACE": "eth1",
    }
    assert without.nic_variables == {}
