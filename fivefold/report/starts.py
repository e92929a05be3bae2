"""Which steps of a run are comparable: started by the same command, with the same settings, on the
same number of ranks."""

from collections.abc import Mapping, Sequence
from typing import Any

from fivefold.train.folder.metrics_file import MOST_STEPS

Start = Mapping[str, Any]


class ComparableSteps:
    """The steps that are comparable with a given one, or with those of the latest start.

    Args:
        starts: entries of `environment.json`; of those without their first step nothing is known,
            and all steps count.
        step: the given step; None: the latest start is meant.
    """

    def __init__(self, starts: Sequence[Start], step: int | None = None) -> None:
        self._spans = [range(MOST_STEPS)]
        self._firsts: set[int] | None = None
        if not starts or any("step" not in start for start in starts):
            return
        self._firsts = {start["step"] + 1 for start in starts}
        every: list[tuple[object, range]] = []
        end = MOST_STEPS
        for start in reversed(starts):  # later starts may have repeated steps of earlier ones
            what, first = _what(start), min(end, start["step"] + 1)
            if every and every[-1][0] == what:
                every[-1] = what, range(first, every[-1][1].stop)
            else:
                every.append((what, range(first, end)))
            end = first
        given = every[0][0]
        if step is not None:
            given = next((what for what, span in every if step in span), given)
        self._spans = [span for what, span in every if what == given]

    def __contains__(self, step: object) -> bool:
        return any(step in span for span in self._spans)

    def usual(self, steps: Sequence[int]) -> set[int]:
        """The comparable steps that count, without the first one of each start, which includes
        preparation."""
        alike = [step for step in steps if step in self]
        return set(alike[1:]) if self._firsts is None else set(alike) - self._firsts


def _what(start: Start) -> object:
    ranks = start.get("variables", {}).get("WORLD_SIZE")
    return start.get("command"), start.get("settings"), ranks
