"""The record of what one rank did in one step, measured or expected; imports no torch."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from fivefold.counts.offload import host_traffic
from fivefold.counts.policy import engine_policy
from fivefold.counts.rank_work import kept_activations, multiplications
from fivefold.counts.routed import StepChoices, rows_of_choices
from fivefold.counts.shards import ShardPlace
from fivefold.counts.state import model_state
from fivefold.counts.volumes import by_axis, step_volumes
from fivefold.errors import DataError, Mistake
from fivefold.files import parse_json, read_text, write_atomic
from fivefold.layout import Layout

Amount = Annotated[float, Meta(ge=0)]
_AGAIN = "train with --audit, which measures one step"


@dataclass(frozen=True)
class RankRecord:
    """One step of one rank. Sizes are bytes. Names are those in files of earlier runs.

    Attributes:
        rank: number of the rank.
        step: number of the step, counted from 1.
        sent: bytes sent, by mesh axis.
        parameters: bytes of the parameters that the optimizer updates, or for which the host does.
        gradients: bytes of the gradients that the optimizer gets after all reductions.
        optimizer: bytes of the optimizer's moments on the device.
        scales: bytes of delayed scales of 8-bit operands, and of their histories.
        rooms: bytes of the device buffers in which state from the host is updated.
        activations: bytes kept between forward and backward of one microbatch, by stage.
        multiplications: FLOPs of matrix products, without those of attention.
        packed: whether rows of the microbatch of `activations` held several documents.
        any_packed: whether rows of any microbatch of the step held several documents.
        document_length: tokens of the document that a token lay in, on average; None: not recorded.
        chosen: what the rank's tokens chose in layers with experts.
        peak_allocated: peak of device memory in the step; None on a CPU.
        world_size: number of ranks of the run; None: not recorded.
        operations: operations that the step launched; None: not counted.
        layer_operations: of these, how many a layer's forward and its backward launch for one
            microbatch; None: no layer ran.
        waits: how often the host waited for the device in the step, by the line that waits; None:
            not counted.
        host: bytes in host memory: of the optimizer's state, and of weights off the device.
        disk: bytes of them in files.
        to_host: bytes copied to the host for the optimizer.
        from_host: bytes copied back to the device for it.
        state_moving: seconds of reading and writing its files, and of copies that the host itself
            made.
        state_waited: seconds of these for which the host waited.
        brought: bytes of weights copied to the device for their gathers.
        moving: seconds of reading such weights, and of copies that the host itself made.
        waited: seconds of these for which the host waited.
    """

    rank: Annotated[int, Meta(ge=0)]
    step: Annotated[int, Meta(ge=1)]
    sent: Mapping[str, Amount]
    parameters: Amount
    gradients: Amount
    optimizer: Amount
    activations: Mapping[Annotated[int, Meta(ge=0)], Amount]
    multiplications: Amount
    packed: bool = False
    any_packed: bool = False
    document_length: Amount | None = None
    chosen: StepChoices = field(default_factory=StepChoices)
    peak_allocated: Amount | None = None
    world_size: Annotated[int, Meta(ge=1)] | None = None
    operations: Amount | None = None
    layer_operations: tuple[Amount, Amount] | None = None
    waits: Mapping[str, Amount] | None = None
    rooms: Amount = 0.0
    scales: Amount = 0.0
    host: Amount = 0.0
    disk: Amount = 0.0
    to_host: Amount = 0.0
    from_host: Amount = 0.0
    state_moving: Amount = 0.0
    state_waited: Amount = 0.0
    brought: Amount = 0.0
    moving: Amount = 0.0
    waited: Amount = 0.0


def write_record(folder: Path, record: RankRecord) -> None:
    """Write a record to folder/rank-N.json."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / f"rank-{record.rank}.json", json.dumps(asdict(record), indent=2) + "\n")


def read_records(folder: Path) -> list[RankRecord]:
    """All ranks' records, in order.

    Raises:
        DataError: there are no records, one is missing or of another step, or one cannot be read.
    """
    paths = sorted(folder.glob("rank-*.json"))
    if not paths:
        what = f"{folder} has no records: nothing was measured in that run"
        raise DataError(Mistake(what, attempt=_AGAIN))
    records = [_read_record(path) for path in paths]
    records.sort(key=lambda record: record.rank)
    there = {record.rank for record in records}
    count = max(len(records), *(record.world_size or 0 for record in records))
    missing = next((rank for rank in range(count) if rank not in there), None)
    if missing is not None:
        what = f"{folder} lacks the record of rank {missing}"
        raise DataError(Mistake(what, attempt=_AGAIN))
    if len(steps := sorted({record.step for record in records})) > 1:
        what = f"{folder} has records of steps {steps[0]} and {steps[-1]}"
        raise DataError(Mistake(what, attempt=_AGAIN))
    return records


def _read_record(path: Path) -> RankRecord:
    text = read_text(path, DataError)
    names = set(parse_json(text, dict[str, Any], str(path), DataError))
    if unknown := sorted(names - {each.name for each in fields(RankRecord)}):
        what = f"{path} has {unknown[0]!r}, of which this version knows nothing"
        raise DataError(Mistake(what, attempt=_AGAIN))
    return parse_json(text, RankRecord, str(path), DataError)


def audited_step(folder: Path) -> int | None:
    """The step of which there are records; None if there are none that can be read."""
    try:
        return _read_record(folder / "rank-0.json").step
    except DataError:
        return None


def expected_record(
    layout: Layout, measured: RankRecord, every: Sequence[RankRecord] = ()
) -> RankRecord:
    """The record that theory predicts for the rank and step of a measured record.

    Args:
        layout: layout of the run.
        measured: record of the rank.
        every: records of all ranks, whose tokens may reach this one's experts; none: the choices
            are not known, and expected to be even.
    """
    rows = None
    if every:
        rows = rows_of_choices(layout, measured.rank, [record.chosen for record in every])
    at = layout.grid.coordinates(measured.rank)
    traffic = host_traffic(layout, measured.rank)
    state = model_state(layout, at["pp"], ShardPlace.of(layout, measured.rank))
    on_gpu, count = measured.peak_allocated is not None, len(layout.split.stages)
    stages = layout.stages_of(at["pp"])
    return replace(
        measured,
        sent=by_axis(step_volumes(layout, measured.rank, rows)),
        parameters=state.masters,
        gradients=state.updated * engine_policy(layout.config).gradient,
        optimizer=state.optimizer,
        rooms=state.update_buffers,
        scales=state.scales,
        host=state.host,
        disk=state.disk,
        to_host=traffic.to_host,
        from_host=traffic.to_device,
        brought=traffic.weights,
        activations={
            s: kept_activations(layout, s % count, rows, packed=measured.packed, on_gpu=on_gpu)
            for s in stages
        },
        multiplications=multiplications(layout, measured.rank, rows),
    )
