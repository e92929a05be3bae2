"""What the rank of an engine reads."""

from fivefold.data.packing import Microbatch
from fivefold.train.engine import Engine
from fivefold.verify.batches import global_batch, microbatches, rows_of


def own_batch(engine: Engine, index: int) -> list[Microbatch]:
    """The microbatches of global batch `index` that this rank reads."""
    config, grid = engine.layout.config, engine.layout.grid
    rows = rows_of(config, grid.dp_rank(engine.groups.rank), grid.dp)
    return microbatches(config, global_batch(config, index), rows)
