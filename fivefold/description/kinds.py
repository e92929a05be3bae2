"""The kinds of layers that a model has."""

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

from fivefold.config.layer_pattern import Mixer
from fivefold.config.model import ModelConfig


class LayerKind(NamedTuple):
    """The kind of a layer; layers of one kind have equal descriptions.

    Attributes:
        experts: whether the layer has experts instead of a dense MLP.
        predicts: whether an MTP module starts with it, and so has a projection and norms.
        linear: whether it has linear attention, or Mamba-2.
        mixer: all that the layer has (`hybrid_override_pattern`); None: attention and an MLP.
        wide: whether its linear layers keep bf16 where those of others have 8 bits.
        local: whether its attention has the sizes of layers with a window, where these differ.
    """

    experts: bool = False
    predicts: bool = False
    linear: bool = False
    mixer: Mixer | None = None
    wide: bool = False
    local: bool = False

    @property
    def attends(self) -> bool:
        """Whether tokens are mixed in it: by attention, or by states."""
        return self.mixer in (None, "M", "*")

    @property
    def softmax(self) -> bool:
        """Whether it has attention with a softmax."""
        return self.attends and not self.linear

    @property
    def mlp(self) -> bool:
        """Whether it has an MLP or experts."""
        return self.mixer in (None, "-", "E")

    @property
    def dense(self) -> bool:
        """Whether it has an MLP that is not one of experts."""
        return self.mlp and not self.experts

    @property
    def name(self) -> str:
        """Short name, under which layer costs are reported: dense, moe, those with linear attention
        as linear_dense and linear_moe, local_dense and local_moe where those with a window have
        sizes of their own, or mtp; mamba, attention, mlp and experts for layers of one mixer."""
        if self.predicts:
            return "mtp"
        if self.mixer is not None:
            return {"M": "mamba", "*": "attention", "-": "mlp", "E": "experts"}[self.mixer]
        before = "linear_" * self.linear + "local_" * self.local
        return before + ("moe" if self.experts else "dense")


def layer_kind(model: ModelConfig, layer: int) -> LayerKind:
    """The kind of a layer."""
    predicts, linear = model.starts_prediction(layer), model.is_linear(layer)
    mixer, wide = model.mixer_of(layer), model.is_wide(layer)
    local = model.has_local_sizes and model.is_softmax(layer) and model.is_local(layer)
    return LayerKind(model.is_moe(layer), predicts, linear, mixer, wide, local)


@lru_cache(maxsize=64)
def layer_kinds(model: ModelConfig) -> Mapping[LayerKind, int]:
    """The index of the first layer of each kind that the model has."""
    found: dict[LayerKind, int] = {}
    for layer in (*range(model.num_layers), *model.prediction_layers[: model.prediction_size]):
        found.setdefault(layer_kind(model, layer), layer)
    return MappingProxyType(found)
