"""Compares ways to split experts: EP, ETP and TP, in numbers."""

from collections.abc import Iterator

from fivefold.search.search import SearchResult
from fivefold.tell.explain import slower

AXES = ("ep", "etp", "tp")


def expert_degrees(result: SearchResult) -> Iterator[str]:
    """One line: the degrees of the best layout, and for each the best layout with another."""
    best = result.best
    if best.layout.config.model.num_experts is None:
        return
    grid, others = best.layout.grid, []
    for axis in AXES:
        own = getattr(grid, axis)
        differing = [c for c in result.by_mesh() if getattr(c.layout.grid, axis) != own]
        found = min(differing, key=lambda c: c.seconds, default=None)
        if found is not None:
            degree = getattr(found.layout.grid, axis)
            others.append(f"{axis} {degree} {slower(best.predicted, found.predicted)}")
    chosen = ", ".join(f"{axis} {getattr(grid, axis)}" for axis in AXES)
    unlike = "; ".join(others) or "none fits"
    yield f"{chosen}; the best with another: {unlike}"
