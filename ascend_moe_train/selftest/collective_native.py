"""Which cases MindSpore's own collectives can do, by device. Pure."""

from ascend_moe_train.selftest.collective_cases import Case, partition

GATHERED = ("float32", "float16", "int32")
# in an order of its own, fp16 in fp16
TOLERANCES = {"float32": 1e-6, "float16": 1e-2}


def is_on_cpus(case: Case, n: int) -> bool:
    """What MindSpore's collectives have on CPUs."""
    parts = partition(case.group, n)
    if case.group == "backwards":
        return False
    if len(parts) == n:
        return case.verb != "all_to_all_v" and case.dtype != "bfloat16"
    match case.verb:
        case "all_reduce":
            return case.dtype in TOLERANCES and case.how == "sum" and case.wire != "bf16"
        case "all_gather" | "broadcast":
            return case.dtype in GATHERED and len(parts) == 1
        case _:
            return case.verb == "barrier"


def is_on_ascend(case: Case, n: int) -> bool:
    """What the trainer asks of HCCL: ranks of a group ascend, and nothing has 64 bits or one byte."""
    return case.group != "backwards" and case.dtype in GATHERED
