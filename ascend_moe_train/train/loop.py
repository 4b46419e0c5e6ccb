"""A training run from start to report: the loop and its hooks."""

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ascend_moe_train.checkpoint.writer import AsyncWriter
from ascend_moe_train.config import RunConfig, dump_yaml
from ascend_moe_train.data.loader import EvalLoader
from ascend_moe_train.data.tokenizer import load_tokenizer
from ascend_moe_train.model.counts import num_active_parameters, num_parameters, training_flops_per_token
from ascend_moe_train.train.evaluate import Evaluator
from ascend_moe_train.train.generate import Generator, Sampling
from ascend_moe_train.train.json_view import JsonView
from ascend_moe_train.train.live import LiveView
from ascend_moe_train.train.metrics import JsonlWriter, Record, replace_file
from ascend_moe_train.train.peak import measured_cpu_peak_flops_per_s
from ascend_moe_train.train.persist import checkpoint_meta, collect
from ascend_moe_train.train.report import write_report
from ascend_moe_train.train.run_info import RunInfo, versions, write_run_info
from ascend_moe_train.train.run_lock import locked
from ascend_moe_train.train.stop import StopRequest, stop_on_signal
from ascend_moe_train.train.tensorboard import TensorBoardWriter
from ascend_moe_train.train.trainer import Trainer

Hook = Callable[[int, bool], None]


View = LiveView | JsonView


def train(config: RunConfig, view: View) -> int:
    """Trains until the last step, or until a signal asks to stop; continues from the run's newest checkpoint.

    Returns the exit code: 0, or 128 plus the number of the signal. Raises UserError subclasses.
    """
    run_dir = Path(config.run.dir)
    with locked(run_dir), stop_on_signal() as stop:
        trainer = Trainer(config, view.note)
        peak, source = _peak(config, trainer.device)
        _write_facts(config, run_dir, peak, source)
        view.note(f"{trainer.device} device, {trainer.kernels.name} kernels, step {trainer.state.step + 1} is next")
        with _records(config, run_dir, trainer.state.step + 1, view) as record, _saver(trainer) as save:
            hooks = [_evaluate(trainer, record), save]
            meter = trainer.meter(peak)
            for info in trainer.steps(meter):
                if info.warning:
                    view.note(info.warning)
                record(info.record)
                is_last = info.record.step == config.run.steps or stop.signal_number is not None
                for hook in hooks:
                    hook(info.record.step, is_last)
                if stop.signal_number is not None:
                    break
    if config.run.sample_prompt is not None and trainer.state.step == config.run.steps:
        view.note("sample: " + _write_sample(trainer, config.run.sample_prompt, run_dir))
    view.note(f"report: {write_report(run_dir)}")
    return _exit_code(trainer, stop, view)


def _exit_code(trainer: Trainer, stop: StopRequest, view: View) -> int:
    if stop.signal_number is None or trainer.state.step == trainer.config.run.steps:
        return 0
    name = signal.Signals(stop.signal_number).name
    view.note(f"stopped by {name} after step {trainer.state.step}, saved; the same command goes on from there")
    return 128 + stop.signal_number


def _write_sample(trainer: Trainer, prompt: str, run_dir: Path) -> str:
    words = load_tokenizer(Path(trainer.config.data.tokenizer))
    generator = Generator(trainer.model, trainer.config.data.seq_len)
    start = words.encode(prompt) or [words.eod_id]
    text = prompt + words.decode(list(generator.tokens(start, Sampling(), words.eod_id)))
    replace_file(run_dir / "sample.txt", [text.encode()])
    return text


def _peak(config: RunConfig, device: str) -> tuple[float | None, str]:
    if config.run.peak_flops_per_s is not None:
        return config.run.peak_flops_per_s, "run.peak_flops_per_s"
    if device == "cpu":
        return measured_cpu_peak_flops_per_s(), "fp32 matrix product measured at the start"
    return None, "unknown: set run.peak_flops_per_s"


def _write_facts(config: RunConfig, run_dir: Path, peak: float | None, source: str) -> None:
    replace_file(run_dir / "config.yaml", [dump_yaml(config).encode()])
    info = RunInfo(
        total_steps=config.run.steps,
        parameters=num_parameters(config.model),
        active_parameters=num_active_parameters(config.model),
        flops_per_token=training_flops_per_token(config.model, config.data.seq_len),
        peak_flops_per_s=peak,
        peak_source=source,
        versions=versions(),
    )
    write_run_info(run_dir, info)


@contextmanager
def _records(config: RunConfig, run_dir: Path, first_step: int, view: View) -> Iterator[Callable[[Record], None]]:
    """Where records go: the screen, metrics.jsonl, TensorBoard."""
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


def _evaluate(trainer: Trainer, record: Callable[[Record], None]) -> Hook:
    config = trainer.config
    if not config.data.valid:
        return lambda step, is_last: None
    loader = EvalLoader(
        config.data,
        vocab_size=config.model.vocab_size,
        num_sequences=config.run.eval_sequences,
        micro_sequences=config.batch.micro_sequences,
    )
    evaluate = Evaluator(trainer.model, loader)

    def hook(step: int, is_last: bool) -> None:
        if step % config.run.eval_every == 0 or step == config.run.steps:
            record(evaluate(step))

    return hook


@contextmanager
def _saver(trainer: Trainer) -> Iterator[Hook]:
    config = trainer.config.checkpoint
    with AsyncWriter(keep=config.keep) as writer:

        def hook(step: int, is_last: bool) -> None:
            if step % config.every and not is_last:
                return
            tensors = collect(trainer.model, trainer.optimizer)
            writer.submit(trainer.checkpoints, step, tensors, checkpoint_meta(trainer.config, trainer.state))
            if not config.asynchronous:
                writer.wait()

        yield hook
