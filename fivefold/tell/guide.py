"""Decision tables of public guides, compared with the plan.

Each row of a table allows some degrees of parallelism, or several sets of them, of which the first
that fits counts ("as small as fits"). The best layout within them is searched for like the plan
itself, so what a row costs is predicted, not argued.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

from fivefold.description.shape import count_parameters
from fivefold.search.candidate import Candidate
from fivefold.search.request import Only, Request
from fivefold.search.search import SearchResult, search
from fivefold.search.space import FIELDS
from fivefold.tell.columns import prose
from fivefold.tell.describe import summary
from fivefold.tell.explain import slower
from fivefold.tell.rules import LIMITED, LONG
from fivefold.units import human_seconds

_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
_PIPELINE = tuple(range(2, 129))
_ALIKE = 0.1  # share by which a model's size may differ from that of a row that names a model


@dataclass(frozen=True)
class Facts:
    """Properties of a request that the tables need.

    Attributes:
        size: parameters of the model.
        experts: whether it has experts.
        latent: whether its attention is latent.
        length: tokens of a sequence.
        nodes: number of nodes.
        network: bytes/s between nodes for each GPU.
        node: GPUs of a node.
        keys: key/value heads.
    """

    size: float
    experts: bool
    latent: bool
    length: int
    nodes: int
    network: float
    node: int
    keys: int

    @classmethod
    def of(cls, request: Request) -> "Facts":
        """The facts of a request."""
        model, cluster = request.config.model, request.cluster
        return cls(
            count_parameters(model).total,
            model.num_experts is not None,
            model.multi_latent_attention,
            request.config.training.seq_length,
            cluster.nodes,
            cluster.network_link.bandwidth,
            cluster.gpus_per_node,
            1
            if model.multi_latent_attention
            else min(own.num_kv_heads for own in model.attentions),
        )


Allowed = Mapping[str, tuple[Any, ...]]
"""The values that a row allows, by axis of parallelism or by name of a setting."""


@dataclass(frozen=True)
class Row:
    """A row of a table.

    Attributes:
        case: the case it is for, in words.
        says: what it advises, in words.
        holds: whether it is for a question.
        allows: what it leaves; several sets of values in the order in which they are to be tried.
    """

    case: str
    says: str
    holds: Callable[[Facts], bool]
    allows: Allowed | Callable[[Facts], Iterable[Allowed]]

    def only(self, facts: Facts) -> list[Only]:
        """The values that the row allows for a request, by name of the setting, in order."""
        tries = self.allows(facts) if callable(self.allows) else (self.allows,)
        return [
            {FIELDS.get(name, name): frozenset(values) for name, values in allowed.items()}
            for allowed in tries
        ]


@dataclass(frozen=True)
class Table:
    """A decision table: what it decides by, where it was published, and its rows."""

    by: str
    source: str
    rows: tuple[Row, ...]


def _sized(low: float, high: float, says: str, allows: Allowed) -> Row:
    """A row for models without experts of `low` to `high` billion parameters."""
    case = f"over {low:g} B" if high == inf else f"{low:g} to {high:g} B"

    def holds(facts: Facts) -> bool:
        return not facts.experts and low * 1e9 <= facts.size < high * 1e9

    return Row(case, says, holds, {"cp": (1,), **allows})


def _named(name: str, size: float, tp: int, pp: int, ep: int, *, latent: bool = True) -> Row:
    """A row for a model with experts of about `size` billion parameters."""

    def holds(facts: Facts) -> bool:
        alike = abs(facts.size / (size * 1e9) - 1) < _ALIKE
        return facts.experts and facts.latent == latent and alike

    allows = {"tp": (tp,), "pp": (pp,), "ep": (ep,), "etp": (1,)}
    return Row(name, f"tp {tp}, pp {pp}, ep {ep}", holds, allows)


def _small_tensor(facts: Facts) -> Iterator[Allowed]:
    """Tensor parallelism as small as fits, inside a node."""
    for tp in (size for size in _SIZES if size <= facts.node):
        yield {"tp": (tp,), "cp": (1,)}


def _ulysses(facts: Facts) -> Iterator[Allowed]:
    """The same, with Ulysses over the rest of the node, but no wider than the key/value heads."""
    for tp in (size for size in _SIZES if size <= facts.node):
        yield {
            "tp": (tp,),
            "cp": (min(facts.node // tp, facts.keys),),
            "cp_comm_type": (("a2a",),),
        }


def _small_tensor_with_experts(facts: Facts) -> Iterator[Allowed]:
    """The same, with experts whole and their messages under an overlapped 1F1B pipeline."""
    for each in _small_tensor(facts):
        yield {
            "tp": each["tp"],
            "etp": (1,),
            "ep": _SIZES[1:],
            "pipeline_schedule": ("combined_1f1b",),
        }


_SHARDING = "data_parallel_sharding_strategy"
_ZERO_1, _ZERO_3 = ("optim",), ("optim_grads_params",)
_FOUR_TO_EIGHT, _EIGHT_TO_SIXTEEN = tuple(range(4, 9)), tuple(range(8, 17))
TABLES: tuple[Table, ...] = (
    Table(
        "model size",
        "Megatron-Core parallelism guide",
        (
            _sized(0, 1, "data parallelism only", {"tp": (1,), "pp": (1,)}),
            _sized(1, 10, "tp 2 to 4, the rest dp", {"tp": (2, 4), "pp": (1,)}),
            _sized(10, 70, "tp 4, pp 2 to 4, the rest dp", {"tp": (4,), "pp": (2, 3, 4)}),
            _sized(70, 175, "tp 8, pp 4 to 8, the rest dp", {"tp": (8,), "pp": _FOUR_TO_EIGHT}),
            _sized(
                175,
                inf,
                "tp 8, pp 8 to 16, cp 2, the rest dp",
                {"tp": (8,), "pp": _EIGHT_TO_SIXTEEN, "cp": (2,)},
            ),
        ),
    ),
    Table(
        "model scale",
        "distributed training fundamentals",
        (
            _sized(
                1,
                7,
                "dp with ZeRO-2 or 3",
                {"tp": (1,), "pp": (1,), _SHARDING: ("optim_grads", *_ZERO_3)},
            ),
            _sized(
                7,
                13,
                "ZeRO-3 with recomputation",
                {
                    "tp": (1,),
                    "pp": (1,),
                    _SHARDING: _ZERO_3,
                    "recompute_granularity": ("full", "selective"),
                },
            ),
            _sized(13, 70, "tp 4, pp 2, ZeRO-1", {"tp": (4,), "pp": (2,), _SHARDING: _ZERO_1}),
            _sized(
                70,
                400,
                "tp 8, pp 4 to 8, ZeRO-1",
                {"tp": (8,), "pp": _FOUR_TO_EIGHT, _SHARDING: _ZERO_1},
            ),
            Row(
                "400 B to 1 T with experts",
                "tp 8, pp 8, ep 8, ZeRO-1",
                lambda facts: facts.experts and 400e9 <= facts.size < 1.1e12,
                {"tp": (8,), "pp": (8,), "ep": (8,), _SHARDING: _ZERO_1},
            ),
        ),
    ),
    Table(
        "model with experts",
        "Megatron-Bridge parallelism strategies",
        (
            _named("Qwen3 30B-A3B", 30.5, 4, 2, 4, latent=False),
            _named("Qwen3 235B-A22B", 235, 4, 16, 8, latent=False),
            _named("DeepSeek-V2 236B", 236, 1, 4, 32),
            _named("DeepSeek-V3 671B", 671, 2, 16, 64),
            _named("Kimi-K2 1T", 1030, 2, 16, 32),
        ),
    ),
    Table(
        "topology",
        "Megatron-Core parallelism guide",
        (
            Row(
                "one node",
                "tensor parallelism over the node",
                lambda facts: facts.nodes == 1 and facts.size <= 72e9,
                {"tp": (8,), "pp": (1,)},
            ),
            Row(
                "several nodes, fast network",
                "tp 8 inside a node, pp across nodes",
                lambda facts: facts.nodes > 1 and facts.network >= LIMITED,
                {"tp": (8,), "pp": _PIPELINE},
            ),
            Row(
                "several nodes, limited network",
                "tp 1 to 4 inside a node, pp across nodes",
                lambda facts: facts.nodes > 1 and facts.network < LIMITED,
                {"tp": (1, 2, 4), "pp": _PIPELINE},
            ),
        ),
    ),
    Table(
        "sequence length",
        "Megatron-Core parallelism guide",
        (
            Row("up to 8 K tokens", "no cp", lambda facts: facts.length <= LONG, {"cp": (1,)}),
            Row(
                "over 8 K tokens",
                "cp 2 or more",
                lambda facts: facts.length > LONG,
                {"cp": _SIZES[1:]},
            ),
        ),
    ),
    Table(
        "kind of model",
        "verl, Megatron performance options",
        (
            Row(
                "dense, up to 8 K tokens",
                "tp as small as fits, inside a node",
                lambda facts: not facts.experts and facts.length <= LONG,
                _small_tensor,
            ),
            Row(
                "dense, over 8 K tokens",
                "tp as small as fits, Ulysses over min(GPUs of a node / tp, key/value heads)",
                lambda facts: not facts.experts and facts.length > LONG,
                _ulysses,
            ),
            Row(
                "with experts",
                "etp 1, tp as small as fits, ep in an overlapped 1F1B pipeline",
                lambda facts: facts.experts,
                _small_tensor_with_experts,
            ),
        ),
    ),
)


@dataclass(frozen=True)
class Advice:
    """A table's advice for a request, and the planner's comparison with it.

    Attributes:
        table: the table.
        row: its row for the question; None if it has none.
        best: the best layout within the row; None if no layout there fits, or there is no row.
        follows: whether that is the plan itself.
    """

    table: Table
    row: Row | None
    best: Candidate | None
    follows: bool


def advice(result: SearchResult) -> list[Advice]:
    """For each table the row that applies to the plan, and the best layout within it."""
    facts, found = Facts.of(result.request), []
    for table in TABLES:
        row = next((row for row in table.rows if row.holds(facts)), None)
        if row is None:
            found.append(Advice(table, None, None, False))
        else:
            found.append(_within(result, table, row, row.only(facts)))
    return found


def _within(result: SearchResult, table: Table, row: Row, tries: Iterable[Only]) -> Advice:
    """The plan if it follows the row, otherwise the best layout that does."""
    for only in tries:
        if follows(result.best, only):
            return Advice(table, row, result.best, True)
        other = search(result.request.among(only))
        if other.found:
            return Advice(table, row, other.best, False)
    return Advice(table, row, None, False)


def guide(result: SearchResult, found: Iterable[Advice]) -> Iterator[str]:
    """The rows of all tables with the cost of following them, as text; `found`: their advice."""
    for each in found:
        title = f"by {each.table.by} ({each.table.source}): "
        title += f"{each.row.case}: {each.row.says}" if each.row else "no row for this"
        yield from prose([title])
        if each.row:
            yield from prose(f"  {line}" for line in _compared(result.best, each))
    yield from prose([f"the plan: {summary(result.best.layout)}, {_seconds(result.best)}"])


def _compared(plan: Candidate, each: Advice) -> Iterator[str]:
    """Whether the plan follows a row; if not, the best layout that does, and how it differs."""
    if each.follows:
        yield "the plan follows it"
    elif each.best is None:
        yield "no such layout fits these GPUs, this batch and what was given"
    else:
        yield f"the best of it: {summary(each.best.layout)}"
        yield f"{_seconds(each.best)}, {slower(plan.predicted, each.best.predicted)}"


def _seconds(candidate: Candidate) -> str:
    return f"{human_seconds(candidate.seconds)} a step"


def as_json(found: Iterable[Advice]) -> list[dict[str, Any]]:
    """The same as values for JSON."""
    return [
        {
            "by": each.table.by,
            "source": each.table.source,
            "case": each.row and each.row.case,
            "says": each.row and each.row.says,
            "followed": each.follows,
            "layout": each.best and summary(each.best.layout),
            "step_seconds": each.best and each.best.seconds,
        }
        for each in found
    ]


def follows(candidate: Candidate, only: Only) -> bool:
    """Whether a layout has only these values."""
    return all(candidate.layout.config.value(name) in values for name, values in only.items())
