"""What waits for what in a program: one graph proves the absence of dead-lock and gives the time.

One node per compute act, one contracted node per message, one per copy to or from host memory. A
compute act waits for the one before it on its rank and for what it consumes. A message waits for
its producer; once lowered, also for the last compute act issued before its SEND or RECV on either
end, and for the message issued before it on each communication stream of both ends. Under
rendezvous semantics, where a transfer starts only when both ends have reached it, the program
cannot dead-lock if and only if this graph has no cycle, and its longest path is the time.

An OFFLOAD runs beside the compute act that follows it, and the one after that waits for it: its
memory is free from then on. What a RELOAD brings back is waited for by the R or B that needs it.
Each of the two has a stream of its own on every rank.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from fivefold.pipeline.costs import Costs
from fivefold.pipeline.ir import (
    COMMUNICATION,
    COMPUTE,
    COPIES,
    Act,
    Direction,
    Kind,
    Message,
    Program,
    ProgramError,
)


class Stream(StrEnum):
    """What shares one first-in, first-out communication stream on a rank; strictest first."""

    RANK = "rank"  # every message of the rank
    PAIR = "pair"  # the messages to and from one other rank
    PAIR_AND_DIRECTION = "pair_and_direction"  # the messages to, or from, one other rank

    def key(self, message: Message, rank: int) -> Hashable:
        """The stream of `rank` that the message takes."""
        if self is Stream.RANK:
            return rank
        peer = message.src_rank + message.dst_rank - rank
        return (rank, peer) if self is Stream.PAIR else (rank, peer, message.src_rank == rank)


@dataclass(frozen=True)
class Graph:
    """Nodes 0 .. len(computes)-1 are compute acts, rank by rank in order; then messages, copies.

    Attributes:
        computes: (rank, act) of each compute node.
        messages: of each message node.
        copies: (rank, act) of each copy node.
        producers: the compute node whose result each message carries.
        successors: the nodes that wait for each node.
    """

    computes: tuple[tuple[int, Act], ...]
    messages: tuple[Message, ...]
    copies: tuple[tuple[int, Act], ...]
    producers: tuple[int, ...]
    successors: tuple[list[int], ...]

    def weights(self, program: Program, costs: Costs) -> list[float]:
        """How long each node of the graph of `program` lasts."""
        parts, slices = program.num_weight_parts, program.num_slices
        return [
            *(costs.of(act, parts, slices) for _, act in self.computes),
            *(costs.hop for _ in self.messages),
            *(costs.of(act, parts, slices) for _, act in self.copies),
        ]

    def is_message(self, node: int) -> bool:
        """Whether a node is a message."""
        return 0 <= node - len(self.computes) < len(self.messages)

    def is_copy(self, node: int) -> bool:
        """Whether a node is a copy to or from host memory."""
        return node >= len(self.computes) + len(self.messages)

    def order(self) -> list[int]:
        """The nodes, each after all that it waits for.

        Raises:
            ProgramError: a circular wait, spelt out.
        """
        return self._order

    @cached_property
    def _order(self) -> list[int]:
        waiting = [0] * len(self.successors)
        for successors in self.successors:
            for node in successors:
                waiting[node] += 1
        order = [node for node, count in enumerate(waiting) if count == 0]
        for node in order:  # grows while it is read
            for successor in self.successors[node]:
                waiting[successor] -= 1
                if waiting[successor] == 0:
                    order.append(successor)
        if len(order) < len(waiting):
            raise ProgramError(f"dead-lock, a circular wait: {self._cycle(waiting)}")
        return order

    def longest_paths(self, weights: Sequence[float]) -> tuple[list[float], list[float]]:
        """Earliest start and end of each node, when a node lasts as long as its weight."""
        starts, ends = [0.0] * len(weights), [0.0] * len(weights)
        for node in self._order:
            end = ends[node] = starts[node] + weights[node]
            for successor in self.successors[node]:
                if starts[successor] < end:
                    starts[successor] = end
        return starts, ends

    def _cycle(self, waiting: list[int]) -> str:
        """One circular wait among the nodes that still wait."""
        blocker: dict[int, int] = {}
        for node, successors in enumerate(self.successors):
            if waiting[node]:
                blocker.update((s, node) for s in successors if waiting[s])
        node, path = next(iter(blocker)), []
        while node not in path:
            path.append(node)
            node = blocker[node]
        cycle = path[path.index(node) :]
        return " waits for ".join(self._name(n) for n in [*cycle, cycle[0]])

    def _name(self, node: int) -> str:
        if self.is_message(node):
            return str(self.messages[node - len(self.computes)])
        copy = node - len(self.computes) - len(self.messages)
        rank, act = self.computes[node] if copy < 0 else self.copies[copy]
        return f"{act} on rank {rank}"


def dependency_graph(program: Program, stream: Stream | None = None) -> Graph:
    """The graph of a program in which every (stage, microbatch, slice) is computed once.

    With `stream` None, SENDs and RECVs do not count, and a message waits for its producer only.
    """
    computes = _acts(program, COMPUTE)
    messages = program.messages or program.crossings()
    copies = _acts(program, COPIES)
    successors: list[list[int]] = [[] for _ in range(len(computes) + len(messages) + len(copies))]
    for node in range(len(computes) - 1):
        if computes[node][0] == computes[node + 1][0]:
            successors[node].append(node + 1)
    makers = _Makers(program, computes)
    _link_local_stages(program, makers, successors)
    producers = []
    for node, message in enumerate(messages, len(computes)):
        producer = makers.node(message.direction, message.src_stage, message.mb, message.slice)
        producers.append(producer)
        successors[producer].append(node)
        consumer = makers.node(message.direction, message.dst_stage, message.mb, message.slice)
        successors[node].append(consumer)
    if stream is not None:
        _link_streams(program, messages, stream, successors, len(computes))
    if copies:
        _link_copies(program, successors, len(computes) + len(messages))
    return Graph(tuple(computes), messages, tuple(copies), tuple(producers), tuple(successors))


def _acts(program: Program, kinds: frozenset[Kind]) -> list[tuple[int, Act]]:
    return [
        (rank, act) for rank, acts in enumerate(program.ranks) for act in acts if act.kind in kinds
    ]


class _Makers:
    """Which node makes the activations, and which the dX, of a stage and microbatch."""

    def __init__(self, program: Program, computes: Sequence[tuple[int, Act]]) -> None:
        self._slices = program.num_slices
        each = program.num_microbatches * self._slices
        self._forward = [[-1] * each for _ in program.placement]
        self._backward = [[-1] * each for _ in program.placement]
        for node, (_, act) in enumerate(computes):
            for kid in act.elementary:
                if kid.kind is Kind.F:
                    self._forward[kid.stage][kid.mb * self._slices + kid.slice] = node
                elif kid.kind is Kind.B or kid.kind is Kind.BW:
                    self._backward[kid.stage][kid.mb * self._slices + kid.slice] = node

    def node(self, direction: Direction, stage: int, mb: int, piece: int) -> int:
        table = self._forward if direction is Direction.FORWARD else self._backward
        return table[stage][mb * self._slices + piece]


def _link_local_stages(program: Program, makers: _Makers, successors: list[list[int]]) -> None:
    """A tensor handed over on the same rank makes one act wait for the other, too."""
    for mb in range(program.num_microbatches):
        for stage in program.path(mb)[:-1]:
            if program.placement[stage] != program.placement[stage + 1]:
                continue
            for piece in range(program.num_slices):
                lower = makers.node(Direction.FORWARD, stage, mb, piece)
                upper = makers.node(Direction.FORWARD, stage + 1, mb, piece)
                successors[lower].append(upper)
                if not program.forward_only:
                    lower = makers.node(Direction.BACKWARD, stage, mb, piece)
                    upper = makers.node(Direction.BACKWARD, stage + 1, mb, piece)
                    successors[upper].append(lower)


def _link_copies(program: Program, successors: list[list[int]], first_copy: int) -> None:
    """Between the acts of each rank: see the head of this file."""
    compute, copy = -1, first_copy - 1  # the nodes last issued, over all ranks
    for acts in program.ranks:
        issued: dict[Kind, int] = {}
        reloads: dict[tuple[int, int, int], int] = {}
        offloads: dict[tuple[int, int, int], int] = {}
        begun = False
        young: list[int] = []  # offloads before the compute act issued last
        fresh: list[int] = []  # and after it
        for act in acts:
            piece = (act.stage, act.mb, act.slice)
            if act.kind in COMPUTE:
                compute += 1
                begun = True
                for node in young:
                    successors[node].append(compute)
                young, fresh = fresh, []
                for kid in act.elementary:
                    node = reloads.pop((kid.stage, kid.mb, kid.slice), -1)
                    if node >= 0:
                        successors[node].append(compute)
            elif act.kind in COPIES:
                copy += 1
                if begun:
                    successors[compute].append(copy)
                if act.kind in issued:
                    successors[issued[act.kind]].append(copy)
                issued[act.kind] = copy
                if act.kind is Kind.OFFLOAD:
                    fresh.append(copy)
                    offloads[piece] = copy
                else:
                    reloads[piece] = copy
                    successors[offloads[piece]].append(copy)


def _link_streams(
    program: Program,
    messages: tuple[Message, ...],
    stream: Stream,
    successors: list[list[int]],
    first_message: int,
) -> None:
    """The order in which each rank issues its sends and receives, among its compute acts."""
    node_of = {message.id: node for node, message in enumerate(messages, first_message)}
    compute = -1  # the node of the last compute act issued, over all ranks
    for rank, acts in enumerate(program.ranks):
        issued: dict[Hashable, int] = {}
        begun = False
        for act in acts:
            if act.kind in COMPUTE:
                compute += 1
                begun = True
            elif act.kind in COMMUNICATION and act.message:
                node, key = node_of[act.message.id], stream.key(act.message, rank)
                if begun:
                    successors[compute].append(node)
                if key in issued:
                    successors[issued[key]].append(node)
                issued[key] = node
