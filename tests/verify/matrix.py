"""Rows in which every two settings that can go together do, on as few ranks as were found.

    python -m tests.verify.matrix

finds them anew and writes matrix.csv: first rows without experts, then what these leave out.
"""

import csv
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import cache, cached_property, reduce
from heapq import nlargest
from itertools import combinations, count
from math import prod
from operator import or_
from pathlib import Path
from random import Random
from typing import Any

from fivefold.check import check
from fivefold.errors import ConfigError
from tests.verify.cases import EXPERTS, MODELS, config

Row = dict[str, str]  # axis -> choice
Facet = tuple[str, str]  # an axis and one of its kinds of choices

FILE = Path(__file__).with_suffix(".csv")
MAX_RANKS = 8
DRAWS, STARTS = 12_000, 6  # rows by chance, and how many of the best are improved upon
DRAWS_OF_A_PAIR = 200  # more of them for two kinds that came together in none
ROUNDS, LEFT_OUT = 3_000, 8  # of completing anew, and the rows then left out

TP = "tensor_model_parallel_size"
PP = "pipeline_model_parallel_size"
CP = "context_parallel_size"
EP, ETP = "expert_model_parallel_size", "expert_tensor_parallel_size"
SHARDS = "data_parallel_shard_size"
REPLICAS = "num_distributed_optimizer_instances"
STRATEGY = "data_parallel_sharding_strategy"
DEGREES = (TP, PP, CP, SHARDS, REPLICAS)


def _pipeline(schedule: str, stages: str, *, of: int = 2, **more: Any) -> dict[str, Any]:
    split = {PP: of, "pipeline_model_parallel_layout": stages}
    return split | {"pipeline_schedule": schedule} | more


def _context(ranks: int, kind: str) -> dict[str, Any]:
    sizes = {"hierarchical_context_parallel_sizes": (2, ranks // 2)} if kind == "a2a+p2p" else {}
    return {CP: ranks, "cp_comm_type": (kind,)} | sizes


def _selective(*modules: str) -> dict[str, Any]:
    return {"recompute_granularity": "selective", "recompute_modules": modules}


def _moved(*modules: str) -> dict[str, Any]:
    size = {"min_offloaded_tensor_size": 1}  # all of a tiny model's are below the default
    return {"fine_grained_activation_offloading": True, "offload_modules": modules} | size


def _experts(dispatcher: str, *, ep: int = 2, etp: int = 1, **more: Any) -> dict[str, Any]:
    return EXPERTS | {EP: ep, ETP: etp, "moe_token_dispatcher_type": dispatcher} | more


FAMILIES = ("llama", "llama tied", "gpt", "gpt untied", "latent", "sinks")
LINE, LOOP = "Et|ttL", "Et|t||tL"
# What stands before a colon is the kind of a choice: every two kinds come together in a row, and
# every choice of a kind is in one.
AXES: dict[str, dict[str, dict[str, Any]]] = {
    "family": {family: {} for family in FAMILIES},
    "tp": {
        "1": {},
        "2": {TP: 2},
        "2 split": {TP: 2, "sequence_parallel": True},
        "4 split": {TP: 4, "sequence_parallel": True},  # more than a llama's key/value heads
        "2 split: in parts": {TP: 2, "sequence_parallel": True, "tp_comm_overlap": True},
        "4 split: in parts": {TP: 4, "sequence_parallel": True, "tp_comm_overlap": True},
    },
    "pipeline": {
        "one": {},
        "one: zb_h1": {"pipeline_schedule": "zb_h1"},
        "line: gpipe": _pipeline("gpipe", LINE),
        "line: 1f1b": _pipeline("1f1b", LINE),
        "line: 1f1b of 4 ranks": _pipeline("1f1b", "Et|t||tL", of=4),
        "line: eager_1f1b": _pipeline("eager_1f1b", LINE),
        "line: zb_h1": _pipeline("zb_h1", LINE),
        "line: zb_h2": _pipeline("zb_h2", "E|tttL"),
        "sliced": _pipeline("sliced_1f1b", LINE, num_sequence_slices=4),
        "loop: looped_bfs": _pipeline("looped_bfs", LOOP),
        "loop: interleaved_1f1b": _pipeline("interleaved_1f1b", LOOP),
        "loop: combined_1f1b": _pipeline("combined_1f1b", LOOP),
        "loop: interleaved_zb": _pipeline("interleaved_zb", LOOP),
        "v: gpipe": _pipeline("gpipe", "v:" + LOOP),
        "v: zb_v": _pipeline("zb_v", LOOP),
        "v: v_half": _pipeline("v_half", LOOP),
        "v: v_min": _pipeline("v_min", LOOP),
        "v: dualpipe_v": _pipeline("dualpipe_v", LOOP),
        "v: synthesised": _pipeline("synthesised", LOOP),
        "copies": _pipeline("dualpipe", LINE),
    },
    "further": {  # tokens that are predicted behind the next one, and where in the pipeline
        "none": {},
        "some: 1": {"mtp_num_layers": 1},
        "some: 2": {"mtp_num_layers": 2},
        "some: 1 before the head": {"mtp_num_layers": 1},
    },
    "sharding": {s: {STRATEGY: s} for s in ("no_shard", "optim", "optim_grads")}
    | {"optim_grads_params": {STRATEGY: "optim_grads_params"}},
    "shards": {str(n): {SHARDS: n} for n in (1, 2)},
    "replicas": {str(n): {REPLICAS: n} for n in (1, 2)},
    "context": {
        "whole": {},
        "p2p": _context(2, "p2p"),
        "all_gather": _context(2, "all_gather"),
        "a2a": _context(2, "a2a"),
        "a2a+p2p": _context(4, "a2a+p2p"),
    },
    "experts": {
        "none": {},
        "alltoall": _experts("alltoall"),
        "alltoall: dropped": _experts("alltoall", moe_expert_capacity_factor=0.7),
        "flex": _experts("flex", ep=4),
        "flex: parts": _experts("flex", etp=2),
        "allgather": _experts("allgather", moe_router_enable_expert_bias=True),
        "allgather: parts": _experts("allgather", ep=1, etp=2),
    },
    "memory": {
        "kept": {},
        "layers: uniform": {"recompute_granularity": "full", "recompute_num_layers": (2,)},
        "layers: block": {"recompute_granularity": "full", "recompute_method": "block"},
        "modules: every": _selective("core_attn", "mlp", "layernorm"),
        "modules: attention": _selective("core_attn"),
        "modules: experts": _selective("layernorm", "moe_act", "shared_experts"),
        "modules: layers of experts": _selective("moe", "mlp"),
        "moved: every": _moved("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm"),
        "moved: experts": _moved("expert_fc1", "moe_act"),
        "moved: recomputed": _moved("core_attn") | _selective("core_attn", "mlp"),
        "stages": {"recompute_in_flight_limit": 1},
        "stages: moved": {"recompute_in_flight_limit": 1} | _moved("core_attn"),
        "stages: modules": {"recompute_in_flight_limit": 2} | _selective("core_attn", "mlp"),
    },
    "loss": {
        "plain": {},
        "native": {"cross_entropy_loss_fusion": True},
        "linear": {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "linear"},
    },
    "rows": {str(n): {"micro_batch_size": n} for n in (1, 2)},
    "documents": {"packed": {}, "whole": {"reset_attention_mask": False}},
    "window": {"none": {}, "3": {"window_size": 3}},
    "dropout": {str(p): {"hidden_dropout": p, "attention_dropout": p} for p in (0.0, 0.1)},
    "smoothing": {str(p): {"label_smoothing": p} for p in (0.0, 0.1)},
    "overlap": {"on": {}, "off": {"overlap_grad_reduce": False}},
    "precision": {p: {"precision": p} for p in ("fp64", "fp32", "bf16")},
}
DEFERRED = ("zb", "v_", "dualpipe", "synthesised")  # in schedules with weight gradients that wait


def settings(row: Row) -> dict[str, Any]:
    """What to configure."""
    values = _chosen(row)
    layout, predictions = "pipeline_model_parallel_layout", values.get("mtp_num_layers", 0)
    if layout in values and predictions:
        first, _, last = values[layout].removesuffix("L").rpartition("|")
        apart = row["further"].endswith("before the head")
        further = "m" * predictions
        values[layout] = f"{first}{last}{further}|L" if apart else f"{first}|{last}{further}L"
    return values | {"global_batch_size": microbatches(row) * _samples_at_once(values)}


def _chosen(row: Row) -> dict[str, Any]:
    return {name: v for axis, choice in row.items() for name, v in AXES[axis][choice].items()}


def microbatches(row: Row) -> int:
    """How many of them a rank has in a step: few, but enough to fill a pipeline."""
    values = _chosen(row)
    return min(max(8 // _samples_at_once(values), 1), 2 * values.get(PP, 1))


def _samples_at_once(values: dict[str, Any]) -> int:
    return prod(values.get(name, 1) for name in (SHARDS, REPLICAS, "micro_batch_size"))


def ranks(row: Row) -> int:
    """How many the row takes."""
    return prod(settings(row).get(degree, 1) for degree in DEGREES)


def kind(choice: str) -> str:
    """What stands before the colon."""
    return choice.partition(":")[0]


def facets(row: Row) -> set[Facet]:
    """The kinds of a row's choices, and whether its weight gradients wait."""
    schedule = settings(row).get("pipeline_schedule", "")
    deferred = any(part in schedule for part in DEFERRED)
    kinds = {(axis, kind(choice)) for axis, choice in row.items()}
    return kinds | {("weights", "deferred" if deferred else "at once")}


def covered(row: Row) -> set[Any]:
    """What a row proves: every two of its facets, and each of its choices.

    In bf16 only pairs with bf16 itself: its limits are too wide to tell much of the others.
    """
    pairs = {frozenset(pair) for pair in combinations(facets(row), 2)}
    if row["precision"] == "bf16":
        pairs = {pair for pair in pairs if ("precision", "bf16") in pair}
    return pairs | set(row.items())


def legal(row: Row) -> bool:
    """Whether it fits the ranks, shards what it says, and passes the check."""
    values = settings(row)
    splits = values.get(CP, 1) * values[SHARDS] > 1
    if ranks(row) > MAX_RANKS or splits < (row["sharding"] != "no_shard"):
        return False
    # Which rows of an expert are dropped may depend on the last bit of a score.
    if row["experts"].endswith("dropped") and row["precision"] != "fp64":
        return False
    try:
        check(config(MODELS[row["family"]], **values), ranks(row))
    except ConfigError:
        return False
    return True


def read() -> list[Row]:
    """The rows that were found."""
    with FILE.open(newline="") as file:
        return list(csv.DictReader(file))


def draw(random: Random, *fixed: Facet) -> Row:
    """A row by chance, but for the kinds of some of its choices."""
    row = {}
    for axis, choices in AXES.items():
        wanted = dict(fixed).get(axis) or random.choice(_kinds(axis))
        row[axis] = random.choice([choice for choice in choices if kind(choice) == wanted])
    return row


def _kinds(axis: str) -> list[str]:
    return sorted(set(map(kind, AXES[axis])))


def find(seed: int = 0) -> list[Row]:
    """Rows that prove all that any does, those without experts first."""
    random = Random(seed)
    dense = _fewest([], [("experts", "none")], random)
    return dense + _fewest(dense, [], random)


def _fewest(before: list[Row], fixed: list[Facet], random: Random) -> list[Row]:
    """What completes earlier rows, all with the fixed facets: greedily, and a few found again."""
    candidates = _legal_draws(DRAWS, fixed, random)
    for pair in combinations([(axis, of) for axis in AXES for of in _kinds(axis)], 2):
        rare = 1 << _BITS[frozenset(pair)]
        if not rare & _union(one.proves for one in candidates):
            candidates += _legal_draws(DRAWS_OF_A_PAIR, [*fixed, *pair], random)
    wanted = _union(one.proves for one in candidates)
    wanted &= ~_union(_candidate(row).proves for row in before)
    found = _completed([], candidates, wanted, fixed)
    for _ in range(ROUNDS):
        kept = random.sample(found, max(len(found) - LEFT_OUT, 0))
        others = _completed(kept, candidates, wanted, fixed)
        found = min(others, found, key=lambda some: sum(one.cost for one in some))
    return [one.row for one in found]


def _legal_draws(draws: int, fixed: list[Facet], random: Random) -> list["_Candidate"]:
    if len(dict(fixed)) < len(fixed):  # an axis twice
        return []
    drawn = [_candidate(draw(random, *fixed)) for _ in range(draws)]
    return [one for one in drawn if one.legal]


class _Candidate:
    """A row, and what the search asks of it over and over."""

    def __init__(self, row: Row) -> None:
        self.row = row
        self.proves = sum(1 << _BITS[proven] for proven in covered(row))
        self.cost = cost(row)

    @cached_property
    def legal(self) -> bool:
        return legal(self.row)


def _candidate(row: Row) -> _Candidate:
    return _candidate_of(tuple(row.items()))


@cache
def _candidate_of(choices: tuple[tuple[str, str], ...]) -> _Candidate:
    return _Candidate(dict(choices))


def cost(row: Row) -> float:
    """Roughly of what it takes to run; a fit to the CPU seconds of the rows of 2026-11-23."""
    slices = 2 if row["pipeline"] == "sliced" else 1
    stages = 0.65 if PP in settings(row) else 1
    return ranks(row) ** 1.5 * microbatches(row) ** 0.44 * slices * stages


def _completed(
    found: list[_Candidate], candidates: list[_Candidate], wanted: int, fixed: list[Facet]
) -> list[_Candidate]:
    """With always the best row that some of the candidates, and single changes of them, lead to."""
    found = list(found)
    missing = wanted & ~_union(one.proves for one in found)
    while missing:

        def worth(one: _Candidate, missing: int = missing) -> float:
            return (one.proves & missing).bit_count() / one.cost

        starts = nlargest(STARTS, candidates, key=worth)
        best = max((_climbed(one, worth, fixed) for one in starts), key=worth)
        missing &= ~best.proves
        found.append(best)
    return found


def _climbed(
    one: _Candidate, worth: Callable[[_Candidate], float], fixed: list[Facet]
) -> _Candidate:
    free = [axis for axis in AXES if axis not in dict(fixed)]
    reached = worth(one)
    for change in [{axis: choice} for axis in free for choice in AXES[axis]]:
        other = _candidate(one.row | change)
        if worth(other) > reached and other.legal:
            one, reached = other, worth(other)
    return one


_BITS: defaultdict[Any, int] = defaultdict(count().__next__)


def _union(masks: Iterable[int]) -> int:
    return reduce(or_, masks, 0)


def write(rows: list[Row]) -> None:
    """Keep the rows."""
    with FILE.open("w", newline="") as file:
        writer = csv.DictWriter(file, AXES, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    write(find())
