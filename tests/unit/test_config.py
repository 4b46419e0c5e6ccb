"""Run files: what they resolve to, and the one line that each mistake gives."""

from pathlib import Path

import pytest

from ascend_moe_train.cli.main import main
from ascend_moe_train.config import RunConfig, dump_yaml, load_run, run_to_dict
from ascend_moe_train.config_error import OTHER_NAMES, known_keys
from ascend_moe_train.errors import ConfigError
from ascend_moe_train.presets import PRESETS, demo

GOOD = """\
run: {dir: runs/x, steps: 600}
model: {preset: demo, vocab_size: 2048}
data: {train: [{path: corpora/a}], valid: [{path: corpora/b}], tokenizer: tokenizer.json}
batch: {global_sequences: 16, micro_sequences: 8}
optim:
  lr: 3e-4
"""


@pytest.fixture
def run_yaml(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(GOOD)
    return path


def test_preset_defaults_and_overrides(run_yaml: Path) -> None:
    cfg = load_run(run_yaml, ["optim.lr=2e-4", "model.moe.top_k=1", "data.train.0.weight=2.5", "run.steps=700"])
    assert cfg.optim.lr == 2e-4
    assert cfg.run.steps == 700
    assert cfg.data.train[0].weight == 2.5
    assert cfg.model.moe is not None
    assert cfg.model == demo().model_copy(
        update={"vocab_size": 2048, "moe": cfg.model.moe.model_copy(update={"top_k": 1})}
    )
    assert cfg.tokens_per_step == 16 * 256


def test_preset_can_be_overridden_and_experts_removed(run_yaml: Path) -> None:
    cfg = load_run(run_yaml, ["model.preset=tiny", "model.moe=null"])
    assert (cfg.model.hidden, cfg.model.vocab_size, cfg.model.moe) == (32, 2048, None)


def test_whole_sections_in_one_override(run_yaml: Path) -> None:
    cfg = load_run(run_yaml, ["optim={lr: 1e-2, schedule: wsd}", "data.valid=[]"])
    assert (cfg.optim.lr, cfg.optim.schedule, cfg.data.valid) == (1e-2, "wsd", ())


def test_resolved_yaml_reads_back_the_same(run_yaml: Path, tmp_path: Path) -> None:
    cfg = load_run(run_yaml, ["run.dir='3e-4'"])
    again = tmp_path / "again.yaml"
    again.write_text(dump_yaml(cfg))
    assert load_run(again) == cfg
    assert RunConfig.model_validate(cfg) == cfg
    assert run_to_dict(cfg)["run"]["dir"] == "3e-4"


def test_names_used_elsewhere_lead_to_keys_that_exist() -> None:
    known = set(known_keys(RunConfig))
    assert set(OTHER_NAMES.values()) <= known
    leaves = {key.rpartition(".")[2] for key in known}
    assert not leaves & set(OTHER_NAMES)


OVERRIDE_MISTAKES = [
    ("optim.learning_rate=3e-4", "unknown key 'optim.learning_rate' (value 0.0003): did you mean 'optim.lr'?"),
    ("optm.lr=1", "unknown key 'optm' (value {\"lr\": 1}): did you mean 'optim'?"),
    ("train.lr=1", "unknown key 'train' (value {\"lr\": 1}): did you mean 'optim.lr'?"),
    ("model.hidden_size=3", "unknown key 'model.hidden_size' (value 3): did you mean 'model.hidden'?"),
    ("batch.seq_len=3", "unknown key 'batch.seq_len' (value 3): did you mean 'data.seq_len'?"),
    ("model.moe.topk=2", "unknown key 'model.moe.topk' (value 2): did you mean 'model.moe.top_k'?"),
    ("data.train.0.wight=2", "unknown key 'data.train.0.wight' (value 2): did you mean 'data.train.0.weight'?"),
    ("checkpoint.xyzzy=2", "unknown key 'checkpoint.xyzzy' (value 2): checkpoint has every, keep, asynchronous"),
    ("optim.lr=-1", "optim.lr: -1 is not allowed: must be greater than 0"),
    ("run.dir=''", 'run.dir: "" is not allowed: must be text that is not empty'),
    ("model.num_layers=1000000000000", "model.num_layers: 1000000000000 is not allowed: must be at most 10000"),
    ("model.mtp.depth=1000000000000", "model.mtp.depth: 1000000000000 is not allowed: must be at most 10000"),
    ("optim.lr=fast", 'optim.lr: "fast" is not allowed: must be a number'),
    ("optim.lr=1e999", "optim.lr: Infinity is not allowed: must be a finite number"),
    ("optim.beta1=1.0", "optim.beta1: 1.0 is not allowed: must be less than 1"),
    ("guard.spike_window=4", "guard.spike_window: 4 is not allowed: must be at least 8"),
    ("optim.min_lr_ratio=2", "optim.min_lr_ratio: 2 is not allowed: must be at most 1"),
    (
        "optim.schedule=cosin",
        "optim.schedule: \"cosin\" is not allowed: must be 'cosine', 'linear' or 'wsd' (did you mean 'cosine'?)",
    ),
    ("run.device=gpu", "run.device: \"gpu\" is not allowed: must be 'auto', 'cpu' or 'ascend' (did you mean 'cpu'?)"),
    ("run.steps=1.5", "run.steps: 1.5 is not allowed: must be a whole number"),
    ("run.steps=true", "run.steps: true is not allowed: must be a whole number"),
    ("run.seed=99999999999", "run.seed: 99999999999 is not allowed: must be less than 2147483648"),
    ("run.seed=99999999999999999999999", "run.seed: 1e+23 is not allowed: must be a whole number"),
    ("run.tensorboard=yes", 'run.tensorboard: "yes" is not allowed: must be true or false'),
    ("run.dir=", "run.dir: null is not allowed: must be text"),
    ("data.train=x", 'data.train: "x" is not allowed: must be a list'),
    ("checkpoint=3", "checkpoint: 3 is not allowed: must be a mapping with keys every, keep, asynchronous"),
    (
        "model.preset=demos",
        f"model.preset: \"demos\" is not a preset: allowed are {', '.join(PRESETS)} (did you mean 'demo'?)",
    ),
    ("optim.warmup_steps=601", "optim.warmup_steps 601 is more than run.steps 600"),
    ("batch.micro_sequences=3", "batch: global_sequences 16 does not divide by micro_sequences 3"),
    ("model.num_kv_heads=3", "model: num_heads 8 does not divide by num_kv_heads 3"),
    ("model.moe.top_k=9", "model.moe: top_k 9 is more than num_experts 8"),
    ("model.rope.factor=2.0", "model.rope: factor 2.0 has no effect with scaling 'none': set scaling to 'linear'"),
    ("model.moe.dense_layers=[7]", "model: moe.dense_layers [7] beyond the last layer 3"),
    (
        "data.seq_len=200000000",
        "batch.micro_sequences 8 x data.seq_len 200000000 x top_k 2 is 3,200,000,000 assignments at once: fewer than "
        "2,147,483,648 are possible",
    ),
    ("model.mtp.depth=256", "model.mtp.depth 256 needs longer sequences: data.seq_len is 256"),
    ("recompute.policy=fully", "recompute.policy: \"fully\" is not allowed: must be 'none', 'selective' or 'full'"),
    ("recompute.layers=2", "recompute: layers 2 has no effect with policy 'none': leave it out"),
    ("recompute={policy: full, layers: 0}", "recompute.layers: 0 is not allowed: must be greater than 0"),
    (
        "recompute={policy: selective, kept: block_inputs}",
        "recompute: kept 'block_inputs' needs policy 'full', not 'selective'",
    ),
    ("data.train.1.weight=2", "data.train is a list of 1: name an item by its number, from 0"),
    ("run.steps.x=2", "run.steps is 600, which has no keys"),
    ("lr", "not of the form section.key=value, such as optim.lr=3e-4"),
    ("a..b=1", "not of the form section.key=value, such as optim.lr=3e-4"),
    ("optim.lr=[1", "not valid YAML: expected ',' or ']', but got '<stream end>'"),
    ("optim.lr=!!python/name:os.system x", "tags are not allowed ('tag:yaml.org,2002:python/name:os.system'): plain"),
]


@pytest.mark.parametrize(("override", "message"), OVERRIDE_MISTAKES)
def test_mistakes_in_overrides(override: str, message: str, run_yaml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "check", str(run_yaml), "--set", override]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith(f"error: --set {override}: {message}")
    assert output.err.count("\n") == 1


FILE_MISTAKES = [
    (
        "optim:\n  lr: 3e-4",
        "optim:\n  lrr: 3e-4",
        ":6: unknown key 'optim.lrr' (value 0.0003): did you mean 'optim.lr'?",
    ),
    ("lr: 3e-4", "lr: 0", ":6: optim.lr: 0 is not allowed: must be greater than 0"),
    ("lr: 3e-4", "lr: 3e-4\n  lr: 1", ":7: duplicate key 'optim.lr'"),
    (
        "optim:\n  lr: 3e-4",
        "recompute: {policy: full, layers: 9}",
        ":5: recompute.layers 9: the model has 4 layers (model.num_layers); null is all of them",
    ),
    (
        "optim:\n  lr: 3e-4",
        "recompute: {policy: full, kept: block_inputs}",
        ":5: recompute.kept 'block_inputs' is for pipeline stages: parallel.pp is 1, leave it out",
    ),
    ("lr: 3e-4", "warmup_steps: 601", ":6: optim.warmup_steps 601 is more than run.steps 600"),
    ("  lr: 3e-4", "\tlr: 3e-4", ":6: not valid YAML: found character '\\t' that cannot start any token"),
    ("steps: 600", "", ":1: run.steps is missing: it has no default"),
    (
        "preset: demo, ",
        "",
        ":2: model.hidden is missing: it has no default, or start from one with model.preset (and 4 more)",
    ),
    (
        "preset: demo, ",
        "hiden: 3, ",
        ":2: unknown key 'model.hiden' (value 3): did you mean 'model.hidden'? (and 5 more)",
    ),
    ("optim:\n  lr: 3e-4", "optim:", ":5: optim: null is not allowed: must be a mapping with keys lr, min_lr_ratio,"),
    (
        "optim:\n  lr: 3e-4",
        "optim: [1]",
        ":5: optim: [1] is not allowed: must be a mapping with keys lr, min_lr_ratio,",
    ),
    ("run: {dir: runs/x, steps: 600}", "run: &a {dir: b, steps: 2}", ":1: anchors and aliases are not allowed ('a')"),
    ("dir: runs/x", "dir: runs/x, device: cpu, precision: bf16", ":1: run.precision 'bf16' is for device 'ascend'"),
    ("dir: runs/x", "dir: runs/x, device: ascend, kernels: native", ":1: run.kernels 'native' is for device 'cpu'"),
    (GOOD, "- run", ": a run file is a mapping of sections: run, model, data, batch, optim"),
    (GOOD, "", ": a run file is a mapping of sections: run, model, data, batch, optim"),
    (GOOD, "optim: {lr: 1}", ": run is missing: it has no default (and 2 more)"),
]


@pytest.mark.parametrize(("old", "new", "message"), FILE_MISTAKES)
def test_mistakes_in_files(
    old: str, new: str, message: str, run_yaml: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert GOOD.count(old) == 1
    run_yaml.write_text(GOOD.replace(old, new))
    assert main(["config", "show", str(run_yaml)]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith(f"error: {run_yaml}{message}")
    assert output.err.count("\n") == 1


def test_keys_below_removed_experts(run_yaml: Path) -> None:
    with pytest.raises(ConfigError, match=r"model.moe is null, which has no keys"):
        load_run(run_yaml, ["model.moe=null", "model.moe.top_k=2"])


def test_decay_needs_room_after_warmup(run_yaml: Path) -> None:
    with pytest.raises(ConfigError, match=r"optim.decay_fraction 0.9 of run.steps 600 leaves no room"):
        load_run(run_yaml, ["optim.schedule=wsd", "optim.decay_fraction=0.9"])


def test_later_override_wins_and_is_named(run_yaml: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--set optim.lr=-2: optim.lr: -2"):
        load_run(run_yaml, ["optim.lr=-1", "optim.lr=-2"])
