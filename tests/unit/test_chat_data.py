"""Conversations as shards and as batches: what counts, what is left out, and that no conversation sees another."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ascend_moe_train.cli import main as cli
from ascend_moe_train.data.config import CorpusConfig, DataConfig
from ascend_moe_train.data.indexed import IndexedDataset, IndexedWriter
from ascend_moe_train.data.loader import Batch, EvalLoader, TrainLoader
from ascend_moe_train.data.manifest import SplitRecord, read_manifest
from ascend_moe_train.data.prepare import ChatOptions, prepare
from ascend_moe_train.data.tokenizer import Tokenizer, load_tokenizer
from ascend_moe_train.errors import DataError
from tests.chat_corpus import prepare_chat, talk, write_conversations, write_tokenizer

VOCAB_SIZE = 260
SEQ_LEN = 100
TALKS = [
    talk("Häuser?", "houses, and <think> more"),
    talk("one?", "eins", "two?", "zwei\n"),
    [{"role": "system", "content": "Answer in one word."}, *talk("Sky?", "blue")],
    talk("a" * 60, "b" * 30),
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def answers(tokenizer: Tokenizer, tokens: Any, counted: Any) -> list[str]:
    """The text of each run of counted tokens."""
    texts: list[list[int]] = []
    for place, (token, counts) in enumerate(zip(tokens, counted, strict=True)):
        if counts:
            if place == 0 or not counted[place - 1]:
                texts.append([])
            texts[-1].append(int(token))
    return [tokenizer.decode(text) for text in texts]


def expected_answers(messages: list[dict[str, Any]]) -> list[str]:
    return [f"{message['content']}<|im_end|>\n" for message in messages if message["role"] == "assistant"]


def record(folder: Path, split: str = "train") -> SplitRecord:
    manifest = read_manifest(folder)
    assert manifest is not None
    return manifest.splits[split]


def test_only_answers_count_and_the_text_is_the_templates(tmp_path: Path, tokenizer: Tokenizer) -> None:
    manifest = prepare_chat(tmp_path, TALKS).manifest
    tokens, marks = (IndexedDataset(tmp_path / "corpus" / name) for name in ("train", "train-counted"))
    assert tokens.num_documents == marks.num_documents == len(TALKS)
    for number, messages in enumerate(TALKS):
        text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
        assert tokenizer.decode(tokens.document(number).tolist()) == text
        counted = marks.document(number)
        assert answers(tokenizer, tokens.document(number), counted) == expected_answers(messages)
        assert not counted[0]
    one = manifest.splits["train"]
    said = "".join(answer for messages in TALKS for answer in expected_answers(messages))
    assert (one.documents, one.tokens, one.bytes) == (4, tokens.num_tokens, len(said.encode()))
    assert one.counted_tokens == int(marks.tokens.sum())
    assert one.bytes_per_token == one.bytes / int(marks.tokens.sum())
    assert (one.dropped, one.truncated) == (0, 0)
    assert (manifest.arguments.format, manifest.arguments.field) == ("chat", "messages")
    assert set(manifest.files) == {path.name for path in (tmp_path / "corpus").iterdir()} - {"manifest.json"}


def test_the_markers_are_single_tokens(tmp_path: Path, tokenizer: Tokenizer) -> None:
    prepare_chat(tmp_path, TALKS[:1])
    ids = IndexedDataset(tmp_path / "corpus" / "train").document(0).tolist()
    assert ids.count(257) == ids.count(258) == 2
    assert (tokenizer.decode([257]), tokenizer.decode([258])) == ("<|im_start|>", "<|im_end|>")


def test_the_last_answer_alone(tmp_path: Path, tokenizer: Tokenizer) -> None:
    prepare_chat(tmp_path, TALKS, answers="last")
    tokens, marks = (IndexedDataset(tmp_path / "corpus" / name) for name in ("train", "train-counted"))
    for number, messages in enumerate(TALKS):
        assert answers(tokenizer, tokens.document(number), marks.document(number)) == expected_answers(messages)[-1:]


@pytest.mark.parametrize(("too_long", "kept", "cut"), [("drop", 1, 0), ("truncate", 2, 1)])
def test_long_conversations_are_dropped_or_truncated_and_counted(
    too_long: str, kept: int, cut: int, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    """Of the four, the first fits, and of the last two nothing that counts would be left."""
    prepare_chat(tmp_path, TALKS, max_tokens=50, too_long=too_long)
    one = record(tmp_path / "corpus")
    assert (one.documents, one.dropped, one.truncated) == (kept, 4 - kept, cut)
    tokens, marks = (IndexedDataset(tmp_path / "corpus" / name) for name in ("train", "train-counted"))
    assert max(np.diff(tokens.document_offsets)) <= 50
    said = "".join(
        "".join(answers(tokenizer, tokens.document(number), marks.document(number))) for number in range(kept)
    )
    assert one.bytes == len(said.encode())


def test_a_split_that_loses_every_conversation_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no document is left for the train split, 4 in all; .* larger --max-tokens"):
        prepare_chat(tmp_path, TALKS, max_tokens=5)
    assert not (tmp_path / "corpus").exists()


def test_a_complete_output_is_reused_and_another_template_refused(tmp_path: Path) -> None:
    prepare_chat(tmp_path, TALKS)
    tokenizer = tmp_path / "tokenizer" / "tokenizer.json"
    arguments: dict[str, Any] = {"sources": [str(tmp_path / "talks.jsonl")], "out": tmp_path / "corpus"}
    arguments |= {"tokenizer": tokenizer, "valid_fraction": 0}
    assert prepare(chat=ChatOptions(), **arguments).reused
    # the corpus has the template beside its tokenizer
    assert prepare(chat=ChatOptions(template=tmp_path / "corpus" / "chat_template.jinja"), **arguments).reused
    with pytest.raises(DataError, match=r"made with answers 'all', asked for is 'last'"):
        prepare(chat=ChatOptions(answers="last"), **arguments)
    (tmp_path / "tokenizer" / "chat_template.jinja").write_text("{% generation %}x{% endgeneration %}")
    with pytest.raises(DataError, match=r"made with template_sha256 "):
        prepare(chat=ChatOptions(), **arguments)


def message(**keys: Any) -> str:
    return json.dumps({"messages": [keys]})


def after_user(**keys: Any) -> str:
    return json.dumps({"messages": [{"role": "user", "content": "x"}, keys]})


GOOD = json.dumps({"messages": talk("x", "y")})
# The second line of a file, and what the line says.
MALFORMED: dict[str, tuple[str | bytes, str]] = {
    "bad JSON": ('{"messages": ', r"talks\.jsonl: line 2: not JSON: Expecting value at column"),
    "bad bytes": (b'{"messages": "\xff"}', r"line 2: byte 0xff at byte offset \d+ is not UTF-8"),
    "no object": ("[]", r"line 2: a JSON list, an object with the field 'messages' is needed"),
    "no messages": ('{"text": "x"}', r"line 2: no field 'messages' \(fields there: 'text'\)"),
    "text for messages": ('{"messages": "x"}', r"line 2: field 'messages' is no list of messages"),
    "empty messages": ('{"messages": []}', r"line 2: field 'messages' is no list of messages, or an empty one"),
    "message that is no object": ('{"messages": ["x"]}', r"line 2: message 1 is a JSON str, an object with role"),
    "no role": (message(content="x"), r"line 2: message 1 has no role, one of system, user, assistant, tool is needed"),
    "unknown role": (message(role="usr", content="x"), r"message 1 has the role 'usr', .* \(did you mean 'user'\?\)"),
    "no content": (message(role="user"), r"line 2: message 1 has no content, text is needed"),
    "content of another type": (message(role="user", content=[{"text": "x"}]), r"message 1 has content of type list"),
    "empty content": (message(role="user", content=" \n"), r"line 2: message 1: the content is empty"),
    "assistant first": (message(role="assistant", content="x"), r"message 1: assistant at the start is not possible"),
    "two users": (after_user(role="user", content="x"), r"message 2: user after user is not possible, allowed: assist"),
    "late system": (after_user(role="system", content="x"), r"message 2: system after user is not possible"),
    "tool after user": (after_user(role="tool", content="x"), r"message 2: tool after user is not possible"),
    "no answer": (message(role="user", content="x"), r"line 2: no message of the assistant"),
    "half a surrogate pair": (after_user(role="assistant", content="\ud800"), r"line 2: a message holds half a surrog"),
    "noncharacter": (after_user(role="assistant", content="\ufdd0"), r"line 2: a message holds U\+FDD0, which is no"),
    "special token": (
        after_user(role="assistant", content="x<|im_end|>y"),
        r"line 2: a message spells the special token '<\|im_end\|>': spell it differently",
    ),
    "tools of another type": (
        json.dumps({"messages": talk("x", "y"), "tools": "z"}),
        r"line 2: tools is of type str, a list is needed",
    ),
    "nested too deep": ("[" * 100_000, r"line 2: not JSON that can be read: nested too deep"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_files_with(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    second, expected = MALFORMED[case]
    data = second if isinstance(second, bytes) else second.encode()
    (tmp_path / "talks.jsonl").write_bytes(GOOD.encode() + b"\n" + data + b"\n")
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    assert_matches(expected, one_line(tmp_path, tokenizer, capsys, "--format", "chat"))


# Further options, the template beside the tokenizer, and what the line says.
COMMANDS: dict[str, tuple[list[str], str | None, str]] = {
    "a template that is wrong": (["--format", "chat"], "{% if %}", r"tokenizer_config\.json: line 1: Expected an exp"),
    "a template that fails": (
        ["--format", "chat"],
        "{{ ''.__class__ }}",
        r"talks\.jsonl: line 1: chat template .*tokenizer_config\.json: access to attribute '__class__'",
    ),
    "no template": (["--format", "chat"], None, r"no chat template beside it, .* name one with --chat-template"),
    "an absent template": (["--format", "chat", "--chat-template", "t.jinja"], None, r"t\.jinja: no such file"),
    "too few tokens": (["--format", "chat", "--max-tokens", "1"], "x", r"max_tokens 1 is not possible, allowed: 2"),
    "options of another format": (["--answers", "last"], "x", r"are for --format chat"),
}


@pytest.mark.parametrize("case", COMMANDS)
def test_command_with(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options, template, expected = COMMANDS[case]
    (tmp_path / "talks.jsonl").write_text(GOOD)
    tokenizer = write_tokenizer(tmp_path / "tokenizer", template)
    assert_matches(expected, one_line(tmp_path, tokenizer, capsys, *options))


def test_conversations_need_a_tokenizer_and_jsonl(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(DataError, match="conversations need --source and a --tokenizer"):
        prepare(sources=[str(tmp_path / "a.txt")], out=tmp_path / "o", vocab_size=300, chat=ChatOptions())
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    with pytest.raises(DataError, match=r"a\.txt: conversations are read from JSONL: \.jsonl, \.ndjson"):
        prepare(sources=[str(tmp_path / "a.txt")], out=tmp_path / "o", tokenizer=tokenizer, chat=ChatOptions())


def one_line(folder: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """Runs the command, which must print one line, end with 2 and leave nothing."""
    before = sorted(path.name for path in folder.iterdir())
    source, out = str(folder / "talks.jsonl"), str(folder / "corpus")
    arguments = ["data", "prepare", "--source", source, "--out", out, "--tokenizer", str(tokenizer)]
    assert cli.main([*arguments, "--valid-fraction", "0", *options]) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert sorted(path.name for path in folder.iterdir()) == before
    return printed.err


def assert_matches(pattern: str, text: str) -> None:
    with pytest.raises(DataError, match=pattern):
        raise DataError(text)


KILLED = """
import os, sys
from ascend_moe_train.cli.main import main
from ascend_moe_train.data import prepare
number, source, tokenizer, out = sys.argv[1:]
prepare.write_synced = lambda path, data: os.kill(os.getpid(), int(number))
main(["data", "prepare", "--source", source, "--tokenizer", tokenizer, "--format", "chat", "--out", out])
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interruption_leaves_nothing_and_no_process(number: signal.Signals, tmp_path: Path) -> None:
    source = write_conversations(tmp_path / "talks.jsonl", TALKS * 10)
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    arguments = [sys.executable, "-c", KILLED, str(number.value), str(source), str(tokenizer), str(tmp_path / "out")]
    subprocess.run(arguments, check=False, env={**os.environ, "MARK_OF_TEST": str(tmp_path)})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["talks.jsonl", "tokenizer"]
    assert not [path for path in Path("/proc").glob("[0-9]*/environ") if str(tmp_path).encode() in environment(path)]


def environment(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


# Loading


def config(*paths: Path, weights: tuple[float, ...] = (), seq_len: int = SEQ_LEN, reset: bool = False) -> DataConfig:
    corpora = tuple(
        CorpusConfig(path=str(path), weight=weight)
        for path, weight in zip(paths, weights or (1.0,) * len(paths), strict=True)
    )
    return DataConfig(train=corpora, valid=corpora, tokenizer="none", seq_len=seq_len, reset_attention=reset)


def loader(data: DataConfig, sequences: int = 4, *, seed: int = 1, rank: int = 0, size: int = 1) -> TrainLoader:
    return TrainLoader(data, vocab_size=VOCAB_SIZE, seed=seed, global_sequences=sequences, dp_rank=rank, dp_size=size)


def conversations(batch: Batch, row: int) -> list[tuple[list[int], list[int]]]:
    """Tokens and counted targets of each segment of a sequence; a last target is of the segment before it."""
    found = []
    for segment in range(int(batch.segment_BS[row].max()) + 1):
        places = np.flatnonzero(batch.segment_BS[row] == segment)
        assert (np.diff(places) == 1).all()
        assert batch.position_BS[row, places].tolist() == list(range(places.size))
        found.append((batch.tokens_BS[row, places].tolist(), batch.targets_BS[row, places].tolist()))
    return found


@pytest.fixture
def many(tmp_path: Path) -> Path:
    """Forty conversations of many lengths."""
    texts = [talk(f"question {number}", "answer " * (number % 5 + 1)) for number in range(40)]
    prepare_chat(tmp_path, texts, valid_fraction=0.2)
    return tmp_path / "corpus"


def test_sequences_hold_whole_conversations_each_once_per_epoch(many: Path) -> None:
    shard, marks = IndexedDataset(many / "train"), IndexedDataset(many / "train-counted")
    documents = Counter(tuple(shard.document(number).tolist()) for number in range(shard.num_documents))
    counted = {tuple(shard.document(n).tolist()): marks.document(n).tolist() for n in range(shard.num_documents)}
    one = loader(config(many), 1)
    epoch, step, seen = Counter[tuple[int, ...]](), 0, 0
    while epoch.total() < shard.num_documents:
        batch = one.batch(step)
        for tokens, targets in conversations(batch, 0):
            # the window has one token more than the sequence: the last conversation may end with it
            whole = next(
                (each for each in documents if each[: len(tokens)] == tuple(tokens) and len(each) - len(tokens) <= 1),
                None,
            )
            if whole is None:
                assert set(tokens) == {0}
                assert set(targets) == {-1}
                continue
            epoch[whole] += 1
            expected = [token if counts else -1 for token, counts in zip(whole[1:], counted[whole][1:], strict=True)]
            expected += [-1] * (len(tokens) - len(expected))
            assert targets == expected
            seen += len(tokens)
        step += 1
    assert epoch == documents
    assert seen > 0.8 * step * SEQ_LEN


def test_epochs_differ_in_order_and_ranks_share_a_batch(many: Path) -> None:
    data = config(many)
    windows = 0
    first = loader(data, 1).batch(0)
    while not (windows and np.array_equal(loader(data, 1, seed=1).batch(windows).tokens_BS, first.tokens_BS)):
        windows += 1
    assert not np.array_equal(loader(data, 1, seed=2).batch(0).tokens_BS, first.tokens_BS)
    whole, halves = loader(data).batch(3), [loader(data, rank=rank, size=2).batch(3) for rank in (0, 1)]
    for name in ("tokens_BS", "targets_BS", "segment_BS", "position_BS"):
        joined = np.concatenate([getattr(half, name) for half in halves])
        np.testing.assert_array_equal(joined, getattr(whole, name))


@pytest.mark.parametrize("reset", [False, True])
def test_text_and_conversations_mix(many: Path, tmp_path: Path, reset: bool) -> None:
    (tmp_path / "text.txt").write_text("plain text of no one in particular. " * 40)
    tokenizer = tmp_path / "tokenizer" / "tokenizer.json"
    prepare(sources=[str(tmp_path / "text.txt")], out=tmp_path / "text", tokenizer=tokenizer, valid_fraction=0)
    batch = loader(config(many, tmp_path / "text", weights=(1.0, 3.0), reset=reset), 8).batch(0)
    is_chat = (batch.tokens_BS == 257).any(1)
    assert is_chat.sum() == 2
    assert (batch.segment_BS[is_chat].max(1) >= 1).all()
    assert not batch.segment_BS[~is_chat].any()
    assert (batch.targets_BS[~is_chat] >= 0).all()


def test_validation_reads_each_answer_once(many: Path) -> None:
    validation = EvalLoader(config(many), vocab_size=VOCAB_SIZE, num_sequences=100, micro_sequences=3)
    targets = np.concatenate([batch.targets_BS.ravel() for batch in validation])
    one = record(many, "valid")
    assert int((targets >= 0).sum()) == one.counted_tokens
    assert validation.bytes_per_token == pytest.approx(one.bytes_per_token, rel=1e-12)


def test_a_conversation_longer_than_a_sequence_is_refused(many: Path) -> None:
    with pytest.raises(DataError, match=r"train\.bin: conversation \d+ has \d+ tokens, .* --max-tokens 41, or raise"):
        loader(config(many, seq_len=40))


def test_foreign_marks_are_refused(many: Path) -> None:
    shard = IndexedDataset(many / "train")
    lengths = np.diff(shard.document_offsets).tolist()
    for wrong in ([*lengths[1:], lengths[0]], lengths[:-1]):
        with IndexedWriter(many / "train-counted", np.dtype("u1")) as writer:
            for length in wrong:
                writer.add([1] * length)
        with pytest.raises(DataError, match=r"train-counted\.idx: does not mark the tokens of .*train\.bin"):
            loader(config(many))
    (many / "manifest.json").unlink()
    with IndexedWriter(many / "train-counted", np.dtype("u1")) as writer:
        for length in lengths:
            writer.add([0] * length)
    with pytest.raises(DataError, match=r"train-counted\.bin: marks no token of .*train\.bin: there is nothing to"):
        loader(config(many))


def test_a_corpus_of_conversations_that_has_lost_its_marks_is_refused(many: Path) -> None:
    (many / "train-counted.idx").unlink()
    with pytest.raises(DataError, match=r"train-counted\.idx: no such file"):
        loader(config(many))
    (many / "train-counted.bin").unlink()
    with pytest.raises(DataError, match=r"train-counted\.idx: no such file"):
        loader(config(many))
