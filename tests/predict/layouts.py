"""Layouts to plan with."""

from typing import Any

from fivefold.check import check
from fivefold.config.config import Config
from fivefold.config.presets import PRESETS
from fivefold.layout import Layout

SHORT = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "sp": "sequence_parallel",
    "virtual": "num_virtual_stages_per_pipeline_rank",
    "mbs": "micro_batch_size",
    "gbs": "global_batch_size",
    "seq": "seq_length",
    "zero": "data_parallel_sharding_strategy",
}


def planned(model: str, world: int, **settings: Any) -> Layout:
    """A checked layout of a preset; settings by the short names above, or by their own."""
    defaults = {"gbs": world, "seq": 4096, "zero": "optim"}
    values = {SHORT.get(name, name): value for name, value in (defaults | settings).items()}
    return check(Config(PRESETS[model]).with_values(**values), world, planned=True)
