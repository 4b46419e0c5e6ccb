"""Some steps of a run profiled: on Ascend by MindSpore's profiler, on a CPU by spans of our own. Off by default."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol

from mindspore import profiler

from ascend_moe_train.closing import Closing
from ascend_moe_train.config import RunConfig
from ascend_moe_train.parallel.mesh import DENSE_AXES, EXPERT_AXES
from ascend_moe_train.parallel.spans import CallLog
from ascend_moe_train.profile.write import Capture, Phase, write_capture
from ascend_moe_train.train.config import ProfileConfig
from ascend_moe_train.train.ranks import Ranks

_NOTHING = nullcontext()
_OF_HOST = frozenset({"data", "checkpoint"})


class Session(Protocol):
    """Collects from its making until `finish`."""

    def step(self, number: int) -> None:
        """A step begins, and with it the one before is over."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """What a part of a step is done in."""

    def finish(self) -> None:
        """The last step is over: writes what was collected. Raises OSError."""


class Profiling(Closing):
    """The steps of section `profile`, once in a process. `first_step` is the first that is trained now. A profile that
    cannot be written does not end the run: what is wrong is noted. All ranks make one, at the same time."""

    def __init__(
        self, config: RunConfig, ranks: Ranks, device: str, first_step: int, note: Callable[[str], None]
    ) -> None:
        self._config, self._ranks, self._device, self._note = config.profile, ranks, device, note
        given = config.profile.dir
        self.folder = Path(config.run.dir) / "profile" if given is None else Path(given)
        self._steps = self._config.span
        self._session: Session | None = None
        self._last = 0
        if self._steps:
            problem = ranks.of_first(self._problem(first_step) if ranks.is_first else None)
            if problem is not None:
                note(f"profile.steps '{self._config.steps}': not profiled: {problem}")
                self._steps = range(0)

    def begin(self, step: int) -> None:
        """A step begins."""
        if self._session is not None and (step not in self._steps or step <= self._last):
            self._finish()
        if step not in self._steps:
            return
        if self._session is None:
            left = self._steps[-1] - step + 1
            self._session = (
                AscendSession(self._config, self.folder, left)
                if self._device == "ascend"
                else CpuSession(self._ranks, self.folder)
            )
        self._session.step(step)
        self._last = step

    def phase(self, name: str) -> AbstractContextManager[None]:
        """What a part of a step is done in."""
        return _NOTHING if self._session is None else self._session.phase(name)

    def close(self) -> None:
        """Writes what was collected, if the run ends before the last of the steps is over."""
        if self._session is not None:
            self._finish()

    def _problem(self, first_step: int) -> str | None:
        if self._steps[-1] < first_step:
            return f"step {first_step} is next"
        try:
            if self.folder.exists() and any(self.folder.iterdir()):
                return f"{self.folder} is not empty: remove it, or name another as profile.dir"
        except OSError as error:
            return f"{self.folder}: {error.strerror or error}"
        return None

    def _finish(self) -> None:
        session, self._session, self._steps = self._session, None, range(0)
        assert session is not None
        self._ranks.progress.phase("saving", self._last)
        try:
            session.finish()
        except OSError as error:
            self._note(f"the profile could not be written: {self.folder}: {error.strerror or error}")
        else:
            self._note(f"profiled up to step {self._last}: amt profile show {self.folder}")


class CpuSession:
    """Phases, and every collective of this rank with its times."""

    def __init__(self, ranks: Ranks, folder: Path, clock: Callable[[], float] = time.perf_counter) -> None:
        self._ranks, self._folder, self._clock = ranks, folder, clock
        self._zero_ns = time.time_ns() - round(clock() * 1e9)
        self._log = CallLog(clock=clock)
        self._starts: list[tuple[int, float]] = []
        self._phases: list[Phase] = []
        if ranks.spans is not None:
            ranks.spans.log = self._log

    def step(self, number: int) -> None:
        """See Session."""
        self._starts.append((number, self._clock()))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """See Session."""
        start_s = self._clock()
        yield
        phase = Phase(name=name, start_s=start_s, end_s=self._clock(), computes=name not in _OF_HOST)
        self._phases.append(phase)

    def finish(self) -> None:
        """See Session."""
        end_s = self._clock()
        if self._ranks.spans is not None:
            self._ranks.spans.log = None
        rank, mesh = self._ranks.comm.rank, self._ranks.mesh
        ends = [*(start_s for _, start_s in self._starts[1:]), end_s]
        capture = Capture(
            rank=rank,
            zero_ns=self._zero_ns,
            steps=[(number, start_s, stop_s) for (number, start_s), stop_s in zip(self._starts, ends, strict=True)],
            phases=self._phases,
            calls=self._log.calls,
            waits_s=self._log.waits_s,
            axes={
                **{axis: mesh.group((axis,), rank) for axis in dict.fromkeys((*DENSE_AXES, *EXPERT_AXES))},
                "world": tuple(range(mesh.world_size)),
            },
        )
        write_capture(self._folder, capture)


class AscendSession:
    """MindSpore's profiler (2.10, `mindspore.profiler.profile`) over so many steps, which it numbers from 0. What it
    collected it analyses at the end, while the run waits. `api` is that module."""

    def __init__(self, config: ProfileConfig, folder: Path, num_steps: int, api: Any = profiler) -> None:
        settings = api._ExperimentalConfig(
            profiler_level=api.ProfilerLevel[config.level],
            aic_metrics=api.AicoreMetrics[config.aic_metrics],
            export_type=[api.ExportType.Text],
        )
        self._profile = api.profile(
            activities=[api.ProfilerActivity.CPU, api.ProfilerActivity.NPU],
            start_profile=False,
            schedule=api.schedule(wait=0, active=num_steps, repeat=1),
            on_trace_ready=api.tensorboard_trace_handler(str(folder.resolve())),
            experimental_config=settings,
        )
        self._has_begun = False

    def step(self, number: int) -> None:
        """See Session."""
        if self._has_begun:
            self._profile.step()
        else:
            self._profile.start()
            self._has_begun = True

    def phase(self, name: str) -> AbstractContextManager[None]:
        """See Session: the profiler sees for itself."""
        return _NOTHING

    def finish(self) -> None:
        """See Session."""
        self._profile.stop()
