"""The report of a rehearsal: one line for each rank, the bytes it sends, and any problems."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fivefold.layout import Layout
from fivefold.predict.cluster import Cluster
from fivefold.predict.memory.peak import RankMemory, peak_memory
from fivefold.rehearse.agree import disagreements
from fivefold.rehearse.script import Script
from fivefold.units import human_bytes, human_count, several, table

BYTES_TOLERANCE = 1e-9
"""Relative difference of two sums of the same whole numbers, in another order."""


@dataclass(frozen=True)
class RehearsalReport:
    """What the rehearsed ranks need, and whether they agree.

    Attributes:
        title: description of the job and its layout.
        names: coordinates of each rehearsed rank.
        scripts: what each of them did, in the order of ranks.
        planned: memory of each of them as the planner predicts it.
        capacity: bytes of a device.
        problems: why the job would hang, one for each pair of ranks, or a circular wait of several.
        differing: ranks that send other than theory says, with the axis.
    """

    title: str
    names: tuple[str, ...]
    scripts: tuple[Script, ...]
    planned: tuple[RankMemory, ...]
    capacity: float
    problems: tuple[str, ...]
    differing: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether all ranks agree with each other, and their bytes with theory."""
        return not self.problems and not self.differing

    @property
    def deviation(self) -> float:
        """The largest difference of a peak from the planner's, relative to the planner's."""
        pairs = zip(self.scripts, self.planned, strict=True)
        return max((script.peak / planned.peak - 1 for script, planned in pairs), key=abs)

    def text(self) -> str:
        """A table of needs, one of bytes, and the verdict in the last line."""
        lines = [self.title, *self._repeated(), "", *self._needs(), "", *self._sent(), ""]
        worst = max(script.peak for script in self.scripts)
        room = "fits in" if worst <= self.capacity else "DOES NOT FIT in"
        lines.append(f"peak {human_bytes(worst)} {room} {human_bytes(self.capacity)}")
        lines.append(f"farthest from the planner's peak: {self.deviation:+.1%}")
        lines += [*self.problems, *self.differing]
        verdict = f"{len(self.scripts)} ranks agree on every message, and send what theory says"
        if len(self.scripts) == 1:
            verdict = "the one rank sends what theory says"
        if self.problems:
            count = several(len(self.problems), "reason")
            verdict = f"this job would hang, or mix up messages, for {count}"
        elif self.differing:
            verdict = f"other bytes than theory says: {len(self.differing)}"
        return "\n".join([*lines, verdict])

    def as_json(self) -> dict[str, Any]:
        """The report as a value for JSON."""
        return {
            "title": self.title,
            "passed": self.passed,
            "problems": self.problems,
            "differing": self.differing,
            "ranks": [
                {
                    "rank": script.rank,
                    "name": name,
                    "peak": script.peak,
                    "peak_at": script.peak_at,
                    "planned": planned.peak,
                    "planned_at": f"{planned.phase}: {planned.act}",
                    "planned_parts": planned.parts,
                    "held": script.held,
                    "operations": script.operations,
                    "waits": script.waits,
                    "sent": script.by_axis(),
                    "acts": script.acts,
                    "repeated": script.repeated,
                    "seconds": script.seconds,
                }
                for name, script, planned in zip(
                    self.names, self.scripts, self.planned, strict=True
                )
            ],
        }

    def _repeated(self) -> list[str]:
        acts, repeated = (sum(getattr(s, n) for s in self.scripts) for n in ("acts", "repeated"))
        if not repeated:
            return []
        return [
            f"{repeated:,} of {acts:,} forwards and backwards repeat those of earlier microbatches "
            "and are counted, not run (--microbatches every runs them)"
        ]

    def _needs(self) -> list[str]:
        kinds = list(dict.fromkeys(kind for s in self.scripts for kind in s.held))
        rows = [("rank", "", "peak", "planner", "", *kinds, "operations", "waits")]
        for name, script, planned in zip(self.names, self.scripts, self.planned, strict=True):
            rows.append(
                (
                    str(script.rank),
                    name,
                    human_bytes(script.peak),
                    human_bytes(planned.peak),
                    f"{script.peak / planned.peak - 1:+.1%}",
                    *(human_bytes(script.held.get(kind, 0)) for kind in kinds),
                    human_count(script.operations),
                    str(script.waits),
                )
            )
        return table(rows, right=range(len(rows[0])))

    def _sent(self) -> list[str]:
        sent = [script.by_axis() for script in self.scripts]
        axes = list(dict.fromkeys(axis for each in sent for axis in each))
        rows = [("sent by rank", *axes)]
        rows += [
            (str(script.rank), *(human_bytes(each.get(axis, 0.0)) for axis in axes))
            for script, each in zip(self.scripts, sent, strict=True)
        ]
        return table(rows, right=range(len(rows[0])))


def make_report(
    layout: Layout, title: str, scripts: Sequence[Script], cluster: Cluster
) -> RehearsalReport:
    """Compare scripts with each other, with theory and with the planner.

    Args:
        layout: layout that was rehearsed.
        title: description of the job.
        scripts: scripts of the rehearsed ranks.
        cluster: hardware for which the planner predicts.
    """
    peaks = peak_memory(layout, cluster).ranks
    name = layout.grid.name
    return RehearsalReport(
        title,
        tuple(name(script.rank) for script in scripts),
        tuple(scripts),
        tuple(peaks[layout.grid.coordinates(s.rank)["pp"]] for s in scripts),
        cluster.gpu.memory_bytes,
        tuple(disagreements(scripts, name)),
        tuple(what for script in scripts for what in _differing(script)),
    )


def _differing(script: Script) -> list[str]:
    sent: Mapping[str, float] = script.by_axis()
    found = []
    for axis in dict.fromkeys((*sent, *script.sent)):
        here, theory = sent.get(axis, 0.0), script.sent.get(axis, 0.0)
        if abs(here - theory) > BYTES_TOLERANCE * max(here, theory):
            sizes = f"{human_bytes(here)} over {axis}, and theory says {human_bytes(theory)}"
            found.append(f"rank {script.rank} sends {sizes}")
    return found
