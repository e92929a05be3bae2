"""The dense MLP. Shapes: T tokens, H features, F inner features of this rank."""

from torch import Tensor

from fivefold.config.model import ModelConfig
from fivefold.model.activation import activated
from fivefold.model.context import Context
from fivefold.model.dropout import NO_DROPS, Drops
from fivefold.model.layers import LayerBlock, Linear
from fivefold.model.xielu import XIELU


class MLP(LayerBlock):
    """down(activation(gate(x)) * up(x)), or down(activation(up(x))) without a gate.

    Attributes:
        fuses_gate: as in `model.fusions`.
    """

    recomputed_as = "mlp"
    gate_proj: Linear | None

    def __init__(self, model: ModelConfig, inner: int) -> None:
        super().__init__()
        hidden, bias = model.hidden_size, model.inner_bias
        self.gate_proj = Linear(hidden, inner, bias) if model.gated_linear_unit else None
        self.up_proj = Linear(hidden, inner, bias)
        self.down_proj = Linear(inner, hidden, bias)
        self.act_fn = XIELU() if model.activation_func == "xielu" else None
        self.model = model
        self.fuses_gate = False

    def forward(self, x_TH: Tensor, context: Context | None = None) -> Tensor:
        """[T, H] -> [T, H], independently for each token."""
        return self.run(x_TH, NO_DROPS if context is None else context.layer.adapters)

    def run(self, x_TH: Tensor, drops: Drops) -> Tensor:
        """`forward` with the dropout of its adapters alone."""
        return self.outer(self.inner(x_TH, drops), drops)

    def inner(self, x_TH: Tensor, drops: Drops = NO_DROPS) -> Tensor:
        """[T, H] -> [T, F], after the activation."""
        gate_proj, up_proj = self.gate_proj, self.up_proj
        linears = (up_proj,) if gate_proj is None else (gate_proj, up_proj)
        inner = self.project(x_TH, *linears, drops=drops)
        if self.act_fn is not None:
            made: Tensor = self.act_fn(*inner)
            return made
        return activated(self.model, inner, fused=self.fuses_gate)

    def outer(self, x_TF: Tensor, drops: Drops) -> Tensor:
        """[T, F] -> [T, H]."""
        return self.project_back(x_TF, self.down_proj, drops)
