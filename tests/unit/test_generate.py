"""Drawing tokens, the generator against whole forward passes, and text that comes piece by piece."""

import json
import math
import shutil
from collections import Counter
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from numpy.typing import NDArray

from ascend_moe_train.cli.main import main
from ascend_moe_train.data.tokenizer import Tokenizer, load_tokenizer
from ascend_moe_train.errors import TrainingError
from ascend_moe_train.model.transformer import Transformer
from ascend_moe_train.presets import tiny
from ascend_moe_train.train.generate import Generator, Sampling, choose_token, text_pieces
from tests.model_run import kernels
from tests.oracle.transformer import inputs, transformer
from tests.oracle.weights import random_params
from tests.small_run import run_to_end, small_run

WINDOW = 6
CONFIG = tiny().model_copy(update={"num_layers": 1})
PARAMS = random_params(CONFIG, seed=9)
TOKENS = [int(token) for token in np.random.default_rng(2).integers(0, 64, 20)]
GREEDY = Sampling(max_tokens=9, temperature=0.0)


def drawn(logits: list[float], sampling: Sampling, times: int) -> Counter[int]:
    random = np.random.default_rng(sampling.seed)
    return Counter(choose_token(np.array(logits), sampling, random) for _ in range(times))


def test_temperature_zero_takes_the_most_likely() -> None:
    assert drawn([0.1, 3.0, 2.9, -1.0], Sampling(temperature=0.0), 50) == {1: 50}


def test_tokens_come_as_often_as_their_probability_says() -> None:
    logits, times = [0.0, 1.0, 2.0, -1.0], 20_000
    for temperature in (1.0, 0.5, 3.0):
        p = np.exp(np.array(logits) / temperature)
        p /= p.sum()
        found = drawn(logits, Sampling(temperature=temperature, top_p=1.0), times)
        for token, share in enumerate(p):
            # five standard deviations of a binomial share
            assert abs(found[token] / times - share) < 5 * math.sqrt(share * (1 - share) / times) + 1e-9


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(1e-9, {2}), (0.49, {2}), (0.51, {2, 0}), (0.79, {2, 0}), (0.81, {2, 0, 3}), (0.99, {2, 0, 3, 1})],
)
def test_top_p_keeps_the_fewest_tokens_that_hold_it(top_p: float, kept: set[int]) -> None:
    logits = [math.log(share) for share in (0.3, 0.05, 0.5, 0.15)]
    assert set(drawn(logits, Sampling(temperature=1.0, top_p=top_p), 2000)) == kept


def test_kept_tokens_share_what_was_cut() -> None:
    logits = [math.log(share) for share in (0.3, 0.05, 0.5, 0.15)]
    found = drawn(logits, Sampling(temperature=1.0, top_p=0.6), 20_000)
    assert found[2] / 20_000 == pytest.approx(0.5 / 0.8, abs=0.02)


def test_extreme_temperatures_and_logits_stay_numbers() -> None:
    for temperature in (1e-300, 1e-3, 100.0):
        assert drawn([1e4, 1e4 + 1, -1e30], Sampling(temperature=temperature), 20)[2] == 0


@pytest.fixture(scope="module")
def generator() -> Generator:
    model = Transformer(CONFIG, kernels("auto"), WINDOW)
    for name, parameter in model.weights():
        parameter.set_data(ms.Tensor(PARAMS[name].astype(np.float32)))
    return Generator(model, WINDOW, CONFIG.vocab_size)


def oracle_logits(tokens: list[int]) -> NDArray[np.float64]:
    """After the last of all tokens in the window, without any padding."""
    window = np.array([tokens[-WINDOW:]])
    return transformer(PARAMS, CONFIG, inputs(window, window)).logits_BSV[0, -1]


@pytest.mark.parametrize("length", [1, 3, WINDOW, WINDOW + 1, 20])
def test_logits_are_those_of_the_whole_forward_pass_over_the_window(generator: Generator, length: int) -> None:
    np.testing.assert_allclose(generator.logits(TOKENS[:length]), oracle_logits(TOKENS[:length]), rtol=1e-4, atol=1e-4)


def test_greedy_text_follows_the_oracle_beyond_the_window(generator: Generator) -> None:
    expected = list(TOKENS[:2])
    for _ in range(GREEDY.max_tokens):
        expected.append(int(np.argmax(oracle_logits(expected))))
    assert list(generator.tokens(TOKENS[:2], GREEDY, None)) == expected[2:]


def test_the_end_of_document_token_ends_and_is_not_given(generator: Generator) -> None:
    whole = list(generator.tokens(TOKENS[:2], GREEDY, None))
    end = whole[4]
    assert list(generator.tokens(TOKENS[:2], GREEDY, end)) == whole[: whole.index(end)]


def test_a_seed_gives_one_text_and_another_gives_another(generator: Generator) -> None:
    def text(seed: int) -> list[int]:
        return list(generator.tokens([1], Sampling(max_tokens=12, temperature=2.0, seed=seed), None))

    assert text(1) == text(1) != text(2)


def test_ids_beyond_the_tokenizer_are_never_drawn() -> None:
    model = Transformer(CONFIG, kernels("auto"), WINDOW)
    model.initialize(seed=1)
    small = Generator(model, WINDOW, 5)
    assert small.logits([1, 2]).shape == (5,)
    assert max(small.tokens([1], Sampling(max_tokens=30, temperature=50.0, top_p=1.0), None)) == 4


def test_weights_that_are_no_numbers_give_no_text() -> None:
    model = Transformer(CONFIG, kernels("auto"), WINDOW)
    model.initialize(seed=1)
    model.norm.weight.set_data(ms.Tensor(np.full(CONFIG.hidden, math.nan, np.float32)))
    with pytest.raises(TrainingError, match="logits are not finite"):
        Generator(model, WINDOW, CONFIG.vocab_size).logits([1])


@pytest.fixture(scope="module")
def tokenizer(small_corpus: Path) -> Tokenizer:
    return load_tokenizer(small_corpus / "tokenizer.json")


def byte_tokens(tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokens that no merge joins across characters: one per byte of what the corpus hardly had."""
    return [token for character in text for token in tokenizer.encode(character)]


@pytest.mark.parametrize("text", ["plain", "größer – 漢字 🙂 end", "🙂", "漢"])
def test_a_character_waits_until_it_is_whole(tokenizer: Tokenizer, text: str) -> None:
    tokens = byte_tokens(tokenizer, text)
    assert len(tokens) > len(text) or text.isascii()
    pieces = list(text_pieces(tokenizer, "say ", tokens))
    assert pieces[0] == "say "
    assert "".join(pieces) == "say " + text
    assert not any("\ufffd" in piece for piece in pieces)


def test_bytes_that_never_become_a_character_are_shown_in_the_end(tokenizer: Tokenizer) -> None:
    tokens = byte_tokens(tokenizer, "漢字")[:-1]
    pieces = list(text_pieces(tokenizer, "", tokens))
    assert "".join(pieces) == tokenizer.decode(tokens)
    assert pieces[-1] == "\ufffd" and "\ufffd" not in "".join(pieces[:-1])
    broken = [*byte_tokens(tokenizer, "漢")[:2], *tokenizer.encode("a")]
    assert "".join(text_pieces(tokenizer, "", broken)) == tokenizer.decode(broken) == "\ufffda"


def test_the_command_writes_the_same_text_every_way(
    tmp_path: Path, small_corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named = tmp_path / "named.json"
    shutil.copy(small_corpus / "tokenizer.json", named)
    options = ("data.valid=[]", "batch.micro_sequences=4", "run.steps=10", "run.precision=fp16")
    run_to_end(small_run(tmp_path, small_corpus, *options, f"data.tokenizer={named}"))
    folder, out, kept = tmp_path / "run" / "checkpoints", tmp_path / "text.txt", tmp_path / "kept.txt"
    kept.touch()
    out.symlink_to(kept)
    same = ["--prompt", "the router é", "--max-tokens", "20", "--seed", "3"]
    assert main(["generate", "--checkpoint", str(folder), *same, "--out", str(out)]) == 0
    streamed = capsys.readouterr().out
    assert streamed.startswith("the router é") and streamed == kept.read_text() + "\n"
    assert out.is_symlink()
    named.unlink()  # the run has kept a copy
    assert main(["generate", "--checkpoint", str(folder.parent), *same]) == 0
    assert capsys.readouterr().out == streamed
    assert main(["generate", "--checkpoint", str(folder / "step-00000010"), *same, "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert whole["text"] + "\n" == streamed
    assert 0 < whole["tokens"] <= 20
