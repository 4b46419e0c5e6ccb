"""`amt convert`."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ascend_moe_train.cli.finite_range import FiniteRange
from ascend_moe_train.cli.long_run import progress_bar, stop_cleanly

if TYPE_CHECKING:
    from ascend_moe_train.checkpoint.convert import Converted
    from ascend_moe_train.checkpoint.describe import Described
    from ascend_moe_train.checkpoint.stream_output import Progress

_PATH = click.Path(path_type=Path)
_NONFINITE = click.option("--allow-nonfinite", is_flag=True, help="Take infinities and NaN as they are.")
_JSON = click.option("--json", "as_json", is_flag=True, help="As JSON, without a progress bar.")
_VERIFY = click.option(
    "--verify",
    type=click.Choice(["logits"]),
    help="Also run both sides on a prompt: needs memory for both, torch and transformers.",
)


@click.group("convert")
def command() -> None:
    """Hugging Face folders to checkpoints and back, each time with proof; new models from old ones.

    Nothing appears under its name before every byte that was written has been read back and compared. A command that
    was interrupted goes on from its finished files.
    """


@command.command("import")
@click.argument("source", type=_PATH)
@click.argument("out", type=_PATH)
@click.option(
    "--vocab-size", type=click.IntRange(1), metavar="N", help="Rows that are the vocabulary; more are padding."
)
@_NONFINITE
@_VERIFY
@_JSON
def import_command(
    source: Path, out: Path, vocab_size: int | None, allow_nonfinite: bool, verify: str | None, as_json: bool
) -> None:
    """Make the checkpoint OUT of the Hugging Face folder SOURCE."""
    from ascend_moe_train.checkpoint.convert_import import import_folder

    check = _logits_check(hugging_face=source) if verify else None
    with _working("importing", silent=as_json) as progress:
        converted = import_folder(
            source, out, vocab_size=vocab_size, allow_nonfinite=allow_nonfinite, progress=progress, check=check
        )
    _show(converted, as_json=as_json)


@command.command("export")
@click.argument("checkpoint", type=_PATH)
@click.argument("out", type=_PATH)
@click.option("--like", type=_PATH, help="Take config and tokenizer from this Hugging Face folder or checkpoint.")
@click.option("--family", "model_type", metavar="MODEL_TYPE", help="As this model_type, such as mixtral.")
@click.option("--dtype", type=click.Choice(["fp32", "bf16", "fp16"]), help="Round weights to this; else as they are.")
@click.option("--vocab-size", type=click.IntRange(1), metavar="N", help="Pad embedding and head to so many rows.")
@click.option("--tokenizer", type=_PATH, help="This tokenizer.json, instead of that of the run.")
@click.option(
    "--shard-gb", type=FiniteRange(0, 1_000_000, min_open=True), default=5.0, show_default=True, help="Per file."
)
@_NONFINITE
@_VERIFY
@_JSON
def export_command(
    checkpoint: Path,
    out: Path,
    like: Path | None,
    model_type: str | None,
    dtype: str | None,
    vocab_size: int | None,
    tokenizer: Path | None,
    shard_gb: float,
    allow_nonfinite: bool,
    verify: str | None,
    as_json: bool,
) -> None:
    """Make the Hugging Face folder OUT of CHECKPOINT (or of the newest in a folder of them)."""
    from ascend_moe_train.checkpoint.convert_export import export_folder
    from ascend_moe_train.checkpoint.convert_target import ExportOptions

    options = ExportOptions(
        model_type=model_type,
        like=like,
        dtype=dtype,
        vocab_size=vocab_size,
        extras=_tokenizer_files(checkpoint, tokenizer),
    )
    check = _logits_check(checkpoint=checkpoint) if verify else None
    with _working("exporting", silent=as_json) as progress:
        converted = export_folder(
            checkpoint,
            out,
            options,
            allow_nonfinite=allow_nonfinite,
            max_shard_bytes=int(shard_gb * 1e9),
            progress=progress,
            check=check,
        )
    _show(converted, as_json=as_json)


@command.command("resize")
@click.argument("checkpoint", type=_PATH)
@click.argument("out", type=_PATH)
@click.option("--vocab-size", required=True, type=click.IntRange(1, 2**31), metavar="N", help="Rows to have.")
@_JSON
def resize_command(checkpoint: Path, out: Path, vocab_size: int, as_json: bool) -> None:
    """Make OUT of CHECKPOINT with another vocabulary: rows are cut, or added as the mean of the old ones."""
    from ascend_moe_train.checkpoint.derive import resize_vocabulary

    with _working("resizing", silent=as_json) as progress:
        converted = resize_vocabulary(checkpoint, out, vocab_size=vocab_size, progress=progress)
    _show(converted, as_json=as_json)


@command.command("upcycle")
@click.argument("checkpoint", type=_PATH)
@click.argument("out", type=_PATH)
@click.option(
    "--experts", "num_experts", required=True, type=click.IntRange(2, 4096), metavar="E", help="In each layer."
)
@click.option("--top-k", required=True, type=click.IntRange(1), metavar="K", help="Experts per token.")
@click.option("--noise", default=0.0, show_default=True, type=FiniteRange(0, 1), help="How much copies differ.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0), help="Of routers and noise.")
@_JSON
def upcycle_command(
    checkpoint: Path, out: Path, num_experts: int, top_k: int, noise: float, seed: int, as_json: bool
) -> None:
    """Make a Mixture of Experts OUT of the dense CHECKPOINT: each expert is a copy of the feed-forward.

    Without --noise its first logits are those of the dense model. With it, each number of a copy changes by a random
    one of this share of its tensor's spread.
    """
    from ascend_moe_train.checkpoint.derive import upcycle

    with _working("upcycling", silent=as_json) as progress:
        converted = upcycle(
            checkpoint, out, num_experts=num_experts, top_k=top_k, noise=noise, seed=seed, progress=progress
        )
    _show(converted, as_json=as_json)


@command.command("merge")
@click.argument("checkpoint", type=_PATH)
@click.argument("out", type=_PATH)
@click.option("--dtype", type=click.Choice(["fp32", "bf16", "fp16"]), help="Round weights to this; else as they are.")
@_JSON
def merge_command(checkpoint: Path, out: Path, dtype: str | None, as_json: bool) -> None:
    """Make OUT with all weights, adapters added, of a CHECKPOINT that holds adapters."""
    from ascend_moe_train.checkpoint.merge import merge_adapters

    with _working("merging", silent=as_json) as progress:
        converted = merge_adapters(checkpoint, out, dtype=dtype, progress=progress)
    _show(converted, as_json=as_json)


@command.command("adapter")
@click.argument("checkpoint", type=_PATH)
@click.argument("out", type=_PATH)
@click.option("--base", required=True, metavar="NAME", help="The model that PEFT loads below: a folder or a hub name.")
@_JSON
def adapter_command(checkpoint: Path, out: Path, base: str, as_json: bool) -> None:
    """Make the folder OUT, which PEFT reads, of a CHECKPOINT that holds adapters."""
    from ascend_moe_train.checkpoint.peft import export_adapters
    from ascend_moe_train.units import format_bytes

    exported = export_adapters(checkpoint, out, base)
    if as_json:
        click.echo(json.dumps(asdict(exported) | {"out": str(exported.out), "base": str(exported.base)}, indent=2))
    else:
        size = format_bytes(exported.size_bytes)
        click.echo(f"{out}: adapters of {exported.modules:,} modules, {size}; they were trained on {exported.base}.")


@command.command("inspect")
@click.argument("path", type=_PATH)
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def inspect_command(path: Path, as_json: bool) -> None:
    """Print what PATH holds, a checkpoint or a Hugging Face folder, without reading its tensors."""
    from ascend_moe_train.checkpoint.describe import describe

    described = describe(path)
    if as_json:
        content = asdict(described) | {"path": str(described.path)}
        content["model"] = None if described.model is None else described.model.model_dump(mode="json")
        click.echo(json.dumps(content, indent=2))
        return
    print_lines(_description(described))


def _description(found: "Described") -> Iterator[tuple[str, str]]:
    from ascend_moe_train.units import format_bytes, format_count

    yield "format", found.format
    yield "family", found.model_type or "none"
    if found.step is not None:
        others = f" (also there: {', '.join(map(str, found.other_steps))})" if found.other_steps else ""
        yield "step", f"{found.step}{others}"
    if found.unusable is not None:
        yield "unusable", found.unusable
    if found.model is not None:
        model = found.model
        yield (
            "parameters",
            f"{format_count(found.parameters or 0)}, {format_count(found.active_parameters or 0)} active",
        )
        yield "layers", f"{model.num_layers}, hidden {model.hidden}, {model.num_heads} heads"
        if model.moe is not None:
            moe_layers = sum(model.is_moe(layer) for layer in range(model.num_layers))
            yield "experts", f"{model.moe.num_experts} in {moe_layers} layers, {model.moe.top_k} per token"
        yield "vocabulary", f"{model.vocab_size:,}"
    if found.layout is not None:
        yield "layout", found.layout
    yield "tensors", f"{found.tensors:,} in {found.files} files, {format_bytes(found.data_bytes)}"
    yield "dtypes", ", ".join(f"{dtype} {format_bytes(size)}" for dtype, size in found.bytes_by_dtype.items())
    yield "elements", ", ".join(f"{part} {format_count(count)}" for part, count in found.elements_by_part.items())
    if found.extras:
        yield "files beside", ", ".join(found.extras)


def print_lines(pairs: Iterator[tuple[str, str]]) -> None:
    """A name and what belongs to it on each line."""
    rows = list(pairs)
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        click.echo(f"{name.ljust(width)}  {text}")


def _show(converted: "Converted", *, as_json: bool) -> None:
    from ascend_moe_train.units import format_bytes

    if as_json:
        click.echo(json.dumps(asdict(converted) | {"out": str(converted.out)}, indent=2))
        return
    experts = f", {converted.experts} experts in each of {converted.moe_layers} layers" if converted.experts else ""
    reused = f" ({converted.files_reused} from before the interruption)" if converted.files_reused else ""
    click.echo(
        f"{converted.out}: {converted.model_type or 'no family'}, {converted.tensors_read:,} tensors "
        f"({format_bytes(converted.bytes_read)}) read, {converted.tensors_written:,} "
        f"({format_bytes(converted.bytes_written)}) written in {converted.files} files{reused} and read back{experts}."
    )
    for note in converted.notes:
        click.echo(note)


def _tokenizer_files(checkpoint: Path, given: Path | None) -> dict[str, bytes]:
    """Those of the given tokenizer, else of the run that wrote the checkpoint, where that is still there."""
    from ascend_moe_train.checkpoint.convert_target import tokenizer_of_run
    from ascend_moe_train.data.tokenizer_files import tokenizer_files

    path = given or tokenizer_of_run(checkpoint)
    if path is None:
        return {}
    if given is None and not path.exists():
        click.echo(f"{path}: the run's tokenizer is not there any more: left out (--tokenizer names another)", err=True)
        return {}
    return tokenizer_files(path)


@contextmanager
def _working(stage: str, *, silent: bool) -> Iterator["Progress"]:
    with stop_cleanly(), progress_bar(silent=silent) as bar:
        try:
            yield lambda done_bytes, total_bytes: bar(stage, done_bytes, total_bytes)
        except KeyboardInterrupt:
            click.echo("interrupted: what is finished is kept, and the same command goes on from there", err=True)
            raise


def _logits_check(**sides: Any) -> Any:
    from ascend_moe_train.cli.environment import prepare_environment

    prepare_environment()
    from ascend_moe_train.train.verify_logits import logits_check

    return logits_check(**sides)
