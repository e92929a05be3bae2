"""Elementwise operations as kernels of their own on a GPU, switched by Megatron's flags.

A fusion decides how, not what, is computed: it takes the kernel where tensors are on a GPU and
Triton is installed, and the plain operations elsewhere. While torch.compile traces it takes the
plain ones, too, which the compiler fuses with their neighbours: no kernel breaks a graph.
"""

from fivefold.config.training import TrainingConfig
from fivefold.model.mlp import MLP
from fivefold.model.moe.layer import Experts
from fivefold.model.transformer import Stage


def install_fusions(stage: Stage, training: TrainingConfig) -> None:
    """Enable the fusions of the settings.

    `bias_swiglu_fusion`: an activation by a sigmoid, or a squared ReLU, with its gate and row
    weights, forward and backward, is one kernel each (`kernels.gates`); `bias_gelu_fusion`: so is
    one by GELU (the product before it adds its bias); `rope_fusion`: so is the rotation of
    queries and keys (`kernels.rotary`); `bias_dropout_fusion`: so are a dropout mask, what it
    drops, and the sum with the residual stream (`kernels.dropout`), and attention with dropout of
    its probabilities (`kernels.attention`); `fused_residual_rmsnorm`: so is the sum after
    attention, where nothing is dropped, with the norm of the MLP (`kernels.norms`).
    """
    stage.fuses_rope = training.rope_fusion
    stage.fuses_dropout = training.bias_dropout_fusion
    for layer in stage.transformer_layers:
        layer.fuses_norm = training.fused_residual_rmsnorm
    gelu = stage.model.activation_func in ("gelu", "gelu_tanh")
    for module in stage.modules():
        if isinstance(module, MLP | Experts):
            module.fuses_gate = training.bias_gelu_fusion if gelu else training.bias_swiglu_fusion
