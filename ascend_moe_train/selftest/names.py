"""What checks are called, so that who asks for them needs no framework. Pure."""

from ascend_moe_train.selftest.curve import SAVED_AFTER, STEPS

DEVICE = "device"
LOSSES = f"{STEPS} steps, against golden losses"
GO_ON = f"checkpoint of step {SAVED_AFTER}, gone on from"
RANKS_GO_ON = f"checkpoint of step {SAVED_AFTER} by one process, gone on from by all ranks"
ONE_GOES_ON = f"checkpoint of step {SAVED_AFTER} by all ranks, gone on from by one process"
VERBS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "all_to_all_v", "broadcast", "send", "barrier")
HOST, GRAPH = "on host arrays", "in a graph"


def of_verb(verb: str, way: str) -> str:
    """The check of a verb."""
    return f"{'send and recv' if verb == 'send' else verb} {way}"


COLLECTIVES = {of_verb(verb, way): (verb, way) for way in (HOST, GRAPH) for verb in VERBS}
