"""`amt plan sweep`: the best plan for each of several values."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ascend_moe_train.errors import ConfigError

if TYPE_CHECKING:
    from ascend_moe_train.cli.plan_job import Wanted
    from ascend_moe_train.planner.hardware import Cluster
    from ascend_moe_train.planner.plan import Imbalance
    from ascend_moe_train.planner.search import Found

MAX_VALUES = 50
VARIED = ("devices", "seq-len", "micro-sequences", "imbalance", "link", "cluster")

Asked = Callable[[dict[str, Any]], "tuple[Wanted, Cluster, Imbalance]"]


def swept(vary: str, over: str, options: Mapping[str, Any], asked: Asked) -> tuple[list[str], list[dict[str, Any]]]:
    """A table, and the same as JSON. Raises ConfigError for what cannot be varied, or not so."""
    from ascend_moe_train.planner.explain import aligned
    from ascend_moe_train.units import format_bytes, format_count, format_seconds, format_share

    values = _values(vary, over)
    rows = [[vary, "devices", "plan", "memory", "step", "tokens/s", "tokens/s each", "MFU"]]
    shown: list[dict[str, Any]] = []
    for value in values:
        found, cluster, words = _best(vary, value, dict(options), asked)
        entry: dict[str, Any] = {vary: value, "cluster": cluster.name, "predicted": True}
        if not found.best:
            rows.append([value, str(cluster.num_devices), "nothing fits", *["-"] * 5])
            shown.append({**entry, "fits": False})
            continue
        best = found.best[0]
        each = best.time.tokens_per_s / cluster.num_devices
        rows.append(
            [
                value,
                str(cluster.num_devices),
                words,
                format_bytes(best.memory.peak_bytes),
                format_seconds(best.time.step_s),
                format_count(best.time.tokens_per_s),
                format_count(each),
                format_share(best.time.mfu),
            ]
        )
        figures = {"step_s": best.time.step_s, "tokens_per_s": best.time.tokens_per_s, "mfu": best.time.mfu}
        shown.append({**entry, "fits": True, "plan": words, "peak_bytes": best.memory.peak_bytes, **figures})
    order = [0, 1, 3, 4, 5, 6, 7, 2]
    lines = aligned([[row[place] for place in order] for row in rows])
    return ["predicted, not measured", *lines], shown


def _values(vary: str, over: str) -> list[str]:
    if vary not in VARIED:
        raise ConfigError(f"--vary {vary!r} is not possible: there are {', '.join(VARIED)}")
    values = [value.strip() for value in over.split(",") if value.strip()]
    if not values or len(values) > MAX_VALUES:
        raise ConfigError(f"--over has {len(values)} values: must be from 1 to {MAX_VALUES}, separated by commas")
    return values


def _best(vary: str, value: str, options: dict[str, Any], asked: Asked) -> "tuple[Found, Cluster, str]":
    from dataclasses import replace

    from ascend_moe_train.planner.explain import plan_words
    from ascend_moe_train.planner.search import search_among
    from ascend_moe_train.planner.space import Space

    limits: dict[str, Any] = {}
    if vary == "cluster":
        options["cluster"] = value
    elif vary == "devices":
        options["cluster"] = f"{_whole(vary, value)}x{_device_of(options['cluster'])}"
    elif vary == "seq-len":
        options["seq_len"] = _whole(vary, value)
    elif vary == "imbalance":
        options["imbalance"] = _number(vary, value)
    elif vary == "micro-sequences":
        limits["micro"] = (_whole(vary, value),)
    wanted, cluster, imbalance = asked(options)
    if vary == "link":
        factor, device = _number(vary, value), cluster.device
        across = replace(device.across, bytes_per_s=factor * device.across.bytes_per_s)
        cluster = replace(cluster, device=replace(device, across=across))
    space = Space.of(wanted.job, cluster, **limits)
    found = search_among(wanted.job, cluster, wanted.techniques, imbalance=imbalance, top=1, space=space)
    return found, cluster, plan_words(found.best[0].plan) if found.best else ""


def _device_of(cluster: str | None) -> str:
    return (cluster or "").partition("x")[2]


def _whole(vary: str, value: str) -> int:
    if not value.isdecimal() or not 0 < int(value[:12]) < 2**40:
        raise ConfigError(f"--over {value[:40]!r} is no value for {vary}: must be a whole number above 0")
    return int(value)


def _number(vary: str, value: str) -> float:
    try:
        found = float(value)
    except ValueError:
        found = 0.0
    if not 0 < found < 1e9:
        raise ConfigError(f"--over {value[:40]!r} is no value for {vary}: must be a number above 0")
    return found
