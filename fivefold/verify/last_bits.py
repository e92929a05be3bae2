"""Refuses runs in fp32 whose result depends on a last bit."""

from fivefold.config.config import Config
from fivefold.config.settings import flag_of
from fivefold.errors import ConfigError, Mistake


def refuse_last_bits(config: Config) -> None:
    """Refuse a comparison in fp32 if a changed last bit would matter more than a mistake.

    Raises:
        ConfigError: it is fp32, and numbers are rounded to fewer bits or tokens dropped by their
            score.
    """
    if config.training.precision != "fp32":
        return
    experts, rounds = config.experts, "decides now and then how 8 bits are rounded: errors of 6 %"
    by_score = experts.limits_rows and experts.moe_token_drop_policy == "probs"
    moments = {name: config.value(name) for name in ("exp_avg_dtype", "exp_avg_sq_dtype")}
    reasons = (
        ("fp8_format", config.training.fp8_format is not None, rounds, ()),
        (
            "zero_quantized_weights",
            config.parallel.zero_quantized_weights,
            rounds,
            ("--no-zero-quantized-weights",),
        ),
        (
            "moe_token_drop_policy probs",
            by_score,
            "decides now and then which of two tokens finds room: errors of 18 %",
            ("--moe-token-drop-policy position",),
        ),
        *(
            (
                f"{name} {kind}",
                kind != "fp32",
                "decides now and then how a moment is rounded: errors of 3e-5",
                (f"{flag_of(name)} fp32",),
            )
            for name, kind in moments.items()
        ),
    )
    mistakes = [
        Mistake(f"with {name}, a last bit of fp32 {reason}", works=("--precision fp64", *works))
        for name, is_set, reason, works in reasons
        if is_set
    ]
    if mistakes:
        raise ConfigError(*mistakes)
