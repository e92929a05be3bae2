"""Diagnoses wrong gradients: finds the reduction that is missing or done twice.

Hypotheses are tested numerically: a gradient may be a multiple of the right one, become right when
summed over an axis, or be that of a subset of the samples. A hypothesis that holds on all ranks
that hold a parameter explains that parameter.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.counts.shards import num_expert_shards, num_shards
from fivefold.description.shape import EMBEDDING
from fivefold.mesh.collectives import all_reduce, gather_objects
from fivefold.mesh.slices import local_slices
from fivefold.train.engine import Engine
from fivefold.train.step_result import StepResult
from fivefold.units import few
from fivefold.verify.batches import global_batch, microbatches
from fivefold.verify.diagnose_context import losses_by_mistake
from fivefold.verify.diagnose_experts import gradients_of_tokens, routing_findings
from fivefold.verify.partial import gradients_of_ranks, plain_before
from fivefold.verify.reference import ReferenceStep, Tensors, valid_tokens

MATCH = 1e-3  # relative tolerance; distinct hypotheses differ by much more
MATCH_16_BITS = 5e-2

RIGHT = "right"
_SUM_OVER = "is right once summed over {}: that sum is missing"
_ROW_BIASES = ("o_proj.bias", "down_proj.bias")
_OF_KEYS = tuple(
    f"{x}.{kind}" for x in ("k_proj", "v_proj", "k_norm") for kind in ("weight", "bias")
)


def diagnose(
    engine: Engine,
    step: int,
    result: StepResult,
    reference: ReferenceStep,
    strange: Collection[str] = (),
) -> list[str]:
    """Sentences on what is probably wrong, most significant first; every rank calls this.

    Args:
        engine: engine with the wrong gradients on its parameters.
        step: step, from 0.
        result: the engine's result of that step.
        reference: the reference's result of that step.
        strange: stored names of gradients that are wrong, however small; used on rank 0.

    Returns:
        The sentences on rank 0, an empty list on other ranks.
    """
    narrow = engine.layout.config.training.in_16_bits
    match = MATCH_16_BITS if narrow else MATCH
    own = _explanations(engine, step, reference, match)
    every = gather_objects(own, engine.groups.world)
    if engine.groups.rank != 0:
        return []
    found = _loss_findings(engine, step, result, reference, match)
    if not narrow:  # in 16 bits, experts are those of fp64
        found += routing_findings(engine, result, reference)
    held = _shared(every)
    for name in strange:
        if RIGHT in held[name] or len(held[name]) > 1:  # too small beside others to tell them apart
            held[name] = set()
    if found and all(RIGHT in of_one for of_one in held.values()):
        return found
    return found + _gradient_findings(held, list(reference.grads), engine.layout.grid.cp > 1)


def _explanations(
    engine: Engine, step: int, reference: ReferenceStep, match: float
) -> dict[str, set[str]]:
    """Stored name -> hypotheses that hold for this rank's part of the gradient."""
    named = engine.trained.items()
    own = {name: engine.optimizer.gradient(name).cpu().double() for name, _ in named}
    partial = dict(_gradients_of_samples(engine, step, reference))
    if engine.groups.experts is not None:
        partial |= dict(gradients_of_tokens(engine, step, reference))
    sums = dict(_sums(engine, own))
    factors = {experts: _factors(engine, experts) for experts in (False, True)}
    largest = max(float(grad.abs().max()) for grad in reference.grads.values())
    found: dict[str, set[str]] = {}
    for name, parameter in named:
        record, part = engine.model.records[name], local_slices(parameter)
        stored, multiples = record.stored, factors[record.experts].items()
        whole = reference.grads[stored]
        scale = max(float(whole.abs().max()), match * largest)

        def holds(a: Tensor, b: Tensor, scale: float = scale) -> bool:
            return a.numel() == 0 or float((a - b).abs().max()) <= match * scale

        mine, true = own[name], whole[part]
        held = {RIGHT} if holds(mine, true) else set()
        held |= {text for k, text in multiples if holds(mine, k * true, (k or 1.0) * scale)}
        held |= {text for text, of in sums.items() if name in of and holds(of[name], true)}
        held |= {text for text, of in partial.items() if holds(mine, of[stored][part])}
        found[stored] = held & found[stored] if stored in found else held
    return found


def _factors(engine: Engine, experts: bool) -> dict[float, str]:
    """Multiples of the right gradient that identify a mistake -> their meaning, for experts or
    other weights."""
    grid, count = engine.layout.grid, engine.layout.num_microbatches
    names: dict[int, list[str]] = {2: []}
    axes = {"tp": grid.tp, "cp": grid.cp}
    if experts:
        axes = {"ep": grid.ep, "etp": grid.etp, "edp": grid.edp}
    for name, size in {**axes, "dp": grid.dp, "microbatches": count}.items():
        if size > 1:
            names.setdefault(size, []).append(name)
    factors = {0.0: "is zero: it never arrived"}
    for size, equal in names.items():
        known = "".join(f" = {name}" for name in equal)
        factors[float(size)] = f"is {size}{known} times the right one: summed once too often"
        factors[1 / size] = f"is 1/{size}{known} of the right one: a sum is missing or averaged"
    return factors


def _sums(engine: Engine, own: Tensors) -> Iterator[tuple[str, Tensors]]:
    """(hypothesis, gradients after one more sum)."""
    if not own:  # an empty stage takes part in the sum
        return
    groups, device = engine.groups, engine.device

    def summed(tensors: Tensors, group: dist.ProcessGroup) -> Tensors:
        flat = torch.cat([t.flatten() for t in tensors.values()]).to(device)
        parts = all_reduce(flat, group).cpu().split([t.numel() for t in tensors.values()])
        return {n: p.view_as(t) for (n, t), p in zip(tensors.items(), parts, strict=True)}

    if groups.tp is not None:
        yield _SUM_OVER.format("tensor parallelism"), summed(own, groups.tp)
    # Shards on these ranks hold different elements, possibly of different sizes.
    whole = num_shards(engine.layout) == 1
    if groups.cp is not None and whole:
        yield _SUM_OVER.format("context parallelism"), summed(own, groups.cp)
    if groups.cp is not None and whole and engine.layout.grid.dp > 1 and groups.data is not None:
        yield _SUM_OVER.format("data and context parallelism"), summed(own, groups.data)
    records = engine.model.records
    edp = None if groups.experts is None else groups.experts.edp
    if edp is not None and num_expert_shards(engine.layout) == 1:
        experts = {name: grad for name, grad in own.items() if records[name].experts}
        if experts:
            yield _SUM_OVER.format("expert data parallelism"), summed(experts, edp)
    if groups.tied is not None:
        ends = {name: grad for name, grad in own.items() if "tied" in records[name].sums}
        here = {EMBEDDING: torch.stack([*ends.values()]).sum(0)}
        sum_of_all = summed(here, groups.tied)[EMBEDDING]
        yield _SUM_OVER.format("the copies of the embedding"), dict.fromkeys(ends, sum_of_all)


def _gradients_of_samples(
    engine: Engine, step: int, reference: ReferenceStep
) -> Iterator[tuple[str, Tensors]]:
    """(hypothesis, gradients without a data-parallel sum: of some samples or tokens only)."""
    config, grid = engine.layout.config, engine.layout.grid
    here = grid.coordinates(engine.groups.rank)
    name = "data parallelism" if grid.cp == 1 else "data and context parallelism"
    name = name if grid.dp > 1 else "context parallelism"
    hypotheses: dict[str, tuple[str, ...]] = {name: ("dp_replicate", "dp_shard")}
    if grid.dp_replicate > 1 and grid.dp_shard > 1:
        hypotheses |= {"dp_shard": ("dp_shard",), "dp_replicate": ("dp_replicate",)}
    for missing, alike in hypotheses.items():
        dp_ranks = {
            grid.dp_rank(rank)
            for rank in range(grid.world_size)
            if all(grid.coordinates(rank)[axis] == here[axis] for axis in alike)
        }
        if len(dp_ranks) < grid.dp or grid.cp > 1:
            part = "samples" if grid.cp == 1 else "tokens"
            ranks = {(dp_rank, here["cp"]) for dp_rank in dp_ranks}
            grads = gradients_of_ranks(config, grid, step, reference, ranks)
            yield f"is that of some {part}: the sum over {missing} is missing", grads


def _shared(every: Sequence[Mapping[str, set[str]]]) -> dict[str, set[str]]:
    """Hypotheses that hold on all ranks with a part of a parameter."""
    shared: dict[str, set[str]] = {}
    for own in every:
        for name, held in own.items():
            shared[name] = shared[name] & held if name in shared else held
    return shared


def _gradient_findings(
    held: Mapping[str, set[str]], order: Sequence[str], divided: bool
) -> list[str]:
    """Sentences on the wrong gradients, nearest to the loss first.

    Args:
        held: stored name -> hypotheses that hold on every rank.
        order: parameter names in model order.
        divided: whether context-parallel ranks split sequences.
    """
    wrong = [name for name in reversed(order) if RIGHT not in held[name]]
    if not wrong:
        return ["no gradient is far off: not a reduction, but a narrower type or another order"]
    if all(name.endswith(_ROW_BIASES) for name in wrong):
        bias = "the bias of row-parallel linears is added by every tensor-parallel rank"
        return [f"{bias}: {few(wrong, 2)}"]
    beside = _of_queries(wrong[0], held)
    if divided and wrong[0].endswith(_OF_KEYS) and all(RIGHT in held[n] for n in beside):
        lost = "keys and values lack the gradients of queries on other context-parallel ranks"
        return [f"{lost}: {few(wrong, 2)}"]
    # The wrong gradient nearest to the loss causes the others, often by powers of its factor.
    found = []
    for text in sorted(held[wrong[0]] or {text for name in wrong for text in held[name]}):
        names = [name for name in wrong if text in held[name]]
        found.append((wrong.index(names[0]), -len(names), f"{few(names, 2)}: the gradient {text}"))
    verb = "is" if len(wrong) == 1 else "are"
    count = f"{len(wrong)} of {len(order)} gradients {verb} wrong"
    return [*(text for _, _, text in sorted(found)), f"{count}; nearest to the loss: {wrong[0]}"]


def _of_queries(name: str, names: Iterable[str]) -> list[str]:
    """The parameters of the same attention outside the path of keys and values."""
    attention = name.rpartition(".")[0].rpartition(".")[0]
    return [n for n in names if n.startswith((f"{attention}.q_proj", f"{attention}.o_proj"))]


def _loss_findings(
    engine: Engine, step: int, result: StepResult, reference: ReferenceStep, match: float
) -> list[str]:
    """Sentences on the loss: which wrong normalisation or mistake explains its value."""
    config, grid = engine.layout.config, engine.layout.grid
    batch = global_batch(config, step)
    samples = microbatches(config, batch)
    tokens = torch.tensor([valid_tokens(sample) for sample in samples])

    def means(parts: int) -> float:
        sums = reference.losses.view(parts, -1).sum(1)
        return float((sums / tokens.view(parts, -1).sum(1).clamp_min(1)).sum())

    scaled = f"the loss is {result.loss / reference.loss:.4g} times the right one: "
    if grid.cp > 1:
        model, deviation = plain_before(config, reference), abs(result.loss - reference.loss)
        for text, loss in losses_by_mistake(config, model, samples, step):
            # It must explain the deviation, which may be small, not only the loss.
            if abs(result.loss - loss / valid_tokens(batch)) <= match * deviation:
                return [scaled + text]
    if abs(result.loss - reference.loss) <= match * abs(reference.loss):
        return []
    for value, text in (
        (means(grid.dp), "each data-parallel rank divides by its own tokens, not by all"),
        (means(grid.dp) / grid.dp, "a mean of the data-parallel ranks' means, not of the tokens"),
        (means(len(samples)), "each microbatch divides by its own tokens, not by all"),
        (means(len(samples)) / len(samples), "a mean of the microbatches' means"),
    ):
        if abs(result.loss - value) <= match * abs(value):
            return [scaled + text]
    return [scaled + "the forward pass itself differs"]
