"""The step of one rank, from its part of a model."""

from functools import partial
from itertools import chain
from typing import Any

from ascend_moe_train.config import RunConfig
from ascend_moe_train.model.transformer import Transformer
from ascend_moe_train.optim.adamw import AdamW
from ascend_moe_train.optim.host_adamw import HostAdamW
from ascend_moe_train.optim.onebit import OneBitAdam
from ascend_moe_train.optim.reduction import Reduction
from ascend_moe_train.parallel.agree import sum_int
from ascend_moe_train.parallel.comm import Comm
from ascend_moe_train.parallel.mesh import Mesh, num_micro
from ascend_moe_train.parallel.pipeline import Pipeline, StageSite
from ascend_moe_train.parallel.places import own_part
from ascend_moe_train.parallel.zero import Sharded
from ascend_moe_train.train.step import TrainStep


def make_step(
    config: RunConfig,
    mesh: Mesh,
    comm: Comm,
    model: Transformer,
    sharded: Sharded,
    optimizer: AdamW | HostAdamW,
    site: StageSite | None,
) -> TrainStep:
    """The step of this rank; `site` is its place in a pipeline. Every rank calls it."""
    data = comm.split("dp", mesh.groups(("dp",))).carrying("figures")

    def make_passes(sums: Any) -> Pipeline:
        assert site is not None
        weights = {share.name: kept for share, kept in zip(sharded.plan.trained, sharded.differentiated, strict=True)}
        return Pipeline(model, config, site, weights=weights, sums=sums, reduction=sharded.reduction)

    return TrainStep(
        model,
        optimizer,
        num_micro(config.batch, mesh),
        reduction=sharded.reduction,
        differentiated=sharded.differentiated,
        summed=sharded.summed,
        names=sharded.names,
        total_of=lambda count: sum_int(comm, count, data),
        own=partial(own_part, mesh=mesh, here=mesh.coordinates(comm.rank)),
        refill=sharded.refill,
        later=_later(optimizer, sharded, comm.world.size),
        make_passes=None if site is None else make_passes,
        moe_rows=None if site is None else tuple(chain.from_iterable(site.moe_rows)),
    )


def _later(optimizer: AdamW | HostAdamW, sharded: Sharded, num_ranks: int) -> tuple[OneBitAdam, Reduction] | None:
    """1-bit Adam, if the run has it."""
    momenta = sharded.momenta
    if momenta is None or isinstance(optimizer, HostAdamW):
        return None
    return OneBitAdam(optimizer, momenta.buckets, momenta.means, num_ranks), momenta.reduction
