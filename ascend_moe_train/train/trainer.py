"""One run in hand: its model, optimizer, data and state, and the generator of its steps."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from ascend_moe_train.checkpoint.starting import Start
from ascend_moe_train.checkpoint.store import CHECKPOINTS
from ascend_moe_train.config import RunConfig
from ascend_moe_train.data.loader import TrainLoader
from ascend_moe_train.errors import TrainingError
from ascend_moe_train.model.adapters import run_flops_per_token
from ascend_moe_train.model.lora import apply_lora
from ascend_moe_train.model.transformer import Transformer
from ascend_moe_train.optim.adamw import AdamW, step_factors
from ascend_moe_train.optim.host_adamw import HostAdamW
from ascend_moe_train.optim.lr import learning_rate
from ascend_moe_train.optim.scaling import LossScale
from ascend_moe_train.parallel.apply import parallelize, placed_by
from ascend_moe_train.parallel.host_ops import HostOps
from ascend_moe_train.parallel.pipeline import site_of
from ascend_moe_train.parallel.zero import check_adds_up
from ascend_moe_train.train.building import make_step
from ascend_moe_train.train.guard import find_origin, remember_loss, spike_limit
from ascend_moe_train.train.memory import give_back_free
from ascend_moe_train.train.metrics import Smoother, StepMeter, StepRecord
from ascend_moe_train.train.persist import Tensors, restore
from ascend_moe_train.train.profiling import Profiling
from ascend_moe_train.train.ranks import Ranks
from ascend_moe_train.train.session import build_model
from ascend_moe_train.train.state import TrainingState
from ascend_moe_train.train.step import StepResult
from ascend_moe_train.train.stop import StopRequest
from ascend_moe_train.train.stragglers import Stragglers
from ascend_moe_train.train.variance import with_fixed_variance


@dataclass(frozen=True, kw_only=True)
class StepInfo:
    """One finished step: its record, a line for the user if something was out of the ordinary in it, and one if other
    ranks are slow than before."""

    record: StepRecord
    warning: str | None
    remark: str | None = None


class Trainer:
    """Builds one rank's part of a run and steps it. `state` always describes the last finished step, and is the same on
    every rank; `start` is that of `Inputs`, `put_in` changes ports of the whole model before it is cut.

    Raises UserError subclasses for checkpoints and devices that cannot be used.
    """

    def __init__(
        self,
        config: RunConfig,
        loader: TrainLoader,
        note: Callable[[str], None],
        ranks: Ranks,
        start: Start | None = None,
        put_in: Callable[[Transformer, RunConfig], None] | None = None,
    ) -> None:
        self.config, self.loader, self.ranks = config, loader, ranks
        self.model, self.kernels, self.device = build_model(config)
        if put_in is not None:
            put_in(self.model, config)
        given = {}
        if config.lora is not None:
            apply_lora(self.model, config.model, config.lora, config.run.seed)
            given = {name: p.asnumpy().copy() for name, p in self.model.weights() if p.requires_grad}
        self.sharded = parallelize(self.model, ranks.mesh, config, ranks.device or HostOps(ranks.comm))
        make = HostAdamW if config.parallel.offload_optimizer else AdamW
        self.optimizer = make(self.sharded.weights, config.optim, self.kernels, self.sharded.num_dims)
        placed = placed_by(config, ranks.mesh, ranks.comm.rank)
        check_adds_up(self.sharded.plan, placed, ranks.comm)
        here = (ranks.comm.rank, ranks.mesh.world_size)
        self.tensors = Tensors(config, placed, self.model, self.sharded, self.optimizer, *here)
        self.tensors.fill_first(start, given)
        self.checkpoints = Path(config.run.dir) / CHECKPOINTS
        self._restore = partial(restore, self.checkpoints, config, self.tensors, ranks, start, note)
        self.state, self.origin = self._restore()
        if self.state.step == 0:
            self.state = self.state.model_copy(update={"loss_scale": LossScale(scale=self._first_scale())})
        self.site = site_of(config, ranks.mesh, ranks.comm, ranks.device) if ranks.mesh.pp > 1 else None
        self._step = make_step(config, ranks.mesh, ranks.comm, self.model, self.sharded, self.optimizer, self.site)
        self.profiling = Profiling(config, ranks, self.device, self.state.step + 1, note)
        self._step.phase = self.profiling.phase
        self._has_run = False
        self.must_rewind = False
        self._stragglers = Stragglers(ranks, config.guard)
        self._sends_momenta = self.sharded.momenta is not None and self.state.fixed_after is not None
        if self._sends_momenta:
            self._step.change_over()

    @property
    def is_done(self) -> bool:
        """Whether the run's last step is behind it."""
        return self.state.step >= self.config.run.steps

    def steps(self, meter: StepMeter, stop: StopRequest) -> Iterator[StepInfo]:
        """Runs the steps that are left, one per item, until a stop is asked for.

        Raises TrainingError: too many non-finite steps in a row; the message names step and tensor.
        """
        while not self.must_rewind and not self.is_done and not self._is_asked_to_stop(stop):
            self.profiling.begin(self.state.step + 1)
            self.ranks.progress.phase("step" if self._has_run else "compile", self.state.step + 1)
            info = self._one_step(meter)
            if not self._has_run:
                give_back_free()
            yield info
            self._has_run = True

    def rewind(self) -> str:
        """Goes back to the newest checkpoint, to pass over the data since then, that of the last step included; what
        there is to say. To be called when `must_rewind`, with every checkpoint written.

        Raises TrainingError: too often to the same one.
        """
        bad, most = self.state, self.config.guard.max_rewinds
        saved, self.origin = self._restore()
        self.state = bad.rewound(saved)
        self.must_rewind = False
        if self.state.rewinds > most:
            raise TrainingError(
                f"stopped at step {bad.step}: it was bad after {most} rewinds to the checkpoint of step {saved.step}, "
                "each to other data (guard.max_rewinds)"
            )
        return (
            f"back to step {saved.step} (rewind {self.state.rewinds} of at most {most} to it): the data of the "
            f"{bad.step - saved.step} steps since then is passed over"
        )

    def meter(self, peak_flops_per_s: float | None) -> StepMeter:
        """A meter that goes on with the smoothed loss of the state."""
        return StepMeter(
            total_steps=self.config.run.steps,
            flops_per_token=run_flops_per_token(self.config.model, self.config.lora, self.config.data.seq_len),
            peak_flops_per_s=peak_flops_per_s,
            smoother=Smoother(total=self.state.smooth_total, weight=self.state.smooth_weight),
            lists_comm=self.config.run.log_comm,
        )

    def _is_asked_to_stop(self, stop: StopRequest) -> bool:
        """Whether any rank is: all of them stop after the same step."""
        own = (stop.signal_number or 0) if stop.is_made() else 0
        agreed = self.ranks.largest(own)
        if agreed:  # else leave it: a signal of this very moment is for the next question
            stop.signal_number = agreed
        return agreed != 0

    def _first_scale(self) -> float:
        return self.config.loss_scale.init if self._scales_loss else 1.0

    @property
    def _scales_loss(self) -> bool:
        return self.config.run.precision == "fp16"

    def _one_step(self, meter: StepMeter) -> StepInfo:
        config, state = self.config, self.state
        start_s = time.perf_counter()
        if self.ranks.spans is not None:
            self.ranks.spans.take()
        with self.profiling.phase("data"):
            batch = self.loader.batch(state.data_step)
        lr = learning_rate(config.optim, state.step, config.run.steps)
        limit = spike_limit(config.guard, state)
        highest = limit if config.guard.spike_action in ("skip", "rewind") else math.inf
        factors = step_factors(config.optim, lr, state.updates + 1, state.fixed_after if self._sends_momenta else None)
        noise_seed = (config.run.seed * 1_000_003 + state.step) % 2**31
        result = self._step(batch, noise_seed, np.array([*factors, state.loss_scale.scale, highest]))
        tokens = batch.tokens_BS.size * self.ranks.data.size
        self.state, warning = self._advance(result, limit, tokens)
        warning = self._fix_variance() or warning
        if self.state.bad_in_row >= config.guard.max_bad_steps and not self.must_rewind:
            last = f"the last with loss {result.loss:.6g} and gradient norm {result.grad_norm:.6g}"
            why = f"loss limit {limit:.6g}"
            if not _is_finite(result):
                # of a single rank sequence by sequence; several need equally many tokens, which tp cuts
                passes = len(batch.tokens_BS) if self.ranks.mesh.world_size == 1 else self._step.num_micro
                own = self.ranks.own(batch)
                origin = find_origin(self.model, self.ranks, own, result, noise_seed, passes, self.site)
                why = f"first not finite: {origin}"
            raise TrainingError(
                f"stopped at step {self.state.step}: {self.state.bad_in_row} steps in a row were skipped, {last}; {why}"
            )
        step_s, comm = time.perf_counter() - start_s, None if self.ranks.spans is None else self.ranks.spans.take()
        remark = None
        if comm is not None and self._has_run:
            remark = self._stragglers.after_step(step_s - comm.exposed_s)
        record = meter.record(
            step=self.state.step,
            loss=result.loss,
            aux_loss=result.aux_loss,
            z_loss=result.z_loss,
            lr=lr,
            grad_norm=result.grad_norm,
            tokens=tokens,
            step_s=step_s,
            counts_LE=result.counts_LE,
            dropped=result.num_dropped,
            loss_scale=state.loss_scale.scale if self._scales_loss else None,
            skipped=not result.applied,
            mtp_loss=result.mtp_loss if config.model.mtp is not None else None,
            comm=comm,
        )
        smooth = {"smooth_total": meter.smoother.total, "smooth_weight": meter.smoother.weight}
        self.state = self.state.model_copy(update=smooth)
        return StepInfo(record=record, warning=warning, remark=remark)

    def _fix_variance(self) -> str | None:
        """Changes to sending momenta when it is time for it; what there is to say then."""
        if self.sharded.momenta is None or self._sends_momenta:
            return None
        self.state = with_fixed_variance(self.config, self.state, self._second_sum)
        if self.state.fixed_after is None:
            return None
        self._sends_momenta = True
        self._step.change_over()
        return f"step {self.state.step}: second moments stay as they are, momenta are sent as signs from now on"

    def _second_sum(self) -> float:
        """Of the tensors whose momenta are to be sent, in fp64: the same on every rank."""
        momenta = self.sharded.momenta
        places = [] if momenta is None else [i for bucket in momenta.buckets for i in bucket]
        return float(sum(self.optimizer.second[i].asnumpy().sum(dtype=np.float64) for i in places))

    def _advance(self, result: StepResult, limit: float, tokens: int) -> tuple[TrainingState, str | None]:
        """The state after a step, and what the user should know of it."""
        config, state = self.config, self.state
        step = state.step + 1
        finite = _is_finite(result)
        is_spike = finite and result.total_loss > limit
        scale, at_least = state.loss_scale, state.loss_scale.scale <= config.loss_scale.min
        if self._scales_loss:
            scale = scale.after(not finite, config.loss_scale)
        # an overflow that a lower scale can still mend is fp16's normal life
        is_bad = (is_spike and not result.applied) or (not finite and (not self._scales_loss or at_least))
        action = config.guard.spike_action if is_spike else config.guard.nonfinite_action
        self.must_rewind = is_bad and action == "rewind"
        after = state.model_copy(
            update={
                "step": step,
                "tokens": state.tokens + tokens,
                "updates": state.updates + int(result.applied),
                "skipped": state.skipped + int(not result.applied),
                "bad_in_row": state.bad_in_row + 1 if is_bad else 0 if finite else state.bad_in_row,
                "loss_scale": scale,
            }
        )
        if is_spike:
            done = "skipped" if not result.applied else "applied"
            return after, f"step {step}: loss {result.total_loss:.4f} is a spike (limit {limit:.4f}), {done}"
        if finite:
            return after.model_copy(
                update={"recent_losses": remember_loss(config.guard, state, result.total_loss)}
            ), None
        if not is_bad:
            return (
                after,
                f"step {step}: fp16 overflow, skipped; loss scale {state.loss_scale.scale:g} -> {scale.scale:g}",
            )
        return after, f"step {step}: loss {result.loss} or gradient norm {result.grad_norm} not finite, skipped"


def _is_finite(result: StepResult) -> bool:
    return math.isfinite(result.total_loss) and math.isfinite(result.grad_norm)
