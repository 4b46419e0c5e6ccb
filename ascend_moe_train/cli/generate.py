"""`amt generate`."""

import json
import os
import sys
from itertools import takewhile
from pathlib import Path

import click

from ascend_moe_train.cli.finite_range import FiniteRange
from ascend_moe_train.cli.out_file import check_out, write_out

MAX_PROMPT_BYTES = 1 << 24


@click.command("generate")
@click.option(
    "--checkpoint", required=True, type=click.Path(path_type=Path), help="A checkpoint, or a folder of them (newest)."
)
@click.option("--prompt", required=True, help="The text to continue; - reads it from stdin.")
@click.option("--chat", "is_chat", is_flag=True, help="The prompt is a user's message: print the model's answer to it.")
@click.option("--tokenizer", help="Another tokenizer.json than the run's, or the converted one.")
@click.option("--context", type=click.IntRange(2, 1_000_000), help="See so many tokens; else as in training, or 512.")
@click.option("--max-tokens", default=200, show_default=True, type=click.IntRange(1, 1_000_000), help="At most.")
@click.option("--temperature", default=0.8, show_default=True, type=FiniteRange(0, 100), help="0: most likely.")
@click.option("--top-p", default=0.95, show_default=True, type=FiniteRange(0, 1, min_open=True), help="Nucleus.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0), help="Same seed, same text.")
@click.option("--out", type=click.Path(path_type=Path), help="Also write the text to this file.")
@click.option("--json", "as_json", is_flag=True, help="As JSON, when complete.")
def command(
    checkpoint: Path,
    prompt: str,
    is_chat: bool,
    tokenizer: str | None,
    context: int | None,
    max_tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
    out: Path | None,
    as_json: bool,
) -> None:
    """Sample text from a checkpoint."""
    from ascend_moe_train.cli.environment import prepare_environment

    text = _prompt_text(prompt)
    if out is not None:
        check_out(out)
    prepare_environment()
    from ascend_moe_train.train.generate import Sampling, chat_prompt, load_generator, text_pieces

    asked = chat_prompt(checkpoint, tokenizer, text) if is_chat else text
    generator, words = load_generator(checkpoint, tokenizer, context)
    sampling = Sampling(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    start = words.encode_marked([asked])[0][0] if is_chat else words.encode(asked) or [words.eod_id]
    tokens = generator.tokens(start, sampling, words.eod_id)
    if is_chat:
        # the end of a turn is one of the special tokens, the template knows which
        text, tokens = "", takewhile(lambda token: token not in words.special_ids, tokens)
    if as_json:
        drawn = list(tokens)
        text = "".join(text_pieces(words, text, drawn))
        click.echo(json.dumps({"text": text, "tokens": len(drawn)}))
    else:
        pieces = []
        for piece in text_pieces(words, text, tokens):
            pieces.append(piece)
            click.echo(piece, nl=False)
        click.echo()
        text = "".join(pieces)
    if out is not None:
        write_out(out, text)


def _prompt_text(prompt: str) -> str:
    from ascend_moe_train.errors import DataError

    content = _read_stdin() if prompt == "-" else os.fsencode(prompt)
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        found = f"byte 0x{content[error.start]:02x} at byte offset {error.start}"
        raise DataError(f"--prompt: {found} is not UTF-8 text") from None


def _read_stdin() -> bytes:
    from ascend_moe_train.errors import DataError

    if sys.stdin is None:
        raise DataError("--prompt -: there is no standard input to read")
    content = sys.stdin.buffer.read(MAX_PROMPT_BYTES + 1)
    if len(content) > MAX_PROMPT_BYTES:
        raise DataError(f"--prompt -: more than {MAX_PROMPT_BYTES:,} bytes on standard input")
    return content
