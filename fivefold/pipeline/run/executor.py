"""Runs a lowered program on one rank: the only training (and evaluation) step there is."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fivefold.data_parallel.stage_gradients import StageGradients
from fivefold.model.batch import Batch
from fivefold.model.moe.routing import Decisions
from fivefold.model.sequence_slices import SlicedSequence
from fivefold.model.transformer import Stage
from fivefold.pipeline.ir import (
    COMPUTE,
    READS_PARAMETERS,
    Act,
    Direction,
    Kind,
    Message,
    Piece,
    Program,
)
from fivefold.pipeline.run.interleaver import Interleaver
from fivefold.pipeline.run.messages import Address, StepMessages
from fivefold.tensor.deferred_weight import DeferredWeights, Work

Observer = Callable[[Act], AbstractContextManager[object]]
"""Entered when the inputs of a compute action are there, and left when it has ended."""


@dataclass
class _Forward:
    """State that a forward leaves for its backward: its input, and the edge at which it starts.

    Attributes:
        x: None for the first stage.
        edge: None where the forward is to be recomputed.
    """

    x: Tensor | None
    edge: GradientEdge | None


@dataclass
class Executor:
    """One rank's interpreter of pipeline programs.

    Attributes:
        stages: this rank's stages by index.
        gradients: data parallelism of each of them.
        deferred: where their linears leave weight gradients during a B.
        group: the pipeline group; None for one rank.
        hidden_shape: shape of one hidden state of every token, [T or T/tp, H], of a slice where
            sequences are cut.
        dtype: type of hidden states.
        device: where stages live.
        turns: lets the halves of an FB run in turns; where experts wait for messages, the other
            half goes on.
        delays_weights: whether an FB computes dW while its messages travel.
        observe: called with every compute act (an FB is one), where a step is measured.
        enter: called with every act that begins, again when a compute act has what it needs, and
            with None at the end.
        states_into: hidden states of a token that enter a stage, by its index, where further tokens
            are predicted; None: always one.
        loss_scale: factor of the loss in its gradients, scalar; None: 1.
        lines: groups of two ranks by sender and receiver, for messages between them; other messages
            use `group`.
        begin: what runs a program; None: `ProgramRun`.
    """

    stages: Mapping[int, Stage]
    gradients: Mapping[int, StageGradients]
    deferred: DeferredWeights
    group: dist.ProcessGroup | None
    hidden_shape: tuple[int, int]
    dtype: torch.dtype
    device: torch.device
    turns: Interleaver
    delays_weights: bool = False
    observe: Observer = field(default=nullcontext)
    enter: Callable[[Act | None], None] = field(default=lambda act: None)
    loss_scale: Tensor | None = None
    states_into: Callable[[int], int] | None = None
    lines: Mapping[tuple[int, int], dist.ProcessGroup] = field(default_factory=dict)
    begin: "Callable[[Executor, Program, Sequence[Batch], Tensor], ProgramRun] | None" = None

    @property
    def pp_rank(self) -> int:
        """Which of a program's ranks this is."""
        return 0 if self.group is None else self.group.rank()

    def run(self, program: Program, batches: Sequence[Batch], scale: Tensor) -> "StepSums":
        """Run one step's forwards and backwards.

        Args:
            program: lowered.
            batches: the microbatches, the same on every pipeline rank; of each, one after the
                other, as many slices as the program has.
            scale: scale by which each microbatch's summed loss is multiplied: one over the number
                of valid tokens of the global batch; on the device, a scalar, or [1 + D] where the
                batches ask for D further tokens, one for the loss of each depth.

        Returns:
            This rank's sums. Gradients are on the parameters, reductions started.
        """
        return (self.begin or ProgramRun)(self, program, batches, scale).run()


@dataclass(frozen=True)
class StepSums:
    """Sums over the forwards of a step on one rank.

    Attributes:
        loss: this rank's part of the loss, shaped as the step's scale, in at least fp32; 0 without
            the head.
        routing: sums of its routers' decisions that had a backward, by layer.
        z_loss: part of the loss of the next token that is z-loss, scalar.
        noted: sum of what layers noted in backwards: losses of indexers; fp64 scalar.
    """

    loss: Tensor
    routing: Mapping[int, Tensor]
    z_loss: Tensor
    noted: Tensor


class ProgramRun:
    """The state of one run of a program, as `Executor.run` takes it.

    One class because every kind of action reads and writes the same few tables by microbatch.
    """

    def __init__(
        self, executor: Executor, program: Program, batches: Sequence[Batch], scale: Tensor
    ) -> None:
        self._on = executor
        self._program, self._batches = program, batches
        self._scale = scale.to(torch.promote_types(executor.dtype, torch.float32))
        self._acts = program.ranks[executor.pp_rank]
        self._predicts = batches[0].mtp_depth > 0
        self._mail = StepMessages(
            executor.group, executor.lines, executor.hidden_shape, executor.dtype, executor.device
        )
        self._recomputed = {act.piece for act in self._acts if act.kind is Kind.R}
        self._forwards: dict[Piece, _Forward] = {}
        self._weights: dict[Piece, list[Work]] = {}
        self._sequences: dict[tuple[int, int], SlicedSequence] = {}
        self._losses: list[Tensor] = []
        self._z_sums: list[Tensor] = []
        self._noted: list[Tensor] = []
        self._decisions: dict[Piece, Decisions] = {}
        self._routing: dict[int, Tensor] = {}
        weights = (
            kid for act in self._acts for kid in act.elementary if kid.kind in (Kind.W, Kind.BW)
        )
        self._last_weights = {kid.stage: kid for kid in weights}

    def run(self) -> StepSums:
        """Run all actions of this rank; see `Executor.run`."""
        with torch.set_grad_enabled(not self._program.forward_only):
            for act in self._acts:
                self._on.enter(act)
                if act.kind in COMPUTE:
                    self._compute(act)
                else:
                    self._manage(act)
        self._mail.finish()
        self._on.enter(None)
        loss = torch.stack(self._losses).sum(0) if self._losses else torch.zeros_like(self._scale)
        z_loss = torch.zeros_like(self._scale.flatten()[0])
        if self._z_sums:
            z_loss = torch.stack(self._z_sums).sum() * self._scale.flatten()[0]
        noted = torch.zeros_like(z_loss, dtype=torch.float64)
        if self._noted:
            noted = torch.stack(self._noted).sum()
        return StepSums(loss, self._routing, z_loss, noted)

    def _manage(self, act: Act) -> None:
        """Run an action that only starts something; a STEP belongs to the training loop."""
        match act.kind:
            case Kind.SEND:
                assert act.message is not None
                self._mail.send(act.message)
            case Kind.RECV:
                assert act.message is not None
                self._mail.receive(act.message, self._states_of(act.message))
            case Kind.UNSHARD:
                self._on.gradients[act.stage].unshard()
            case Kind.RESHARD:
                self._on.gradients[act.stage].reshard()
            case Kind.REDUCE:
                self._on.gradients[act.stage].reduce()

    def _states_of(self, message: Message) -> int:
        """Number of hidden states (or their gradients) per token in a message."""
        if self._on.states_into is None or not self._predicts:
            return 1
        backward = message.direction is Direction.BACKWARD
        return self._on.states_into(message.dst_stage + backward)

    def _compute(self, act: Act) -> None:
        """Wait for the inputs of an action, then run it.

        What both halves of an FB have received is there before it begins.
        """
        for kid in act.elementary:
            self._await(kid)
            if kid.kind in READS_PARAMETERS:
                self._on.gradients[kid.stage].await_unshard()
        self._on.enter(act)
        self._observed(act)

    def _observed(self, act: Act) -> None:
        with self._on.observe(act):
            self._run(act)

    def _run(self, act: Act) -> None:
        match act.kind:
            case Kind.FB:
                self._in_turns(*act.kids)
            case Kind.F:
                self._forward(act)
            case Kind.R:
                self._recompute(act)
            case Kind.BW:
                self._backward(act)
            case Kind.B:
                self._backward_input(act)
            case Kind.W:
                self._backward_weights(act)

    def _await(self, act: Act) -> None:
        if (address := self._input_of(act)) is not None:
            self._mail.wait(address)

    def _input_of(self, act: Act) -> Address | None:
        """The address of the tensor that another stage sends for an action; None: none does."""
        parts = self._on.stages[act.stage].parts
        if act.kind is Kind.F and not parts.embedding:
            return Direction.FORWARD, *act.piece
        if act.kind in (Kind.B, Kind.BW) and not parts.head:
            return Direction.BACKWARD, *act.piece
        return None

    def _forward(self, act: Act) -> None:
        piece, module = act.piece, self._on.stages[act.stage]
        x = None
        if not module.parts.embedding:
            x = self._mail.take((Direction.FORWARD, *piece))
        keeps = not self._program.forward_only and piece not in self._recomputed
        with torch.set_grad_enabled(keeps):
            out = self._run_stage(act, x)
        if module.parts.head:
            self._losses.append(out.detach())
            self._z_sums += module.z_sums[:1]
        else:
            # Detached: once sent, nothing but the graph holds what the stage made.
            self._give(act, Direction.FORWARD, act.stage + 1, out.detach())
        if not self._program.forward_only:
            self._forwards[piece] = _Forward(x, self._edge(act, out) if keeps else None)
        else:
            del self._decisions[piece]
            if act.slice == self._program.num_slices - 1:
                self._sequences.pop((act.stage, act.mb), None)

    def _recompute(self, act: Act) -> None:
        """Repeat a forward that kept only its input, now with its graph."""
        forward = self._forwards[act.piece]
        forward.edge = self._edge(act, self._run_stage(act, forward.x))

    def _edge(self, act: Act, out: Tensor) -> GradientEdge:
        """Where the backward of a stage begins: at its hidden states, or at its objective."""
        module = self._on.stages[act.stage]
        return get_gradient_edge(module.objective(out) if module.parts.head else out)

    def _run_stage(self, act: Act, x: Tensor | None) -> Tensor:
        """Run a stage; returns hidden states, or the scaled losses."""
        program, module = self._program, self._on.stages[act.stage]
        end = self._last_weights.get(act.stage)
        last = end is not None and end.kind is Kind.BW and end.piece == act.piece
        self._on.gradients[act.stage].before_forward(last=last)
        sequence = None
        if program.num_slices > 1:
            sequence = self._sequences.setdefault((act.stage, act.mb), SlicedSequence())
            sequence.begin(act.slice)
        if x is not None:
            x.requires_grad_(torch.is_grad_enabled())
        batch = self._batches[act.mb * program.num_slices + act.slice]
        decisions = self._decisions.setdefault(act.piece, Decisions())
        out: Tensor = module(x, batch, sequence, decisions)
        return out * self._scale if module.parts.head else out

    def _in_turns(self, forward: Act, backward: Act) -> None:
        """The backward begins: its first message travels under the forward's first computation."""
        turns, ahead = self._on.turns, partial(self._forward, forward)
        if not (self._on.delays_weights and backward.kind is Kind.BW):
            turns.run(partial(self._run, backward), ahead)
            return

        def back() -> None:
            self._backward_input(backward)
            last = self._last_weights[backward.stage] == backward
            rest = self._weights.pop(backward.piece)
            self._on.gradients[backward.stage].run_weights(rest, last=last)

        turns.run(back, ahead, between=self._on.deferred.run_early)

    def _backward(self, act: Act) -> None:
        last = self._last_weights[act.stage] == act
        self._on.gradients[act.stage].before_backward(whole=True, last=last)
        self._differentiate(act)
        self._on.gradients[act.stage].after_backward(last=last)

    def _backward_input(self, act: Act) -> None:
        """Compute dX only; the computation of dW is deferred."""
        self._on.gradients[act.stage].before_backward(whole=False, last=False)
        with self._on.deferred.collect() as works:
            self._differentiate(act)
        self._weights[act.piece] = [*self._on.gradients[act.stage].put_aside(), *works]

    def _differentiate(self, act: Act) -> None:
        """Run autograd from the gradient of the output and those from later slices."""
        piece, module = act.piece, self._on.stages[act.stage]
        forward = self._forwards.pop(piece)
        assert forward.edge is not None
        edges: list[GradientEdge] = [forward.edge]
        grads: list[Tensor | None] = [self._on.loss_scale]
        if not module.parts.head:
            grads = [self._mail.take((Direction.BACKWARD, *piece))]
        if self._program.num_slices > 1:
            for edge, grad in self._sequences[act.stage, act.mb].release(act.slice):
                edges.append(edge)
                grads.append(grad)
        torch.autograd.backward(edges, grads)
        self._noted += module.noted.take()
        for layer, decision in self._decisions.pop(piece).items():
            before = self._routing.get(layer)
            self._routing[layer] = decision.sums if before is None else before + decision.sums
        if forward.x is not None:
            assert forward.x.grad is not None
            self._give(act, Direction.BACKWARD, act.stage - 1, forward.x.grad)

    def _backward_weights(self, act: Act) -> None:
        """Run the dW that a B has deferred, or one part of it."""
        works, parts = self._weights[act.piece], self._program.num_weight_parts
        share = -(-len(works) // (parts - act.part))
        now, self._weights[act.piece] = works[:share], works[share:]
        del works
        last = self._last_weights[act.stage] == act
        self._on.gradients[act.stage].run_weights(now, last=last)
        if act.part == parts - 1:
            del self._weights[act.piece]

    def _give(self, act: Act, direction: Direction, stage: int, tensor: Tensor) -> None:
        """Pass a tensor to `stage`, on this rank or by the following SEND."""
        address = (direction, stage, act.mb, act.slice)
        if self._program.placement[stage] == self._on.pp_rank:
            self._mail.hand_over(address, tensor)
        else:
            self._mail.post(address, tensor)
