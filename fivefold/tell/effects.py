"""Effects of changing the cluster, or of one more technique, on a step."""

from collections.abc import Sequence
from math import inf

from fivefold.search.candidate import Candidate
from fivefold.search.search import SearchResult
from fivefold.tell.describe import summary
from fivefold.tell.explain import Sensitivity, percent
from fivefold.units import human_seconds


def effects(result: SearchResult, changes: Sequence[Sensitivity]) -> list[tuple[str, str, str]]:
    """A table of changes, the step with each, and the layout that results."""
    rows = [("if", "step", "")]
    for change in changes:
        if change.seconds == inf:
            rows.append((change.change, "-", "none of the layouts found fits"))
            continue
        layout = percent(change.seconds / result.best.seconds - 1)
        if change.moves:
            layout += f", by {_unlike(change.candidate, result.best)}"
        if change.untrained:
            layout += "; Fivefold cannot train with it yet"
        rows.append((change.change, human_seconds(change.seconds), layout))
    return rows


def _unlike(candidate: Candidate, other: Candidate) -> str:
    """The parts of a layout's summary that differ from another's."""
    known = summary(other.layout).split(", ")
    words = [word for word in summary(candidate.layout).split(", ") if word not in known]
    return ", ".join(words) or "the same without some of its techniques"
