"""The report of an audit: predicted and measured values, and notes; imports no torch."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from fivefold.audit.record import RankRecord, expected_record
from fivefold.layout import Layout
from fivefold.units import human_bytes, human_flops, human_seconds, table

ACTIVATION_TOLERANCE = 0.03
"""Relative tolerance for activations: kernels, which differ by machine, keep small buffers."""


@dataclass(frozen=True)
class Finding:
    """One quantity, on the rank where prediction and measurement differ most.

    Attributes:
        name: name of the quantity.
        measured: measured value; None if it was not measured.
        shown: function that formats a value.
        predicted: predicted value; None if it cannot be predicted.
        rank: rank of these values; None for values of the whole run.
        tolerance: largest allowed relative difference; None: the quantity is only shown.
        wrong: number of ranks on which the difference is larger than allowed.
        note: explanation of a difference.
    """

    name: str
    measured: float | None
    shown: Callable[[float], str]
    predicted: float | None = None
    rank: int | None = None
    tolerance: float | None = None
    wrong: int = 0
    note: str = ""

    @property
    def deviation(self) -> float | None:
        """The measured value relative to the predicted one, minus 1."""
        if self.predicted is None or self.measured is None:
            return None
        return _deviation(self.predicted, self.measured)


@dataclass(frozen=True)
class AuditReport:
    """The result of an audit.

    Attributes:
        title: description of the run and its layout.
        ranks: number of measured ranks.
        findings: compared quantities, in the order in which they are shown.
    """

    title: str
    ranks: int
    findings: tuple[Finding, ...]

    @property
    def passed(self) -> bool:
        """Whether every checked quantity is as predicted."""
        return not any(finding.wrong for finding in self.findings)

    def text(self) -> str:
        """A table, notes, and the verdict in the last line."""
        rows = [("", "predicted", "measured", "")]
        rows += [self._row(finding) for finding in self.findings]
        lines = [self.title, "", *table(rows, right=(1, 2))]
        notes = [f"{f.name}: {f.note}" for f in self.findings if f.note]
        judged = sum(finding.tolerance is not None for finding in self.findings)
        failed = [finding.name for finding in self.findings if finding.wrong]
        where = f"on all {self.ranks} ranks" if self.ranks > 1 else "on the one rank"
        verdict = (
            f"not as predicted: {', '.join(failed)}"
            if failed
            else f"as predicted: all {judged} quantities {where}"
        )
        return "\n".join([*lines, *([""] if notes else []), *notes, "", verdict])

    def as_json(self) -> dict[str, object]:
        """The report as a value for JSON; sizes in bytes, times in seconds."""
        return {
            "passed": self.passed,
            "ranks": self.ranks,
            "findings": [
                {
                    "name": f.name,
                    "predicted": f.predicted,
                    "measured": f.measured,
                    "tolerance": f.tolerance,
                    "rank": f.rank,
                    "wrong_ranks": f.wrong,
                    "note": f.note,
                }
                for f in self.findings
            ],
        }

    def _row(self, finding: Finding) -> tuple[str, str, str, str]:
        predicted, measured = (
            "-" if value is None else finding.shown(value)
            for value in (finding.predicted, finding.measured)
        )
        return finding.name, predicted, measured, self._in_words(finding)

    def _in_words(self, finding: Finding) -> str:
        off = finding.deviation
        if off is None:
            return ""
        where = "" if finding.rank is None else f" on rank {finding.rank}"
        if finding.tolerance is None:
            return f"{off:+.1%}{where}"
        if finding.wrong:
            many = f", wrong on {finding.wrong} of {self.ranks} ranks" if self.ranks > 1 else ""
            assert finding.predicted is not None and finding.measured is not None
            if finding.tolerance == 0:
                return f"{finding.measured - finding.predicted:+,.0f}{where}{many}"
            return f"{off:+.1%}{where}{many}"
        return "equal" if off == 0 else f"{off:+.2%} at most"


@dataclass(frozen=True)
class PlannerEstimate:
    """The planner's prediction for a run on a cluster.

    Attributes:
        seconds: predicted step time, in seconds.
        interval: ends of the 80 % interval of the step time, in seconds.
        peaks: predicted peaks of allocated device memory by pipeline rank, in bytes.
        host_operation: seconds that the host needs to launch an operation.
    """

    seconds: float
    interval: tuple[float, float]
    peaks: Sequence[float]
    host_operation: float


def audit(
    title: str,
    layout: Layout,
    records: Sequence[RankRecord],
    seconds: float | None,
    outlook: PlannerEstimate | None,
    layer_operations: tuple[float, float] | None = None,
) -> AuditReport:
    """Compare what every rank did with theory.

    Args:
        title: title of the report.
        layout: layout of the run.
        records: records of all ranks.
        seconds: measured time of a usual step; None if there was none.
        outlook: the planner's prediction; None without a cluster.
        layer_operations: operations that the planner takes a layer's forward and its backward to
            launch; None: not asked for.
    """
    pairs = [(expected_record(layout, record, records), record) for record in records]
    findings = [
        *_sent(layout, pairs),
        _compare("weights", pairs, lambda r: r.parameters),
        _compare("gradients", pairs, lambda r: r.gradients),
        _compare("optimizer state", pairs, lambda r: r.optimizer),
        *_scales(layout, pairs),
        *_on_host(layout, pairs),
        *_activations(pairs),
        _products(layout, pairs),
        *_operations(records, layer_operations, outlook),
        *_waits(records),
        *_peaks(layout, records, outlook),
        _step_time(seconds, outlook),
    ]
    return AuditReport(title, len(records), tuple(findings))


Pairs = Sequence[tuple[RankRecord, RankRecord]]


def _compare(
    name: str,
    pairs: Pairs,
    value: Callable[[RankRecord], float],
    *,
    tolerance: float = 0.0,
    shown: Callable[[float], str] = human_bytes,
    note: str = "",
    judged: bool = True,
) -> Finding:
    """The finding of a quantity, with the values of the rank that deviates most."""
    values = [(value(expected), value(record), record.rank) for expected, record in pairs]
    predicted, measured, rank = max(values, key=lambda v: abs(_deviation(v[0], v[1])))
    off = sum(abs(_deviation(a, b)) > tolerance for a, b, _ in values)
    found = Finding(name, measured, shown, predicted, rank, note=note if off else "")
    return replace(found, tolerance=tolerance, wrong=off) if judged else found


def _sent(layout: Layout, pairs: Pairs) -> Iterator[Finding]:
    # Every cp_comm_type but a2a sends only visible keys.
    by_sight = any(kind != "a2a" for kind in layout.config.parallel.cp_comm_type)
    unjudged = {}
    if by_sight and any(record.any_packed for _, record in pairs):
        unjudged["cp"] = (
            "reported, not judged: the formula assumes whole rows, but keys of documents that no "
            "query of another rank sees are not sent"
        )
    for axis in dict.fromkeys(axis for pair in pairs for record in pair for axis in record.sent):
        yield _compare(
            f"sent over {axis}",
            pairs,
            partial(_sent_over, axis),
            note=unjudged.get(axis, "a collective more or less than the closed forms know"),
            judged=axis not in unjudged,
        )


def _sent_over(axis: str, record: RankRecord) -> float:
    return record.sent.get(axis, 0.0)


def _scales(layout: Layout, pairs: Pairs) -> Iterator[Finding]:
    if layout.config.training.delays_scales:
        yield _compare("delayed scales", pairs, lambda r: r.scales)


def _on_host(layout: Layout, pairs: Pairs) -> Iterator[Finding]:
    """The findings for an optimizer in host memory, and for weights off the device."""
    memory = layout.config.memory
    if memory.optimizer_off_device:
        what = "optimizer and weights" if memory.param_cpu_offload else "optimizer"
        yield _compare(f"{what} in host memory", pairs, lambda r: r.host)
        if memory.optimizer_offload_path is not None or memory.param_offload_path is not None:
            yield _compare(f"{what} on disk", pairs, lambda r: r.disk)
        if memory.offload_optimizer_states:
            yield _compare("update buffers", pairs, lambda r: r.rooms)
        yield _compare("copied to the host", pairs, lambda r: r.to_host)
        yield _compare("copied from the host", pairs, lambda r: r.from_host)
    if memory.param_cpu_offload:
        yield _compare("weights brought to the device", pairs, lambda r: r.brought)
    records = [record for _, record in pairs]
    state = [(r.state_waited, r.state_moving, r.rank) for r in records]
    yield from _hidden("optimizer state", state)
    yield from _hidden("weights", [(r.waited, r.moving, r.rank) for r in records])


def _hidden(what: str, found: Sequence[tuple[float, float, int]]) -> Iterator[Finding]:
    """The finding for time spent waiting for copies, on the rank with the longest: (waited, moved,
    rank)."""
    waited, moved, rank = max(found)
    if moved:  # copies that the host only starts cost it no time
        hidden = max(0.0, 1 - waited / moved)
        note = f"of {human_seconds(moved)} of reading, writing and copying, {hidden:.0%} was hidden"
        yield Finding(f"waited for {what}", waited, human_seconds, rank=rank, note=note)


def _activations(pairs: Pairs) -> Iterator[Finding]:
    """A finding for the activations of each stage, over all ranks that hold it."""
    for stage in sorted({stage for _, record in pairs for stage in record.activations}):
        yield _compare(
            f"activations of stage {stage}",
            [pair for pair in pairs if stage in pair[1].activations],
            partial(_kept_by, stage),
            tolerance=ACTIVATION_TOLERANCE,
            note="what autograd keeps is not what description/activations.py counts",
        )


def _products(layout: Layout, pairs: Pairs) -> Finding:
    """The finding for FLOPs of linear layers."""
    layers = {layer for spec in layout.split.stages for layer in spec.layers}
    gathers = any(map(layout.config.projects_latents, layers))
    informative = gathers and any(record.any_packed for _, record in pairs)
    note = (
        "reported, not judged: the formula assumes whole rows, but gathered latents of "
        "documents that no query of this rank sees are not projected"
    )
    return _compare(
        "matrix products",
        pairs,
        lambda record: record.multiplications,
        shown=human_flops,
        note=note if informative else "",
        judged=not informative,
    )


def _operations(
    records: Sequence[RankRecord],
    predicted: tuple[float, float] | None,
    outlook: PlannerEstimate | None,
) -> Iterator[Finding]:
    """Findings for the operations launched by a layer and by the step, where they are most, and the
    share of the step that the host launches."""
    of_layers = [(r.layer_operations, r.rank) for r in records if r.layer_operations is not None]
    on_gpu = any(record.peak_allocated is not None for record in records)
    for index, way in enumerate(("forward", "backward") if of_layers else ()):
        measured, rank = max((both[index], rank) for both, rank in of_layers)
        expected = None if predicted is None else predicted[index]
        note = ""
        if expected is not None and not on_gpu and index == 0:
            note = "predicted, as of its backward, for a GPU, where a kernel does more than here"
        yield Finding(f"launches of a layer's {way}", measured, _whole, expected, rank, note=note)
    counted = [(r.operations, r.rank) for r in records if r.operations is not None]
    if counted:
        measured, rank = max(counted)
        note = ""
        if outlook is not None:
            host = measured * outlook.host_operation
            each, share = human_seconds(outlook.host_operation), host / outlook.seconds
            note = f"at {each} each, launching takes the host {human_seconds(host)}, "
            note += f"{share:.0%} of the predicted step"
        yield Finding("launches of the step", measured, _whole, rank=rank, note=note)


def _waits(records: Sequence[RankRecord]) -> Iterator[Finding]:
    """The finding for waits of the host for the device, where they are most: lines that wait."""
    counted = [(sum(r.waits.values()), r.rank, r.waits) for r in records if r.waits is not None]
    if counted:
        most, rank, places = max(counted, key=lambda found: found[0])
        often = sorted(places.items(), key=lambda place: -place[1])
        note = "; ".join(f"{times:,.0f} {where}" for where, times in often)
        yield Finding("waits of the host", most, _whole, rank=rank, note=note)


def _kept_by(stage: int, record: RankRecord) -> float:
    return record.activations.get(stage, 0.0)


def _peaks(
    layout: Layout, records: Sequence[RankRecord], outlook: PlannerEstimate | None
) -> Iterator[Finding]:
    """The finding for the highest peak of device memory."""
    counted = [(r.peak_allocated, r.rank) for r in records if r.peak_allocated is not None]
    if not counted:
        return
    measured, rank = max(counted)
    predicted = None
    if outlook is not None:
        predicted = outlook.peaks[layout.grid.coordinates(rank)["pp"]]
    note = "" if outlook is not None else _NO_CLUSTER
    yield Finding("device memory", measured, human_bytes, predicted, rank, note=note)


def _step_time(seconds: float | None, outlook: PlannerEstimate | None) -> Finding:
    note = ""
    if outlook is None:
        note = _NO_CLUSTER
    elif seconds is None:
        note = "the run has no step besides the first and the measured one"
    else:
        low, high = map(human_seconds, outlook.interval)
        note = f"expected between {low} and {high} with a probability of 80 %"
    predicted = None if outlook is None else outlook.seconds
    return Finding("step time", seconds, human_seconds, predicted, note=note)


_NO_CLUSTER = "to predict it, name the machine: --cluster NAME or FILE.toml"


def _deviation(predicted: float, measured: float) -> float:
    if predicted == measured:
        return 0.0
    return measured / predicted - 1 if predicted else float("inf")


def _whole(count: float) -> str:
    return f"{count:,.0f}"
