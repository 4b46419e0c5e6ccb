"""Fine-tuning from a checkpoint on conversations: it learns to answer, only answers count, runs resume exactly."""

import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from ascend_moe_train.checkpoint import store
from ascend_moe_train.checkpoint.starting import open_start
from ascend_moe_train.cli import main as cli
from ascend_moe_train.config import RunConfig, load_run
from ascend_moe_train.data.prepare import ChatOptions, prepare
from ascend_moe_train.data.tokenizer import Tokenizer
from ascend_moe_train.errors import CheckpointError, ConfigError
from ascend_moe_train.model.adapters import adapter_shapes
from ascend_moe_train.train.generate import Generator, Sampling, load_generator
from tests.adapted import weights, write_weights
from tests.chat_corpus import Messages, prepare_chat, talk
from tests.small_run import MemoryView, metrics, newest_state, run, run_to_end, stop_at

ROOT = Path(__file__).parents[2]
NOUNS = ("sky", "sea", "grass", "leaf", "rose", "blood")
COLOURS = {"sky": "blue", "sea": "blue", "grass": "green", "leaf": "green", "rose": "red", "blood": "red"}
RUN = """\
run: {{dir: {folder}/run, steps: 8, seed: 3, log_every: 4, eval_every: 100, eval_sequences: 8, tensorboard: false,
  init_from: {base}, peak_flops_per_s: 1e+11}}
model: {{preset: tiny, vocab_size: 264, num_layers: 1}}
data: {{train: [{{path: {corpus}}}], tokenizer: {corpus}/tokenizer.json, seq_len: 96}}
batch: {{global_sequences: 4, micro_sequences: 4}}
optim: {{lr: 1e-2, warmup_steps: 2}}
checkpoint: {{every: 4, keep: 5}}
"""
LORA = ("lora.r=4", "lora.alpha=8.0", "lora.targets=[attn.qkv, attn.out, experts.w13, experts.w2]")


def talks() -> list[Messages]:
    """Questions after the colours of things, in many words; an answer is one word in brackets."""
    generator = random.Random(5)
    conversations: list[Messages] = []
    for _ in range(120):
        nouns = generator.choices(NOUNS, k=generator.choice((1, 2)))
        turns = [turn for noun in nouns for turn in (question(generator, noun), f"[{COLOURS[noun]}]")]
        conversations.append(talk(*turns))
    return conversations


def question(generator: random.Random, noun: str) -> str:
    return generator.choice(("{}?", "the {}?", "{}, say?")).format(noun)


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of conversations, and a checkpoint in bfloat16 to start from."""
    folder = tmp_path_factory.mktemp("material")
    prepare_chat(folder, talks(), valid_fraction=0.1)
    config = load(folder, folder, "run.init_from=null")
    tensors = {name: value * np.asarray(0.2, value.dtype) for name, value in weights(config.model, 1, "BF16").items()}
    write_weights(folder / "base", config.model, tensors)
    return folder


def load(folder: Path, material: Path, *overrides: str) -> RunConfig:
    folder.mkdir(exist_ok=True)
    text = RUN.format(folder=folder, base=material / "base", corpus=material / "corpus")
    (folder / "run.yaml").write_text(text)
    return load_run(folder / "run.yaml", overrides)


def answer(generator: Generator, tokenizer: Tokenizer, text: str) -> str:
    prompt = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    (ids, _), (end, _) = tokenizer.encode_marked([prompt, "<|im_end|>"])
    return tokenizer.decode(list(generator.tokens(ids, Sampling(max_tokens=8, temperature=0.0), end[0])))


def test_a_model_learns_to_answer(material: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    valid = f"data.valid=[{{path: {material}/corpus}}]"
    config = load(tmp_path, material, "run.steps=200", "run.eval_every=100", "checkpoint.every=1000", valid)
    view = run_to_end(config)
    assert f"starting from {material}/base/step-00000001" in view.notes
    assert view.losses[-1] < 0.1 < 2.0 < view.losses[0]
    assert view.evaluations[-1].loss < 0.2
    generator, tokenizer = load_generator(tmp_path / "run" / "checkpoints", None)
    assert {noun: answer(generator, tokenizer, f"the {noun}?") for noun in NOUNS} == {
        noun: f"[{COLOURS[noun]}]" for noun in NOUNS
    }
    checkpoints = str(tmp_path / "run" / "checkpoints")
    capsys.readouterr()
    asked = ["generate", "--checkpoint", checkpoints, "--chat", "--prompt", "grass, say?", "--temperature", "0"]
    assert cli.main(asked) == 0
    assert capsys.readouterr().out == "[green]\n"


def test_a_run_says_where_its_weights_are_from_and_then_needs_them_no_more(material: Path, tmp_path: Path) -> None:
    base = Path(shutil.copytree(material / "base", tmp_path / "base"))
    config = load(tmp_path, material, f"run.init_from={base}")
    assert run(config, stop_at(4)) == 143
    shutil.rmtree(base)
    assert run_to_end(config).steps[0].step == 5
    checkpoint = store.newest(tmp_path / "run" / "checkpoints")
    assert checkpoint is not None and checkpoint.step == 8
    assert checkpoint.meta["started_from"]["path"] == str(base / "step-00000001")
    with pytest.raises(CheckpointError, match=r"written with run\.init_from = .*/base, this run has elsewhere: set it"):
        run(load(tmp_path, material, "run.init_from=elsewhere"), MemoryView())


@pytest.fixture(scope="module")
def unbroken(material: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with adapters."""
    folder = tmp_path_factory.mktemp("unbroken")
    view = run_to_end(load(folder, material, *LORA))
    assert any(note.startswith("adapters of ") and "parameters are trained" in note for note in view.notes)
    return folder


def test_adapters_alone_are_trained_and_kept(material: Path, unbroken: Path) -> None:
    config = load(unbroken, material, *LORA)
    assert config.lora is not None
    found = store.load_newest(unbroken / "run" / "checkpoints", lambda message: None)
    assert found is not None
    checkpoint, tensors = found
    shapes = adapter_shapes(config.model, config.lora)
    expected = {f"{kind}{name}" for kind in ("adapters.", "optim.first.", "optim.second.") for name in shapes}
    assert set(tensors) == expected
    assert all(tensors[f"adapters.{name}"].any() for name in shapes)
    base = open_start(material / "base")
    assert checkpoint.meta["started_from"] == base.record.model_dump()
    losses = [record["loss"] for record in metrics(unbroken / "run") if record["kind"] == "step"]
    assert losses[-1] < losses[0]


def test_a_run_with_adapters_resumes_exactly(material: Path, tmp_path: Path, unbroken: Path) -> None:
    config = load(tmp_path, material, *LORA)
    for step in (3, 6):
        assert run(config, stop_at(step)) == 143
    run_to_end(config)
    assert metrics(tmp_path / "run") == metrics(unbroken / "run")
    assert newest_state(tmp_path / "run") == newest_state(unbroken / "run")


def test_the_first_step_is_taken_from_the_base(material: Path, tmp_path: Path, unbroken: Path) -> None:
    """B is zero, so the first loss is that of the weights as they are, with and without adapters."""
    view = run_to_end(load(tmp_path, material, "run.steps=2", "optim.warmup_steps=1"))
    assert view.losses[0] == metrics(unbroken / "run")[0]["loss"]
    assert view.losses[1] != metrics(unbroken / "run")[1]["loss"]


def test_adapters_find_their_base_wherever_it_is_and_know_another_one(
    material: Path, tmp_path: Path, unbroken: Path
) -> None:
    shutil.copytree(unbroken / "run", tmp_path / "run")
    moved = shutil.copytree(material / "base", tmp_path / "moved")
    longer = ("run.steps=9", "optim.schedule=wsd", *LORA)
    config = load(tmp_path, material, f"run.init_from={moved}", *longer)
    assert [record.step for record in run_to_end(config).steps] == [9]
    checkpoint = store.newest(tmp_path / "run" / "checkpoints")
    assert checkpoint is not None
    assert checkpoint.meta["started_from"]["path"] == str(Path(moved) / "step-00000001")
    write_weights(Path(moved), config.model, weights(config.model, 2))
    with pytest.raises(CheckpointError, match=r"adapts the weights that .*/moved/step-00000001 had then, run\.init"):
        run(config, MemoryView())
    with pytest.raises(CheckpointError, match=r"written with lora\.r = 4, this run has 8: set it back"):
        run(load(tmp_path, material, *longer, "lora.r=8"), MemoryView())


def test_text_is_generated_with_adapters(unbroken: Path) -> None:
    generator, tokenizer = load_generator(unbroken / "run" / "checkpoints", None)
    assert isinstance(answer(generator, tokenizer, "sky?"), str)


def test_the_example_is_as_its_page_says(tmp_path: Path, small_corpus: Path) -> None:
    manifest = prepare(
        sources=[str(ROOT / "examples" / "talks.jsonl")],
        out=tmp_path / "talks",
        tokenizer=small_corpus / "tokenizer.json",
        valid_fraction=0.1,
        chat=ChatOptions(template=ROOT / "examples" / "chat.jinja", max_tokens=800),
    ).manifest
    assert sum(split.documents for split in manifest.splits.values()) == 20
    config = load_run(ROOT / "examples" / "finetune.yaml", ["model.preset=demo"])
    assert config.lora is not None and config.run.init_from == "runs/demo/checkpoints"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["run.init_from=null"], r"lora adapts a trained model: run\.init_from is missing, name its checkpoint"),
        (
            ["lora.targets=[attn.qvk]"],
            r"lora\.targets: 'attn\.qvk' names no weight of this model: there are attn\.qkv",
        ),
        (["lora.r=0"], r"lora\.r: 0 is not allowed: must be greater than 0"),
        (["lora.rank=3"], r"lora\.rank"),
    ],
)
def test_settings_that_cannot_be(overrides: Sequence[str], message: str, material: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        load(tmp_path, material, *LORA, *overrides)
    assert "\n" not in str(raised.value)


def test_a_model_of_another_shape_is_refused_before_anything_is_written(material: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds a model with model\.norm_eps = 1e-05, this run has 0\.001"):
        run(load(tmp_path, material, "model.norm_eps=0.001"), MemoryView())
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]
