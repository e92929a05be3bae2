"""One rank's part of a verification: runs the layout's steps and compares with the reference."""

import hashlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fivefold.data.packing import Microbatch
from fivefold.layout import Layout
from fivefold.mesh.collectives import all_reduce, gather_objects
from fivefold.mesh.slices import Piece, piece_of
from fivefold.model.eight_bit.rules import SCALES
from fivefold.train.engine import Engine
from fivefold.train.step_result import DeviceResult, StepResult
from fivefold.verify.batches import EVALUATION, global_batch, microbatches, rows_of
from fivefold.verify.choices import Choices, follow
from fivefold.verify.diagnose import diagnose
from fivefold.verify.plant import PLANTS
from fivefold.verify.reference import ReferenceStep
from fivefold.verify.report import (
    SMALL,
    Difference,
    VerifyReport,
    errors_alone,
    errors_in,
    judge,
)
from fivefold.verify.standing_in import scale_each_element, send_each_element


def compare(
    layout: Layout,
    rank: int,
    device: torch.device,
    trace: Sequence[ReferenceStep],
    *,
    baseline: Sequence[ReferenceStep] = (),
    plant: str | None = None,
) -> VerifyReport | None:
    """Run a layout and compare it with a reference; every rank calls this.

    The comparison ends at the first step with wrong gradients, which are then diagnosed.

    Args:
        layout: layout prepared for verification, as the reference's configuration was.
        rank: rank of this process.
        device: device of this rank.
        trace: results of one device in fp64, for each step to run.
        baseline: results of one device in the layout's precision, unless that is fp64.
        plant: name of an error to plant, see `plant.PLANTS`.

    Returns:
        The report on rank 0, None on other ranks.
    """
    engine = Engine(layout, rank, device)
    for stage in engine.model.stages.values():
        scale_each_element(stage, layout.config.training)
    for gradients in engine.model.gradients.values():
        send_each_element(gradients.exchanges)
    if plant is not None:
        PLANTS[plant].install(engine)
    training, errors, alone = layout.config.training, None, None
    if baseline:
        of_one = baseline_differences(trace, baseline)
        errors = errors_in(training.precision, of_one)
        alone = errors_alone(of_one) if training.in_16_bits else None
    found: list[Difference] = []
    findings: list[str] = []
    for step, reference in enumerate(trace):
        sums, result = _gradients(engine, step, reference.choices if training.in_16_bits else None)
        of_step = list(_gradient_differences(engine, step, result, reference))
        of_step += _load_differences(engine, step, result, reference)
        found += of_step
        every = _of_all_ranks(engine, of_step)
        strange: set[str] = set()
        wrong = False
        if rank == 0:
            so_far = judge(layout, every, errors, (), alone)
            wrong = not so_far.passed
            strange = {name for name, *_ in so_far.strange}
        if all_reduce(torch.tensor(float(wrong), device=device), engine.groups.world):
            findings = diagnose(engine, step, result, reference, strange)
            break
        engine.apply(sums)
        found += _weight_differences(engine, step, reference)
        if reference.evaluation is not None:  # after a step, so that its side effects show
            evaluation, _ = engine.evaluate([_own_part(engine, EVALUATION)])
            found.append(_number("evaluation", step, rank, evaluation, reference.evaluation))
    engine.graphs.release()
    every = _of_all_ranks(engine, found)
    return judge(layout, every, errors, findings, alone) if rank == 0 else None


def baseline_differences(
    trace: Sequence[ReferenceStep], other: Sequence[ReferenceStep]
) -> list[Difference]:
    """Differences of another one-device run from the reference."""
    found = []
    for step, (true, own) in enumerate(zip(trace, other, strict=True)):
        for what in ("loss", "norm") + ("evaluation",) * (true.evaluation is not None):
            found.append(_number(what, step, 0, getattr(own, what), getattr(true, what)))
        for name, value in true.further.items():
            found.append(_number("further", step, 0, own.further[name], value, name))
        for what, of_own, of_true in (
            ("grad", own.grads, true.grads),
            ("param", own.after, true.after),
        ):
            for name, whole in of_true.items():
                if name.startswith(SCALES):  # compared in fp64 alone
                    continue
                found.append(_tensor(what, step, 0, name, piece_of(of_own[name]), whole))
    return found


def _gradients(
    engine: Engine, step: int, choices: Choices | None
) -> tuple[DeviceResult, StepResult]:
    """Compute a step's gradients on the parameters; in fp16 with the first loss scale that allows
    it.

    Args:
        engine: this rank's engine.
        step: step, from 0.
        choices: choices that its routers and indexers must make; None: their own.
    """
    _, least = engine.layout.config.optimizer.loss_scales
    while True:
        if choices is not None:
            for stage in engine.model.stages.values():
                follow(stage, choices, engine.device)
        sums = engine.gradients(_own_part(engine, step))
        result = sums.read()
        if not result.overflowed or sums.loss_scale == least:
            return sums, result
        engine.apply(sums)
        engine.optimizer.zero_grad()


def _own_part(engine: Engine, index: int) -> list[Microbatch]:
    """This data-parallel rank's part of a global batch."""
    config, grid = engine.layout.config, engine.layout.grid
    rows = rows_of(config, grid.dp_rank(engine.groups.rank), grid.dp)
    return microbatches(config, global_batch(config, index), rows)


def _gradient_differences(
    engine: Engine, step: int, result: StepResult, reference: ReferenceStep
) -> Iterator[Difference]:
    """Differences of the loss, the norm and every gradient."""
    rank = engine.groups.rank
    yield _number("loss", step, rank, result.loss, reference.loss)
    for name, true in reference.further.items():
        yield _number("further", step, rank, result.extra[name], true, name)
    yield _number("norm", step, rank, result.grad_norm, reference.norm)
    # A gradient that is zero up to rounding (a key's bias) is compared with the largest one.
    floor = SMALL * max(float(grad.abs().max()) for grad in reference.grads.values())
    for name, parameter in engine.trained.items():
        stored = engine.model.records[name].stored
        piece = piece_of(parameter).like(engine.optimizer.gradient(name))
        yield _tensor("grad", step, rank, stored, piece, reference.grads[stored], floor=floor)


def _load_differences(
    engine: Engine, step: int, result: StepResult, reference: ReferenceStep
) -> Iterator[Difference]:
    """Differences in tokens per expert."""
    for here, true_ME in zip(result.routing, reference.loads, strict=True):
        own = torch.tensor(here.counts, dtype=torch.float64)
        name = f"layers.{here.layer}.mlp.experts"
        yield _tensor("load", step, engine.groups.rank, name, piece_of(own), true_ME.sum(0))


def _weight_differences(
    engine: Engine, step: int, reference: ReferenceStep
) -> Iterator[Difference]:
    """Differences of every weight, expert bias and delayed scale after the update, with digests for
    replicas."""
    rank, floor = engine.groups.rank, engine.layout.config.optimizer.lr
    held = {name: piece_of(p).like(engine.weight(name)) for name, p in engine.parameters.items()}
    held |= {name: piece_of(value) for name, value in engine.model.buffers(copies=True).items()}
    if not engine.layout.config.training.in_16_bits:  # one bit of 16 moves a scale by more
        held |= engine.model.scaling.stored(copies=True)
    for name, piece in held.items():
        record = engine.model.records.get(name)
        stored = name if record is None else record.stored
        whole = reference.after[stored]
        yield _tensor("param", step, rank, stored, piece, whole, floor=floor, digests=True)


def _number(what: str, step: int, rank: int, own: float, true: float, name: str = "") -> Difference:
    # A power that a float cannot hold is an error in Python; a product is infinite.
    return Difference(
        what, step, name, (), rank, abs(own - true), abs(true), own * true, own * own, true * true
    )


def _tensor(
    what: str,
    step: int,
    rank: int,
    name: str,
    piece: Piece,
    whole: Tensor,
    *,
    floor: float = 0.0,
    digests: bool = False,
) -> Difference:
    """Difference of a rank's part from the same part of the whole, which is fp64 on the CPU."""
    held = piece.local.cpu()
    own, true = held.double().flatten(), whole[piece.slices].flatten()
    off = own - true
    return Difference(
        what=what,
        step=step,
        name=name,
        part=tuple(edge for part in piece.slices for edge in (part.start, part.stop)),
        rank=rank,
        error=float(off.abs().max()) if off.numel() else 0.0,
        scale=max(float(whole.abs().max()), floor),
        dot=float(own @ true),
        own=float(own @ own),
        true=float(true @ true),
        off=float(off @ off),
        digest=_digest(held) if digests else "",
    )


def _digest(tensor: Tensor) -> str:
    raw = tensor.contiguous().view(torch.uint8)  # numpy has no bf16
    return hashlib.blake2b(raw.numpy().tobytes(), digest_size=8).hexdigest()


def _of_all_ranks(engine: Engine, own: list[Difference]) -> list[Difference]:
    return [each for found in gather_objects(own, engine.groups.world) for each in found]
