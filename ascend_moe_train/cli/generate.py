"""`amt generate`."""

import json
import sys
from pathlib import Path

import click


@click.command("generate")
@click.option(
    "--checkpoint", required=True, type=click.Path(path_type=Path), help="A checkpoint, or a folder of them (newest)."
)
@click.option("--prompt", required=True, help="The text to continue; - reads it from stdin.")
@click.option("--tokenizer", help="Another tokenizer.json than the run's.")
@click.option("--max-tokens", default=200, show_default=True, type=click.IntRange(1, 1_000_000), help="At most.")
@click.option("--temperature", default=0.8, show_default=True, type=click.FloatRange(0, 100), help="0: most likely.")
@click.option("--top-p", default=0.95, show_default=True, type=click.FloatRange(0, 1, min_open=True), help="Nucleus.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0), help="Same seed, same text.")
@click.option("--out", type=click.Path(path_type=Path), help="Also write the text to this file.")
@click.option("--json", "as_json", is_flag=True, help="As JSON, when complete.")
def command(
    checkpoint: Path,
    prompt: str,
    tokenizer: str | None,
    max_tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
    out: Path | None,
    as_json: bool,
) -> None:
    """Sample text from a checkpoint."""
    from ascend_moe_train.cli.quiet import quiet_mindspore
    from ascend_moe_train.errors import DataError

    quiet_mindspore()
    from ascend_moe_train.train.generate import Sampling, load_generator
    from ascend_moe_train.train.metrics import replace_file

    text = sys.stdin.read() if prompt == "-" else prompt
    generator, words = load_generator(checkpoint, tokenizer)
    start = words.encode(text) or [words.eod_id]
    sampling = Sampling(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    tokens: list[int] = []
    shown = 0
    for token in generator.tokens(start, sampling, words.eod_id):
        tokens.append(token)
        if not as_json:
            whole = text + words.decode(tokens)
            # a character may be spread over tokens: what is not yet whole waits
            ready = len(whole.rstrip("\ufffd"))
            click.echo(whole[shown:ready], nl=False)
            shown = max(shown, ready)
    whole = text + words.decode(tokens)
    click.echo(json.dumps({"text": whole, "tokens": len(tokens)}) if as_json else whole[shown:])
    if out is not None:
        if out.is_dir():
            raise DataError(f"--out {out}: is a folder, a file is needed")
        replace_file(out, [whole.encode()])
