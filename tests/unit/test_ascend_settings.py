"""Section `ascend`: its limits, the environment that follows from it, and what MindSpore is told."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import mindspore
import pytest
from pydantic import ValidationError

from ascend_moe_train.cli import main as cli
from ascend_moe_train.cli.environment import CACHE, prepare_environment
from ascend_moe_train.cluster import msrun
from ascend_moe_train.cluster.ascend_environment import ascend_environment, environment_line
from ascend_moe_train.config import load_run
from ascend_moe_train.errors import ConfigError
from ascend_moe_train.train import session
from ascend_moe_train.train.ascend_settings import apply_settings
from ascend_moe_train.train.config import AscendConfig, HcclConfig
from ascend_moe_train.train.session import set_device
from ascend_moe_train.train.start import prepare_ascend
from tests.recorded import Call, Recorded
from tests.small_run import write_run

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "demo.yaml"
DEFAULTS = {"HCCL_CONNECT_TIMEOUT": "600", "HCCL_EXEC_TIMEOUT": "1836", "HCCL_BUFFSIZE": "200"}
ALL = AscendConfig(
    jit_level="O1", deterministic=True, memory_limit_bytes=58 * 2**30, op_timeout_s=1000, bind_cores=True
)


def told(settings: AscendConfig) -> list[Call]:
    calls: list[Call] = []
    apply_settings(settings, Recorded(mindspore, calls))
    return calls


def test_what_mindspore_is_told_by_default() -> None:
    assert told(AscendConfig()) == [
        ("set_context", (), {"jit_config": {"jit_level": "O0"}}),
        ("device_context.ascend.op_debug.execute_timeout", (900,), {}),
    ]


def test_what_mindspore_is_told() -> None:
    assert told(ALL) == [
        ("set_context", (), {"jit_config": {"jit_level": "O1"}}),
        ("set_deterministic", (True,), {}),
        ("runtime.set_memory", (), {"max_size": "58.000000GB"}),
        ("device_context.ascend.op_debug.execute_timeout", (1000,), {}),
        ("runtime.set_cpu_affinity", (True,), {}),
    ]


def test_the_stand_in_takes_no_other_names_or_arguments() -> None:
    stand_in = Recorded(mindspore, [])
    with pytest.raises(AttributeError):
        stand_in.runtime.set_max_memory("1GB")
    with pytest.raises(TypeError):
        stand_in.runtime.set_memory(max_bytes=1)
    with pytest.raises(TypeError):
        stand_in.set_deterministic()


def test_the_installed_mindspore_takes_the_values() -> None:
    code = (
        "import os, mindspore as ms\n"
        "from mindspore._c_expression import RuntimeConf\n"
        "from ascend_moe_train.train.ascend_settings import apply_settings\n"
        "from ascend_moe_train.train.config import AscendConfig\n"
        "ms.set_device('CPU')\n"
        "apply_settings(AscendConfig.model_validate_json(os.environ['SETTINGS']))\n"
        "conf = RuntimeConf.get_instance()\n"
        "print(ms.context.get_jit_config(), conf.is_memory_configured(), conf.is_thread_bind_core_configured(),\n"
        "    os.environ['HCCL_DETERMINISTIC'], os.environ['TE_PARALLEL_COMPILER'])\n"
    )
    settings = {"SETTINGS": ALL.model_dump_json(), "PYTHONPATH": str(ROOT), "GLOG_v": "3"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | settings, capture_output=True, text=True, check=False
    )
    assert done.stdout == "{'jit_level': 'O1'} True True true 1\n", done.stderr


@pytest.mark.parametrize(("wanted", "times"), [("auto", 1), ("ascend", 1), ("cpu", 0)])
def test_settings_are_applied_on_ascend_alone(wanted: str, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    applied: list[Any] = []
    monkeypatch.setattr(session, "apply_settings", applied.append)
    monkeypatch.setattr(mindspore.hal, "is_available", lambda target: target == "Ascend")
    monkeypatch.setattr(mindspore, "set_device", lambda target: None)
    assert set_device(wanted, ALL) == ("ascend" if times else "cpu")
    assert applied == [ALL] * times


def test_settings_are_told_once() -> None:
    calls: list[Call] = []
    stand_in = Recorded(mindspore, calls)
    apply_settings(ALL, stand_in)
    apply_settings(ALL.model_copy(), stand_in)
    assert len(calls) == 5


@pytest.mark.parametrize(("device", "is_given"), [("ascend", True), ("cpu", False)])
def test_ranks_on_npus_are_given_the_environment(
    device: str, is_given: bool, tmp_path: Path, small_corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(write_run(tmp_path, small_corpus))
    words = ["--set", f"run.device={device}", "--set", "ascend.hccl.exec_timeout_s=3600"]
    assert cli.main(["launch", "--ranks", "2", "--dry-run", "train", run, *words]) == 0
    assert ("HCCL_EXEC_TIMEOUT=3600 " in capsys.readouterr().out) is is_given


def test_environment_of_a_rank() -> None:
    assert ascend_environment(AscendConfig(), {"PATH": "/bin", "HCCL_ALGO": "x"}) == DEFAULTS
    config = AscendConfig(
        jit_level="O1",
        graph_kernel_flags="--enable_expand_ops=Square",
        deterministic=True,
        hccl=HcclConfig(connect_timeout_s=1000, exec_timeout_s=7200, buffer_bytes=2**29),
    )
    assert ascend_environment(config, {}) == {
        "HCCL_CONNECT_TIMEOUT": "1000",
        "HCCL_EXEC_TIMEOUT": "7200",
        "HCCL_BUFFSIZE": "512",
        "HCCL_DETERMINISTIC": "true",
        "TE_PARALLEL_COMPILER": "1",
        "MS_DEV_GRAPH_KERNEL_FLAGS": "--enable_expand_ops=Square",
    }


def test_what_the_user_has_set_stays_and_is_told() -> None:
    given = {"HCCL_EXEC_TIMEOUT": "3000", "HCCL_BUFFSIZE": "200"}
    assert ascend_environment(AscendConfig(), given) == DEFAULTS | {"HCCL_EXEC_TIMEOUT": "3000"}
    assert environment_line(AscendConfig(), given) == (
        "environment: HCCL_CONNECT_TIMEOUT=600, HCCL_EXEC_TIMEOUT=3000 (yours, the run file has 1836), "
        "HCCL_BUFFSIZE=200"
    )
    strict = ascend_environment(AscendConfig(deterministic=True), {"HCCL_DETERMINISTIC": "strict"})
    assert strict["HCCL_DETERMINISTIC"] == "strict"


def test_setting_it_again_changes_nothing() -> None:
    first = ascend_environment(ALL, {"HCCL_BUFFSIZE": "400"})
    assert ascend_environment(ALL, first) == first


@pytest.mark.parametrize(
    ("config", "given", "message"),
    [
        ({}, {"HCCL_CONNECT_TIMEOUT": "119"}, "HCCL_CONNECT_TIMEOUT '119': must be a whole number from 120 to 7200"),
        ({}, {"HCCL_CONNECT_TIMEOUT": "7201"}, "must be a whole number from 120 to 7200"),
        ({}, {"HCCL_EXEC_TIMEOUT": "-1"}, "HCCL_EXEC_TIMEOUT '-1': must be a whole number from 0 to 2147483647"),
        ({}, {"HCCL_EXEC_TIMEOUT": ""}, "HCCL_EXEC_TIMEOUT '': must be"),
        ({}, {"HCCL_EXEC_TIMEOUT": "9" * 5000}, "HCCL_EXEC_TIMEOUT '999999"),
        ({}, {"HCCL_EXEC_TIMEOUT": "٣٠٠٠"}, "must be a whole number"),
        ({}, {"HCCL_BUFFSIZE": "0"}, "HCCL_BUFFSIZE '0': must be a whole number from 1 to 1048576"),
        ({}, {"HCCL_BUFFSIZE": "200MB"}, "HCCL_BUFFSIZE '200MB': must be"),
        ({}, {"HCCL_CONNECT_TIMEOUT": "1836"}, "HCCL_CONNECT_TIMEOUT 1836 is not less than HCCL_EXEC_TIMEOUT 1836"),
        ({}, {"HCCL_EXEC_TIMEOUT": "900"}, "ascend.op_timeout_s 900 is not less than HCCL_EXEC_TIMEOUT 900: lower it"),
        (
            {},
            {"HCCL_OP_EXPANSION_MODE": "AIV"},
            "HCCL_EXEC_TIMEOUT 1836: with HCCL_OP_EXPANSION_MODE AIV it is at most",
        ),
        ({"deterministic": True}, {"HCCL_DETERMINISTIC": "false"}, "HCCL_DETERMINISTIC 'false' contradicts ascend.det"),
        ({"deterministic": True}, {"TE_PARALLEL_COMPILER": "8"}, "TE_PARALLEL_COMPILER '8' contradicts ascend.determ"),
    ],
)
def test_environments_that_cannot_be(config: dict[str, Any], given: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ascend_environment(AscendConfig(**config), given)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 250


def test_without_determinism_the_users_own_stays_out_of_it() -> None:
    assert ascend_environment(AscendConfig(), {"HCCL_DETERMINISTIC": "true"}) == DEFAULTS
    for_ever = AscendConfig(op_timeout_s=0, hccl=HcclConfig(exec_timeout_s=0))
    assert ascend_environment(for_ever, {})["HCCL_EXEC_TIMEOUT"] == "0"
    aiv = {"HCCL_OP_EXPANSION_MODE": "AIV", "HCCL_EXEC_TIMEOUT": "1091"}
    assert ascend_environment(AscendConfig(), aiv)["HCCL_EXEC_TIMEOUT"] == "1091"


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("ascend.jit_level=O3", "ascend.jit_level: \"O3\" is not allowed: must be 'O0', 'O1' or 'O2'"),
        ("ascend.jit_levle=O1", "did you mean 'ascend.jit_level'?"),
        ("ascend.graph_kernel_flags=--x", "graph_kernel_flags has no effect with jit_level 'O0': leave it out"),
        (
            "ascend.memory_limit_bytes=1000",
            "ascend.memory_limit_bytes: 1000 is not allowed: must be at least 2147483648",
        ),
        ("ascend.op_timeout_s=1836", "op_timeout_s 1836 is not less than hccl.exec_timeout_s 1836"),
        ("ascend.op_timeout_s=0", "op_timeout_s 0 (for ever) is not less than hccl.exec_timeout_s 1836"),
        ("ascend.hccl.connect_timeout_s=60", "must be at least 120"),
        ("ascend.hccl.connect_timeout_s=7000", "hccl.connect_timeout_s 7000 is not less than hccl.exec_timeout_s 1836"),
        ("ascend.hccl.buffer_bytes=2000000", "buffer_bytes 2000000: must be whole MiB, a multiple of 1048576"),
    ],
)
def test_mistakes_in_the_section_are_one_line(setting: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_run(EXAMPLE, [setting])
    assert message in str(caught.value)


def test_flags_with_control_characters_are_refused() -> None:
    with pytest.raises(ValidationError):
        AscendConfig(jit_level="O1", graph_kernel_flags="--a\n")


def test_a_run_on_a_host_with_npus_gets_its_environment_and_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "compiler"
    compiler.mkdir()
    (compiler / "version.info").write_text("Version=8.0.0.1\n")
    (tmp_path / "davinci0").touch()
    for name in DEFAULTS:
        monkeypatch.setenv(name, "so that it is as before after the test")
        monkeypatch.delenv(name)
    monkeypatch.setenv("HCCL_BUFFSIZE", "400")
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    notes: list[str] = []
    config = load_run(EXAMPLE)
    prepare_ascend(config, notes.append)
    assert notes == []  # this host has none
    monkeypatch.setattr(msrun, "_DEVICES", tmp_path)
    prepare_ascend(load_run(EXAMPLE, ["run.device=cpu"]), notes.append)
    assert notes == []
    prepare_ascend(config, notes.append)
    assert {name: os.environ[name] for name in DEFAULTS} == DEFAULTS | {"HCCL_BUFFSIZE": "400"}
    assert len(notes) == 2
    assert "HCCL_BUFFSIZE=400 (yours, the run file has 200)" in notes[0]
    assert notes[1].startswith("warning: versions do not fit: CANN for MindSpore: ")


FIRST_IMPORT = """
import os, sys
from pathlib import Path
from ascend_moe_train.cluster import msrun
from ascend_moe_train.config import load_run
from ascend_moe_train.train.start import start
from ascend_moe_train.train.stop import StopRequest
from ascend_moe_train.train.view import Silent

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "mindspore":
            print(os.environ.get("HCCL_EXEC_TIMEOUT"), flush=True)
            os._exit(0)

sys.meta_path.insert(0, Watch())
msrun._DEVICES = Path(sys.argv[2])
with StopRequest() as stop:
    start(load_run(Path(sys.argv[1])), Silent(), stop)
"""


@pytest.mark.parametrize(("device", "seen"), [("davinci0", "1836"), ("null", "None")])
def test_the_environment_is_there_when_mindspore_is_imported(
    device: str, seen: str, tmp_path: Path, small_corpus: Path
) -> None:
    devices = tmp_path / "dev"
    devices.mkdir()
    (devices / device).touch()
    words = [sys.executable, "-c", FIRST_IMPORT, str(write_run(tmp_path, small_corpus)), str(devices)]
    without = {name: value for name, value in os.environ.items() if name != "HCCL_EXEC_TIMEOUT"}
    done = subprocess.run(words, env=without, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout == f"{seen}\n", done.stderr


def test_mindspores_cache_of_graphs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE, "1")
    with pytest.raises(ConfigError, match="MS_COMPILER_CACHE_ENABLE 1: this cache of MindSpore takes graphs of other"):
        prepare_environment()
    monkeypatch.setenv(CACHE, "0")
    prepare_environment()
