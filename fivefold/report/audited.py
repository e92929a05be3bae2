"""Compares the audited step of a run with theory."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Annotated

from msgspec import UNSET, Meta, UnsetType

from fivefold.audit.record import RankRecord, read_records
from fivefold.audit.report import AuditReport, PlannerEstimate, audit
from fivefold.check import check
from fivefold.description.kinds import layer_kind
from fivefold.files import read_json_lines
from fivefold.layout import Layout
from fivefold.predict.cluster_file import load_cluster
from fivefold.predict.memory.peak import peak_memory
from fivefold.predict.software import Software
from fivefold.predict.step import predict
from fivefold.predict.times.layer import forward_operations
from fivefold.report.settings import run_config
from fivefold.report.starts import ComparableSteps
from fivefold.tell.describe import parallelism
from fivefold.train.folder.run_folder import RunFolder


def audited(folder: Path, cluster: str | None = None) -> AuditReport:
    """The audit of a run that was trained with --audit.

    Args:
        folder: run folder.
        cluster: kind of GPU, or file of a cluster, for which to predict time and peak memory.

    Raises:
        DataError: the folder is none of a run, or holds no audit.
        ConfigError: there is no such cluster.
    """
    run = RunFolder(folder)
    config, records = run_config(folder, run.audit), read_records(run.audit)
    step, sizes = records[0].step, config.training.batch_sizes
    config = config.with_batch(sizes.at(sizes.samples(step - 1)))
    layout = check(config, len(records), planned=True)
    return audit(
        f"{folder}, step {step}; {parallelism(layout)}",
        layout,
        records,
        usual_seconds(run.metrics_file, step, ComparableSteps(run.starts(), step)),
        None if cluster is None else outlook(layout, records, cluster),
        layer_operations(layout),
    )


def usual_seconds(metrics: Path, audited: int, alike: ComparableSteps) -> float | None:
    """The median time of a run's usual steps of the measured one's size, without itself.

    Args:
        metrics: file with the times.
        audited: the measured step.
        alike: which steps were taken as that one.

    Raises:
        DataError: the file cannot be read.
    """
    lines = read_json_lines(metrics, _Line)
    steps = [line for line in lines if line.grad_norm is not UNSET]
    usual = alike.usual([line.step for line in steps]) - {audited}
    sizes = {line.step: line.tokens for line in steps}
    same = [s for s in steps if s.step in usual and s.tokens == sizes.get(audited, s.tokens)]
    timed = [s.seconds for s in same if s.seconds is not UNSET]
    return median(timed) if timed else None


@dataclass(frozen=True)
class _Line:
    """The used fields of a line of `metrics.jsonl`; only steps have a gradient norm."""

    step: Annotated[int, Meta(ge=0)]
    tokens: int | UnsetType = UNSET
    seconds: Annotated[float, Meta(ge=0)] | UnsetType = UNSET
    grad_norm: float | UnsetType | None = UNSET


def _as_packed(layout: Layout, records: Sequence[RankRecord]) -> Layout:
    """The layout, with documents as long as the audited rows held on average."""
    found = [r.document_length for r in records if r.document_length is not None]
    if not found or not layout.config.data.reset_attention_mask:
        return layout
    length = max(round(mean(found)), 1)
    return replace(layout, config=layout.config.with_values(document_length=length))


def layer_operations(layout: Layout) -> tuple[float, float]:
    """What the planner's times take a layer to launch, forward and backward: the usual layer."""
    model = layout.config.model
    kinds = [layer_kind(model, layer) for layer in range(model.num_layers)]
    forward = median(forward_operations(layout, kind, Software()) for kind in kinds)
    return forward, 2 * forward


def outlook(layout: Layout, records: Sequence[RankRecord], name: str) -> PlannerEstimate:
    """The planner's prediction for a run on a cluster, by kind of GPU or file.

    Args:
        layout: layout of the run.
        records: what it measured: its documents are taken to be as long as those of that step.
        name: kind of GPU, or file of a cluster.
    """
    layout = _as_packed(layout, records)
    cluster = load_cluster(name, layout.grid.world_size)
    step = predict(layout, cluster)
    peaks = [rank.peak for rank in peak_memory(layout, cluster).ranks]
    return PlannerEstimate(step.step_time, (step.low, step.high), peaks, cluster.host_operation)
