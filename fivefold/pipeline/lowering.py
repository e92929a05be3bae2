"""Lowering of programs: sends dX early, splits overlapped pairs, and adds sends and receives."""

from collections import deque
from dataclasses import replace

from fivefold.pipeline.costs.costs import Costs
from fivefold.pipeline.graph import dependency_graph
from fivefold.pipeline.ir import COMMUNICATION, COMPUTE, Act, Kind, Program


def eager_dx(program: Program) -> Program:
    """Send dX before dW is computed: each BW whose dX goes to another rank becomes B, W.

    Reduces 1F1B's bubble from (P-1)(F+B+W) to (P-1)(F+B) and holds nothing longer, but needs a
    backward pass in two halves.
    """
    length = program.num_stages // program.num_copies
    leaving = [
        stage % length > 0 and program.placement[stage - 1] != rank
        for stage, rank in enumerate(program.placement)
    ]

    def halves(act: Act) -> tuple[Act, ...]:
        if act.kind is not Kind.BW or not leaving[act.stage]:
            return (act,)
        where = act.piece
        return Act(Kind.B, *where), Act(Kind.W, *where)

    ranks = tuple(tuple(half for act in acts for half in halves(act)) for acts in program.ranks)
    return replace(program, ranks=ranks)


def unpaired(program: Program) -> Program:
    """Run the two halves of each FB in sequence, the forward first."""
    ranks = tuple(tuple(kid for act in acts for kid in act.elementary) for acts in program.ranks)
    return replace(program, ranks=ranks)


def executed(program: Program, *, pairs: bool, eager: bool) -> Program:
    """The compute actions of a program as they are executed.

    Args:
        program: compute-only program, as its schedule makes it.
        pairs: whether the halves of an FB overlap; otherwise the forward runs first.
        eager: whether a dX outside pairs is sent before its dW is computed.
    """
    if not pairs:
        program = unpaired(program)
    return eager_dx(program) if eager else program


def lower(program: Program, costs: Costs | None = None) -> Program:
    """Add every SEND and RECV, in an order that cannot deadlock under any stream model.

    The program is timed with `costs` (default: one unit for each of F, B and W). A message's time t
    is the end of its producer. SEND follows the producer directly; RECV precedes the receiver's
    first compute action that *ends* after t; a rank issues its messages by (t, id). Every wait then
    leads to a later (t, id), so there is no circular wait, whether streams are shared by a rank, a
    pair, or a pair and direction. The costs affect the speed, not the safety.

    Deterministic: every rank that lowers the same program gets the same result.
    """
    costs = costs or Costs.uniform(program.num_stages)
    program = replace(program, messages=())
    graph = dependency_graph(program)
    _, ends = graph.longest_paths(graph.weights(program, costs))
    queues: list[list[tuple[float, int, Act]]] = [[] for _ in program.ranks]
    for message, producer in zip(graph.messages, graph.producers, strict=True):
        t, ids = ends[producer], (message.mb, message.slice)
        send = Act(Kind.SEND, message.src_stage, *ids, message=message)
        receive = Act(Kind.RECV, message.dst_stage, *ids, message=message)
        queues[message.src_rank].append((t, message.id, send))
        queues[message.dst_rank].append((t, message.id, receive))
    node, ranks = 0, []
    for acts, queue in zip(program.ranks, queues, strict=True):
        own = sum(act.kind in COMPUTE for act in acts)
        queue.sort(key=lambda entry: entry[:2])
        ranks.append(_merge(acts, ends[node : node + own], deque(queue)))
        node += own
    return replace(program, ranks=tuple(ranks), messages=graph.messages)


def _merge(
    acts: tuple[Act, ...], ends: list[float], queue: deque[tuple[float, int, Act]]
) -> tuple[Act, ...]:
    """Insert a rank's sends and receives between its actions.

    Messages with t < its end precede a compute action; messages with t <= the end of the last
    compute action precede any other action (for example REDUCE).
    """
    merged: list[Act] = []
    clock, remaining = 0.0, iter(ends)
    for act in acts:
        if act.kind in COMMUNICATION:
            continue  # already lowered: placed anew
        if act.kind in COMPUTE:
            clock = next(remaining)
            while queue and queue[0][0] < clock:
                merged.append(queue.popleft()[2])
        else:
            while queue and queue[0][0] <= clock:
                merged.append(queue.popleft()[2])
        merged.append(act)
    merged.extend(entry[2] for entry in queue)
    return tuple(merged)
