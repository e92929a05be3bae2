"""Initial values of new adapters beside loaded weights."""

from collections.abc import Callable, Mapping

from fivefold.checkpoint.checkpointer import Checkpointer
from fivefold.mesh.slices import Piece
from fivefold.model.init import load_lengths
from fivefold.model.lora import MAGNITUDE
from fivefold.train.engine import Engine


def measure_rows(
    engine: Engine, source: Checkpointer, fill: Callable[[Mapping[str, Piece]], None], *, new: bool
) -> None:
    """Set new row magnitudes (DoRA), if there are any, to the lengths of the rows of the loaded
    weights.

    Args:
        engine: its weights are loaded, and not yet finished by `after_load`.
        source: agrees between the ranks on how it ended.
        fill: reads pieces of the weights, by their stored names.
        new: whether adapters were not loaded.

    Raises:
        CheckpointError: on every rank, if one could not read.
    """
    weights, records = engine.optimizer.weights(), engine.model.records
    magnitudes = {name: kept for name, kept in weights.items() if name.endswith(MAGNITUDE)}

    def measure(_: Mapping[str, Piece]) -> None:
        for name, kept in magnitudes.items():
            of = weights[f"{name.removesuffix(MAGNITUDE)}.weight"]
            load_lengths(records[name].stored, kept, of, fill)

    if new:
        source.load_by("measuring rows", {}, measure)
        engine.optimizer.take(magnitudes)
