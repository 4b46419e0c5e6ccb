"""What `amt plan` plans for: a model from a preset, a run file or a folder, and the tokens of a step."""

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ascend_moe_train.errors import ConfigError

if TYPE_CHECKING:
    from ascend_moe_train.planner.hardware import Cluster
    from ascend_moe_train.planner.plan import Job
    from ascend_moe_train.planner.techniques import Techniques

SEQ_LEN = 4096
SEQUENCES = 1024
ON_CPU = {"seq_len": 256, "sequences": 64}
STEPS = 1000
RUN_SUFFIXES = (".yaml", ".yml")
DATA_MISSING = "data-of-amt-data-prepare"  # stands for a corpus while only a plan is asked for


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """`tree` is the run as a file would say it; `has_data` whether it names a corpus. `techniques` are to be tried, the
    first without asking."""

    job: "Job"
    tree: dict[str, Any]
    name: str
    has_data: bool
    techniques: "tuple[Techniques, ...]"


def wanted(
    model: str,
    cluster: "Cluster",
    *,
    overrides: tuple[str, ...],
    data: Path | None,
    seq_len: int | None,
    global_sequences: int | None,
    precision: str | None,
    engine: str,
    allow: tuple[str, ...],
) -> Wanted:
    """The job. Raises ConfigError, CheckpointError or DataError for what cannot be read or used."""
    import copy
    from typing import get_args

    from ascend_moe_train.cli.plan_allow import alternatives
    from ascend_moe_train.config import apply_override, resolve
    from ascend_moe_train.planner.plan import ENGINES, Job, Precision
    from ascend_moe_train.train.inputs import model_of_run

    if precision is not None and precision not in get_args(Precision):
        raise ConfigError(f"--precision {precision!r} does not exist: there are {', '.join(get_args(Precision))}")
    for option, value in {"--seq-len": seq_len, "--global-sequences": global_sequences}.items():
        if value is not None and value < 1:
            raise ConfigError(f"{option} {value} is not possible: must be 1 or more")
    tree, origins, is_run = _tree(model, cluster)
    if data is not None:
        tree["data"] = {**_section(tree, "data"), **_corpus(data)}
    _set(tree, "data", "seq_len", seq_len)
    _set(tree, "batch", "global_sequences", global_sequences)
    _set(tree, "batch", "micro_sequences", 1)
    run = resolve(copy.deepcopy(_layout_free(tree)), origins, f"--model {model}", overrides, model_of_run)
    for override in overrides:
        apply_override(tree, override)
    if precision is None:
        precision = run.run.precision if is_run or cluster.device.kind == "cpu" else "bf16"
    job = Job(
        model=run.model,
        seq_len=run.data.seq_len,
        global_sequences=run.batch.global_sequences,
        precision=precision,  # type: ignore[arg-type]  # one of Precision, seen above
        engine=ENGINES[engine],
    )
    has_data = run.data.tokenizer != DATA_MISSING
    if has_data and data is not None:
        from ascend_moe_train.train.inputs import open_tokenizer

        open_tokenizer(Path(run.data.tokenizer), run.model.vocab_size)
    return Wanted(
        job=job,
        tree=tree,
        name=_name(model),
        has_data=has_data,
        techniques=alternatives(_section(tree, "parallel"), allow, cluster, engine),
    )


def _tree(model: str, cluster: "Cluster") -> tuple[dict[str, Any], dict[str, str], bool]:
    """The run's tree, where its keys are from, and whether it is a run file's."""
    from ascend_moe_train import strict_yaml
    from ascend_moe_train.presets import PRESETS

    path = Path(model)
    if model in PRESETS:
        return _made(model, {"preset": model}, cluster), {}, False
    if path.suffix in RUN_SUFFIXES:
        document = strict_yaml.read_file(path)
        if not isinstance(document.value, dict):
            raise ConfigError(f"{path}: a run file is a mapping of sections, such as run, model and data")
        return document.value, {key: f"{path}:{line}" for key, line in document.lines.items()}, True
    if model and path.is_dir():
        return _made(path.resolve().name or "model", _model_of_folder(path), cluster), {}, False
    begun = [name for name in PRESETS if model and name.startswith(model)]  # nearer than what has as many letters
    near = begun or difflib.get_close_matches(model, PRESETS, 1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise ConfigError(
        f"--model {model[:80]!r} is no preset, run file (.yaml) or folder: {hint}presets are {', '.join(PRESETS)}"
    )


def _made(name: str, model: dict[str, Any], cluster: "Cluster") -> dict[str, Any]:
    """A run's tree around a model, with the usual tokens of a step: as many sequences as divide by the devices."""
    is_cpu = cluster.device.kind == "cpu"
    least = ON_CPU["sequences"] if is_cpu else SEQUENCES
    return {
        "run": {"dir": f"runs/{name}", "steps": STEPS},
        "model": model,
        "data": {
            "train": [{"path": DATA_MISSING}],
            "tokenizer": DATA_MISSING,
            "seq_len": ON_CPU["seq_len"] if is_cpu else SEQ_LEN,
        },
        "batch": {"global_sequences": -(-least // cluster.num_devices) * cluster.num_devices},
    }


def _model_of_folder(path: Path) -> dict[str, Any]:
    """Of a Hugging Face folder's config.json, or of a checkpoint of ours."""
    from ascend_moe_train.checkpoint import store
    from ascend_moe_train.checkpoint.converted import model_meta
    from ascend_moe_train.checkpoint.huggingface_config import model_config_from_hf
    from ascend_moe_train.checkpoint.strict_json import parse_json

    config = path / "config.json"
    if config.is_file():
        return model_config_from_hf(parse_json(config.read_bytes(), str(config))).model_dump(mode="json")
    found = store.find(path)
    return model_meta(store.read_manifest(found).meta, str(found)).model.model_dump(mode="json")


def _corpus(folder: Path) -> dict[str, Any]:
    """Section `data` of a folder that `amt data prepare` wrote."""
    if not (folder / "tokenizer.json").is_file() or not (folder / "train.idx").is_file():
        raise ConfigError(
            f"--data {folder}: no corpus of `amt data prepare` (train.idx and tokenizer.json are missing)"
        )
    valid = {"valid": [{"path": str(folder / "valid")}]} if (folder / "valid.idx").is_file() else {}
    return {"train": [{"path": str(folder / "train")}], **valid, "tokenizer": str(folder / "tokenizer.json")}


def _layout_free(tree: dict[str, Any]) -> dict[str, Any]:
    """Without the layout that the file has now, which need not be possible."""
    return {name: section for name, section in tree.items() if name not in ("parallel", "recompute")}


def _section(tree: dict[str, Any], name: str) -> dict[str, Any]:
    section = tree.get(name, {})
    return section if isinstance(section, dict) else {}


def _set(tree: dict[str, Any], section: str, key: str, value: int | None) -> None:
    if value is not None:
        tree[section] = {**_section(tree, section), key: value}


def _name(model: str) -> str:
    return Path(model).stem if Path(model).suffix in RUN_SUFFIXES else Path(model).name or model
