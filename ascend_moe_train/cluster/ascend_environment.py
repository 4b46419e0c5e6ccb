"""What a rank on an Ascend host finds in its environment: HCCL's variables, from the run file, in this one place. Pure.

They have to be there before MindSpore is imported: it sets one itself, and HCCL reads them once.
"""

import re
from collections.abc import Mapping

from ascend_moe_train.errors import ConfigError
from ascend_moe_train.train.config import MIB, MOST_S, AscendConfig, timeouts_problem

CONNECT = "HCCL_CONNECT_TIMEOUT"
EXECUTE = "HCCL_EXEC_TIMEOUT"
BUFFER = "HCCL_BUFFSIZE"
DETERMINISTIC = "HCCL_DETERMINISTIC"
EXPANSION = "HCCL_OP_EXPANSION_MODE"
COMPILER = "TE_PARALLEL_COMPILER"
FUSION = "MS_DEV_GRAPH_KERNEL_FLAGS"
MAX_AIV_S = 1091
MAX_BUFFER_MIB = 2**20
MAX_SHOWN = 60
_WHOLE = re.compile(r"[0-9]{1,10}", re.ASCII)
# What each may be, whoever sets it. HCCL's own ranges are those of its documentation for Atlas A2.
_RANGES = {CONNECT: (120, 7200), EXECUTE: (0, MOST_S), BUFFER: (1, MAX_BUFFER_MIB)}


def ascend_environment(config: AscendConfig, given: Mapping[str, str]) -> dict[str, str]:
    """The variables of every rank that `config` bears on. What `given` has of them stays.

    The same on all ranks if `given` is. Raises ConfigError, naming the variable: a value that is out of range or no
    number, an order of time-outs that hides which of them is to blame, and what contradicts `ascend.deterministic`.
    """
    chosen = {name: given.get(name, value) for name, value in _wanted(config).items()}
    for name, (least, most) in _RANGES.items():
        text = chosen[name]
        if not _WHOLE.fullmatch(text) or not least <= int(text) <= most:
            raise ConfigError(f"{name} {text[:MAX_SHOWN]!r}: must be a whole number from {least} to {most}")
    execute_s = int(chosen[EXECUTE])
    problem = timeouts_problem(
        (CONNECT, int(chosen[CONNECT])), (EXECUTE, execute_s), ("ascend.op_timeout_s", config.op_timeout_s)
    )
    if problem is not None:
        raise ConfigError(problem)
    if given.get(EXPANSION) == "AIV" and not 0 < execute_s <= MAX_AIV_S:
        raise ConfigError(
            f"{EXECUTE} {execute_s}: with {EXPANSION} AIV it is at most {MAX_AIV_S}: set ascend.hccl.exec_timeout_s"
        )
    if config.deterministic:
        _check_deterministic(chosen)
    return chosen


def environment_line(config: AscendConfig, given: Mapping[str, str]) -> str:
    """Which variables are set to what, and by whom, in one line. Raises what `ascend_environment` raises."""
    wanted = _wanted(config)
    words = []
    for name, value in ascend_environment(config, given).items():
        shown = " ".join(value.split())[:MAX_SHOWN]
        words.append(
            f"{name}={shown}" + ("" if value == wanted[name] else f" (yours, the run file has {wanted[name]})")
        )
    return f"environment: {', '.join(words)}"


def _wanted(config: AscendConfig) -> dict[str, str]:
    """As the run file has it. Deterministic sums need more than one switch, which MindSpore would set too, later."""
    hccl = config.hccl
    wanted = {
        CONNECT: str(hccl.connect_timeout_s),
        EXECUTE: str(hccl.exec_timeout_s),
        BUFFER: str(hccl.buffer_bytes // MIB),
    }
    if config.deterministic:
        wanted |= {DETERMINISTIC: "true", COMPILER: "1"}
    if config.graph_kernel_flags is not None:
        wanted[FUSION] = config.graph_kernel_flags
    return wanted


def _check_deterministic(chosen: Mapping[str, str]) -> None:
    """MindSpore would change the user's variables, with a warning in its log only."""
    for name, allowed in ((DETERMINISTIC, ("true", "strict")), (COMPILER, ("1",))):
        if chosen[name] not in allowed:
            raise ConfigError(
                f"{name} {chosen[name][:MAX_SHOWN]!r} contradicts ascend.deterministic true: unset it, or make it "
                f"{' or '.join(allowed)}"
            )
