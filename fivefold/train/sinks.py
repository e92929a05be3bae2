"""Where the metrics of a run go."""

from collections.abc import Collection
from dataclasses import asdict

from fivefold.config.config import Config
from fivefold.train.console import Console
from fivefold.train.folder.metrics_file import MetricsFile
from fivefold.train.folder.run_folder import RunFolder
from fivefold.train.machine.numa import ranges
from fivefold.train.metrics import Sink, TensorBoard, WeightsAndBiases


def open_sinks(
    config: Config, folder: RunFolder, step: int, skipped: Collection[int], console: Console
) -> list[Sink]:
    """The destinations of metrics that the settings name, apart from the console.

    Args:
        config: every setting.
        folder: run folder; records of steps after `step`, the last one done, are removed there.
        step: number of steps done.
        skipped: steps without a record, as the numbers of steps before each.
        console: console that shows lines that are no records.
    """
    logging = config.logging
    metrics = MetricsFile(folder.metrics_file, after_step=step)
    if metrics.removed:
        lines = "1 line that is no record"
        if metrics.removed > 1:
            lines = f"{metrics.removed} lines that are no records"
        console.warning(f"removed {lines} from {folder.metrics_file}")
    if lost := [step for step in metrics.missing if step - 1 not in skipped]:
        steps = f"step{'s' * (len(lost) > 1)} {ranges(lost)}"
        console.warning(f"{folder.metrics_file} has lost its record of {steps}")
    sinks: list[Sink] = [metrics]
    if logging.tensorboard:
        sinks.append(TensorBoard(folder.path / "tensorboard"))
    if logging.wandb_project:
        values = {name: asdict(section) for name, section in config.sections()}
        sinks.append(
            WeightsAndBiases(
                logging.wandb_project, folder.path.name, values, folder.path, resume=step > 0
            )
        )
    return sinks
