"""A training run from start to report: the loop and its hooks."""

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ascend_moe_train.checkpoint.saving import Writer
from ascend_moe_train.checkpoint.starting import Start
from ascend_moe_train.checkpoint.store import steps
from ascend_moe_train.checkpoint.writer import AsyncWriter
from ascend_moe_train.config import RunConfig, dump_yaml
from ascend_moe_train.data.tokenizer import Tokenizer
from ascend_moe_train.model.adapters import num_adapter_parameters, run_flops_per_token
from ascend_moe_train.model.config import LoraConfig, ModelConfig, RopeConfig
from ascend_moe_train.model.counts import num_active_parameters, num_parameters
from ascend_moe_train.parallel.callback import named_failures
from ascend_moe_train.train.evaluate import Evaluator
from ascend_moe_train.train.generate import TOKENIZER, Generator, Sampling, text_pieces
from ascend_moe_train.train.inputs import Inputs
from ascend_moe_train.train.metrics import JsonlWriter, Record, replace_file
from ascend_moe_train.train.peak import measured_cpu_peak_flops_per_s
from ascend_moe_train.train.persist import checkpoint_meta
from ascend_moe_train.train.ranks import Ranks
from ascend_moe_train.train.report import write_report
from ascend_moe_train.train.run_info import RunInfo, processor, read_run_info, versions, write_run_info
from ascend_moe_train.train.stop import BY_CLOCK, StopRequest
from ascend_moe_train.train.tensorboard import TensorBoardWriter
from ascend_moe_train.train.trainer import Trainer
from ascend_moe_train.train.view import View

MEASURED = "fp32 matrix product measured at the start"


def train(config: RunConfig, inputs: Inputs, view: View, stop: StopRequest, ranks: Ranks) -> int:
    """Trains until the last step, or until `stop` asks any rank for an end; continues from the run's newest checkpoint.

    The first rank alone tells the view and writes what is not a checkpoint. Returns the exit code: 0, or 128 plus the
    number of the signal. Raises UserError subclasses.
    """
    run_dir = Path(config.run.dir)
    trainer = Trainer(config, inputs.train, view.note, ranks, inputs.start)
    peak, source = _peak(config, trainer.device, run_dir, ranks)
    with named_failures(), trainer.profiling:
        view.note(f"{_where(trainer)}, {_what_is_next(trainer)}")
        if config.lora is not None:
            view.note(_what_is_trained(config.model, config.lora))
        if inputs.start is not None and inputs.start.model.rope != config.model.rope:
            view.note(_how_far(config.model.rope, inputs.start))
        _until_a_rewind(trainer, inputs, (peak, source), view, stop)
        while trainer.must_rewind:
            view.note(trainer.rewind())
            _until_a_rewind(trainer, inputs, (peak, source), view, stop)
    if ranks.is_first:
        _write_results(trainer, inputs, run_dir, view)
    ranks.progress.phase("done", trainer.state.step)
    return _exit_code(trainer, stop, view)


def _until_a_rewind(
    trainer: Trainer, inputs: Inputs, peak: tuple[float | None, str], view: View, stop: StopRequest
) -> None:
    """Steps until the last, or a stop, or one after which the run has to go back; every checkpoint is written then.

    `peak` is the device's, and how it is known.
    """
    run_dir = Path(trainer.config.run.dir)
    with _records(trainer.config, run_dir, trainer, view) as record, _saver(trainer) as saver:
        if trainer.ranks.is_first:
            _write_facts(trainer.config, inputs, run_dir, *peak)
        if trainer.config.guard.rewinds and trainer.state.step == 0:
            saver.save_first()
        evaluate = _evaluation(trainer, inputs, record)
        try:
            for info in trainer.steps(trainer.meter(peak[0]), stop):
                for line in filter(None, (info.warning, info.remark)):
                    view.note(line)
                record(info.record)
                if not trainer.must_rewind:
                    evaluate(info.record.step)
                    saver.after_step()
        except (BrokenPipeError, SystemExit):  # nobody reads the output any more; rich makes a SystemExit of that
            saver.save()
            raise
        if not trainer.must_rewind:
            saver.save()


def _where(trainer: Trainer) -> str:
    ranks = f"{trainer.ranks.mesh.world_size} ranks, " if trainer.ranks.mesh.world_size > 1 else ""
    return f"{ranks}{trainer.device} device, {trainer.kernels.name} kernels"


def _write_results(trainer: Trainer, inputs: Inputs, run_dir: Path, view: View) -> None:
    prompt = trainer.config.run.sample_prompt
    if prompt is not None and trainer.is_done:
        if trainer.ranks.mesh.world_size == 1:
            view.note("sample: " + _write_sample(trainer, inputs.tokenizer, prompt, run_dir))
        else:
            view.note(f"no rank has the whole model for a sample: amt generate {run_dir} writes one")
    view.note(f"report: {write_report(run_dir)}")


def _what_is_next(trainer: Trainer) -> str:
    return f"all {trainer.state.step} steps are done" if trainer.is_done else f"step {trainer.state.step + 1} is next"


def _what_is_trained(model: ModelConfig, lora: LoraConfig) -> str:
    trained, total = num_adapter_parameters(model, lora), num_parameters(model)
    return f"adapters of {trained:,} parameters are trained ({trained / total:.2%} of the model's {total:,})"


def _how_far(rope: RopeConfig, start: Start) -> str:
    return f"rotary positions are scaled ({rope.scaling}, factor {rope.factor:g}), not as in {start.path}"


def _exit_code(trainer: Trainer, stop: StopRequest, view: View) -> int:
    if stop.signal_number is None or trainer.is_done:
        return 0
    number, name = stop.signal_number, signal.Signals(stop.signal_number).name
    if number == BY_CLOCK:
        number, name = signal.SIGTERM, f"run.time_limit_s {trainer.config.run.time_limit_s:g}"
    view.note(f"stopped by {name} after step {trainer.state.step}, saved; the same command goes on from there")
    return 128 + number


def _write_sample(trainer: Trainer, tokenizer: Tokenizer, prompt: str, run_dir: Path) -> str:
    generator = Generator(trainer.model, trainer.config.data.seq_len, tokenizer.vocab_size)
    start = tokenizer.encode(prompt) or [tokenizer.eod_id]
    text = "".join(text_pieces(tokenizer, prompt, generator.tokens(start, Sampling(), tokenizer.eod_id)))
    replace_file(run_dir / "sample.txt", [text.encode()])
    return text


def _peak(config: RunConfig, device: str, run_dir: Path, ranks: Ranks) -> tuple[float | None, str]:
    """Of all ranks together."""
    if config.run.peak_flops_per_s is not None:
        return config.run.peak_flops_per_s * ranks.mesh.world_size, "run.peak_flops_per_s"
    if device != "cpu":
        return None, "unknown: set run.peak_flops_per_s"
    before, peak = read_run_info(run_dir), ranks.sum_of_all(measured_cpu_peak_flops_per_s())
    # a start on a busy machine measures less than the machine can do
    if before is not None and before.peak_source == MEASURED and before.versions.get("processor") == processor():
        peak = max(peak, before.peak_flops_per_s or 0.0)
    return peak, MEASURED


def _write_facts(config: RunConfig, inputs: Inputs, run_dir: Path, peak: float | None, source: str) -> None:
    replace_file(run_dir / "config.yaml", [dump_yaml(config).encode()])
    # a copy for `amt generate` in another folder, where the path in the configuration leads nowhere
    replace_file(run_dir / TOKENIZER, [inputs.tokenizer.to_json().encode()])
    info = RunInfo(
        total_steps=config.run.steps,
        parameters=num_parameters(config.model),
        active_parameters=num_active_parameters(config.model),
        flops_per_token=run_flops_per_token(config.model, config.lora, config.data.seq_len),
        peak_flops_per_s=peak,
        peak_source=source,
        versions=versions(),
    )
    write_run_info(run_dir, info)


@contextmanager
def _records(config: RunConfig, run_dir: Path, trainer: Trainer, view: View) -> Iterator[Callable[[Record], None]]:
    """Where records go: the screen, metrics.jsonl, TensorBoard; those of other ranks than the first, nowhere."""
    if not trainer.ranks.is_first:
        yield lambda item: None
        return
    first_step = trainer.state.step + 1
    with ExitStack() as stack:
        writers: list[JsonlWriter | TensorBoardWriter] = [
            stack.enter_context(JsonlWriter(run_dir / "metrics.jsonl", first_step=first_step))
        ]
        if config.run.tensorboard:
            writers.append(stack.enter_context(TensorBoardWriter(run_dir / "tensorboard", first_step=first_step)))

        def record(item: Record) -> None:
            for writer in writers:
                writer.write(item)
            view.show(item)

        yield record


def _evaluation(trainer: Trainer, inputs: Inputs, record: Callable[[Record], None]) -> Callable[[int], None]:
    """What evaluates after the steps that are due."""
    run = trainer.config.run
    if inputs.valid is None:
        return lambda step: None
    evaluate = Evaluator(trainer.model, inputs.valid, trainer.ranks, site=trainer.site)

    def after_step(step: int) -> None:
        if step % run.eval_every == 0 or step == run.steps:
            trainer.ranks.progress.phase("evaluating", step)
            with trainer.profiling.phase("evaluation"):
                record(evaluate(step))

    return after_step


class _Saver:
    """Hands the run's state to a writer, each state once."""

    def __init__(self, trainer: Trainer, writer: AsyncWriter) -> None:
        self._trainer, self._writer = trainer, writer
        self._saved_step = trainer.state.step

    def after_step(self) -> None:
        """Saves when a checkpoint is due."""
        if self._trainer.state.step % self._trainer.config.checkpoint.every == 0:
            with self._trainer.profiling.phase("checkpoint"):
                self.save()

    def save(self) -> None:
        """Saves the state that training has reached."""
        if self._trainer.state.step != self._saved_step:
            self._save()

    def save_first(self) -> None:
        """Saves the state before the first step, for a run that may have to go back to it, unless that is there."""
        if self._trainer.ranks.of_first(not steps(self._trainer.checkpoints)):
            self._save()

    def _save(self) -> None:
        trainer = self._trainer
        trainer.ranks.progress.phase("saving", trainer.state.step)
        meta = checkpoint_meta(trainer.config, trainer.state, trainer.origin, trainer.ranks)
        self._writer.prepare(trainer.checkpoints, trainer.state.step)
        trainer.ranks.wait_for_all()
        self._writer.submit_part(trainer.checkpoints, trainer.state.step, trainer.tensors.portions(), meta)
        self._saved_step = trainer.state.step
        if not trainer.config.checkpoint.asynchronous:
            self._writer.wait()


@contextmanager
def _saver(trainer: Trainer) -> Iterator[_Saver]:
    ranks = trainer.ranks
    deadline_s = trainer.config.parallel.deadlines.save_s
    part = Writer(index=ranks.comm.rank, count=ranks.mesh.world_size, deadline_s=deadline_s)
    with AsyncWriter(keep=trainer.config.checkpoint.keep, writer=part) as writer:
        yield _Saver(trainer, writer)
