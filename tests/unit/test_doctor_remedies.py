"""Every remedy of the doctor can be typed: programs, our verbs and options, environment variables, keys that exist."""

import re
import shlex
from collections.abc import Iterator, Mapping

import pytest

from ascend_moe_train.config import RunConfig
from ascend_moe_train.config_error import known_keys
from ascend_moe_train.doctor.explain import rules_of
from ascend_moe_train.doctor.fill import filled_remedy, names_of
from ascend_moe_train.doctor.rule import Remedy, rule_book
from ascend_moe_train.doctor.words import filled_remedies, verdict_lines
from ascend_moe_train.errors import ConfigError
from scripts.docs_commands import DOTTED, check_settings, complaint
from tests.doctored import verdict_on

BOOK = rule_book()
REMEDIES = {remedy.do: remedy for rule in BOOK.rules.values() if rule.role != "fact" for remedy in BOOK.remedies(rule)}

# Of Linux, and of the drivers and tools of Ascend, NVIDIA and MindSpore.
PROGRAMS = frozenset(
    re.findall(
        r"\S+",
        """ascend-dmi cat chronyc df dmesg docker env find firewall-cmd fuser grep hccn_tool hostnamectl ibstat id ip
    journalctl kill ls msrun nc npu-smi nvidia-smi pip ps py-spy python sort source ss ssh-copy-id sysctl systemctl
    ulimit which""",
    )
)
# Documented for CANN 8 and 9 (HCCL, log and runtime pages), MindSpore 2.10, torch_npu, PyTorch, NCCL, MPICH and Python.
VARIABLES = frozenset(
    re.findall(
        r"\S+",
        """ACL_DEVICE_SYNC_TIMEOUT ASCEND_GLOBAL_EVENT_ENABLE ASCEND_GLOBAL_LOG_LEVEL ASCEND_HOME_PATH
    ASCEND_LAUNCH_BLOCKING ASCEND_RT_VISIBLE_DEVICES CUDA_LAUNCH_BLOCKING GLOO_SOCKET_IFNAME HCCL_BUFFSIZE
    HCCL_CONNECT_TIMEOUT HCCL_ENTRY_LOG_ENABLE HCCL_EXEC_TIMEOUT HCCL_IF_BASE_PORT HCCL_IF_IP
    HCCL_INTRA_PCIE_ENABLE HCCL_INTRA_ROCE_ENABLE HCCL_LOGIC_SUPERPOD_ID HCCL_NPU_SOCKET_PORT_RANGE
    HCCL_RDMA_RETRY_CNT HCCL_RDMA_TIMEOUT HCCL_SOCKET_IFNAME HOME LD_LIBRARY_PATH MS_BUILD_PROCESS_NUM
    MPIEXEC_PORT_RANGE
    MS_DEV_RUNTIME_CONF NCCL_DEBUG NCCL_IB_GID_INDEX NCCL_SOCKET_IFNAME NPU_ASD_ENABLE OMP_NUM_THREADS PATH
    PYTHONFAULTHANDLER PYTORCH_NPU_ALLOC_CONF RANK_TABLE_FILE TASK_QUEUE_ENABLE TORCH_NCCL_DESYNC_DEBUG
    TORCH_NCCL_DUMP_ON_TIMEOUT TORCH_NCCL_TRACE_BUFFER_SIZE VARIABLE_NAMED_ABOVE""",
    )
)
# Keys and options of other programs, whose logs the doctor reads too.
OTHERS: Mapping[str, str] = {
    "auto_trans_ckpt": "MindFormers",
    "deepspeed_moe_layer_cls_names": "accelerate",
    "drop_remainder": "MindSpore",
    "max_device_memory": "MindFormers",
    "num_parallel_workers": "MindSpore",
    "--cross-entropy-fusion-impl": "Megatron-LM",
    "--master_addr": "msrun",
    "--master_port": "msrun",
}
MSRUN = frozenset({"--join", "--worker_num", "--local_worker_num", "--master_addr", "--master_port", "--log_dir"})


def problems(do: str) -> list[str]:
    """What in a remedy does not exist."""
    if (key := re.fullmatch(r"([a-z_0-9.]+): (.+)", do)) is not None:
        return _key_problems(key[1], key[2])
    if do.startswith("--"):
        return [] if do.split()[0] in OTHERS else [f"no program has the option {do.split()[0]}"]
    return [problem for words in _commands(do) for problem in _command_problems(words)]


def _key_problems(key: str, value: str) -> list[str]:
    if key in OTHERS:
        return []
    if key not in set(known_keys(RunConfig)):
        return [f"no run has the key {key}"]
    try:
        check_settings((f"{key}={value}",))
    except ConfigError as error:
        return [str(error)]
    return []


def _commands(do: str) -> Iterator[list[str]]:
    """The words of each command; those of loops too."""
    lexer = shlex.shlex(do, posix=True, punctuation_chars="|;")
    lexer.whitespace_split = True
    words: list[str] = []
    for word in [*lexer, ";"]:
        if set(word) <= set("|;"):
            if words and words[0] not in ("for", "done"):
                yield words[1:] if words[0] == "do" else words
            words = []
        else:
            words.append(word)


def _command_problems(words: list[str]) -> list[str]:
    name = words[0]
    if name in ("export", "unset"):
        named = [word.partition("=")[0] for word in words[1:]]
        return [f"no variable {word}" for word in named if word not in VARIABLES]
    if name == "amt":
        found = complaint(tuple("8" if word == "N" else word for word in words))
        return [] if found is None else [found]
    if name not in PROGRAMS:
        return [f"no program {name}"]
    options = [word.partition("=")[0] for word in words if word.startswith("--")] if name == "msrun" else []
    return [f"msrun has no {option}" for option in options if option not in MSRUN]


def texts_problems(remedy: Remedy) -> list[str]:
    """Keys and variables that the explanations name, and that do not exist."""
    keys = set(known_keys(RunConfig))
    found = []
    for text in (remedy.en, remedy.zh):
        found += [f"no run has the key {key}" for key in DOTTED.findall(text) if key not in keys]
        named = re.findall(r"\b(?:HCCL|ASCEND|NCCL|TORCH|MS|OMP|LD|RANK)_[A-Z_]+\b", text)
        found += [f"no variable {word}" for word in named if word not in VARIABLES]
    return found


@pytest.mark.parametrize("do", sorted(REMEDIES))
def test_a_remedy_can_be_typed(do: str) -> None:
    assert [*problems(do), *texts_problems(REMEDIES[do])] == []


@pytest.mark.parametrize(
    ("do", "problem"),
    [
        ("amt doctr logs", "unknown command 'doctr'"),
        ("amt launch --rank 4 train run.yaml", "No such option"),
        ("amt plan check run.yaml --cluste 8x910B", "No such option"),
        ("export HCCL_CONECT_TIMEOUT=1", "no variable HCCL_CONECT_TIMEOUT"),
        ("optim.learn: 1.0", "no run has the key optim.learn"),
        ("optim.lr: fast", "optim.lr"),
        ("tensor: tensor.contiguous()", "no run has the key tensor"),
        ("frobnicate --all", "no program frobnicate"),
        ("cat x | frobnicate", "no program frobnicate"),
        ("for i in 0 1; do frobnicate $i; done", "no program frobnicate"),
        ("msrun --wokers=3 x.py", "msrun has no --wokers"),
        ("--no-such-option 3", "no program has the option"),
    ],
)
def test_what_does_not_exist_is_found(do: str, problem: str) -> None:
    found = problems(do)
    assert len(found) == 1
    assert problem in found[0]


def test_a_text_that_names_what_is_not_there_is_found() -> None:
    remedy = Remedy(do="id", en="set optim.learn", zh="HCCL_CONECT_TIMEOUT")
    assert texts_problems(remedy) == ["no run has the key optim.learn", "no variable HCCL_CONECT_TIMEOUT"]


def test_something_helps_now() -> None:
    remedies = [BOOK.remedies(rule) for rule in BOOK.rules.values() if rule.remedies]
    assert [each[0].do for each in remedies if all(remedy.prevents for remedy in each)] == []


@pytest.mark.parametrize(
    ("line", "first"),
    [
        (
            "OSError: [Errno 28] No space left on device: '/data/runs/7/step-00000020/x'",
            "df -h /data/runs/7/step-00000020",
        ),
        ("PermissionError: [Errno 13] Permission denied: '/data/x.bin'", "ls -ld /data/x.bin"),
        ("FileNotFoundError: [Errno 2] No such file or directory: '/data/a/b.json'", "ls -l /data/a/b.json"),
        ("ImportError: libfoo.so.2: cannot open shared object file: No such file", "find / -name libfoo.so.2*"),
        ("EI0001: Environment variable [HCCL_BUFFSIZE] is invalid. Reason: it is 0", "unset HCCL_BUFFSIZE"),
    ],
)
def test_names_are_put_in(line: str, first: str) -> None:
    lines = verdict_lines(verdict_on({"x.log": f"{line}\n"}), BOOK)
    assert [each for each in lines if first in each], lines


def test_a_package_is_named() -> None:
    verdict = verdict_on({"x.log": "ModuleNotFoundError: No module named 'yaml.scanner'\n"})
    assert verdict.cause is not None
    assert "pip install pyyaml" in [remedy.do for remedy in filled_remedies(verdict.cause, verdict, BOOK)]


@pytest.mark.parametrize("path", ["/tmp/$(reboot)", "/tmp/a;reboot", "/tmp/`x`", "/tmp/a b|c", "/x/\u202e"])
def test_what_a_shell_would_run_is_not_put_in(path: str) -> None:
    verdict = verdict_on({"x.log": f"PermissionError: [Errno 13] Permission denied: '{path}'\n"})
    assert verdict.cause is not None
    for remedy in filled_remedies(verdict.cause, verdict, BOOK):
        assert not set("$;`|\u202e") & set(remedy.do.partition("LOG")[0]) or remedy.do in REMEDIES


def test_a_log_with_spaces_is_quoted() -> None:
    verdict = verdict_on({"a b;c/rank_3.log": "KeyError: 'x'\n"})
    assert verdict.cause is not None
    names = names_of(verdict.cause, verdict.evidence)
    assert names["LOG_OF_THAT_RANK"] == "'a b;c/rank_3.log'"
    remedy = Remedy(do="grep -n x LOG_OF_THAT_RANK --port OTHER_PORT", en="x", zh="x", prevents=True)
    done = filled_remedy(remedy, names | {"PORT": "7"})
    assert (done.do, done.prevents) == ("grep -n x 'a b;c/rank_3.log' --port OTHER_PORT", True)


def test_labels_are_by_what_a_remedy_is_for() -> None:
    killed = next(rule for rule in rules_of("SIGKILL", BOOK))
    assert [remedy.prevents for remedy in BOOK.remedies(killed)] == [False, False, True, False]
    log = "[ERROR] ME(5:1,MainProcess):2026-03-01-10:00:00.100.000 [_api.py:1] Worker process 71 exit with exception. "
    log += "Error code: -9.\n"
    heads = [line[:17].strip() for line in verdict_lines(verdict_on({"msrun.log": log}), BOOK)]
    assert heads.count("to prevent it") == 1
    assert heads.index("do now") < heads.index("then") < heads.index("to prevent it")
    lines = verdict_lines(verdict_on({"x.log": "KeyError: 'x'\n"}), BOOK)
    assert not any(line.startswith("to prevent it") for line in lines)
