"""The table of the READMEs: what benchmarks/*.json hold as ratios, each with its date and machine.

A region `<!-- ratios: en -->` or `<!-- ratios: zh -->` of a page has it (scripts/docs_regions.py writes it anew).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.docs_pages import ROOT

HEADS = {
    "en": ("what, against what", "ratio", "measured on"),
    "zh": ("什么与什么相比", "比值", "测于"),
}


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What the column that begins with `key` has in the rows of a page that have all of `where`; over what it has in
    the row `over`, if there is one. With `best_of`, the largest of rows whose variant begins so. `says` has the words
    by language."""

    page: str
    where: Mapping[str, str] = field(default_factory=dict)
    best_of: str = ""
    key: str
    over: Mapping[str, str] | None = None
    says: Mapping[str, str]


CLAIMS = (
    Claim(
        page="step_speed",
        best_of="ours",
        key="against the best peer",
        says={
            "en": "tokens/s of the demo model's training step, against Hugging Face's Mixtral on torch, best of each",
            "zh": "demo 模型训练步的 token/s，与 torch 上的 Hugging Face Mixtral 相比，双方都取最好成绩",
        },
    ),
    Claim(
        page="step_speed",
        best_of="ours",
        key="share of",
        says={
            "en": "its model FLOP/s, against sgemm on the same cores",
            "zh": "其模型 FLOP/s，与同样的核上的 sgemm 相比",
        },
    ),
    Claim(
        page="step_speed_wide",
        best_of="ours",
        key="against the best peer",
        says={
            "en": "tokens/s with hidden 512, 64 experts, top-8, against Hugging Face's Qwen3-MoE, best of each",
            "zh": "hidden 512、64 个专家、top-8 的 token/s，与 Hugging Face Qwen3-MoE 相比，双方都取最好成绩",
        },
    ),
    Claim(
        page="step_speed_wide",
        best_of="ours",
        key="tokens/s",
        over={"variant": "the guide's layer: each expert given all tokens"},
        says={
            "en": "the same, against the layer of experts of the guide, in MindSpore",
            "zh": "同上，与指南的专家层（MindSpore）相比",
        },
    ),
    Claim(
        page="step_speed_wide",
        best_of="ours",
        key="share of",
        says={"en": "its model FLOP/s, against sgemm", "zh": "其模型 FLOP/s，与 sgemm 相比"},
    ),
    Claim(
        page="ablate",
        where={"rung": "kernels"},
        key="against_first",
        says={
            "en": "tokens/s of a small model on two ranks: grouped experts, fused kernels, against a loop over experts",
            "zh": "两个 rank 上小模型的 token/s：分组专家加融合算子，与逐个专家循环相比",
        },
    ),
    Claim(
        page="ablate",
        where={"rung": "expert_parallel"},
        key="sent_bytes",
        over={"rung": "buckets"},
        says={
            "en": "bytes that a rank of it sends with expert parallelism, against data parallelism",
            "zh": "其每个 rank 发送的字节数：专家并行，与数据并行相比",
        },
    ),
    Claim(
        page="overlap",
        where={"way": "overlap"},
        key="exposed against plain",
        says={
            "en": "time that a step stands still for communication over slow links: with overlap, against without",
            "zh": "慢链路上一步停下来等待通信的时间：有重叠，与没有相比",
        },
    ),
    Claim(
        page="ranks",
        where={"variant": "2 ranks, dp2"},
        key="against one",
        says={
            "en": "tokens/s of two data parallel ranks, against one rank that has the same two cores to itself",
            "zh": "两个数据并行 rank 的 token/s，与独占同样两个核的一个 rank 相比",
        },
    ),
    Claim(
        page="pipeline",
        where={"variant": "pp2, 1f1b"},
        key="memory against one",
        says={
            "en": "memory of the larger of two pipeline stages, against one rank",
            "zh": "两个流水线阶段中较大者的内存，与一个 rank 相比",
        },
    ),
    Claim(
        page="recompute",
        where={"kernels": "native", "policy": "full"},
        key="memory against none",
        says={
            "en": "memory of a micro-batch with full recomputation, against without",
            "zh": "一个微批次的内存：完全重计算，与不重计算相比",
        },
    ),
    Claim(
        page="recompute",
        where={"kernels": "native", "policy": "full"},
        key="time against none",
        says={"en": "its time, in the same way", "zh": "其时间，同样相比"},
    ),
    Claim(
        page="onebit",
        key="of the run",
        says={
            "en": "bytes of dense gradients in a whole run: Adam's in fp32, against 1-bit Adam's",
            "zh": "整个训练中稠密梯度的字节数：fp32 的 Adam，与 1-bit Adam 相比",
        },
    ),
    Claim(
        page="onebit",
        key="1-bit over Adam",
        says={"en": "the loss in the end: 1-bit Adam's, against Adam's", "zh": "最终的损失：1-bit Adam，与 Adam 相比"},
    ),
    Claim(
        page="convert",
        where={"variant": "transformers"},
        key="seconds",
        over={"variant": "export"},
        says={
            "en": "time to load and save a 2 GB checkpoint with transformers, against our export of it",
            "zh": "用 transformers 加载并保存 2 GB 检查点的时间，与我们的导出相比",
        },
    ),
    Claim(
        page="convert",
        where={"variant": "transformers"},
        key="peak memory, MB",
        over={"variant": "export"},
        says={"en": "memory that this takes, in the same way", "zh": "所用的内存，同样相比"},
    ),
    Claim(
        page="profile",
        where={"command": "msprof-analyze cluster -m all"},
        key="CPU, s",
        over={"command": "amt profile show"},
        says={
            "en": "CPU time to read a capture of 4 ranks: msprof-analyze's, against `amt profile show`'s",
            "zh": "读取 4 个 rank 的采集所用的 CPU 时间：msprof-analyze，与 `amt profile show` 相比",
        },
    ),
)


def ratios(language: str, folder: Path = ROOT / "benchmarks") -> list[str]:
    """The table, in Markdown. Raises ValueError: a page has no such figure any more."""
    lines = ["| " + " | ".join(HEADS[language]) + " |", "| --- | --- | --- |"]
    for claim in CLAIMS:
        result = json.loads((folder / f"{claim.page}.json").read_text(encoding="utf-8"))
        where = f"[{_measured_on(result)}](benchmarks/{claim.page}.md)"
        lines.append(f"| {claim.says[language]} | {_ratio(claim, result['rows'])} | {where} |")
    return lines


def _ratio(claim: Claim, rows: Sequence[Mapping[str, Any]]) -> str:
    found = _figures(claim, rows, claim.where, claim.best_of)
    if claim.best_of:
        found = [max(found)]
    if claim.over is not None:
        (below,) = _figures(claim, rows, claim.over, "")
        found = [figure / below for figure in found]
    lowest, highest = f"{min(found):.3g}", f"{max(found):.3g}"
    return lowest if lowest == highest else f"{lowest} – {highest}"


def _figures(claim: Claim, rows: Sequence[Mapping[str, Any]], where: Mapping[str, str], begins: str) -> list[float]:
    """The numbers of all rows that have `where` and whose variant begins so, both ends of `0.97 to 0.98`."""
    chosen = [row for row in rows if where.items() <= row.items() and str(row.get("variant", "")).startswith(begins)]
    cells = [cell for row in chosen for name, cell in row.items() if name.startswith(claim.key)]
    if not cells or len(cells) != len(chosen):
        raise ValueError(f"benchmarks/{claim.page}.json: no row with {dict(where)} has {claim.key!r}")
    return [float(end) for cell in cells for end in str(cell).split(" to ")]


def _measured_on(result: Mapping[str, Any]) -> str:
    date = result["machine"].get("date") or result["made_at"][:10]
    return f"{date}, {result['machine']['processor']}"
