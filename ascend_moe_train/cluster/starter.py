"""The process that starts the ranks of a machine: mpiexec, msrun, or MPI's proxy. Pure."""

import contextlib
import os
import subprocess
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

from ascend_moe_train.cluster.mpiexec import python

LEAVE_S = 3.0  # for it to end
_LINES = 20


class StarterProcess:
    """It, and what it says itself, of which `noise` keeps the last."""

    def __init__(self, name: str, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        self._name, self._process = name, process
        self.output = process.stdout.fileno()
        self.noise: deque[str] = deque(maxlen=_LINES)

    def ending(self) -> tuple[str, int] | None:
        """Its name, and its exit code or minus the signal; None while it runs."""
        code = self._process.poll()
        return None if code is None else (self._name, code)

    @property
    def last_words(self) -> str:
        """See RanksStarter."""
        *before, last = self.noise or [""]
        return "\n".join([last, *before])

    def kill(self) -> None:
        """Ends it by force."""
        self._process.kill()


@contextlib.contextmanager
def started(command: Sequence[str], environment: Mapping[str, str], name: str) -> Iterator[StarterProcess]:
    """Started in a session of its own, where no Ctrl-C reaches it; ended at the end."""
    process = subprocess.Popen(
        [*python(), "-m", "ascend_moe_train.cluster.tether", str(os.getpid()), *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=dict(environment),
        start_new_session=True,
        bufsize=0,
    )
    with process:
        try:
            yield StarterProcess(name, process)
        finally:
            try:
                process.wait(LEAVE_S)
            except subprocess.TimeoutExpired:
                process.kill()
