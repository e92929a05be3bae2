"""Requirements of DeepEP's kernels; torch-free."""

from importlib.util import find_spec

from fivefold.config.config import Config
from fivefold.errors import Mistakes

OFF = "--no-moe-enable-deepep"
RANKS = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)  # those with settings
NODE_RANKS = 8  # ranks that its NVLink kernels reach
ROW_BYTES = 16  # rows must be a multiple of this


def check_deepep(config: Config, device_type: str, *, shared: bool = False) -> None:
    """Refuse to start ranks if DeepEP cannot send for them.

    Args:
        config: the configuration.
        device_type: where the ranks will compute, "cuda" or "cpu".
        shared: whether ranks share GPUs.

    Raises:
        ConfigError: all that is in the way.
    """
    parallel, mistakes = config.parallel, Mistakes()
    if not parallel.moe_enable_deepep:
        return
    spec = find_spec("deep_ep")
    if spec is None or spec.origin is None:  # not installed: only a folder of that name
        mistakes.add(
            "moe_enable_deepep needs the package deep_ep, which is not installed",
            "github.com/deepseek-ai/DeepEP says how; flex without it is Fivefold's own",
            works=[OFF],
        )
    if device_type != "cuda":
        mistakes.add(
            f"moe_enable_deepep: DeepEP's kernels run on GPUs, and the device is {device_type}",
            works=[OFF],
        )
    if shared:
        mistakes.add("moe_enable_deepep: DeepEP needs a GPU for each rank", works=[OFF])
    if config.training.precision != "bf16":
        mistakes.add(
            f"moe_enable_deepep: DeepEP sums rows in bf16, and precision is "
            f"{config.training.precision}",
            works=["--precision bf16", OFF],
        )
    hidden, width = config.model.expert_features, ROW_BYTES // 2
    if hidden % width:
        mistakes.add(
            f"moe_enable_deepep: DeepEP sends multiples of {ROW_BYTES} bytes, and "
            f"hidden_size {hidden} in bf16 is {2 * hidden}",
            works=[f"--hidden-size {-(-hidden // width) * width}", OFF],
        )
    mistakes.raise_if_any()


def check_deepep_settings(config: Config, mistakes: Mistakes) -> None:
    """Report settings that contradict DeepEP on any machine."""
    parallel = config.parallel
    if not parallel.moe_enable_deepep or config.model.num_experts is None:
        return
    if parallel.moe_token_dispatcher_type != "flex":
        mistakes.add(
            "moe_enable_deepep sends a token once to a rank, as flex does, and "
            f"moe_token_dispatcher_type is {parallel.moe_token_dispatcher_type}",
            works=["--moe-token-dispatcher-type flex", OFF],
        )
    ranks = parallel.expert_model_parallel_size
    if ranks == 1:
        mistakes.add(
            "moe_enable_deepep sends tokens between expert-parallel ranks, and ep is 1",
            works=["--expert-model-parallel-size 2", OFF],
        )
    elif ranks not in RANKS:
        near = sorted(RANKS, key=lambda other: abs(other - ranks))[:2]
        mistakes.add(
            f"moe_enable_deepep: DeepEP has settings for {', '.join(map(str, RANKS))} "
            f"expert-parallel ranks, not for {ranks}",
            works=[*(f"--expert-model-parallel-size {other}" for other in near), OFF],
        )
    if config.experts.moe_expert_rank_capacity_factor is not None and ranks > NODE_RANKS:
        mistakes.add(
            "moe_expert_rank_capacity_factor needs rows of a fixed number, which DeepEP sends "
            f"among {NODE_RANKS} expert-parallel ranks at most, not {ranks}",
            works=[
                OFF,
                "--moe-expert-rank-capacity-factor none",
                f"--expert-model-parallel-size {NODE_RANKS}",
            ],
        )
    if parallel.moe_deepep_num_sms % 2:
        mistakes.add(
            f"moe_deepep_num_sms must be even, not {parallel.moe_deepep_num_sms}: of each pair "
            "one sends and one receives",
            works=[f"--moe-deepep-num-sms {parallel.moe_deepep_num_sms + 1}"],
        )
