"""What Muon does not go with."""

from fivefold.config.config import Config
from fivefold.config.settings import flag_of
from fivefold.errors import Mistakes

_OTHERWISE = "--optimizer adam"


def check_optimizer(config: Config, mistakes: Mistakes) -> None:
    """Report settings of AdamW's state that Muon's does not have."""
    if config.optimizer.optimizer != "muon":
        return
    if config.optimizer.use_precision_aware_optimizer:
        mistakes.add(
            "use_precision_aware_optimizer chooses types of AdamW's state; Muon keeps the mean of "
            "gradients and the weights that it updates in fp32",
            works=("--no-use-precision-aware-optimizer", _OTHERWISE),
        )
    for name in ("optimizer_cpu_offload", "offload_optimizer_states"):
        if getattr(config.memory, name):
            mistakes.add(
                f"{name} moves the state of AdamW, which is updated part by part; Muon needs whole "
                "matrices, and keeps half as much",
                works=(flag_of(f"no_{name}"), _OTHERWISE),
            )
