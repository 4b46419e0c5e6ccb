"""Why plans are not among the best, counted by family, in words with numbers. Pure."""

from dataclasses import dataclass

from ascend_moe_train.units import format_bytes


@dataclass(kw_only=True)
class Family:
    """Plans that are out for one reason. `closeness` is of the member that came nearest: the lower, the nearer."""

    label: str
    reason: str
    count: int
    closeness: float


class Rejections:
    """Families by kind: `impossible`, `too_big`, `slower`."""

    def __init__(self) -> None:
        self._families: dict[tuple[str, str], Family] = {}

    def add(self, kind: str, label: str, reason: str, *, count: int = 1, closeness: float = 0.0) -> None:
        """So many more plans of a family; the reason of its nearest member is kept."""
        found = self._families.get((kind, label))
        if found is None:
            self._families[kind, label] = Family(label=label, reason=reason, count=count, closeness=closeness)
            return
        found.count += count
        if closeness < found.closeness:
            found.reason, found.closeness = reason, closeness

    def too_big(self, label: str, stage: int, needs_bytes: float, room_bytes: float, *, count: int = 1) -> None:
        """Plans whose fullest stage has no room."""
        reason = f"stage {stage} needs {format_bytes(needs_bytes)} of {format_bytes(room_bytes)}"
        self.add("too_big", label, reason, count=count, closeness=needs_bytes)

    def listed(self, kind: str) -> list[Family]:
        """Those of a kind, the nearest first."""
        found = [family for (each, _), family in self._families.items() if each == kind]
        return sorted(found, key=lambda family: family.closeness)

    def total(self, kind: str) -> int:
        """Plans of all families of a kind."""
        return sum(family.count for family in self.listed(kind))
