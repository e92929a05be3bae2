"""A model with experts that starts from the weights of a dense model."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from fivefold.checkpoint.checkpointer import Checkpointer
from fivefold.config.config import Config
from fivefold.config.upcycling import dense_model
from fivefold.convert.upcycle import upcycled
from fivefold.errors import CheckpointError
from fivefold.mesh.slices import Piece
from fivefold.model.eight_bit.rules import SCALES
from fivefold.train.engine import Engine
from fivefold.train.folder.new_adapters import measure_rows
from fivefold.units import several


def of_dense(config: Config) -> Config:
    """The configuration whose --load is the dense model; only its weights are taken."""
    dense = dense_model(config.model, config.checkpoint.moe_upcycling_granularity)
    return replace(config, model=dense, checkpoint=replace(config.checkpoint, finetune=True))


@contextmanager
def naming_needed_size(config: Config) -> Iterator[None]:
    """Add the size that the experts need, where a dense model is refused for the size of its
    MLP."""
    try:
        yield
    except CheckpointError as error:
        size, parts = config.model.expert_ffn_size, config.checkpoint.moe_upcycling_granularity
        why = (
            f"experts of {size} features (moe_ffn_hidden_size), of which {parts} make an MLP "
            f"(moe_upcycling_granularity), ask for one of {parts} x {size} = {parts * size}"
        )
        raise CheckpointError(
            *(
                replace(mistake, why=(*mistake.why, why), works=(), attempt=None)
                if any(line.startswith("ffn_hidden_size") for line in mistake.why)
                else mistake
                for mistake in error.mistakes
            )
        ) from error


def upcycling_note(config: Config, folder: Path) -> str:
    """A note about how experts are made from the MLPs of a dense model."""
    model, parts = config.model, config.checkpoint.moe_upcycling_granularity
    experts, topk = several(model.num_experts or 0, "expert"), model.moe_router_topk
    if parts == 1:
        return f"each of {experts} starts as the MLP of {folder}"
    said = f"{experts} start as {parts} parts of the MLP of {folder}, each several times"
    if topk % parts:
        said += f"; {topk} experts of a token are not whole sets of these parts"
    return said


def start_from_dense(
    engine: Engine,
    source: Checkpointer,
    job: str,
    fill_dense: Callable[[Mapping[str, Piece]], None],
) -> None:
    """Give a model with experts the weights of the dense model that `fill_dense` reads.

    Args:
        engine: its weights are set.
        source: agrees between the ranks on how it ended.
        job: what is being done, for messages.
        fill_dense: fills pieces of the dense model's tensors, by their stored names.

    Raises:
        CheckpointError: on every rank, if one could not read.
    """
    config = engine.layout.config
    parts, seed = config.checkpoint.moe_upcycling_granularity, config.training.seed
    fill = upcycled(config.model, parts, seed, fill_dense)
    weights = engine.weights_to_load(new_adapters=True)
    weights = {name: kept for name, kept in weights.items() if not name.startswith(SCALES)}
    source.load_by(job, weights, fill)
    measure_rows(engine, source, fill, new=True)
    engine.after_load(0, weights)
