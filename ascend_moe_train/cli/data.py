"""`amt data`."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ascend_moe_train.cli.long_run import print_table, progress_bar, stop_cleanly

if TYPE_CHECKING:
    from ascend_moe_train.data.chat_template import Answers
    from ascend_moe_train.data.encoding import TooLong
    from ascend_moe_train.data.manifest import SplitRecord
    from ascend_moe_train.data.prepare import Prepared


@click.group("data")
def command() -> None:
    """Make token shards from text or conversations, and look into them."""


@command.command("prepare")
@click.option(
    "--source",
    "sources",
    multiple=True,
    metavar="PATH_OR_GLOB",
    help="Text file, folder, glob in quotes, or JSONL file (.jsonl, .ndjson: a document per line). Repeatable.",
)
@click.option("--corpus", metavar="NAME", help="Built-in corpus instead: python-stdlib, this Python's own library.")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder to make.")
@click.option("--vocab-size", type=int, metavar="N", help="Size of the vocabulary to train; bound for a given one.")
@click.option("--tokenizer", type=click.Path(path_type=Path), help="Use this tokenizer.json, train none.")
@click.option("--field", help="The field of a JSONL line that is read.  [default: text; messages of conversations]")
@click.option("--valid-fraction", default=0.05, show_default=True, help="Share of documents, or of a text, held out.")
@click.option(
    "--format",
    "kind",
    type=click.Choice(["text", "chat"]),
    default="text",
    show_default=True,
    help="chat: each JSONL line is a conversation, of which only the assistant's turns count in the loss.",
)
@click.option(
    "--chat-template",
    type=click.Path(path_type=Path),
    help="Jinja file instead of the template beside the tokenizer.",
)
@click.option("--max-tokens", type=int, metavar="N", help="Longest conversation; data.seq_len + 1 fits a sequence.")
@click.option(
    "--too-long",
    type=click.Choice(["drop", "truncate"]),
    default="drop",
    show_default=True,
    help="What becomes of a longer conversation.",
)
@click.option(
    "--answers",
    type=click.Choice(["all", "last"]),
    default="all",
    show_default=True,
    help="Which of the assistant's turns count.",
)
@click.option("--force", is_flag=True, help="Replace a corpus that is there already.")
@click.option("--json", "as_json", is_flag=True, help="As JSON, without a progress bar.")
def prepare_command(
    sources: tuple[str, ...],
    corpus: str | None,
    out: Path,
    vocab_size: int | None,
    tokenizer: Path | None,
    field: str | None,
    valid_fraction: float,
    kind: str,
    chat_template: Path | None,
    max_tokens: int | None,
    too_long: "TooLong",
    answers: "Answers",
    force: bool,
    as_json: bool,
) -> None:
    """Tokenise text into OUT: train and valid shards, tokenizer.json, manifest.json."""
    from ascend_moe_train.data.prepare import ChatOptions, prepare

    chat = ChatOptions(template=chat_template, max_tokens=max_tokens, too_long=too_long, answers=answers)
    if kind == "text" and chat != ChatOptions():
        raise click.UsageError("--chat-template, --max-tokens, --too-long and --answers are for --format chat")
    with stop_cleanly(), progress_bar(silent=as_json) as progress:
        prepared = prepare(
            sources=sources,
            corpus=corpus,
            out=out,
            vocab_size=vocab_size,
            tokenizer=tokenizer,
            field=field,
            valid_fraction=valid_fraction,
            chat=chat if kind == "chat" else None,
            force=force,
            progress=progress,
        )
    if as_json:
        shown = prepared.manifest.model_dump(mode="json", exclude={"sources"})
        click.echo(json.dumps({"out": str(out), "reused": prepared.reused} | shown, indent=2))
    else:
        _show_prepared(out, prepared)


@command.command("inspect")
@click.argument("prefix", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="As JSON: a list with one entry per prefix.")
def inspect_command(prefix: Path, as_json: bool) -> None:
    """Print documents, tokens and bytes of PREFIX (.bin and .idx), or of every split in a prepared folder."""
    from ascend_moe_train.data.describe import describe
    from ascend_moe_train.units import UNKNOWN, format_bytes

    descriptions = describe(prefix)
    if as_json:
        click.echo(json.dumps([asdict(description) for description in descriptions], indent=2))
        return
    rows: list[tuple[str, ...]] = [("prefix", "documents", "sequences", "tokens", "type", "largest id", "file", "text")]
    for one in descriptions:
        counts = (f"{count:,}" for count in (one.documents, one.sequences, one.tokens))
        text = UNKNOWN if one.text_bytes is None else format_bytes(one.text_bytes)
        rows.append((one.prefix, *counts, one.token_type, f"{one.max_token_id:,}", format_bytes(one.bin_bytes), text))
    print_table(rows)


def _show_prepared(out: Path, prepared: "Prepared") -> None:
    from ascend_moe_train.units import format_bytes

    manifest = prepared.manifest
    made = "is there already, made with the same arguments: reused" if prepared.reused else "written"
    origin = "trained here" if manifest.arguments.tokenizer_sha256 is None else "given"
    empty = f", {manifest.empty_documents:,} empty ones left out" if manifest.empty_documents else ""
    click.echo(
        f"{out}: {made}. {len(manifest.sources):,} files{empty}; vocabulary of {manifest.vocab_size:,}, {origin}."
    )
    rows: list[tuple[str, ...]] = [("split", "documents", "tokens", "text", "bytes/token")]
    for name, split in manifest.splits.items():
        ratio = f"{split.bytes_per_token:.2f}"
        rows.append((name, f"{split.documents:,}", f"{split.tokens:,}", format_bytes(split.bytes), ratio))
    print_table(rows)
    for name, split in manifest.splits.items():
        if split.counted_tokens is not None:
            click.echo(_conversations_line(name, split))


def _conversations_line(name: str, split: "SplitRecord") -> str:
    counted = split.counted_tokens or 0
    line = f"{name}: {counted:,} tokens ({counted / split.tokens:.0%}) are the assistant's and count in the loss"
    if split.dropped or split.truncated:
        line += f"; too long: {split.dropped:,} dropped, {split.truncated:,} truncated"
    return line
