"""Every key of a run file is read by something: a switch that nothing reads is a lie."""

import ast

from ascend_moe_train.config import RunConfig
from ascend_moe_train.config_error import parts_in
from ascend_moe_train.part import Part
from tests.rules.field_reads import FieldReads, Read
from tests.rules.source import modules


def fields(part: type[Part]) -> set[Read]:
    """(class, field) of every key below a part."""
    found = {(part.__name__, name) for name in part.model_fields}
    for info in part.model_fields.values():
        for inner in parts_in(info.annotation):
            found |= fields(inner)
    return found


def test_every_key_is_read() -> None:
    facts = FieldReads(module.tree for module in modules())
    assert sorted(fields(RunConfig) - facts.reads) == []


SAMPLE = """
class A:
    used: int
    in_loop: int
    behind_property: int
    through_self: int
    through_call: int
    in_validator_only: int
    written_only: int
    same_name_elsewhere: int

    @property
    def derived(self) -> int:
        return self.behind_property

    @model_validator(mode="after")
    def _check(self) -> "A":
        assert self.in_validator_only
        return self

class Holder:
    many: tuple[A, ...]
    one: "A | None"

class User:
    def __init__(self, holder: Holder) -> None:
        self._a, self._x = holder.one, 3

    def use(self) -> int:
        return self._a.through_self

def load() -> A: ...

def use(holder: Holder, other) -> None:
    a = load()
    print(a.through_call, other.same_name_elsewhere, np.same_name_elsewhere)
    for index, each in enumerate(holder.many):
        print(each.in_loop)
    print([each.used for each in holder.many])
    a.written_only = 3
"""


def test_what_counts_as_a_read() -> None:
    reads = FieldReads([ast.parse(SAMPLE)]).reads
    assert {name for owner, name in reads if owner == "A"} == {
        "used",
        "in_loop",
        "behind_property",
        "through_self",
        "through_call",
    }
