"""The selftest's own parts: it names what is wrong, goes on behind what crashes or hangs, claims nothing not run."""

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ascend_moe_train.cli import main as cli
from ascend_moe_train.cli.selftest import exit_code, write
from ascend_moe_train.errors import DataError
from ascend_moe_train.model.kernels.ascend import AscendKernels
from ascend_moe_train.selftest import suite
from ascend_moe_train.selftest.curve import GOLDEN, STEPS, golden_losses
from ascend_moe_train.selftest.kernel_cases import INPUTS, OTHERS
from ascend_moe_train.selftest.names import COLLECTIVES
from ascend_moe_train.selftest.page import page
from ascend_moe_train.selftest.processes import Part, run_part
from ascend_moe_train.selftest.results import Figures, Result, merged, read_events
from ascend_moe_train.selftest.suite import Asked, Report, plan, run_suite
from ascend_moe_train.selftest.words import as_json, line
from ascend_moe_train.train.config import RunConfigPart
from ascend_moe_train.train.session import build_kernels
from tests.synthetic_run import HOSTILE
from tests.unit.test_report import Page

ROOT = Path(__file__).parents[2]
ON_CPU: Figures = {"device": "cpu", "devices": 1.0, "native kernels": "yes"}
ON_NPUS: Figures = {"device": "ascend", "devices": 8.0, "native kernels": "yes"}


def fake_command(folder: Path) -> list[str]:
    return [sys.executable, "-m", "tests.selftest_worker", str(folder)]


def found(folder: Path, *checks: str, check_s: float = 30.0, **options: Any) -> list[Result]:
    """What a part of these checks comes to."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    part = Part(
        name="fake",
        checks=checks,
        command=fake_command,
        options=options,
        environment=environment,
        check_s=check_s,
        start_s=60.0,
    )
    shown: list[Result] = []
    results = run_part(part, folder, shown.append)
    assert results == shown
    return results


def statuses(results: Sequence[Result]) -> list[tuple[str, str]]:
    return [(each.name, each.status) for each in results]


def test_checks_are_judged_one_by_one(tmp_path: Path) -> None:
    results = found(tmp_path, "good", "bad", "raises", "impossible", "good again")
    expected = [("good", "passed"), ("bad", "failed"), ("raises", "failed"), ("impossible", "not run")]
    assert statuses(results) == [*expected, ("good again", "passed")]
    assert [each.detail for each in results[1:4]] == [
        "it is wrong (and 1 more)",
        "ValueError: of an operator",
        "no such device",
    ]
    assert results[0].figures == {"error": 1e-7}


def test_a_crash_is_named_and_the_rest_goes_on(tmp_path: Path) -> None:
    results = found(tmp_path, "good", "crash", "good 2", "quit", "good 3")
    assert statuses(results) == [
        ("good", "passed"),
        ("crash", "failed"),
        ("good 2", "passed"),
        ("quit", "failed"),
        ("good 3", "passed"),
    ]
    assert results[1].detail == "the process was ended by SIGSEGV: about to crash"
    assert "about to crash" in results[1].log
    assert results[3].detail == "the process ended with exit code 3: I quit"


def test_a_hang_is_over_its_time_and_the_rest_goes_on(tmp_path: Path) -> None:
    results = found(tmp_path, "good", "hang", "good 2", check_s=1.0)
    assert statuses(results) == [("good", "passed"), ("hang", "failed"), ("good 2", "passed")]
    assert results[1].detail == "no result within 1 s"
    mark = str(tmp_path).encode()
    assert [path for path in Path("/proc").glob("[0-9]*/cmdline") if mark in read_bytes(path)] == []


def read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it has ended
        return b""


def test_after_three_hangs_the_rest_is_left_out(tmp_path: Path) -> None:
    results = found(tmp_path, "hang 1", "hang 2", "hang 3", "good", check_s=0.3)
    assert [each.status for each in results] == ["failed"] * 3 + ["not run"]
    assert "3 checks" in results[3].detail


def test_what_cannot_start_fails_everything_once(tmp_path: Path) -> None:
    results = found(tmp_path, "good", "good 2", says_nothing=True)
    assert [each.status for each in results] == ["failed"] * 2
    assert {each.detail for each in results} == {"the process ended with exit code 1: it cannot start"}
    assert len(list(tmp_path.iterdir())) == 1


def test_a_crash_at_the_end_is_a_failure_too(tmp_path: Path) -> None:
    results = found(tmp_path, "good", fails_at_its_end=True)
    assert statuses(results) == [("good", "passed"), ("end of the process", "failed")]
    assert "SIGABRT" in results[1].detail


def test_what_is_no_result_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "found.jsonl"
    good = '{"result": {"part": "a", "name": "b", "status": "passed"}}'
    lines = [good, '{"result": {"part": "a", "name": "b", "status": "fine"}}', '{"begun": 3}', "\x00", good[:20]]
    path.write_text("\n".join(lines))
    assert [each.result for each in read_events(path)] == [Result(part="a", name="b", status="passed")]
    assert read_events(tmp_path / "absent") == []


def test_one_rank_that_fails_fails_all() -> None:
    good = Result(part="p", name="n", status="passed", figures={"cases": 3.0}, took_s=1.0)
    bad = replace(good, status="failed", detail="wrong sums", took_s=2.0)
    expected = replace(bad, detail="rank 1: wrong sums")
    assert merged([good, bad, good]) == expected
    assert merged([good, good]) == good


def by_name(parts: Sequence[suite.Planned]) -> dict[str, Part | None]:
    """Every part, None for what is not run."""
    return {
        each.name if isinstance(each, Part) else each[0].part: each if isinstance(each, Part) else None
        for each in parts
    }


def test_the_plan_for_a_cpu(tmp_path: Path) -> None:
    parts = by_name(plan(Asked(), ON_CPU, tmp_path))
    assert [name for name, part in parts.items() if part is None] == ["several machines"]
    native = parts["kernels: native fp32"]
    assert native is not None
    assert set(native.checks) == set(INPUTS) | set(OTHERS)
    mpi = parts["collectives: MPI, 2 ranks"]
    assert mpi is not None
    assert (mpi.ranks, mpi.checks) == (2, tuple(COLLECTIVES))


def test_the_plan_for_npus(tmp_path: Path) -> None:
    """Not run anywhere: it asks for what `train.session` takes for AscendKernels, and for NativeOps."""
    parts = by_name(plan(Asked(ranks=8), ON_NPUS, tmp_path))
    for precision in ("fp32", "fp16", "bf16"):
        part = parts[f"kernels: ascend {precision}"]
        assert part is not None
        options = {key: part.options[key] for key in ("kernels", "precision", "device")}
        assert options == {"kernels": "auto", "precision": precision, "device": "ascend"}
    run = RunConfigPart(dir="unused", steps=1, kernels="auto", precision="bf16")
    assert isinstance(build_kernels(run, "ascend"), AscendKernels)
    own = parts["collectives: HCCL, 8 ranks"]
    assert own is not None
    assert own.options["backend"] == "native"
    assert not any("MPI" in name for name in parts)
    assert parts["training: one process, bf16"] is not None
    together = parts["training: 8 ranks, fp32"]
    assert together is not None
    assert together.environment["AMT_STARTER"] == "msrun"


@pytest.mark.parametrize(
    ("asked", "machine", "part", "why"),
    [
        (Asked(ranks=1), ON_CPU, "collectives: MPI, 1 ranks", "nobody to talk to"),
        (Asked(ranks=3), ON_CPU, "training: 3 ranks, fp32", "8 sequences do not divide by 3"),
        (Asked(only=("training",)), ON_CPU, "kernels", "--only training"),
        (Asked(), ON_CPU | {"native kernels": "no cc"}, "kernels: native fp16", "no cc"),
        (Asked(), ON_NPUS | {"devices": 1.0}, "collectives: HCCL, 2 ranks", "as many NPUs, and here are 1"),
    ],
)
def test_what_this_machine_cannot_do_is_not_run(
    asked: Asked, machine: Figures, part: str, why: str, tmp_path: Path
) -> None:
    planned = plan(asked, machine, tmp_path)
    left = [each for some in planned if not isinstance(some, Part) for each in some if each.part == part]
    assert left
    assert {each.status for each in left} == {"not run"}
    assert all(why in each.detail for each in left)


def suite_of(
    monkeypatch: pytest.MonkeyPatch, folder: Path, run: Callable[[Part, Callable[[Result], None]], None], **asked: Any
) -> Report:
    """The suite with parts that `run` does."""
    monkeypatch.setattr(suite, "run_part", lambda part, place, show: run(part, show))
    saved: list[bool] = []
    report = run_suite(
        Asked(**asked), folder, lambda result: None, lambda so_far: saved.append(as_json(so_far)["passed"])
    )
    # what a kill leaves behind does not claim anything
    assert saved[-1] == report.has_passed
    assert not any(saved[:-1])
    return report


def passing(part: Part, show: Callable[[Result], None]) -> None:
    for name in part.checks:
        show(Result(part=part.name, name=name, status="passed", figures=ON_CPU if part.name == suite.MACHINE else {}))


def test_without_a_device_nothing_else_is_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def failing(part: Part, show: Callable[[Result], None]) -> None:
        show(Result(part=part.name, name=part.checks[0], status="failed", detail="no MindSpore"))

    report = suite_of(monkeypatch, tmp_path, failing)
    assert [each.status for each in report.results] == ["failed", "not run"]
    assert exit_code(report) == 1


def test_ctrl_c_keeps_what_is_done(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupted(part: Part, show: Callable[[Result], None]) -> None:
        if part.name == "kernels: native fp32":
            show(Result(part=part.name, name=part.checks[0], status="passed"))
            raise KeyboardInterrupt
        passing(part, show)

    report = suite_of(monkeypatch, tmp_path, interrupted)
    names = [(each.part, each.name) for each in report.results]
    assert len(names) == len(set(names))
    assert {part for part, _ in names} == {suite.MACHINE, *by_name(plan(Asked(), ON_CPU, tmp_path))}
    stopped = [each for each in report.results if each.detail == "stopped by SIGINT"]
    assert {each.status for each in stopped} == {"not run"}
    assert len(stopped) > 50
    assert exit_code(report) == 130
    assert (as_json(report)["passed"], as_json(report)["finished"]) == (False, False)
    assert "Not finished" in page(report)


def test_exit_codes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    report = suite_of(monkeypatch, tmp_path, passing)
    assert exit_code(report) == 0
    assert "All checks that were run have passed" in page(report)
    report.results.append(Result(part="p", name="n", status="not run", detail="no such device"))
    assert exit_code(report) == 0
    report.results.append(Result(part="p", name="n", status="failed"))
    assert exit_code(report) == 1


def test_the_page_is_one_safe_file(tmp_path: Path) -> None:
    bad = Result(part=HOSTILE, name=HOSTILE, status="failed", detail=HOSTILE, log=f"{HOSTILE}\nlast line")
    good = Result(part="kernels: native fp32", name="matmul", status="passed", figures={"error": 1e-7, "ratio": None})
    odd = replace(good, name="rope", figures={"error": float("nan"), "ratio": float("inf")})
    skipped = Result(part="several machines", name="training", status="not run", detail="not there yet")
    facts = Result(part=suite.MACHINE, name="device", status="passed", figures={HOSTILE: HOSTILE, "device": "cpu"})
    report = Report(asked=Asked(), results=[facts, bad, good, odd, skipped])
    write(tmp_path, report)
    seen = Page(tmp_path / "report.html")
    assert not {"script", "img", "link", "iframe"} & set(seen.tags)
    assert not any(name in ("src", "href", "style") for name, _ in seen.attributes)
    for text in ("Checks failed", "not there yet", "last line", "error 1.0e-07", "document.title"):
        assert text in seen.text
    data = json.loads((tmp_path / "report.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert (data["passed"], data["counts"]) == (False, {"passed": 3, "failed": 1, "not run": 1})
    assert data["results"][3]["figures"] == {"error": None, "ratio": None}


def test_a_line_of_the_screen() -> None:
    result = Result(part="kernels: native fp32", name="rope", status="passed", figures={"error": 3e-8, "ratio": 1.2})
    assert line(result).split() == [
        "passed",
        "kernels:",
        "native",
        "fp32",
        "rope",
        "error",
        "3.0e-08,",
        "ratio",
        "1.20",
    ]
    assert line(replace(result, status="failed", detail="wrong")).endswith("wrong")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "0"], "--ranks 0: must be 1 to "),
        (["--out", __file__], "is a file, a folder is needed"),
        (["--out", "/absent/selftest"], "there is no folder /absent"),
        (["--only", "kernel"], "'kernel' is not one of"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["selftest", *arguments]) == 2
    output = capsys.readouterr()
    assert (output.out, output.err.count("\n")) == ("", 1)
    assert message in output.err


def test_the_golden_file() -> None:
    losses = golden_losses()
    assert len(losses) == STEPS
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize(
    "change", [lambda text: text + "21 2.0\n", lambda text: text.replace("4.1", "x"), lambda _: ""]
)
def test_a_golden_file_that_is_none(change: Callable[[str], str], tmp_path: Path) -> None:
    path = tmp_path / "losses.txt"
    path.write_text(change(GOLDEN.read_text()))
    with pytest.raises(DataError, match=r"losses\.txt"):
        golden_losses(path)
