"""`python -m ascend_moe_train.bench.rung_rank FOLDER`: one rank of a rung, which FOLDER/asked.json describes.

It trains as `amt train` does, without checkpoints and evaluation; the first rank writes FOLDER/found.json.
"""

import json
import math
import signal
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from ascend_moe_train.bench.ladder import PutIn
from ascend_moe_train.bench.measured import ASKED, FOUND, Measured, RankFound, write_measured
from ascend_moe_train.bench.wire import group_size, sent_bytes
from ascend_moe_train.cluster.as_rank import as_rank
from ascend_moe_train.config import RunConfig
from ascend_moe_train.errors import UserError
from ascend_moe_train.parallel.agree import exchange_json
from ascend_moe_train.train.metrics import StepRecord, peak_resident_bytes, resident_bytes, to_json_line
from ascend_moe_train.train.stop import StopRequest

EXIT_USER_ERROR = 2
_RESET_PEAK = "5"  # proc(5), /proc/PID/clear_refs: the high-water mark of resident memory begins anew

_RANKS = TypeAdapter(tuple[RankFound, ...])


def forget_peak() -> None:
    """What `peak_bytes` says begins from what there is now, where the system can do that."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text(_RESET_PEAK, encoding="ascii")


def own_bytes(what: Literal["VmRSS", "VmHWM"]) -> int:
    """Resident memory, or the most of it since `forget_peak`, without pages of files, which all ranks share and the
    system can take back; with them, and since the process began, where the system does not tell."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        found = {line.partition(":")[0]: line.split()[1:2] for line in lines}
        return 1024 * (int(found[what][0]) - int(found["RssFile"][0]))
    except (OSError, ValueError, LookupError):
        return resident_bytes() if what == "VmRSS" else peak_resident_bytes()


def train(config: RunConfig, steps: int, put_in: PutIn | None, found: Path, stop: StopRequest) -> int:
    """Trains so many steps; the exit code. Raises UserError subclasses."""
    from ascend_moe_train.bench.put_in import PUT_IN
    from ascend_moe_train.train.inputs import open_inputs
    from ascend_moe_train.train.ranks import join
    from ascend_moe_train.train.trainer import Trainer

    ranks = join(config)
    inputs = open_inputs(config, ranks.data.index, ranks.data.size)
    start_bytes = own_bytes("VmRSS")
    trainer = Trainer(config, inputs.train, print, ranks, inputs.start, None if put_in is None else PUT_IN[put_in])
    records: list[StepRecord] = []
    for info in trainer.steps(trainer.meter(None), stop):
        records.append(info.record)
        if ranks.is_first:
            print(to_json_line(info.record).decode(), end="", flush=True)
        if len(records) == 1:
            forget_peak()
        if len(records) == steps:
            break
    if stop.signal_number is not None:
        return 128 + signal.Signals(stop.signal_number)
    own = RankFound(
        start_bytes=start_bytes,
        peak_bytes=max(own_bytes("VmHWM"), start_bytes),
        step_s=tuple(each.step_s for each in records),
        comm_s=tuple(_known(each.comm_s) for each in records),
        exposed_s=tuple(_known(each.comm_exposed_s) for each in records),
    )
    everyone = exchange_json(ranks.comm, asdict(own))
    if ranks.is_first:
        calls = records[-1].comm
        sent = [sent_bytes(each.verb, each.payload_bytes, group_size(each.group, config, ranks.mesh)) for each in calls]
        measured = Measured(
            device=trainer.device,
            kernels=trainer.kernels.name,
            tokens_per_step=config.tokens_per_step,
            losses=tuple(each.loss for each in records),
            ranks=_RANKS.validate_json(json.dumps(everyone)),
            calls=calls,
            sent_bytes=sum(sent),
        )
        write_measured(found, measured)
    ranks.wait_for_all()
    return 0


def _known(value: float | None) -> float:
    return math.nan if value is None else value


def main(folder: Path) -> tuple[int, str | None]:
    """Exit code, and for a user's mistake what was wrong."""
    asked: dict[str, Any] = json.loads((folder / ASKED).read_text(encoding="utf-8"))
    with StopRequest() as stop:
        config = RunConfig.model_validate_json(json.dumps(asked["run"]))
        try:
            return train(config, asked["steps"], asked["put_in"], folder / FOUND, stop), None
        except UserError as error:
            return EXIT_USER_ERROR, str(error)


if __name__ == "__main__":
    given = Path(sys.argv[1])
    sys.exit(as_rank(lambda: main(given)))
