"""A rank's part of the model with every technique installed, as `parallelize` makes it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import nn

from fivefold.counts.parameters import ParameterRecord
from fivefold.data_parallel.replicated import local_grad
from fivefold.data_parallel.stage_gradients import StageGradients
from fivefold.layout import Layout
from fivefold.memory.parameters import OffloadedParameters
from fivefold.mesh.collectives import sum_in_buckets
from fivefold.mesh.groups import Groups
from fivefold.mesh.slices import Piece
from fivefold.model.batch import Batch
from fivefold.model.eight_bit.delayed import DelayedScaling
from fivefold.model.eight_bit.step_weights import StepWeights
from fivefold.model.init import init_slice, initial_buffer
from fivefold.model.transformer import Stage
from fivefold.pipeline.ir import Program
from fivefold.pipeline.run.executor import Executor, StepSums
from fivefold.pipeline.sharding import passes


@dataclass
class ParallelModel:
    """This rank's part of the model, ready to be run by programs.

    Attributes:
        layout: the checked configuration.
        groups: groups of this rank.
        stages: this rank's stages by index.
        gradients: data parallelism of each stage.
        records: what is known of each parameter, by its name.
        executor: runs programs on the stages.
        on_host: names of the parameters whose masters and moments are in host memory.
        offloaded: weights that are on the device for their gathers only; None: all are there.
        scaling: delayed scales of 8-bit operands, if there are any.
        step_weights: weights in 8 bits that the microbatches of a step share.
        limited: entered while a program runs; what limits the memory of the device sets it.
    """

    layout: Layout
    groups: Groups
    stages: dict[int, Stage]
    gradients: dict[int, StageGradients]
    records: dict[str, ParameterRecord]
    executor: Executor
    on_host: frozenset[str]
    scaling: DelayedScaling
    step_weights: StepWeights
    offloaded: OffloadedParameters | None
    limited: AbstractContextManager[object] = field(default_factory=nullcontext)

    def run(self, program: Program, batches: Sequence[Batch], scale: torch.Tensor) -> StepSums:
        """Run a program as `Executor.run` does; weights off the device are read ahead, in its
        order."""
        if self.offloaded is not None:
            acts = program.ranks[self.executor.pp_rank]
            mtp = not program.forward_only
            self.offloaded.follow(
                block
                for stage, backward in passes(acts)
                for block in self.gradients[stage].offloaded(backward=backward, mtp=mtp)
            )
        for gradients in self.gradients.values():
            gradients.before_run(trains=not program.forward_only)
        with self.limited, self.step_weights.keeping():
            return self.executor.run(program, batches, scale)

    def parameters(self) -> dict[str, nn.Parameter]:
        """All of this rank's parameters by the name they have in the whole model."""
        return dict(self._named())

    def shared_weights(self) -> Iterator[torch.Tensor]:
        """Forms of weights that all later forwards and backwards of a step share."""
        yield from self.step_weights.held()
        for gradients in self.gradients.values():
            yield from gradients.second_copies()

    def finish_gradients(self) -> None:
        """Complete every sum that a parameter's record names, the data-parallel sums first."""
        for stage in self.gradients.values():
            stage.finish()
        tp, mirror, tied = (map(local_grad, parameters) for parameters in self._summed_over)
        sum_in_buckets([*tp], self.groups.tp)
        sum_in_buckets([*mirror], self.groups.mirror)
        self._sum_copies([*tied])

    @cached_property
    def _summed_over(self) -> list[list[nn.Parameter]]:
        """Parameters whose gradients tp, mirror and tied ranks sum, by name, since the order
        differs between copies."""
        named, groups = sorted(self.parameters().items()), ("tp", "mirror", "tied")
        return [[p for name, p in named if group in self.records[name].sums] for group in groups]

    def _sum_copies(self, copies: list[torch.Tensor]) -> None:
        """Sum the gradients of all copies of the embedding, here and on other pipeline ranks."""
        if not copies:
            return
        first, *others = copies
        for other in others:
            first.add_(other)
        sum_in_buckets([first], self.groups.tied)
        for other in others:
            other.copy_(first)

    def reshard(self) -> None:
        """Free gathered parameters."""
        for stage in self.gradients.values():
            stage.reshard()
            stage.forget()

    def blocks(self) -> Iterator[tuple[list[nn.Parameter], Callable[[], None]]]:
        """The blocks whose parameters are gathered together, and the functions that start these
        gathers, in the order of the forward."""
        for _, stage in sorted(self.gradients.items()):
            yield from stage.blocks()

    def train(self, mode: bool = True) -> None:
        """Switch dropout on or off."""
        for stage in self.stages.values():
            stage.train(mode)

    def initialise(self, weights: Mapping[str, Piece]) -> None:
        """Give every parameter's weight its initial value, which no layout changes."""
        config = self.layout.config
        with torch.no_grad():
            for name, piece in weights.items():
                values = init_slice(
                    name,
                    tuple(piece.shape),
                    piece.slices,
                    config.model,
                    config.training.seed,
                    piece.local.dtype,
                )
                piece.local.copy_(values)
            for name, buffer in self.buffers(copies=True).items():
                buffer.fill_(initial_buffer(name, config.model))

    def buffers(self, *, copies: bool) -> dict[str, torch.Tensor]:
        """Tensors of stages besides parameters, by name; the same on all ranks of a stage.

        Args:
            copies: whether to name those of the second copy of the model, too.
        """
        last = None if copies else len(self.layout.split.stages)
        return {
            name: value
            for index, stage in self.stages.items()
            if last is None or index < last
            for name, value in stage.named_buffers()
        }

    def _named(self) -> Iterator[tuple[str, nn.Parameter]]:
        for stage in self.stages.values():
            yield from stage.named_parameters()
