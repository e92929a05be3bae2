"""Fewer layers of one mixer each, and smaller states; torch-free."""

from collections.abc import Sequence
from typing import Any

from fivefold.config.config import Config
from fivefold.config.layer_pattern import Mixer
from fivefold.config.model import ModelConfig


def kind_of(model: ModelConfig, layer: int) -> tuple[Mixer | None, bool]:
    """What of a layer a shrunk model keeps: its mixer, and whether it has experts."""
    return model.mixer_of(layer), model.is_moe(layer)


def few_mixers(model: ModelConfig, layers: Sequence[int]) -> str:
    """The mixers of these layers, at least one with states, and one with experts if there were."""
    few = [str(model.mixer_of(layer)) for layer in layers]
    few[0] = few[0] if "M" in few else "M"
    if model.num_experts is not None and "E" not in few:
        few[-1] = "E"
    return "".join(few)


def small_states(config: Config) -> dict[str, Any]:
    """Few and small heads of Mamba-2, of whose groups ranks have as many as before, or two."""
    parallel, sizes = config.parallel, config.model.states
    ranks = parallel.tensor_model_parallel_size * parallel.context_parallel_size
    groups = ranks * min(sizes.groups // ranks, 2)
    return {
        "mamba_num_groups": groups,
        "mamba_num_heads": groups * min(sizes.heads // sizes.groups, 2),
        "mamba_state_dim": min(sizes.key, 16),
        "mamba_head_dim": min(sizes.value, 8),
    }
