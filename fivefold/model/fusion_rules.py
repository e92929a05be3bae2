"""Fusions that would have no effect; torch-free."""

from fivefold.config.config import Config
from fivefold.errors import Mistakes

_OFF = "--no-fused-residual-rmsnorm"
_MOVED = frozenset({"attn_norm", "mlp_norm", "pre_mlp_layernorm_output"})
_TELLS = "fused_residual_rmsnorm sums and normalises in one kernel before every MLP"


def check_fusions(config: Config, mistakes: Mistakes) -> None:
    """Report a fused residual sum and norm for which the model has no place."""
    training, model = config.training, config.model
    if not training.fused_residual_rmsnorm:
        return
    if model.normalization != "RMSNorm":
        mistakes.add(
            f"{_TELLS}, and the model has normalization {model.normalization}", works=[_OFF]
        )
    if model.hidden_dropout:
        mistakes.add(
            f"{_TELLS}, and hidden_dropout {model.hidden_dropout:g} drops features before the sum",
            works=[_OFF, "--hidden-dropout 0"],
        )
    if not model.norms_before:
        mistakes.add(
            f"{_TELLS}, and norm_placement {model.norm_placement} has no norm there", works=[_OFF]
        )
    if model.parallel_residual:
        mistakes.add(f"{_TELLS}, which reads no sum with parallel_residual", works=[_OFF])
    if model.hybrid_override_pattern is not None:
        mistakes.add(f"{_TELLS}, and hybrid_override_pattern has it in other layers", works=[_OFF])


def joins_norm(config: Config) -> bool:
    """Whether a GPU sums and normalises in one kernel.

    Not if the norm is recomputed from the sum, cut into tiles, or moved to the host.
    """
    memory = config.memory
    if not config.training.fused_residual_rmsnorm or memory.recompute_granularity == "selective":
        return False
    moved = {*memory.offload_modules, *memory.offload_tensors} & _MOVED
    return memory.tiled_mlp_num_shards <= 1 and not (
        memory.fine_grained_activation_offloading and moved
    )
