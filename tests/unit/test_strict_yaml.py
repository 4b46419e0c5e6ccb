from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ascend_moe_train.errors import ConfigError
from ascend_moe_train.strict_yaml import MAX_BYTES, Value, dump, read_file, read_text

PRINTABLE = st.text(st.characters(blacklist_categories=("Cc", "Cs")), max_size=20)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(10**17), 10**17)
    | st.floats(allow_nan=False, allow_infinity=False)
    | PRINTABLE
    | st.sampled_from(
        ["3e-4", "08", "1_000", "null", "yes", "True", "~", "1.", "+1", "0x1f", "1:30", "2024-01-01", "<<"]
    )
)
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(PRINTABLE, inner), max_leaves=12)


@given(VALUES)
def test_what_is_written_reads_back(value: Value) -> None:
    assert read_text(dump(value), "text").value == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 3e-4),
        ("-2E5", -2e5),
        (".5", 0.5),
        ("1.", 1.0),
        ("010", 10),
        ("true", True),
        ("yes", "yes"),
        ("'3'", "3"),
        ("", None),
        ("~", None),
        ("1_000", "1_000"),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("[1, {a: b}]", [1, {"a": "b"}]),
    ],
)
def test_scalars(text: str, value: object) -> None:
    read = read_text(text, "text").value
    assert read == value
    assert type(read) is type(value)


def test_lines_are_those_of_the_keys() -> None:
    document = read_text("a: 1\nb:\n  c: [5,\n    6]\n", "text")
    assert document.lines == {"a": 1, "b": 2, "b.c": 3, "b.c.0": 3, "b.c.1": 4}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\na: 2", "f:2: duplicate key 'a'"),
        ("a:\n  b: 1\n  b: 2", "f:3: duplicate key 'a.b'"),
        ("a:\n\tb: 1", "f:2: not valid YAML: found character '\\t' that cannot start any token"),
        ("a: [1", "f:1: not valid YAML: expected ',' or ']', but got '<stream end>'"),
        ("a: &x 1\nb: *x", "f:1: anchors and aliases are not allowed ('x'): write the value out"),
        ("a: *x", "f:1: anchors and aliases are not allowed ('x'): write the value out"),
        ("a: !!python/name:os.system ", "f:1: tags are not allowed ('tag:yaml.org,2002:python/name:os.system')"),
        ("? [a, b]\n: 1", "f:1: a key has to be a plain word"),
        ("--- a\n--- b", "f:2: a second document starts here: one is allowed"),
        ("[" * 100_000, "f:1: nested more than 16 levels deep"),
        ('a: "x\\0y"', "f:1: text with the control character U+0000 is not allowed"),
        ('a: "\\ud800"', "f:1: text with the control character U+D800 is not allowed"),
        ("a: \x07", "f: not valid YAML: unacceptable character #x0007"),
    ],
)
def test_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_text(text, "f", numbered=True)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    latin, large, folder = tmp_path / "latin.yaml", tmp_path / "large.yaml", tmp_path / "folder"
    latin.write_bytes(b"a: caf\xe9")
    large.write_bytes(b"#" * (MAX_BYTES + 1))
    folder.mkdir()
    expected = {
        latin: "not UTF-8 text: byte 0xe9 at offset 6",
        large: "larger than 1,000,000 bytes, which no run file is",
        folder: "cannot be read: Is a directory",
        tmp_path / "absent.yaml": "cannot be read: No such file or directory",
    }
    for path, message in expected.items():
        with pytest.raises(ConfigError) as caught:
            read_file(path)
        assert str(caught.value) == f"{path}: {message}"


def test_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "bom.yaml"
    path.write_bytes(b"\xef\xbb\xbfa: 1")
    assert read_file(path).value == {"a": 1}
