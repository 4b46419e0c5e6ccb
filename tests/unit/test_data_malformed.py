"""Malformed corpora, tokenizers and shards: each is one line that names the file and the place, and leaves nothing."""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from ascend_moe_train.cli import main as cli
from ascend_moe_train.data.config import CorpusConfig, DataConfig
from ascend_moe_train.data.loader import EvalLoader, TrainLoader
from ascend_moe_train.data.prepare import prepare
from ascend_moe_train.data.tokenizer import load_tokenizer
from ascend_moe_train.errors import DataError

VOCAB_SIZE = 300
MAGIC = b"MMIDIDX\x00\x00"


def names_under(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def tokenizer_text(**changes: object) -> str:
    """A tokenizer.json of three tokens, with parts of it replaced."""
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1, "</s>": 2}, "merges": []}
    return json.dumps({"version": "1.0", "added_tokens": [], "model": model} | changes)


# What lies at `in/...` before the run (bytes, or a link's target); further arguments of `prepare`; what the line says.
PREPARE: dict[str, tuple[dict[str, bytes | Path], dict[str, object], str]] = {
    "bad bytes": ({"a.txt": b"good\xff"}, {}, r"a\.txt: byte 0xff at byte offset 4 is not UTF-8 text"),
    "cut character": ({"a.txt": "aé".encode()[:2]}, {}, r"a\.txt: byte 0xc3 at byte offset 1 is not UTF-8 text"),
    "empty file": ({"a.txt": b""}, {"source": "in/a.txt"}, r"a\.txt: is empty \(0 bytes\)"),
    "nothing but empty files": ({"a.txt": b"", "b.txt": b""}, {}, r"2 file\(s\) and no text in them"),
    "empty JSONL": ({"a.jsonl": b"\n \n"}, {"source": "in/a.jsonl"}, r"a\.jsonl: is empty \(3 bytes\)"),
    "empty folder": ({".hidden": b"x"}, {}, r"in: the folder holds no file"),
    "no such file": ({}, {"source": "in/absent.txt"}, r"in/absent\.txt: no such file or folder"),
    "glob without a match": ({"a.txt": b"x"}, {"source": "in/*.md"}, r"in/\*\.md: the glob matches no file"),
    "impossible glob": ({"a.txt": b"x"}, {"source": "in/a**b"}, r"in/a\*\*b: .*(pattern|matches no file)"),
    "link to itself": ({"a.txt": Path("a.txt")}, {"source": "in/a.txt"}, r"a\.txt: .*(symbolic links|Symlink loop)"),
    "link to nothing": ({"a.txt": Path("absent")}, {}, r"a\.txt: cannot be read: No such file"),
    "device": ({"a.txt": Path("/dev/zero")}, {}, r"a\.txt: is no regular file"),
    "malformed JSON": (
        {"a.jsonl": b'{"text": "a"}\n{"text": \n'},
        {},
        r"a\.jsonl: line 2: not JSON: Expecting value at column",
    ),
    "missing field": (
        {"a.jsonl": b'{"text": "a"}\n\n{"body": "b", "n": 1}\n'},
        {},
        r"a\.jsonl: line 3: no field 'text' \(fields there: 'body', 'n'\); name the right one with --field",
    ),
    "JSONL of conversations": (
        {"a.jsonl": b'{"messages": []}\n'},
        {},
        r"a\.jsonl: line 1: no field 'text' \(fields there: 'messages'\); take --format chat",
    ),
    "field of another type": ({"a.jsonl": b'{"text": 3}'}, {}, r"line 1: field 'text' is of type int, text is needed"),
    "line that is no object": ({"a.jsonl": b"[1]"}, {}, r"line 1: a JSON list, an object with the field 'text'"),
    "bad bytes in JSONL": (
        {"a.jsonl": b'{"text": "a"}\n{"text": "\xe9"}\n'},
        {},
        r"a\.jsonl: line 2: byte 0xe9 at byte offset 24 is not UTF-8",
    ),
    "half a surrogate pair": ({"a.jsonl": b'{"text": "\\ud800"}'}, {}, r"line 1: field 'text' holds half a surrogate"),
    "JSON nested too deep": ({"a.jsonl": b"[" * 200_000}, {}, r"line 1: not JSON that can be read: nested too deep"),
    "number too long": ({"a.jsonl": b"1" * 5000}, {}, r"line 1: not JSON that can be read: .* a number too long"),
    "unknown corpus": ({}, {"source": None, "corpus": "wiki"}, r"corpus 'wiki' is not known, allowed: python-stdlib"),
    "source and corpus": ({"a.txt": b"x"}, {"corpus": "python-stdlib"}, r"name either sources or a corpus"),
    "no source": ({}, {"source": None}, r"name either sources or a corpus"),
    "one file, two splits": ({"a.txt": b"x"}, {}, r"no document is left for the train split, 1 in all"),
    "fraction of one": ({"a.txt": b"x"}, {"valid_fraction": 1.0}, r"valid_fraction 1\.0 is not possible"),
    "fraction not a number": ({"a.txt": b"x"}, {"valid_fraction": float("nan")}, r"valid_fraction nan is not possible"),
    "vocabulary too small": ({"a.txt": b"x", "b.txt": b"y"}, {"vocab_size": 256}, r"vocab_size 256 .* allowed: 257"),
    "no vocabulary size": ({"a.txt": b"x"}, {"vocab_size": None}, r"size of the vocabulary to train \(--vocab-size\)"),
    "output inside the source": ({"a.txt": b"x"}, {"out": "in/out"}, r"in/out lies inside the source"),
    "source inside the output": ({"a.txt": b"x"}, {"out": "."}, r"source .*/in lies inside --out"),
    "output exists": (
        {"a.txt": b"x", "../out/mine.txt": b"y"},
        {},
        r"out exists and holds 'mine\.txt', which is no part",
    ),
    "output exists, forced": ({"a.txt": b"x", "../out/mine.txt": b"y"}, {"force": True}, r"out exists and holds 'mine"),
    "output is a file": ({"a.txt": b"x", "../out": b"y"}, {"force": True}, r"out exists and is no folder"),
    "output without a manifest": ({"a.txt": b"x", "../out/train.bin": b"y"}, {}, r"out exists, without a manifest"),
    "output below a file": ({"a.txt": b"x", "../f": b"y"}, {"out": "f/out"}, r"f: cannot be written: (Not a d|File e)"),
    "output with a manifest of something else": (
        {"a.txt": b"x", "../out/manifest.json": b'{"format": "other"}'},
        {},
        r"out/manifest\.json: not a corpus manifest: format",
    ),
    "absent tokenizer": ({"a.txt": b"x"}, {"tokenizer": "t.json"}, r"t\.json: no such file"),
    "tokenizer of other JSON": (
        {"a.txt": b"x", "../t.json": b'{"a": 1}'},
        {"tokenizer": "t.json"},
        r"t\.json: not a Hugging Face tokenizer\.json: .*column",
    ),
    "binary tokenizer": (
        {"a.txt": b"x", "../t.json": b"\x80\x04"},
        {"tokenizer": "t.json"},
        r"t\.json: not UTF-8 at byte",
    ),
    "tokenizer with a merge of unknown tokens": (
        {
            "a.txt": b"x",
            "../t.json": tokenizer_text(model={"type": "BPE", "vocab": {"</s>": 0}, "merges": ["x y"]}).encode(),
        },
        {"tokenizer": "t.json"},
        r"t\.json: not a Hugging Face tokenizer\.json: .*out of vocabulary",
    ),
    "tokenizer without an end-of-document token": (
        {
            "a.txt": b"x",
            "../t.json": tokenizer_text(model={"type": "BPE", "vocab": {"a": 0}, "merges": []}).encode(),
        },
        {"tokenizer": "t.json"},
        r"t\.json: no end-of-document token, one of <\|endoftext\|>, </s>",
    ),
    "tokenizer with an id in the billions": (
        {
            "a.txt": b"x",
            "../t.json": tokenizer_text(model={"type": "BPE", "vocab": {"</s>": 1 << 31}, "merges": []}).encode(),
        },
        {"tokenizer": "t.json"},
        r"t\.json: token id 2147483648, allowed are ids below 16777216",
    ),
    "tokenizer beyond the vocabulary": (
        {"a.txt": b"x", "../t.json": tokenizer_text().encode()},
        {"tokenizer": "t.json", "vocab_size": 2},
        r"t\.json: its largest token id is 2, beyond vocab_size 2; allowed: --vocab-size 3 or more",
    ),
}


@pytest.mark.parametrize("case", PREPARE)
def test_preparation_of(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, changes, message = PREPARE[case]
    (tmp_path / "in").mkdir()
    for name, content in files.items():
        path = Path(os.path.normpath(tmp_path / "in" / name))
        path.parent.mkdir(exist_ok=True)
        if isinstance(content, Path):
            path.symlink_to(content)
        else:
            path.write_bytes(content)
    before = names_under(tmp_path)
    monkeypatch.chdir(tmp_path)
    arguments: dict[str, object] = {"source": "in", "out": "out", "vocab_size": VOCAB_SIZE} | changes
    source, tokenizer = arguments.pop("source"), arguments.pop("tokenizer", None)
    arguments |= {
        "sources": [] if source is None else [source],
        "out": Path(str(arguments["out"])),
        "tokenizer": None if tokenizer is None else Path(str(tokenizer)),
    }
    with pytest.raises(DataError, match=message) as raised:
        prepare(**arguments)  # type: ignore[arg-type]  # the table holds arguments of every type
    assert "\n" not in str(raised.value)
    assert names_under(tmp_path) == before


def index(
    *,
    magic: bytes = MAGIC,
    version: int = 1,
    code: int = 8,
    sizes: tuple[int, ...] = (3, 5),
    pointers: tuple[int, ...] = (0, 6),
    documents: tuple[int, ...] = (0, 1, 2),
    counts: tuple[int, int] | None = None,
) -> bytes:
    """An index file; with its defaults a sound one, for eight uint16 tokens."""
    lengths = counts or (len(sizes), len(documents))
    header = magic + struct.pack("<QBQQ", version, code, *lengths)
    return header + struct.pack(f"<{len(sizes)}i{len(pointers)}q{len(documents)}q", *sizes, *pointers, *documents)


SOUND_BIN = struct.pack("<8H", *range(8))
# The two files (None: absent), and what the line says.
SHARDS: dict[str, tuple[bytes | None, bytes | None, str]] = {
    "no index": (None, SOUND_BIN, r"c\.idx: no such file; `amt data prepare"),
    "no tokens": (index(), None, r"c\.bin: no such file"),
    "empty index": (b"", SOUND_BIN, r"c\.idx: is empty"),
    "empty tokens": (index(), b"", r"c\.bin: is empty"),
    "truncated header": (index()[:20], SOUND_BIN, r"c\.idx: truncated at byte offset 20, the header alone takes 34"),
    "truncated index": (
        index()[:-1],
        SOUND_BIN,
        r"c\.idx: is truncated at byte offset 81: .* take 82 bytes, it has 81",
    ),
    "index with something behind": (index() + b"x", SOUND_BIN, r"c\.idx: goes on after its end at byte offset 82"),
    "wrong magic": (index(magic=b"TNTIDX\0\0\0"), SOUND_BIN, r"c\.idx: starts with b'TNTIDX.* at byte offset 0"),
    "unknown version": (index(version=2), SOUND_BIN, r"c\.idx: format version 2 at byte offset 9"),
    "tokens that are floats": (index(code=6), SOUND_BIN, r"c\.idx: token type code 6 at byte offset 17, known are 1 "),
    "no documents": (index(sizes=(), pointers=(), documents=(0,)), SOUND_BIN, r"c\.idx: .* holds no document"),
    "counts beyond any file": (index(counts=(1 << 63, 1 << 62)), SOUND_BIN, r"c\.idx: is truncated at byte offset 82"),
    "negative length": (index(sizes=(3, -5)), SOUND_BIN, r"c\.idx: sequence length -5 at byte offset 38 is negative"),
    "pointer out of range": (
        index(pointers=(0, 1 << 40)),
        SOUND_BIN,
        r"c\.idx: sequence 1 at byte offset 50 points to byte 1099511627776 of the \.bin file, it should be 6",
    ),
    "negative pointer": (index(pointers=(-2, 6)), SOUND_BIN, r"c\.idx: sequence 0 at byte offset 42 points to byte -2"),
    "truncated tokens": (index(), SOUND_BIN[:-1], r"c\.bin: has 15 bytes, its index c\.idx describes 16: .* truncated"),
    "tokens of another index": (index(), SOUND_BIN * 2, r"c\.bin: has 32 bytes, its index c\.idx describes 16"),
    "document index short of the end": (
        index(documents=(0, 1, 1)),
        SOUND_BIN,
        r"c\.idx: the document index at byte offset 58 runs from 0 to 1, it should run from 0 to 2",
    ),
    "document index that decreases": (
        index(documents=(0, 2, 1, 2)),
        SOUND_BIN,
        r"c\.idx: the document index decreases to 1 at byte offset 74",
    ),
    "id beyond the vocabulary": (
        index(),
        struct.pack("<8H", 0, 1, 2, 3, 4, VOCAB_SIZE, 6, 7),
        r"c\.bin: token id 300 at byte offset 10 is outside the vocabulary of 300 \(allowed: 0 to 299\)",
    ),
    "negative id": (
        index(code=3),
        struct.pack("<8h", 0, 1, 2, -3, 4, 5, 6, 7),
        r"c\.bin: token id -3 at byte offset 6 is outside the vocabulary",
    ),
    "fewer tokens than a sequence": (
        index(sizes=(1, 3), pointers=(0, 2)),
        SOUND_BIN[:8],
        r"c\.bin: holds 4 tokens, one sequence of data\.seq_len 4 needs 5",
    ),
}


def train_config(path: Path) -> DataConfig:
    corpora = (CorpusConfig(path=str(path)),)
    return DataConfig(train=corpora, valid=corpora, tokenizer="none", seq_len=4)


@pytest.mark.parametrize("case", SHARDS)
def test_shards_with(case: str, tmp_path: Path) -> None:
    idx, tokens, message = SHARDS[case]
    for name, content in (("c.idx", idx), ("c.bin", tokens)):
        if content is not None:
            (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as raised:
        TrainLoader(train_config(tmp_path / "c"), vocab_size=VOCAB_SIZE, seed=1, global_sequences=1)
    assert "\n" not in str(raised.value)


def test_the_sound_shard_of_the_table_is_read(tmp_path: Path) -> None:
    (tmp_path / "c.idx").write_bytes(index())
    (tmp_path / "c.bin").write_bytes(SOUND_BIN)
    batch = TrainLoader(train_config(tmp_path / "c"), vocab_size=8, seed=1, global_sequences=1).batch(0)
    assert batch.tokens_BS.shape == (1, 4)


def test_a_prefix_given_with_its_suffix_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"c\.idx: name a corpus without \.bin and \.idx: .*/c$"):
        TrainLoader(train_config(tmp_path / "c.idx"), vocab_size=8, seed=1, global_sequences=1)


def test_validation_without_a_corpus_is_refused(tmp_path: Path) -> None:
    data = train_config(tmp_path / "c").model_copy(update={"valid": ()})
    with pytest.raises(DataError, match=r"data\.valid is empty"):
        EvalLoader(data, vocab_size=8, num_sequences=1, micro_sequences=1)


def test_an_id_outside_the_tokenizer_is_not_decoded(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(tokenizer_text())
    tokenizer = load_tokenizer(tmp_path / "t.json")
    assert (tokenizer.vocab_size, tokenizer.eod_id) == (3, 2)
    for token_id in (-1, 3):
        with pytest.raises(DataError, match=f"token id {token_id} is outside the tokenizer's vocabulary of 3"):
            tokenizer.decode([0, token_id])


COMMANDS: dict[str, tuple[Callable[[Path], list[str]], str]] = {
    "bad bytes": (
        lambda folder: [
            "prepare",
            "--source",
            str(folder / "bad.txt"),
            "--out",
            str(folder / "o"),
            "--vocab-size",
            "300",
        ],
        "byte 0xff at byte offset 0",
    ),
    "inspect of nothing": (lambda folder: ["inspect", str(folder / "absent")], "absent.idx: no such file"),
    "inspect of a folder without a corpus": (lambda folder: ["inspect", str(folder)], "the folder holds no corpus"),
}


@pytest.mark.parametrize("case", COMMANDS)
def test_command_prints_one_line_and_exits_with_2(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, message = COMMANDS[case]
    (tmp_path / "bad.txt").write_bytes(b"\xff")
    assert cli.main(["data", *arguments(tmp_path)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert names_under(tmp_path) == ["bad.txt"]
