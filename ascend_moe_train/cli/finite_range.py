"""Options that are numbers between bounds."""

import math
from typing import Any

import click


class FiniteRange(click.FloatRange):
    """A range that refuses what is no finite number, which comparisons let pass."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number that a text means."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number", param, ctx)
        return number
