"""What a published run recomputes: the settings that its cell may mean."""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from fivefold.config.model import ModelConfig
from fivefold.errors import DataError
from fivefold.published.frameworks.framework import Framework
from fivefold.published.row import PublishedRow

_MODULES: Mapping[str, str] = MappingProxyType(
    {
        "core_attn": "core_attn",
        "norm": "layernorm",
        "layernorm": "layernorm",
        "act": "moe_act",  # in dense models, see below
        "moe_act": "moe_act",
        "moe": "moe",
        "shared_expert": "shared_experts",
        "shared_experts": "shared_experts",
        "mlp": "mlp",
        "mla_up_proj": "mla_up_proj",
    }
)


def ways_to_recompute(
    row: PublishedRow, model: ModelConfig, framework: Framework
) -> list[dict[str, Any]]:
    """The recomputation settings that a row names, or else each that it may have used.

    Raises:
        DataError: the cell names something that is not known.
    """
    text = row.text("recomp")
    if text == "full":
        return [{"recompute_granularity": "full"}]
    if some := re.fullmatch(r"full (\d{1,4})", text):
        layers = {"recompute_method": "block", "recompute_num_layers": (int(some[1]),)}
        return [{"recompute_granularity": "full", **layers}]
    if text == "selective":
        return [_selective("core_attn")]
    if text == "selective-op":
        # About what the first half of the MLP is. What it keeps is counted in torchtitan.py,
        # what it runs again in layer.py.
        return [_selective("layernorm", "mlp")]
    if text.startswith("none") or text in ("no", "0"):
        return [_selective(*framework.recomputes) if framework.recomputes else {}]
    if row.text("flops_conv") == "hfu96":
        return [{"recompute_granularity": "full"}]  # the convention says so
    words = re.findall(r"[a-z_]+|^.+", text)
    if unknown := [word for word in words if word not in _MODULES]:
        known = ", ".join(("none", "full", "selective", *_MODULES))
        raise DataError(f"recomp: {unknown[0]!r} is none of {known}")
    if words:
        # A dense model recomputes its activation within the MLP; no module stands for it alone.
        modules = _MODULES if model.num_experts else {**_MODULES, "act": "mlp", "moe_act": "mlp"}
        return [_selective(*(modules[word] for word in words))]
    light = _selective("layernorm", "moe_act" if model.num_experts else "mlp")
    return [{}, light, {"recompute_granularity": "full"}]


def _selective(*modules: str) -> dict[str, Any]:
    return {"recompute_granularity": "selective", "recompute_modules": modules}
