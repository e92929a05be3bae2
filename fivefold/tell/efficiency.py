"""Details of a plan's kernel efficiency, kind by kind."""

from collections.abc import Iterator, Sequence

from fivefold.predict.prediction import Prediction
from fivefold.predict.times.kernels import KernelKind, kernels
from fivefold.units import human_seconds, table

SHOWN = 0.005  # share of the step from which a kind of kernels has a row of its own


def opened(prediction: Prediction) -> Iterator[str]:
    """A table of the kernels of a step, those that lose the most time first."""
    whole = prediction.step_time
    found = kernels(prediction)
    head = ("", "rows x outputs x inputs", "seconds", "of peak", "lost", "of the step")
    rows: list[tuple[str, ...]] = [head]
    large = [each for each in found if each.excess >= SHOWN * whole]
    rows += [_row(each, whole) for each in large]
    rest = [each for each in found if each.excess < SHOWN * whole]
    if rest:
        rows.append(_row(_sum(rest), whole))
    rows.append(_row(_sum(found, "all"), whole))
    yield from table(rows, right=(2, 3, 4, 5))
    yield (
        "lost: beyond the seconds of the same model FLOPs at the peak; all of it is the kernel "
        "efficiency"
    )


def _sum(kinds: Sequence[KernelKind], name: str = "") -> KernelKind:
    seconds, ideal = sum(each.seconds for each in kinds), sum(each.ideal for each in kinds)
    return KernelKind(name or f"{len(kinds)} more", "", seconds, ideal)


def _row(kind: KernelKind, whole: float) -> tuple[str, ...]:
    return (
        kind.name,
        kind.shape,
        human_seconds(kind.seconds),
        f"{kind.share_of_peak:.0%}" if kind.ideal else "-",
        human_seconds(kind.excess),
        f"{kind.excess / whole:.1%}",
    )
