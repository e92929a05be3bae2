"""`fivefold audit`: compare a run with what theory predicts for its layout."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from fivefold.audit.record import read_records
from fivefold.audit.report import Outlook, audit, usual_seconds
from fivefold.check import check
from fivefold.cli.runs import run_config
from fivefold.cli.verdict import tell
from fivefold.config.parallel import option
from fivefold.config.settings import argument
from fivefold.config.sources import load_options
from fivefold.layout import Layout
from fivefold.model.description import layer_kind
from fivefold.predict.cluster import load_cluster
from fivefold.predict.layer import forward_operations
from fivefold.predict.memory import peak_memory
from fivefold.predict.software import Software
from fivefold.predict.step import predict
from fivefold.verify.report import describe


@dataclass(frozen=True)
class Options:
    """Compare what a run sent, held and computed in one step with what theory predicts.

    The run must have been trained with --audit, which measures its second step on every rank.
    Bytes on the wire, weights, gradients, optimizer state and matrix products must be equal,
    activations within 3 %; the exit status is 0 only if they are. With --cluster, the step time
    and the peak of GPU memory are predicted for that machine.
    """

    run: str = argument("run folder of `fivefold train`")
    cluster: str | None = option(
        None, "kind of GPU, or TOML file of a cluster, for which to predict the step time"
    )
    json: bool = option(False, "print the result as JSON")


def run(argv: Sequence[str]) -> int:
    """Run the command with the arguments that follow its name."""
    options = load_options(argv, Options)
    folder = Path(options.run)
    config = run_config(folder)
    records = read_records(folder / "audit")
    if (folder / "audit" / "config.toml").is_file():  # later starts may have another layout
        config = run_config(folder / "audit")
    layout = check(config, len(records), planned=True)
    step = records[0].step
    report = audit(
        f"{folder}, step {step}; {describe(layout)}",
        layout,
        records,
        usual_seconds(folder / "metrics.jsonl", step),
        None if options.cluster is None else outlook(layout, options.cluster),
        layer_operations(layout),
    )
    return tell(report, as_json=options.json)


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
