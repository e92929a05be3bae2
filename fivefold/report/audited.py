"""Compares the audited step of a run with theory."""

from pathlib import Path
from statistics import median

from fivefold.audit.record import read_records
from fivefold.audit.report import AuditReport, Outlook, audit, usual_seconds
from fivefold.check import check
from fivefold.layout import Layout
from fivefold.model.description import layer_kind
from fivefold.predict.cluster import load_cluster
from fivefold.predict.layer import forward_operations
from fivefold.predict.memory import peak_memory
from fivefold.predict.software import Software
from fivefold.predict.step import predict
from fivefold.report.settings import run_config
from fivefold.verify.report import describe


def audited(folder: Path, cluster: str | None = None) -> AuditReport:
    """The audit of a run that was trained with --audit.

    Args:
        folder: run folder.
        cluster: kind of GPU, or file of a cluster, for which to predict time and peak memory.

    Raises:
        DataError: the folder is none of a run, or holds no audit.
        ConfigError: there is no such cluster.
    """
    config = run_config(folder)
    records = read_records(folder / "audit")
    if (folder / "audit" / "config.toml").is_file():  # later starts may have another layout
        config = run_config(folder / "audit")
    layout = check(config, len(records), planned=True)
    step = records[0].step
    return audit(
        f"{folder}, step {step}; {describe(layout)}",
        layout,
        records,
        usual_seconds(folder / "metrics.jsonl", step),
        None if cluster is None else outlook(layout, cluster),
        layer_operations(layout),
    )


def layer_operations(layout: Layout) -> tuple[float, float]:
    """What the planner's times take a layer to launch, forward and backward: the usual layer."""
    model = layout.config.model
    kinds = [layer_kind(model, layer) for layer in range(model.num_layers)]
    forward = median(forward_operations(layout, kind, Software()) for kind in kinds)
    return forward, 2 * forward


def outlook(layout: Layout, name: str) -> Outlook:
    """The planner's prediction for a run on a cluster, by kind of GPU or file."""
    cluster = load_cluster(name, layout.grid.world_size)
    step = predict(layout, cluster)
    peaks = [rank.peak for rank in peak_memory(layout, cluster).ranks]
    return Outlook(step.step_time, (step.low, step.high), peaks, cluster.host_operation)
