"""The dependency graph of a program: proves the absence of deadlock and gives the execution time.

There is one node per compute action and one contracted node per message. A compute action waits for
the previous one on its rank and for its inputs. A message waits for its producer; once lowered,
also for the last compute action issued before its SEND or RECV on either end, and for the previous
message of either end, as if a rank had one stream for all of its messages. Under rendezvous
semantics, where a transfer starts only when both ends have reached it, the program is free of
deadlock if and only if this graph has no cycle, and its longest path is the execution time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from fivefold.pipeline.costs.costs import Costs
from fivefold.pipeline.ir import (
    COMMUNICATION,
    COMPUTE,
    Act,
    Direction,
    Message,
    Program,
    ProgramError,
)


@dataclass(frozen=True)
class Graph:
    """Dependency graph: nodes are first all compute actions, rank by rank, then all messages.

    Attributes:
        computes: (rank, action) of each compute node.
        messages: message of each message node.
        producers: for each message, the compute node that produces it.
        successors: for each node, the nodes that wait for it.
    """

    computes: tuple[tuple[int, Act], ...]
    messages: tuple[Message, ...]
    producers: tuple[int, ...]
    successors: tuple[list[int], ...]

    def weights(self, program: Program, costs: Costs) -> list[float]:
        """The duration of each node."""
        parts, slices = program.num_weight_parts, program.num_slices
        return [
            *(costs.of(act, parts, slices) for _, act in self.computes),
            *(costs.hop for _ in self.messages),
        ]

    def is_message(self, node: int) -> bool:
        """Whether a node is a message."""
        return node >= len(self.computes)

    def order(self) -> list[int]:
        """The nodes in topological order.

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
        for node in order:  # grows during iteration
            for successor in self.successors[node]:
                waiting[successor] -= 1
                if waiting[successor] == 0:
                    order.append(successor)
        if len(order) < len(waiting):
            raise ProgramError(f"dead-lock, a circular wait: {self._cycle(waiting)}")
        return order

    def longest_paths(self, weights: Sequence[float]) -> tuple[list[float], list[float]]:
        """Earliest start and end of each node, given the nodes' durations."""
        starts, ends = [0.0] * len(weights), [0.0] * len(weights)
        for node in self._order:
            end = ends[node] = starts[node] + weights[node]
            for successor in self.successors[node]:
                if starts[successor] < end:
                    starts[successor] = end
        return starts, ends

    def _cycle(self, waiting: list[int]) -> str:
        """Describes one circular wait among the unfinished nodes."""
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
        rank, act = self.computes[node]
        return f"{act} on rank {rank}"


def dependency_graph(program: Program, *, one_stream: bool = False) -> Graph:
    """The graph of a program in which every (stage, microbatch, slice) is computed once.

    Unless the messages of each rank share `one_stream`, in the order in which it issues them, SENDs
    and RECVs are ignored and a message waits only for its producer.
    """
    computes = [
        (rank, act)
        for rank, acts in enumerate(program.ranks)
        for act in acts
        if act.kind in COMPUTE
    ]
    messages = program.messages or program.crossings()
    successors: list[list[int]] = [[] for _ in range(len(computes) + len(messages))]
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
    if one_stream:
        _link_messages(program, messages, successors, len(computes))
    return Graph(tuple(computes), messages, tuple(producers), tuple(successors))


class _Makers:
    """The node that produces the activations, or the dX, of a stage and microbatch."""

    def __init__(self, program: Program, computes: Sequence[tuple[int, Act]]) -> None:
        self._slices = program.num_slices
        each = program.num_microbatches * self._slices
        self._nodes = {way: [[-1] * each for _ in program.placement] for way in Direction}
        for node, (_, act) in enumerate(computes):
            for kid in act.elementary:
                if (way := kid.direction) is not None:
                    self._nodes[way][kid.stage][kid.mb * self._slices + kid.slice] = node

    def node(self, direction: Direction, stage: int, mb: int, piece: int) -> int:
        return self._nodes[direction][stage][mb * self._slices + piece]


def _link_local_stages(program: Program, makers: _Makers, successors: list[list[int]]) -> None:
    """Add edges for tensors passed between stages on the same rank."""
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


def _link_messages(
    program: Program,
    messages: tuple[Message, ...],
    successors: list[list[int]],
    first_message: int,
) -> None:
    """Add edges for the order in which each rank issues sends and receives."""
    node_of = {message.id: node for node, message in enumerate(messages, first_message)}
    compute = -1  # node of the last compute action issued, over all ranks
    for acts in program.ranks:
        begun, before = False, None
        for act in acts:
            if act.kind in COMPUTE:
                compute += 1
                begun = True
            elif act.kind in COMMUNICATION and act.message:
                node = node_of[act.message.id]
                if begun:
                    successors[compute].append(node)
                if before is not None:
                    successors[before].append(node)
                before = node
