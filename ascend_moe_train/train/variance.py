"""When 1-bit Adam fixes its second moments. Pure."""

from collections.abc import Callable

from ascend_moe_train.config import RunConfig
from ascend_moe_train.train.state import TrainingState

STABLE_RATIO = 0.96


def with_fixed_variance(config: RunConfig, state: TrainingState, second_sum: Callable[[], float]) -> TrainingState:
    """The state after an update, with `fixed_after` set if second moments stay as they are from now on.

    That is after `parallel.compress.warmup_updates`; without a number, once the learning rate has warmed up and the sum
    of second moments is less than 1 / 0.96 times that of 1 / (1 - beta2) updates ago (Tang et al., 2021, section 7.1).
    """
    if config.parallel.compress.method != "onebit_adam" or state.fixed_after is not None or state.updates == 0:
        return state
    wanted = config.parallel.compress.warmup_updates
    if wanted is not None:
        return state.model_copy(update={"fixed_after": state.updates}) if state.updates >= wanted else state
    if state.updates % max(1, round(1 / (1 - config.optim.beta2))):
        return state
    before, now = state.second_sum, second_sum()
    is_stable = state.step >= config.optim.warmup_steps and now > 0 and before / now >= STABLE_RATIO
    return state.model_copy(update={"second_sum": now, "fixed_after": state.updates if is_stable else None})
