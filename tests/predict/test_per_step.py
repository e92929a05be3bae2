"""What is sent once a step, against a slow simulation of actions and messages one by one."""

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from fivefold.config.parallel import ParallelConfig
from fivefold.config.sharding import SHARDING
from fivefold.hardware import GPUS
from fivefold.pipeline.costs.costs import Costs
from fivefold.pipeline.ir import Kind, Program
from fivefold.pipeline.order import Order
from fivefold.predict.data_parallel.per_step import StepTransfers, step_transfers
from fivefold.predict.data_parallel.transfers import StageTransfers
from fivefold.predict.program.makespan import leveled_program
from fivefold.predict.program.walk import Walked
from fivefold.predict.times.compute import overlapped

LINE, LOOP, IN_V = (0, 1, 2, 3), (0, 1, 2, 3) * 2, (0, 1, 2, 3, 3, 2, 1, 0)
PROGRAMS = (
    *(("gpipe", LINE), ("1f1b", LINE), ("zb_h1", LINE), ("zb_h2", LINE), ("dualpipe", LINE)),
    *(("interleaved_1f1b", LOOP), ("interleaved_zb", LOOP)),
    *(("zb_v", IN_V), ("v_half", IN_V), ("v_min", IN_V), ("dualpipe_v", IN_V)),
)
GPU = GPUS["H100"]
SETTINGS = (
    *({}, {"overlap_grad_reduce": False}, {"overlap_param_gather": False}),
    {"overlap_param_gather_with_optimizer_step": True},
)


class Drawn:
    """A program with random times, and what a random strategy sends in it."""

    def __init__(self, name: str, placement: tuple[int, ...], seed: int) -> None:
        rng = random.Random(f"{name} {seed}")
        pairs = name.startswith("dualpipe") and seed % 2 == 0
        self.table = leveled_program(Order(name, placement, 12), pairs=pairs, eager=seed % 3 == 0)
        self.program: Program = self.table.program
        count = self.program.num_stages // self.program.num_copies

        def draw() -> list[float]:
            return [rng.choice((0.2, 1.0, 4.0)) * (0.5 + rng.random()) for _ in range(count)]

        copies = self.program.num_copies
        f, b, w = (tuple(draw() * copies) for _ in range(3))
        self.costs = Costs(f, b, w, rng.choice((0.0, 0.3)))
        self.moves = [
            StageTransfers(gathered, reduced, rng.choice((1, 2, 7)))
            for gathered, reduced in zip(draw(), draw(), strict=True)
        ]
        self.layers = [rng.choice((0, 1, 2, 7)) for _ in range(count)]
        self.parallel = replace(ParallelConfig(), **rng.choice(SETTINGS))
        self.strategy = SHARDING[rng.choice(("no_shard", "optim", "optim_grads"))]
        self.update, self.gpu = rng.random(), GPU
        self.by_block = rng.choice((True, False))

    @property
    def per_step(self) -> StepTransfers:
        f = self.costs.f
        stages = [(each, f[s], self.layers[s]) for s, each in enumerate(self.moves)]
        placement = self.program.placement
        parallel, strategy = self.parallel, self.strategy
        by_block = self.by_block
        return step_transfers(
            self.gpu, parallel, strategy, stages, placement, self.update, by_block
        )

    @property
    def walked(self) -> Walked:
        sent = self.per_step
        ready, gathers = (np.array([each]).T for each in (sent.ready, sent.gathers))
        return self.table.walk([self.costs], ready, gathers)

    @property
    def seconds(self) -> float:
        """Of the program with what is sent, and of the update."""
        walked = self.walked
        arrived = self.per_step.arrived(walked.starts[:, 0].tolist(), walked.ends[:, 0].tolist())
        return max(float(walked.makespans[0]), arrived) + self.update


def drawn(count: int) -> list[Drawn]:
    return [Drawn(*each, seed) for each in PROGRAMS for seed in range(count)]


def one_by_one(
    program: Program, costs: Costs, sent: StepTransfers
) -> tuple[float, list[float], list[float]]:
    """The makespan, and when each stage's last weight gradients begin and end."""
    length = program.num_stages // program.num_copies
    ended: dict[tuple[bool, int, int], float] = {}
    begun: set[int] = set()
    starts, ends = [0.0] * program.num_stages, [0.0] * program.num_stages
    queues, clocks = [list(row) for row in program.ranks], [0.0] * program.num_ranks
    while any(queues):
        for rank, queue in enumerate(queues):
            if not queue:
                continue
            act, needed = queue[0], []
            for kid in act.elementary:
                if kid.kind is Kind.F and kid.stage % length > 0:
                    needed.append((True, kid.stage - 1, kid.mb))
                elif kid.kind in (Kind.B, Kind.BW):
                    last = kid.stage % length == length - 1
                    needed.append((last, kid.stage + (not last), kid.mb))
            if not ended.keys() >= set(needed) - {(True, kid.stage, kid.mb) for kid in act.kids}:
                continue
            start = clocks[rank]
            for key in needed:
                far = program.placement[key[1]] != rank
                start = max(start, ended.get(key, 0.0) + costs.hop * far)
            time = costs.of(act)
            for kid in act.elementary:
                if kid.kind is Kind.F and kid.stage not in begun:
                    begun.add(kid.stage)
                    start, time = max(start, sent.ready[kid.stage]), time + sent.gathers[kid.stage]
            clocks[rank] = start + time
            for kid in act.elementary:
                if kid.kind in (Kind.F, Kind.B, Kind.BW):
                    ended[kid.kind is Kind.F, kid.stage, kid.mb] = clocks[rank]
                if kid.kind in (Kind.W, Kind.BW):
                    starts[kid.stage], ends[kid.stage] = start, clocks[rank]
            queue.pop(0)
    return max(clocks), starts, ends


def message_by_message(
    sent: StepTransfers,
    messages: Sequence[int],
    starts: Sequence[float],
    ends: Sequence[float],
) -> float:
    """When the last message has arrived, if each is sent as soon as it can be and its rank's link
    is free: all but the last of a stage from its backward's start on."""
    free: dict[int, float] = defaultdict(float)
    for stage in sorted(range(len(ends)), key=ends.__getitem__):
        rank, count = sent.placement[stage], messages[stage]
        same = [end for s, end in enumerate(ends) if sent.placement[s] == rank]
        for number in range(count):
            begins = ends[stage] if number == count - 1 else starts[stage]
            begins = begins if sent.overlaps else max(same)
            free[rank] = max(free[rank], begins) + sent.reductions[stage] / count
    return max(free.values())


@pytest.mark.parametrize("name, placement", PROGRAMS)
def test_a_walk_is_the_simulation_of_every_action(name: str, placement: tuple[int, ...]) -> None:
    for seed in range(12):
        each = Drawn(name, placement, seed)
        walked, (makespan, starts, ends) = (
            each.walked,
            one_by_one(each.program, each.costs, each.per_step),
        )
        assert walked.makespans[0] == pytest.approx(makespan)
        assert walked.starts[:, 0] == pytest.approx(starts)
        assert walked.ends[:, 0] == pytest.approx(ends)


def test_sums_arrive_as_their_messages_do_one_by_one() -> None:
    """Where a backward loses nothing to them; otherwise at most what all backwards lose later."""
    later = 0
    for each in drawn(12):
        sent, (_, starts, ends) = each.per_step, one_by_one(each.program, each.costs, each.per_step)
        copies = each.program.num_copies
        messages = [move.messages for move in each.moves] * copies
        apart = message_by_message(sent, messages, starts, ends)
        free = replace(sent, slowdown=0.0)
        assert free.arrived(starts, ends) == pytest.approx(apart)
        most = sent.slowdown * sum(end - start for start, end in zip(starts, ends, strict=True))
        assert apart - 1e-9 <= sent.arrived(starts, ends) <= apart + most + 1e-9
        later += sent.arrived(starts, ends) > apart + 1e-9
    assert later > 20


def test_one_stage_hides_what_overlaps() -> None:
    """The first layer's gather and the last message are exposed; the rest runs beside the work."""
    for seed in range(20):
        rng = random.Random(seed)
        f, b, w, gathered, reduced = (0.1 + rng.random() for _ in range(5))
        table = leveled_program(Order("1f1b", (0,), 1), pairs=False, eager=False)
        stages = [(StageTransfers(gathered, reduced, 4), f, 5)]
        by_block = seed % 2 == 0
        sent = step_transfers(GPU, ParallelConfig(), SHARDING["optim"], stages, (0,), 0.0, by_block)
        ready, gathers = np.array([sent.ready]).T, np.array([sent.gathers]).T
        walked = table.walk([Costs((f,), (b,), (w,))], ready, gathers)
        before = gathered / 5 + overlapped(GPU, f, gathered * 4 / 5)
        after = reduced / 4 + overlapped(GPU, b + w, reduced * 3 / 4)
        found = sent.arrived(walked.starts[:, 0].tolist(), walked.ends[:, 0].tolist())
        assert found == pytest.approx(before + f + b + w + after)


def test_nothing_that_takes_less_time_makes_a_step_longer() -> None:
    changed = 0
    for number, each in enumerate(drawn(16)):
        whole, rng = each.seconds, random.Random(number)
        stage, less = rng.randrange(len(each.moves)), rng.choice((0.3, 0.9))
        count = len(each.moves)
        for name in ("f", "b", "w", "hop"):
            costs, was = each.costs, getattr(each.costs, name)
            shorter: object = (
                was * less
                if name == "hop"
                else tuple(
                    time * less if s % count == stage else time for s, time in enumerate(was)
                )
            )
            each.costs = replace(costs, **{name: shorter})
            assert each.seconds <= whole + 1e-9, (name, number)
            changed += each.seconds < whole - 1e-9
            each.costs = costs
        for name in ("gathered", "reduced"):
            moves = each.moves
            faster = replace(moves[stage], **{name: getattr(moves[stage], name) * less})
            each.moves = [*moves[:stage], faster, *moves[stage + 1 :]]
            assert each.seconds <= whole + 1e-9, (name, number)
            changed += each.seconds < whole - 1e-9
            each.moves = moves
        each.update *= less
        assert each.seconds < whole
        each.update /= less
        each.gpu = replace(GPU, overlap_slowdown=GPU.overlap_slowdown * less)
        assert each.seconds <= whole + 1e-9, number
    assert changed > 300
