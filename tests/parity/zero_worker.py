"""What each rank does for test_zero.py."""

import math
from typing import Any

import mindspore as ms
import numpy as np

from ascend_moe_train.data.loader import Batch
from ascend_moe_train.model.kernels.select import choose
from ascend_moe_train.model.lora import apply_lora
from ascend_moe_train.model.transformer import Transformer
from ascend_moe_train.optim.adamw import AdamW, step_factors
from ascend_moe_train.optim.host_adamw import HostAdamW
from ascend_moe_train.parallel.agree import sum_int
from ascend_moe_train.parallel.comm import Comm, Group, LocalComm, RecordingComm
from ascend_moe_train.parallel.host_ops import HostOps
from ascend_moe_train.parallel.mesh import Mesh, num_micro
from ascend_moe_train.parallel.shards import placements
from ascend_moe_train.parallel.tensor import apply_tensor
from ascend_moe_train.parallel.zero import Sharded, apply_zero
from ascend_moe_train.parallel.zero_costs import zero_bytes, zero_traffic
from ascend_moe_train.train.step import StepResult, TrainStep
from tests.parity.zero_cases import CASES, LENGTH, LR, NUM_STEPS, OPTIM, Case, batch_of, value_of

FIGURES = ("loss", "mtp_loss", "total_loss", "grad_norm", "applied")


def on_rank(names: list[str]) -> dict[str, Any]:
    """What every case gives on this rank."""
    from ascend_moe_train.parallel.mpi import MpiComm

    comm = MpiComm()
    return {name: run_case(CASES[name], comm) for name in names}


def run_case(case: Case, comm: Comm) -> dict[str, Any]:
    """Some steps, then two that must change nothing, then parameters that come from elsewhere."""
    made = Rank(case, comm)
    steps = [made.step(i) for i in range(NUM_STEPS)]
    calls = [[f"{call.verb} {call.group}" for call in each] for each in made.calls]
    after, sent = made.state(), made.sent
    skipped = [made.step(0, limit=-1.0), made.step(1, scale=math.inf)]
    return {
        "steps": [{name: float(getattr(result, name)) for name in FIGURES} for result in steps],
        "squares": [result.squares for result in steps],
        "skipped": [float(result.applied) for result in skipped],
        "same": same_bits(made.state(), after),
        "state": after,
        "calls": calls,
        "sent": sent,
        "expected_sent": {" ".join(key): list(value) for key, value in made.expected_sent.items()},
        "bytes": made.measured_bytes(),
        "expected_bytes": zero_bytes(made.sharded.plan, case.num_micro).total,
        "refilled": made.refilled(),
    }


def squares_of_shares(case: Case) -> list[dict[str, float]]:
    """Squared norms of what each rank brings to the gradients of the first step, computed in one process."""
    one = Rank(case.reference, LocalComm(), num_counted=int((batch_of(case.reference, 0, 0).targets_BS >= 0).sum()))
    return [one.step_on(batch_of(case, 0, index), 0, limit=-1.0).squares for index in range(case.ranks)]


class Rank:
    """One rank's part of a case. `num_counted` are the targets of a step, if not those of all ranks' batches."""

    def __init__(self, case: Case, comm: Comm, num_counted: int | None = None) -> None:
        ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
        self.case, self.comm, self.recording = case, comm, RecordingComm(comm)
        run, kernels = case.run, choose("cpu", case.kernels)
        mesh = Mesh.make(comm.world.size)
        self.model = Transformer(run.model, kernels, LENGTH)
        if case.lora is not None:
            apply_lora(self.model, run.model, case.lora, seed=0)
        self.placed = placements(run.model, mesh, comm.rank, lora=case.lora)
        collectives = HostOps(self.recording)
        alone = Group(name="alone", ranks=(comm.rank,), index=0)
        apply_tensor(self.model, alone, collectives, by_tokens=False)
        self.sharded: Sharded = apply_zero(self.model, self.placed, mesh, run, collectives)
        for name, placement in self.placed.items():
            self.sharded.fill(name, value_of(name, placement.shape))
        make = HostAdamW if run.parallel.offload_optimizer else AdamW
        self.optimizer = make(self.sharded.weights, OPTIM, kernels, self.sharded.num_dims)
        assert num_micro(run.batch, mesh) == case.num_micro
        self._step = TrainStep(
            self.model,
            self.optimizer,
            case.num_micro,
            reduction=self.sharded.reduction,
            differentiated=self.sharded.differentiated,
            summed=self.sharded.summed,
            names=self.sharded.names,
            refill=self.sharded.refill,
            total_of=lambda count: sum_int(comm, count) if num_counted is None else num_counted,
        )
        self.calls: list[Any] = []
        self.sent: dict[str, Any] = {}
        self.expected_sent = zero_traffic(self.sharded.plan, case.num_micro)

    def step(self, number: int, *, scale: float = 1.0, limit: float = math.inf) -> StepResult:
        return self.step_on(batch_of(self.case, number, self.comm.rank), number, scale=scale, limit=limit)

    def step_on(self, batch: Batch, number: int, *, scale: float = 1.0, limit: float) -> StepResult:
        self.recording.calls.clear()
        control = np.array([*step_factors(OPTIM, LR, number + 1), scale, limit])
        result = self._step(batch, 3, control)
        self.calls.append(list(self.recording.calls))
        self.sent = {" ".join(key): list(value) for key, value in self.recording.totals().items()}
        return result

    def state(self) -> dict[str, Any]:
        """Copies of what is here: what the model reads, and what the optimizer updates with its moments."""
        kinds = {"weight": [o.parameter for o in self.sharded.owned]}
        kinds |= {"first": self.optimizer.first, "second": self.optimizer.second}
        owned = {
            owned.name: {"start": owned.start, "stop": owned.stop, "shape": self.placed[owned.name].shape}
            | {kind: tensors[i].asnumpy().copy() for kind, tensors in kinds.items()}
            for i, owned in enumerate(self.sharded.owned)
        }
        return {"owned": owned, "read": {name: p.asnumpy().copy() for name, p in self.model.weights()}}

    def measured_bytes(self) -> int:
        """Of all parameters that are alive, each once."""
        sums = list(self._step.sums) if self.case.num_micro > 1 else []
        updated = [parameter for _, parameter in self.sharded.weights]
        moments = [*self.optimizer.first, *self.optimizer.second]
        alive = {id(p): p for p in (*self.model.get_parameters(), *updated, *moments, *sums)}
        return sum(p.asnumpy().nbytes for p in alive.values())

    def refilled(self) -> bool:
        """Whether the model reads what the optimizer's parameters were filled with."""
        read = dict(self.model.weights())
        before = {name: read[name].asnumpy().copy() for name, _ in self.sharded.weights}
        for _, parameter in self.sharded.weights:
            parameter.set_data(ms.Tensor(parameter.asnumpy() * 2))
        self.sharded.refill()
        return all(np.array_equal(read[name].asnumpy(), 2 * value) for name, value in before.items())


def same_bits(found: Any, expected: Any) -> bool:
    """Whether two nests of dictionaries hold the same arrays."""
    if isinstance(found, dict):
        return found.keys() == expected.keys() and all(same_bits(found[key], expected[key]) for key in found)
    return np.asarray(found).tobytes() == np.asarray(expected).tobytes()
