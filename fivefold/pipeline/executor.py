"""Runs a lowered program on one rank: the only training (and evaluation) step there is."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fivefold.model.batch import Batch
from fivefold.model.transformer import Stage
from fivefold.pipeline.ir import Act, Direction, Kind, Program
from fivefold.tensor.deferred_weight import DeferredWeights, Work

SENDS_IN_FLIGHT = 4
"""Sends of a rank that may be under way: gloo's say that they have ended only when waited for, and
until then what they send is held. No wait is circular: it is for a message that the program issues
earlier, and what the receiver does before it takes that one needs earlier messages only."""


class StageGradients(Protocol):
    """What the executor needs of data parallelism, per stage."""

    def before_backward(self, last: bool) -> None:
        """The next backward is the last of the step on this stage, or not."""

    def reduce(self) -> None:
        """All weight gradients of the step are there: start summing what is not yet."""


@dataclass
class _Forward:
    """What a forward leaves for its backward: its input and the edge to start from."""

    x: Tensor | None
    edge: GradientEdge
    is_loss: bool


class Executor:
    """One rank's interpreter of pipeline programs.

    Args:
        stages: this rank's stages by index.
        gradients: data parallelism of each of them.
        deferred: where their linears leave weight gradients during a B.
        group: the pipeline group; None for one rank.
        hidden_shape: of a hidden state between stages, [T or T/tp, H].
        dtype: of hidden states.
        device: where stages live.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        gradients: Mapping[int, StageGradients],
        deferred: DeferredWeights,
        group: dist.ProcessGroup | None,
        hidden_shape: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._stages, self._gradients, self._deferred = stages, gradients, deferred
        self._group = group
        self._hidden_shape, self._dtype, self._device = hidden_shape, dtype, device

    @property
    def pp_rank(self) -> int:
        """Which of a program's ranks this is."""
        return 0 if self._group is None else self._group.rank()

    def run(self, program: Program, batches: Sequence[Batch], scale: float) -> Tensor:
        """Run one step's forwards and backwards.

        Args:
            program: lowered, with one microbatch per batch.
            batches: the microbatches, the same on every pipeline rank.
            scale: by which each microbatch's summed loss is multiplied: one over the number of
                valid tokens of the global batch.

        Returns:
            This rank's part of the loss: a scalar in at least fp32, 0 without the head. Gradients
            are on the parameters, reductions started.
        """
        return _Step(self, program, batches, scale).run()


class _Step:
    """The state of one run of a program."""

    def __init__(
        self, executor: Executor, program: Program, batches: Sequence[Batch], scale: float
    ) -> None:
        self._on = executor
        self._program, self._batches, self._scale = program, batches, scale
        self._acts = program.ranks[executor.pp_rank]
        self._incoming: dict[tuple[Direction, int, int], tuple[dist.Work | None, Tensor]] = {}
        self._outgoing: dict[tuple[Direction, int, int], Tensor] = {}
        self._sending: list[tuple[dist.Work, Tensor]] = []
        self._forwards: dict[tuple[int, int], _Forward] = {}
        self._weights: dict[tuple[int, int], list[Work]] = {}
        self._losses: list[Tensor] = []
        self._last_backward = {
            act.stage: index
            for index, act in enumerate(self._acts)
            if act.kind in (Kind.B, Kind.BW)
        }

    def run(self) -> Tensor:
        with torch.set_grad_enabled(not self._program.forward_only):
            for index, act in enumerate(self._acts):
                self._do(act, last=self._last_backward.get(act.stage) == index)
        for work, _ in self._sending:
            work.wait()
        if self._losses:
            return torch.stack(self._losses).sum()
        wide = torch.promote_types(self._on._dtype, torch.float32)
        return torch.zeros((), dtype=wide, device=self._on._device)

    def _do(self, act: Act, last: bool) -> None:
        match act.kind:
            case Kind.F:
                self._forward(act.stage, act.mb)
            case Kind.BW:
                self._backward(act.stage, act.mb, last)
            case Kind.B:
                with self._on._deferred.collect() as works:
                    self._backward(act.stage, act.mb, last)
                self._weights[act.stage, act.mb] = works
            case Kind.W:
                with torch.no_grad():
                    for work in self._weights.pop((act.stage, act.mb)):
                        work()
            case Kind.SEND:
                self._send(act)
            case Kind.RECV:
                self._receive(act)
            case Kind.REDUCE:
                self._on._gradients[act.stage].reduce()
            case Kind.STEP:
                pass  # the optimizer belongs to the training loop
            case _:
                raise ValueError(f"the executor has no way to run {act}")

    def _forward(self, stage: int, mb: int) -> None:
        x = None
        if stage > 0:
            x = self._take(Direction.FORWARD, stage, mb)
            x.requires_grad_(not self._program.forward_only)
        module, batch = self._on._stages[stage], self._batches[mb]
        out = module(x, batch)
        if module.parts.head:
            loss = out * self._scale
            self._losses.append(loss.detach())
        else:
            loss = out
            # Detached: once sent, nothing but the graph holds what the stage made.
            self._give(Direction.FORWARD, stage + 1, mb, out.detach())
        if not self._program.forward_only:
            edge = get_gradient_edge(loss)
            self._forwards[stage, mb] = _Forward(x, edge, module.parts.head)

    def _backward(self, stage: int, mb: int, last: bool) -> None:
        forward = self._forwards.pop((stage, mb))
        grad = None if forward.is_loss else self._take(Direction.BACKWARD, stage, mb)
        self._on._gradients[stage].before_backward(last)
        torch.autograd.backward((forward.edge,), (grad,))
        if forward.x is not None:
            assert forward.x.grad is not None
            self._give(Direction.BACKWARD, stage - 1, mb, forward.x.grad)

    def _give(self, direction: Direction, stage: int, mb: int, tensor: Tensor) -> None:
        """Hand a tensor to `stage`, here or by the SEND that follows."""
        if self._program.placement[stage] == self._on.pp_rank:
            self._incoming[direction, stage, mb] = (None, tensor)
        else:
            self._outgoing[direction, stage, mb] = tensor

    def _take(self, direction: Direction, stage: int, mb: int) -> Tensor:
        work, tensor = self._incoming.pop((direction, stage, mb))
        if work is not None:
            work.wait()
        return tensor

    def _send(self, act: Act) -> None:
        message = act.message
        assert message is not None
        tensor = self._outgoing.pop((message.direction, message.dst_stage, message.mb)).contiguous()
        self._sending = [(w, kept) for w, kept in self._sending if not w.is_completed()]
        if len(self._sending) >= SENDS_IN_FLIGHT:
            self._sending.pop(0)[0].wait()
        work = dist.isend(tensor, group=self._on._group, group_dst=message.dst_rank, tag=message.id)
        assert work is not None
        self._sending.append((work, tensor))

    def _receive(self, act: Act) -> None:
        message = act.message
        assert message is not None
        buffer = torch.empty(self._on._hidden_shape, dtype=self._on._dtype, device=self._on._device)
        work = dist.irecv(buffer, group=self._on._group, group_src=message.src_rank, tag=message.id)
        self._incoming[message.direction, message.dst_stage, message.mb] = (work, buffer)
