"""Flags of the MLP's activation for Megatron-LM, and what it lacks of them."""

from collections.abc import Iterator

from fivefold.config.model import ModelConfig
from fivefold.tell.export.settings import Settings, flags, set_flag


def activation_flags(said: Settings, model: ModelConfig) -> Iterator[str]:
    """Flags of the activation; Megatron-LM's GELU uses tanh if fused with a bias, else erf."""
    if said["gated_linear_unit"] and said["activation_func"] == "silu":
        yield "--swiglu"
    elif model.gated_linear_unit and model.activation_func == "quick_gelu":
        yield "--quick-geglu"
    squared = (model.activation_func, model.gated_linear_unit) == ("squared_relu", False)
    yield from set_flag("squared_relu", squared)
    exact = model.activation_func == "gelu" and model.add_bias_linear
    if exact or _has_tanh(model):  # as its fusion is on or off
        said.mention("activation_func")
    unfused = not said["bias_gelu_fusion"] and not _has_tanh(model)
    yield from set_flag("no_bias_gelu_fusion", exact or squared or unfused)
    fuses = said["bias_swiglu_fusion"]
    if said["glu_linear_offset"]:
        yield from flags(said, "glu_linear_offset")
        fuses = fuses and model.activation_func == "quick_gelu"
    yield from set_flag("no_bias_swiglu_fusion", not fuses)
    yield from flags(said, "activation_func_clamp_value")
    if not said["add_bias_linear"]:
        yield "--disable-bias-linear"


def lost_of_activation(said: Settings, model: ModelConfig) -> Iterator[str]:
    """What its MLP cannot be told."""
    function = (model.activation_func, model.gated_linear_unit)
    exact = model.activation_func == "gelu" or model.add_bias_linear
    named = function in (("silu", True), ("quick_gelu", True), ("squared_relu", False))
    if not named and (model.gated_linear_unit or function[0] == "silu" or not exact):
        yield (
            f"activation_func {function[0]} with gated_linear_unit {function[1]} and "
            f"add_bias_linear {model.add_bias_linear} has no flag there: its MLP runs "
            "GELU without a gate"
        )
    if not said["bias_gelu_fusion"] and _has_tanh(model):
        yield "it has GELU by tanh only fused: bias_gelu_fusion stays on"


def _has_tanh(model: ModelConfig) -> bool:
    """Whether its MLP there would be a GELU by tanh, which it has in its fusion alone."""
    return model.activation_func == "gelu_tanh" and model.add_bias_linear
