"""Types of gradients, masters and moments that do not go together are refused, with what does."""

import pytest

from fivefold.check import check
from fivefold.config.config import Config
from fivefold.config.presets import PRESETS
from fivefold.errors import ConfigError, Mistake

AWARE = {"use_precision_aware_optimizer": True}


def refused(world: int, model: str = "debug-llama", **values: object) -> tuple[Mistake, ...]:
    with pytest.raises(ConfigError) as caught:
        check(Config(PRESETS[model]).with_values(**AWARE, **values), world)
    return caught.value.mistakes


@pytest.mark.parametrize(("flag", "model"), [("tp", "debug-llama"), ("etp", "debug-mixtral")])
def test_cutting_a_block_of_8_bits(flag: str, model: str) -> None:
    asked = Config(PRESETS[model]).with_values(**AWARE, global_batch_size=12)
    field = {"tp": "tensor_model_parallel_size", "etp": "expert_tensor_parallel_size"}[flag]
    fits = {"tp": 2, "etp": 3}[flag]
    eight = asked.with_values(exp_avg_sq_dtype="fp8")
    check(eight.with_values(**{field: fits}), fits)
    with pytest.raises(ConfigError) as caught:
        check(eight.with_values(**{field: 4}), 4)
    (found,) = (m for m in caught.value.mistakes if "blocks of 32" in m.what)
    assert f"--{flag} {fits}" in found.works and "--exp-avg-sq-dtype bf16" in found.works
    check(asked.with_values(**{field: 4, "exp_avg_sq_dtype": "bf16"}), 4)


@pytest.mark.parametrize(
    ("values", "what"),
    [
        ({"precision": "fp32"}, "main_grads_dtype = bf16 has no effect"),
        ({"grad_reduce_in_bf16": True}, "grad_reduce_in_bf16 has no effect: main_grads_dtype"),
        ({"zero_quantized_gradients": True}, "zero_quantized_gradients and main_grads_dtype"),
    ],
)
def test_gradients_in_bf16_of_which_another_setting_speaks(values: dict, what: str) -> None:
    sharded = {"data_parallel_sharding_strategy": "optim", "main_grads_dtype": "bf16"}
    (found,) = refused(2, **sharded, **values)
    assert what in found.what and "--main-grads-dtype fp32" in found.works


@pytest.mark.parametrize(
    ("values", "what", "works"),
    [
        (
            {"store_param_remainders": True, "data_parallel_sharding_strategy": "optim"},
            "store_param_remainders saves nothing with optim",
            ("--no-store-param-remainders", "--data-parallel-sharding-strategy no_shard"),
        ),
        (
            {"store_param_remainders": True, "main_params_dtype": "bf16"},
            "main_params_dtype = bf16 keeps none",
            ("--no-store-param-remainders", "--main-params-dtype fp32"),
        ),
        (
            {"main_params_dtype": "bf16", "optimizer_cpu_offload": True},
            "main_params_dtype = bf16 updates the weights where they lie",
            ("--main-params-dtype fp32", "--no-optimizer-cpu-offload"),
        ),
        (
            {"store_param_remainders": True, "precision": "fp32"},
            "store_param_remainders = true has no effect",
            ("--bf16", "--no-store-param-remainders"),
        ),
    ],
)
def test_masters_of_few_bits(values: dict, what: str, works: tuple[str, ...]) -> None:
    (found,) = refused(2, **values)
    assert what in found.what and found.works == works
