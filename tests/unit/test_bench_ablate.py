"""`amt bench ablate` around its runs: rows and parity of made-up figures, resuming, failures, stops, the page."""

import json
import math
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ascend_moe_train.bench import rung_rank, runs
from ascend_moe_train.bench.ablate import Asked, Ladder, climb
from ascend_moe_train.bench.ablate_result import CHARTS, parity, result_of
from ascend_moe_train.bench.measured import ASKED, FOUND, Measured, RankFound, read_measured, write_measured
from ascend_moe_train.bench.page import page
from ascend_moe_train.bench.result import read_result, result_json
from ascend_moe_train.cli.main import main
from ascend_moe_train.cluster.output import Screen
from ascend_moe_train.cluster.supervise import Job, Outcome
from ascend_moe_train.config import load_run, run_to_dict
from ascend_moe_train.errors import ConfigError, DataError, MetricsError
from ascend_moe_train.html_page import policy_hash
from ascend_moe_train.parallel.spans import CommTotal
from ascend_moe_train.train.metrics import resident_bytes
from tests.small_run import write_run
from tests.synthetic_run import HOSTILE
from tests.unit.test_report import Page

STOPPED = 128 + signal.SIGTERM


def measured(step_s: float = 0.5, loss: float = 3.0, losses: tuple[float, ...] = (5.0, 4.5, 4.0)) -> Measured:
    """Four steps on two ranks, the second of which is slower and fuller; the first step compiles."""
    first = RankFound(
        start_bytes=100,
        peak_bytes=300,
        step_s=(9.0, 8.0, step_s / 2, step_s / 2),
        comm_s=(0.1,) * 4,
        exposed_s=(0.1,) * 4,
    )
    second = replace(first, peak_bytes=500, step_s=(9.0, 8.0, step_s, step_s), exposed_s=(0.0,) * 4)
    return Measured(
        device="cpu",
        kernels="portable",
        tokens_per_step=64,
        losses=(*losses, loss),
        ranks=(first, second),
        calls=(CommTotal(verb="all_reduce", group="dp_cp", calls=3, payload_bytes=1000, total_s=0.1),),
        sent_bytes=1000.0,
    )


class FakeRanks:
    """In the place of `launch`: what runs of rungs come to, by name; whatever is not given measures something."""

    def __init__(self, outcomes: dict[str, Measured | Outcome] | None = None) -> None:
        self.outcomes, self.runs = outcomes or {}, list[str]()

    def __call__(self, job: Job, screen: Screen) -> Outcome:
        assert job.log_folder is not None
        folder = job.log_folder.parent
        self.runs.append(folder.name)
        found = self.outcomes.get(folder.name, measured())
        if isinstance(found, Outcome):
            return found
        write_measured(folder / "found.json", found)
        return Outcome(exit_code=0)


@pytest.fixture
def asked(tmp_path: Path, small_corpus: Path) -> Asked:
    return Asked(
        run_yaml=write_run(tmp_path, small_corpus),
        overrides=("model.moe.capacity_factor=null",),
        ranks=2,
        steps=4,
        repeat=1,
        rungs=("one_by_one", "grouped", "kernels"),
        out=tmp_path / "out",
    )


@pytest.fixture
def climbed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ladder]:
    def climb_with(ranks: FakeRanks, asked: Asked) -> Ladder:
        monkeypatch.setattr(runs, "launch", ranks)
        return climb(asked, lambda line: None)

    return climb_with


def test_figures_are_of_the_later_half_and_the_slowest_rank() -> None:
    found = measured(step_s=0.5)
    assert (found.step_s, found.memory_bytes) == (0.5, 400)
    assert [found.comm_s, found.exposed_s] == pytest.approx([0.1, 0.05])


def test_rungs_take_turns_and_ratios_are_those_of_a_round(asked: Asked, climbed: Any) -> None:
    times = {"one_by_one.0": 2.0, "one_by_one.1": 3.0, "grouped.0": 1.0, "grouped.1": 1.0}
    ranks = FakeRanks({name: measured(step_s=step_s) for name, step_s in times.items()})
    ladder = climbed(ranks, replace(asked, repeat=2))
    assert ranks.runs == ["one_by_one.0", "grouped.0", "kernels.0", "kernels.1", "grouped.1", "one_by_one.1"]
    first, second, third = result_of(ladder, asked, "amt").rows
    assert second["against_first"] == second["against_on"] == 2.5
    assert [first["tokens_per_s"], first["low"], first["high"]] == pytest.approx([(32 + 64 / 3) / 2, 64 / 3, 32])
    assert (third["on"], third["against_on"], third["memory_bytes"], third["calls"]) == ("permute", None, 400, 3)


def test_parity_tells_what_is_as_it_should_be() -> None:
    one = [measured()]
    assert parity("same", one, one) == parity("rounds", one, one) == "same bits"
    near, far = [measured(loss=3.0 * (1 + 1e-6))], [measured(loss=3.1)]
    assert parity("order", near, one) == "+1.0e-06, sums in another order"
    assert "NOT" in parity("same", near, one) and "NOT" in parity("order", far, one)
    assert parity("rounds", far, one) == "+3.3e-02, rounds"
    assert "NOT" in parity("same", [measured(losses=(5.0, 4.5, 4.1))], one)


def test_what_is_finished_is_kept_for_the_same_question_only(asked: Asked, climbed: Any) -> None:
    climbed(FakeRanks(), asked)
    again = FakeRanks()
    assert list(climbed(again, asked).measured) == ["one_by_one", "grouped", "kernels"] and again.runs == []
    climbed(again, replace(asked, rungs=("permute", "kernels")))
    assert again.runs == ["permute.0"]
    climbed(again, replace(asked, overrides=(*asked.overrides, "run.seed=7")))
    assert again.runs[1:] == ["one_by_one.0", "grouped.0", "kernels.0"]
    (asked.out / "measured" / "kernels.0.json").write_text('{"asked": 1')
    climbed(again, replace(asked, overrides=(*asked.overrides, "run.seed=7")))
    assert again.runs[4:] == ["kernels.0"]


def test_a_busy_machine_is_named(asked: Asked, climbed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ladder = climbed(FakeRanks(), asked)
    for load, is_busy in ((0.5, False), (1000.0, True)):
        monkeypatch.setattr("os.getloadavg", lambda load=load: (load, load, load))
        notes = result_of(ladder, asked, "amt").notes
        assert notes[0].startswith("The machine had other work (load 1000 on") is is_busy


def test_a_stop_leaves_the_rest_and_the_next_start_goes_on(asked: Asked, climbed: Any) -> None:
    stopped = climbed(FakeRanks({"grouped.0": Outcome(exit_code=STOPPED)}), asked)
    assert stopped.exit_code == STOPPED and list(stopped.measured) == ["one_by_one"]
    result = result_of(stopped, asked, "amt")
    assert any(note.startswith("Not finished") for note in result.notes) and result.rows[1]["parity"] == "not measured"
    rest = FakeRanks()
    assert climbed(rest, asked).exit_code is None and rest.runs == ["grouped.0", "kernels.0"]


def test_a_rung_that_fails_is_named_and_the_others_go_on(asked: Asked, climbed: Any) -> None:
    wrong = Outcome(exit_code=1, message="error: rank 1 was killed by signal 9\n  rank  pid")
    ladder = climbed(FakeRanks({"grouped.0": wrong}), asked)
    assert list(ladder.measured) == ["one_by_one", "kernels"]
    assert result_of(ladder, asked, "amt").rows[1]["parity"] == (
        f"rank 1 was killed by signal 9; what its ranks printed: {asked.out}/work/grouped.0/logs"
    )


def test_the_command_writes_json_markdown_and_a_page(
    asked: Asked, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runs, "launch", FakeRanks({"grouped.0": measured(step_s=0.25)}))
    words = ["bench", "ablate", str(asked.run_yaml), "--steps", "4", "--rungs", "grouped, recompute"]
    assert main([*words, "--out", str(asked.out), "--set", asked.overrides[0]]) == 0
    printed = capsys.readouterr().out
    assert "grouped" in printed and str(asked.out / "ablate.html") in printed
    result = read_result(asked.out / "ablate.json")
    assert [row["rung"] for row in result.rows] == ["grouped", "recompute"]
    assert result.settings["ranks"] == 2 and "processor" in result.machine
    assert "| grouped | tokens sorted by expert" in (asked.out / "ablate.md").read_text()
    shown = Page(asked.out / "ablate.html")
    assert "256" in shown.text and "script" not in shown.tags
    assert main([*words, "--out", str(asked.out), "--set", asked.overrides[0], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "ablate"


def test_the_page_shows_hostile_text_as_text(asked: Asked, climbed: Any, tmp_path: Path) -> None:
    ladder = climbed(FakeRanks(), asked)
    result = result_of(ladder, asked, HOSTILE)
    text = page(replace(result, rows=tuple({**row, "says": HOSTILE} for row in result.rows)), CHARTS)
    (tmp_path / "page.html").write_text(text, "utf-8")
    shown = Page(tmp_path / "page.html")
    assert "img" not in shown.tags and "script" not in shown.tags
    assert policy_hash(shown.blocks["style"][0]) in text
    assert not [name for name, _ in shown.attributes if name == "style" or name.startswith("on")]


def test_one_rank_measures_itself(asked: Asked, tmp_path: Path) -> None:
    config = load_run(asked.run_yaml, (*asked.overrides, "run.log_comm=true", f"run.dir={tmp_path}/run"))
    order = {"run": run_to_dict(config), "steps": 3, "put_in": "one_by_one"}
    (tmp_path / ASKED).write_text(json.dumps(order))
    assert rung_rank.main(tmp_path) == (0, None)
    found = read_measured(tmp_path / FOUND)
    assert found is not None and found.kernels == "native"
    assert (len(found.losses), len(found.ranks), found.sent_bytes) == (3, 1, 0)
    assert found.losses[2] < found.losses[0] and found.memory_bytes >= 0 and math.isnan(found.comm_s)
    (tmp_path / ASKED).write_text(json.dumps(order | {"run": run_to_dict(config) | {"parallel": {"ep": 2}}}))
    code, complaint = rung_rank.main(tmp_path)
    assert code == 2 and complaint is not None and "ep" in complaint


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 1}, r"--steps 1: must be from 2 to 100,000"),
        ({"repeat": 0}, r"--repeat 0: must be from 1 to 100"),
        ({"ranks": 0}, r"--ranks 0: must be 1 to"),
        ({"rungs": ("group",)}, r"--rungs 'group' is not a rung: did you mean 'grouped'\?"),
        ({"ranks": 1, "rungs": ("overlap",)}, r"nothing is left to measure: overlap: one rank talks to nobody"),
        ({"overrides": ("model.moe.top=3",)}, r"unknown key 'model.moe.top'"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(
    asked: Asked, changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "launch", FakeRanks())
    with pytest.raises(ConfigError, match=message):
        climb(replace(asked, **changes), lambda line: None)
    assert not asked.out.exists()


def test_a_corpus_that_is_missing_is_said_first(asked: Asked, climbed: Any) -> None:
    with pytest.raises(DataError, match="nowhere"):
        climbed(FakeRanks(), replace(asked, overrides=("data.train.0.path=nowhere",)))
    asked.out.write_text("")
    with pytest.raises(DataError, match=r"--out .*: is a file, a folder is needed"):
        climbed(FakeRanks(), asked)


def test_a_result_is_read_back_and_what_is_none_is_refused(asked: Asked, climbed: Any, tmp_path: Path) -> None:
    result = result_of(climbed(FakeRanks(), asked), asked, "amt bench")
    path = tmp_path / "result.json"
    path.write_text(result_json(result))
    assert read_result(path) == result
    for text in ("", "[]", '{"kind": "ablate"}', result_json(result).replace('"format": 1', '"format": 2')):
        path.write_text(text)
        with pytest.raises(MetricsError, match="no result of `amt bench`"):
            read_result(path)


def test_memory_of_a_rank_is_without_pages_of_files() -> None:
    """And no less than what it has written itself."""
    block = bytearray(64 * 2**20)
    block[::4096] = b"x" * len(block[::4096])
    own = rung_rank.own_bytes("VmRSS")
    assert len(block) < own < resident_bytes()
    assert rung_rank.own_bytes("VmHWM") >= own
