"""Programs run on tiny models, and what a rank finds."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import pairwise
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef

from fivefold.model.transformer import Stage
from fivefold.pipeline.ir import Program
from fivefold.pipeline.lowering import eager_dx, lower
from fivefold.pipeline.run.executor import Executor, Observer
from fivefold.pipeline.run.interleaver import Interleaver
from fivefold.pipeline.schedules.registry import build_program
from fivefold.pipeline.sharding import with_sharding_actions
from fivefold.pipeline.split.stages import StageSpec
from fivefold.tensor.deferred_weight import DeferredWeights, Work, run_works
from fivefold.tensor.install import install_deferral
from tests.model.models import LLAMA, batch_of, build

MODEL = replace(LLAMA, num_layers=4)
TOKENS = 12


class NoReduction:
    """Data parallelism over one rank; remembers what it was asked."""

    def __init__(self) -> None:
        self.forwards: list[bool] = []
        self.lasts: list[bool] = []
        self.reduced = 0

    def before_forward(self, *, last: bool) -> None:
        """Note the forward of the step's last backward."""
        self.forwards.append(last)

    def before_backward(self, *, whole: bool, last: bool) -> None:
        """Note what is the last of the step."""
        if whole:
            self.lasts.append(last)

    def after_backward(self, *, last: bool) -> None:
        pass

    def put_aside(self) -> list[Work]:
        return []

    def run_weights(self, works: list[Work], *, last: bool) -> None:
        self.lasts.append(last)
        for _ in run_works(works):
            pass

    def reduce(self) -> None:
        self.reduced += 1

    def await_unshard(self) -> None:
        pass


def lowered(
    name: str, placement: tuple[int, ...], microbatches: int, early: bool, **options: Any
) -> Program:
    """A schedule as it runs; `early`: dX before dW."""
    program = build_program(name, placement, microbatches, **options)
    return with_sharding_actions(lower(eager_dx(program) if early else program))


def layers_of(num_stages: int, uneven: int | None = None) -> list[tuple[int, ...]]:
    """The layers of each stage: alike, or at random, by the seed `uneven`, and then maybe none."""
    each = MODEL.num_layers // num_stages
    cuts = [each * stage for stage in range(1, num_stages)]
    if uneven is not None:
        random = Random(uneven)
        cuts = sorted(random.randint(0, MODEL.num_layers) for _ in cuts)
    return [tuple(range(*ends)) for ends in pairwise([0, *cuts, MODEL.num_layers])]


def stages_of(program: Program, rank: int, uneven: int | None) -> dict[int, Stage]:
    """A rank's stages, those of a second copy of the model, too."""
    length = program.num_stages // program.num_copies
    layers = layers_of(length, uneven)
    return {
        stage: build(MODEL, StageSpec(piece == 0, layers[piece], piece == length - 1))
        for stage in program.stages_of(rank)
        for piece in [stage % length]
    }


@dataclass
class Held:
    """The most of some kind of tensors that are alive at a time."""

    refs: list[StorageWeakRef] = field(default_factory=list)
    peak: int = 0

    def add(self, tensor: Tensor) -> None:
        self.refs.append(StorageWeakRef(tensor.untyped_storage()))
        self.peak = max(self.peak, self.alive)

    @property
    def alive(self) -> int:
        """Neither gone nor emptied."""
        self.refs = [ref for ref in self.refs if not ref.expired()]
        storages = [UntypedStorage._new_with_weak_ptr(ref.cdata) for ref in self.refs]
        return sum(storage is not None and storage.nbytes() > 0 for storage in storages)


def execute(
    rank: int,
    program: Program,
    watch: Callable[[dict[int, Stage]], None] = lambda stages: None,
    *,
    observe: Observer = nullcontext,
    uneven: int | None = None,
) -> tuple[Tensor, dict[str, Tensor], dict[int, NoReduction]]:
    """Loss and gradients of a rank after a step, and what data parallelism was told."""
    deferred = DeferredWeights()
    stages = stages_of(program, rank, uneven)
    for stage in stages.values():
        install_deferral(stage, deferred, recomputes=False)
    watch(stages)
    gradients = {i: NoReduction() for i in stages}
    batches = [
        piece
        for mb in range(program.num_microbatches)
        for piece in batch_of(MODEL, [[5, TOKENS - 5]], seed=mb).cut(program.num_slices)
    ]
    executor = Executor(
        stages,
        gradients,
        deferred,
        dist.group.WORLD if program.num_ranks > 1 else None,
        (TOKENS // program.num_slices, MODEL.hidden_size),
        torch.float64,
        torch.device("cpu"),
        Interleaver(torch.device("cpu")),
        observe=observe,
    )
    loss = executor.run(program, batches, torch.tensor(1 / 64, dtype=torch.float64)).loss
    grads = {n: p.grad for s in stages.values() for n, p in s.named_parameters()}
    return loss, grads, gradients


def bits(
    rank: int, world: int, program: Program, uneven: int | None = None
) -> tuple[float, dict[str, bytes]]:
    """Loss of a rank and the bits of its gradients."""
    loss, grads, _ = execute(rank, program, uneven=uneven)
    return loss.item(), {n: g.numpy().tobytes() for n, g in grads.items() if g is not None}


def one_rank(num_stages: int, microbatches: int) -> tuple[float, dict[str, bytes]]:
    """What `bits` of all ranks together must come to."""
    return bits(0, 1, lowered("gpipe", (0,) * num_stages, microbatches, False))
