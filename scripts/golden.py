"""Golden loss curves: tests/golden/loss_<layout>.txt, the losses of one small run under each of some layouts; those of
one process are ascend_moe_train/selftest/golden_losses.txt, where `amt selftest` finds them.

Run from the root of the repository:

    python -m scripts.golden

It trains every layout of tests/parity/curve_cases.py anew, one process and four ranks (about two minutes on two
cores), and rewrites the files only if all layouts agree.
"""

import tempfile
from pathlib import Path

from ascend_moe_train.selftest.curve import ONE_PROCESS, TOLERANCE
from tests.parity.curve_cases import LAYOUTS, golden_path, golden_text, on_ranks


def main() -> None:
    """Rewrite the files. Raises SystemExit if the curves are not those of one process."""
    with tempfile.TemporaryDirectory() as folder:
        curves = on_ranks("curves", Path(folder), deadline_s=1800)[0]
    losses = {layout: [loss for loss, _ in curves[layout]] for layout in LAYOUTS}
    for layout, found in losses.items():
        worst = max(abs(each / wanted - 1) for each, wanted in zip(found, losses[ONE_PROCESS], strict=True))
        print(f"{layout}: {found[0]:.6g} to {found[-1]:.6g}, at most {worst:.1e} from one process")
        if worst > TOLERANCE:
            raise SystemExit(f"{layout}: not the losses of one process; nothing was written")
    for layout, found in losses.items():
        golden_path(layout).write_text(golden_text(layout, found), encoding="utf-8")


if __name__ == "__main__":
    main()
