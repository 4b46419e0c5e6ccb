"""Tables of docs/models.md: sizes counted from the presets, and errors against transformers on the golden files.

Run from the root of the repository:

    python -m scripts.parity_table

It rewrites what is between the two pairs of markers in docs/models.md; the errors take about two minutes.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ascend_moe_train.model.counts import num_active_parameters, num_parameters
from ascend_moe_train.presets import PRESETS
from tests.model_run import KERNEL_SETS, CompiledModel, kernels
from tests.oracle.differences import relative_error
from tests.oracle.golden import FAMILY_CASES, PROMPT, Golden, golden, read_tensors
from tests.oracle.transformer import inputs

PAGE = Path(__file__).parent.parent / "docs" / "models.md"
SIZES, PARITY = "sizes", "parity"


def size_lines() -> Iterator[str]:
    """Parameters of every preset, embedding and head counted in both numbers."""
    yield "| preset | parameters | active per token |"
    yield "|---|---:|---:|"
    for name, preset in PRESETS.items():
        config = preset()
        yield f"| `{name}` | {num_parameters(config):,} | {num_active_parameters(config):,} |"


def parity_lines() -> Iterator[str]:
    """Relative errors of the compiled model in fp32 against transformers in fp64."""
    yield "| golden file | transformers | kernels | logits | loss | worst gradient | its weight | greedy tokens |"
    yield "|---|---|---|---:|---:|---:|---|---:|"
    for case in FAMILY_CASES:
        tensors, metadata = read_tensors(case)
        version = json.loads(metadata["made_of"])["transformers"]
        for kernel_set in KERNEL_SETS:
            yield f"| {case} | {version} | {kernel_set} | {_errors(golden(tensors, metadata), kernel_set)} |"


def _errors(reference: Golden, kernel_set: str) -> str:
    batch = inputs(reference.tokens_BS, reference.targets_BS)
    chosen = kernels(kernel_set)
    model = CompiledModel(reference.config, chosen, reference.weights, num_positions=batch.tokens_BS.shape[1])
    found, continued = model.run(batch), model.run(inputs(reference.generated_BS, reference.targets_BS))
    errors = {name: relative_error(found.grads[name], grad) for name, grad in reference.grads.items()}
    worst = max(errors, key=lambda name: errors[name])
    logits = relative_error(found.logits_BSV, reference.logits_BSV)
    loss = relative_error(found.total, reference.total)
    wanted_BS = reference.generated_BS[:, PROMPT:]
    equal = int(np.sum(continued.logits_BSV.argmax(axis=-1)[:, PROMPT - 1 : -1] == wanted_BS))
    return f"{logits:.1e} | {loss:.1e} | {errors[worst]:.1e} | `{worst}` | {equal} of {wanted_BS.size}"


def between(text: str, name: str, lines: list[str]) -> str:
    """The page with other lines between the markers `name`. Raises ValueError where there are none."""
    begin, end = f"<!-- {name}: python -m scripts.parity_table -->", f"<!-- end of {name} -->"
    before, found, rest = text.partition(begin)
    _, also_found, after = rest.partition(end)
    if not (found and also_found):
        raise ValueError(f"{PAGE}: no markers {begin!r} and {end!r}")
    return "\n".join([before + begin, "", *lines, "", end]) + after


def main() -> None:
    """Rewrite the page."""
    text = between(PAGE.read_text(encoding="utf-8"), SIZES, list(size_lines()))
    text = between(text, PARITY, list(parity_lines()))
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
