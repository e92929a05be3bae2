"""Pipeline stages: which layers each stage holds, and which rank each stage is on."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from fivefold.pipeline.ir import stages_on
from fivefold.units import table


@dataclass(frozen=True)
class StageSpec:
    """A contiguous piece of the model, possibly empty.

    Attributes:
        embedding: whether it holds the token (and position) embedding.
        layers: indices in the model of its decoder layers, ascending.
        head: whether it holds the output head and the loss.
        mtp: number of multi-token prediction layers it holds. The final norm precedes them; without
            them it precedes the output head.
    """

    embedding: bool
    layers: tuple[int, ...]
    head: bool
    mtp: int = 0


@dataclass(frozen=True)
class Split:
    """The stages of a model and their placement.

    Attributes:
        stages: stages in model order.
        placement: stage -> pipeline rank.
    """

    stages: tuple[StageSpec, ...]
    placement: tuple[int, ...]

    def states_into(self, stage: int) -> int:
        """Number of hidden states per token that the stage receives.

        One, plus one per multi-token prediction layer of earlier stages, because the output head
        computes all losses.
        """
        return 1 + sum(before.mtp for before in self.stages[:stage])

    @property
    def num_ranks(self) -> int:
        """Pipeline-parallel size."""
        return max(self.placement) + 1

    @property
    def num_virtual(self) -> int:
        """Stages per rank."""
        return len(self.stages) // self.num_ranks

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages on `rank`, in model order."""
        return stages_on(self.placement, rank)


def stage_table(split: Split) -> str:
    """A table of layers: one row per rank, one column per virtual stage, then their sum."""
    header = ["", *(f"virtual {v}" for v in range(split.num_virtual))]
    rows = [
        [f"rank {rank}", *(_contents(split.stages[stage]) for stage in split.stages_of(rank))]
        for rank in range(split.num_ranks)
    ]
    counts = [len(stage.layers) for stage in split.stages]
    total = f"{'+'.join(map(str, counts))} = {sum(counts)}"
    last = f"{sum(counts)} layers in {len(counts)} stages: {total}"
    return "\n".join([*table([header, *rows]), last])


def layout_string(stages: Iterable[StageSpec]) -> str:
    """The stages in the layout language: 'Et*2|t*3|t*2L'."""
    texts = [
        "E" * stage.embedding
        + _repeated("t", len(stage.layers))
        + _repeated("m", stage.mtp)
        + "L" * stage.head
        for stage in stages
    ]
    runs = [(text, len(list(run))) for text, run in groupby(texts[:-1])]
    body = [f"({text}|)*{count}" if count > 2 else f"{text}|" * count for text, count in runs]
    return "".join(body) + texts[-1]


def layout_of_counts(counts: Sequence[int]) -> str:
    """The layout string of stages with so many layers each; the first and the last are the ends."""
    last = len(counts) - 1
    return layout_string(
        StageSpec(stage == 0, tuple(range(count)), stage == last)
        for stage, count in enumerate(counts)
    )


def _contents(stage: StageSpec) -> str:
    """Contents of a stage for the table: 'E 0-3', '4', 'L' or '-'."""
    layers = ""
    if stage.layers:
        ends = sorted({stage.layers[0], stage.layers[-1]})
        layers = "-".join(str(layer) for layer in ends)
    parts = ["E" * stage.embedding, layers, _repeated("m", stage.mtp), "L" * stage.head]
    return " ".join(part for part in parts if part) or "-"


def _repeated(char: str, count: int) -> str:
    return f"{char}*{count}" if count > 2 else char * count
