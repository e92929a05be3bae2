"""The report of a verification: errors, limits and verdict, as text and JSON. Imports no torch."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from math import inf, isfinite, prod, sqrt
from typing import Any

from fivefold.files import finite
from fivefold.layout import Layout
from fivefold.tell.describe import parallelism
from fivefold.units import few, several

TOLERANCES = {"fp64": 1e-12, "fp32": 1e-5}
"""Relative error that rounding explains in every model."""

FACTOR = 1.5  # allowed multiple of one device's distance from fp64
ALONE = 16.0  # the same for one gradient: of few elements, chance decides far more
FLOORS = {"bf16": 2.0**-9, "fp16": 2.0**-12}
"""Half a unit in the last place of 16 bits; one device may have a smaller error by chance."""
SMALL = 1e-2  # share of the largest, or usual, gradient below which errors are relative to that
Errors = dict[str, float | None]
Alone = dict[str, float]
"""Errors of single gradients by stored name."""
Strange = tuple[str, float, float]
"""A single gradient with too large an error: stored name, error, and error on one device."""
SCALARS = ("loss", "further", "norm", "evaluation")


@dataclass(frozen=True)
class Difference:
    """Difference of one rank's part of a tensor, or of a shared number, from one device's.

    Attributes:
        what: "loss", "norm", "evaluation", "grad", "param", "load" (tokens of experts) or "further"
            (losses of predictions and indexers, the largest logits).
        step: step, from 0.
        name: stored name of the parameter; "" for a number.
        part: start and end of the part along each dim.
        rank: rank that holds the part.
        error: largest absolute difference of an element.
        scale: value that the error is relative to: the largest element of the whole tensor, or a
            lower limit for small tensors.
        dot: inner product of the part with the reference's.
        own: sum of squares of the part.
        true: sum of squares of the reference's part.
        off: sum of squares of the differences.
        digest: digest of the bits, to compare replicas; "" if not compared.
    """

    what: str
    step: int
    name: str
    part: tuple[int, ...]
    rank: int
    error: float
    scale: float
    dot: float
    own: float
    true: float
    off: float = 0.0
    digest: str = ""

    @property
    def relative(self) -> float:
        """Error over scale; infinite if not finite."""
        if not isfinite(self.error) or not isfinite(self.own):
            return inf
        if not self.scale:
            return inf if self.error else 0.0
        return self.error / self.scale

    @property
    def ratio(self) -> float:
        """Norm of the part over the norm of the reference's."""
        return sqrt(self.own / self.true) if self.true else inf

    @property
    def cosine(self) -> float:
        """Cosine of the angle between the part and the reference's."""
        product = self.own * self.true
        return self.dot / sqrt(product) if product else 0.0


@dataclass(frozen=True)
class VerifyReport:
    """The outcome of a verification.

    Attributes:
        passed: whether every error is within its limit and replicas are bitwise equal.
        dtype: precision of the layout's computation; the reference computes in fp64.
        layout: description of the layout.
        steps: number of steps compared.
        max_rel_error: largest relative error of loss, grad, norm, param and evaluation, and of load
            if there are experts. None: not reached, because the comparison ends at the first wrong
            gradient.
        limits: limits of these errors, by the same keys.
        worst: the difference furthest beyond (or nearest to) its limit.
        diagnosis: sentences on what is probably wrong, most significant first.
        diverged: parameters whose replicas are not bitwise equal.
        changes: changes made to the recipe to verify it on one device.
        strange: gradients that are too far off by themselves, in 16 bits.
    """

    passed: bool
    dtype: str
    layout: str
    steps: int
    max_rel_error: Errors
    limits: dict[str, float]
    worst: dict[str, Any] | None
    diagnosis: tuple[str, ...] = ()
    diverged: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()
    strange: tuple[Strange, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """JSON-serialisable values; values that are not finite become null."""
        found: dict[str, Any] = finite(asdict(self))
        return found

    def text(self) -> str:
        """Text: what was compared, errors and limits, the worst difference, the verdict."""
        lines = [f"layout     {self.layout}"]
        lines += [f"{'changed' if i == 0 else '':<11}{c}" for i, c in enumerate(self.changes)]
        lines += [
            f"compared   {several(self.steps, 'step')} in {self.dtype} with one device in fp64",
            *([_rule(self.dtype)] if self.dtype != "fp64" else []),
            "",
            f"{'':<11}{'max error':>11}  {'limit':>9}",
        ]
        for key, error in self.max_rel_error.items():
            shown, limit = _SHOWN[key], self.limits[key]
            number = "not reached" if error is None else f"{error:.2e}"
            mark = "" if error is None or error <= limit else "  <- too large"
            lines.append(f"{shown:<11}{number:>11}  {limit:>9.2e}{mark}")
        if self.worst is not None:
            lines += ["", f"worst      {worst_line(self.worst)}"]
        if self.strange:
            strange = [
                f"{name} ({error:.1e}, on one device {known:.1e})"
                for name, error, known in self.strange
            ]
            lines += ["", f"gradients too far off by themselves: {few(strange, 3)}"]
        if self.diverged:
            lines += ["", f"replicas differ in {few(self.diverged, 3)}"]
        lines += ["", *self.diagnosis] if self.diagnosis else []
        verdict = "PASSED: the layout computes what one device computes"
        lines += [
            "",
            verdict if self.passed else "FAILED: it does not compute what one device does",
        ]
        return "\n".join(lines)


_SHOWN = {
    "loss": "loss",
    "further": "further",
    "grad": "gradients",
    "norm": "norm",
    "param": "weights",
    "evaluation": "evaluation",
    "load": "loads",
}


def _rule(dtype: str) -> str:
    of_one = f"{FACTOR} x the error of one device in {dtype}"
    if dtype in FLOORS:
        return f"{'':<11}all elements together; limit: {of_one}, and of one gradient {ALONE:g} x"
    return f"{'':<11}limit: {TOLERANCES[dtype]:g}, or {of_one} where that is more"


def worst_line(worst: dict[str, Any]) -> str:
    """One line on the worst difference."""
    kind = _SHOWN[worst["what"]]
    name = f"{kind.removesuffix('s')} of {worst['name']}" if worst["name"] else kind
    if worst["what"] == "further":
        name = worst["name"]
    line = f"{name} in step {worst['step'] + 1} on rank {worst['rank']}: {worst['error']:.2e}"
    if worst["name"]:
        line += f" (norm ratio {worst['ratio']:.4g}, cosine {worst['cosine']:.4f})"
    return line


def judge(
    layout: Layout,
    differences: Sequence[Difference],
    baseline: Errors | None,
    diagnosis: Sequence[str] = (),
    alone: Alone | None = None,
) -> VerifyReport:
    """The verdict on the differences of all ranks.

    Args:
        layout: the verified layout.
        differences: differences of every rank.
        baseline: `errors_in` of one device in the same precision; None in fp64.
        diagnosis: sentences from `diagnose`.
        alone: errors of each gradient on that device; None: none is judged by itself.
    """
    dtype = layout.config.training.precision
    errors = errors_in(dtype, differences)
    limits = _limits(dtype, errors, baseline or {})
    floor = max((baseline or {}).get("grad") or 0.0, FLOORS.get(dtype, 0.0))
    diverged, strange = _diverged(differences), _strange(differences, alone, floor)
    worst = max(differences, key=lambda d: d.relative / limits[d.what], default=None)
    return VerifyReport(
        passed=not (diverged or strange)
        # If one device is infinitely far off, nothing passes.
        and all((error or 0.0) <= limits[what] < inf for what, error in errors.items()),
        dtype=dtype,
        layout=parallelism(layout),
        steps=len({d.step for d in differences}),
        max_rel_error=errors,
        limits=limits,
        worst=None
        if worst is None
        else {
            "what": worst.what,
            "name": worst.name,
            "step": worst.step,
            "rank": worst.rank,
            "error": worst.relative,
            "ratio": worst.ratio,
            "cosine": worst.cosine,
        },
        diagnosis=tuple(diagnosis),
        diverged=diverged,
        strange=strange,
    )


def errors_in(dtype: str, differences: Collection[Difference]) -> Errors:
    """Relative errors in a precision, by kind: of the worst element, in 16 bits of the worst step
    over all elements, each counted once."""
    if dtype in FLOORS:
        return _joint_errors(differences)
    return {
        what: max((d.relative for d in differences if d.what == what), default=None)
        for what in _kinds(differences)
    }


def _limits(dtype: str, kinds: Iterable[str], baseline: Errors) -> dict[str, float]:
    """Limits of errors by kind: a multiple of one device's, and no less than rounding explains."""
    least = FACTOR * FLOORS[dtype] if dtype in FLOORS else TOLERANCES[dtype]
    limits = {what: max(FACTOR * (baseline.get(what) or 0.0), least) for what in kinds}
    if dtype in FLOORS:
        # The norm may be as wrong as the gradient; one device's norm may be right by chance.
        limits["norm"] = max(limits["norm"], limits["grad"])
    return limits


def _joint_errors(differences: Collection[Difference]) -> Errors:
    parts = _each_part_once(differences)
    errors: Errors = dict.fromkeys(_kinds(differences))
    for what, step in {(d.what, d.step) for d in parts}:
        here = [d for d in parts if (d.what, d.step) == (what, step)]
        if what in SCALARS:
            error = max(d.relative for d in here)
        else:
            true = sum(d.true for d in here)
            error = sqrt(sum(d.off for d in here) / true) if true else inf
        errors[what] = max(errors[what] or 0.0, error if isfinite(error) else inf)
    return errors


def errors_alone(differences: Collection[Difference]) -> Alone:
    """Relative error of each gradient, in its worst step, over all of its elements.

    Gradients much smaller than others, such as those that are zero up to rounding, are compared
    with a share of the average over all gradients.
    """
    found: defaultdict[int, defaultdict[str, list[Difference]]]
    found = defaultdict(lambda: defaultdict(list))
    for d in _each_part_once(differences):
        if d.what == "grad":
            found[d.step][d.name].append(d)
    errors: Alone = {}
    for gradients in found.values():
        every = [d for parts in gradients.values() for d in parts]
        usual = sum(d.true for d in every) / max(sum(map(_elements, every)), 1)
        for name, parts in gradients.items():
            least = SMALL**2 * usual * sum(map(_elements, parts))
            scale = max(sum(d.true for d in parts), least)
            error = sqrt(sum(d.off for d in parts) / scale) if scale else 0.0
            error = error if isfinite(error) else inf  # of NaN and a number, max gives either
            errors[name] = max(errors.get(name, 0.0), error)
    return errors


def _strange(
    differences: Collection[Difference], alone: Alone | None, floor: float
) -> tuple[Strange, ...]:
    """Gradients whose error is far larger than on one device, and than `floor`: the error of all
    gradients there, or half a unit in the last place."""
    if alone is None:
        return ()
    found = []
    for name, error in errors_alone(differences).items():
        known = max(alone.get(name, 0.0), floor)
        if error > ALONE * known:
            found.append((name, error, known))
    return tuple(found)


def _each_part_once(differences: Iterable[Difference]) -> list[Difference]:
    return [*{(d.what, d.step, d.name, d.part): d for d in differences}.values()]


def _elements(difference: Difference) -> int:
    edges = difference.part
    return prod(stop - start for start, stop in zip(edges[::2], edges[1::2], strict=True))


def _kinds(differences: Iterable[Difference]) -> list[str]:
    """The kinds of differences that are compared: loads only with experts, further numbers only if
    there are any."""
    lines = {difference.what for difference in differences}
    return [what for what in _SHOWN if what in lines or what not in ("load", "further")]


def _diverged(differences: Iterable[Difference]) -> tuple[str, ...]:
    """Parameters whose replicas differ in some bit."""
    digests: dict[tuple[int, str, tuple[int, ...]], set[str]] = {}
    for d in differences:
        if d.digest:
            digests.setdefault((d.step, d.name, d.part), set()).add(d.digest)
    return tuple(sorted({name for (_, name, _), found in digests.items() if len(found) > 1}))
