"""What a run shows while it trains: a table that stays in place on a terminal, plain lines everywhere else. Pure."""

import math
from collections import deque
from types import TracebackType
from typing import Self

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ascend_moe_train.train.metrics import EvalRecord, Record, StepRecord
from ascend_moe_train.units import UNKNOWN, format_bytes, format_flops_per_s, format_seconds, format_share

SPARK = "▁▂▃▄▅▆▇█"
SPARK_WIDTH = 40

Figures = dict[str, str]


def loss_figures(record: StepRecord) -> Figures:
    """Loss and optimizer figures of a step, as text by label."""
    figures = {
        "loss": _number(record.loss),
        "smoothed": _number(record.loss_smooth),
        "lr": f"{record.lr:.2e}",
        "grad norm": f"{record.grad_norm:.3g}",
    }
    if record.mtp_loss is not None:
        figures["mtp loss"] = _number(record.mtp_loss)
    if record.loss_scale is not None:
        figures["loss scale"] = f"{record.loss_scale:.0f}"
    return figures


def speed_figures(record: StepRecord) -> Figures:
    """Throughput, memory, share of waiting for other ranks, and time left of a step, as text by label."""
    rate = record.tokens_per_s
    waits = record.comm_exposed_s
    return {
        "tokens/s": f"{rate:,.0f}" if math.isfinite(rate) else UNKNOWN,
        "model": format_flops_per_s(record.model_flops_per_s),
        "MFU": format_share(record.mfu),
        "memory": format_bytes(record.memory_bytes),
        **({} if waits is None or not record.step_s else {"waits": format_share(waits / record.step_s)}),
        "left": format_seconds(record.eta_s),
    }


def expert_figures(record: StepRecord) -> Figures:
    """Expert load of a step as text by label: mean over layers, worst layer, sum; nothing for a dense model."""
    if not record.load_cv:
        return {}
    return {
        "load cv": f"{sum(record.load_cv) / len(record.load_cv):.2f}",
        "max/mean": f"{max(record.load_max_over_mean):.2f}",
        "dead": str(sum(record.dead_experts)),
        "dropped": format_share(record.drop_rate),
    }


def eval_figures(record: EvalRecord) -> Figures:
    """Validation figures as text by label."""
    figures = {"loss": _number(record.loss), "perplexity": f"{record.perplexity:.4g}"}
    if record.bits_per_byte is not None:
        figures["bits/byte"] = _number(record.bits_per_byte)
    return figures


def plain_line(record: Record, total_steps: int) -> str:
    """One record as one line of text."""
    if isinstance(record, EvalRecord):
        return f"validation after step {record.step}: {_joined(eval_figures(record))}"
    figures = loss_figures(record) | speed_figures(record) | expert_figures(record)
    mark = "  SKIPPED" if record.skipped else ""
    return f"step {record.step}/{total_steps}{mark}  {_joined(figures)}"


class LiveView:
    """Shows records as they come. Use it as a context manager; without a terminal it prints every `log_every` steps.

    `note` is for whatever else has to be said (a checkpoint written, a step skipped): it stays above the table.
    """

    def __init__(self, *, total_steps: int, log_every: int, console: Console | None = None) -> None:
        self._console = console or Console()
        self._total_steps = total_steps
        self._log_every = log_every
        self._step: StepRecord | None = None
        self._eval: EvalRecord | None = None
        self._losses: deque[float] = deque(maxlen=SPARK_WIDTH)
        in_place = self._console.is_terminal and not self._console.is_dumb_terminal
        self._live = Live(console=self._console, get_renderable=self._render) if in_place else None

    def show(self, record: Record) -> None:
        """Takes in one record. A skipped step and an evaluation are always printed."""
        if isinstance(record, EvalRecord):
            self._eval = record
            self.note(plain_line(record, self._total_steps))
            return
        self._step = record
        due = record.step % self._log_every == 0 or record.step in (1, self._total_steps)
        if due:
            self._losses.append(record.loss_smooth)
        if record.skipped or (due and self._live is None):
            self.note(plain_line(record, self._total_steps))

    def note(self, message: str) -> None:
        """Prints a line."""
        self._console.print(Text(message), soft_wrap=True)

    def _render(self) -> RenderableType:
        if self._step is None:
            return Text("compiling the training step …", style="dim")
        step = self._step
        head = Table.grid(padding=(0, 1), expand=True)
        head.add_column(no_wrap=True)
        head.add_column(ratio=1)
        head.add_row(
            f"step [bold]{step.step}[/bold]/{self._total_steps}",
            ProgressBar(total=self._total_steps, completed=step.step),
        )
        tables = {"loss": loss_figures(step), "speed": speed_figures(step), "experts": expert_figures(step)}
        if self._eval is not None:
            tables[f"validation @ {self._eval.step}"] = eval_figures(self._eval)
        height = max(len(figures) for figures in tables.values())
        panels = [_panel(title, figures, height) for title, figures in tables.items() if figures]
        curve = Text(f"smoothed loss {sparkline(self._losses)}", style="cyan")
        return Group(head, Columns(panels), curve)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()


def sparkline(values: deque[float]) -> str:
    """Finite values as block characters, lowest to highest; a dot where a value is not finite."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    low, span = min(finite), max(finite) - min(finite)
    top = len(SPARK) - 1
    return "".join(
        SPARK[round((value - low) / span * top) if span else 0] if math.isfinite(value) else "·" for value in values
    )


def _panel(title: str, figures: Figures, height: int) -> Panel:
    """Figures as a framed table of `height` rows."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(justify="right", no_wrap=True)
    for label, text in figures.items():
        grid.add_row(label, text)
    return Panel(grid, title=title, title_align="left", border_style="dim", height=height + 2)


def _joined(figures: Figures) -> str:
    return "  ".join(f"{label} {text}" for label, text in figures.items())


def _number(value: float) -> str:
    return f"{value:.4f}" if math.isfinite(value) else str(value)
