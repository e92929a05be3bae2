"""The two memory tables that every guide has: activations of a layer, and bytes of a parameter.

    python -m benchmarks.memory_tables [--model gpt3-175b] [--tp 8] [--dp 8] [--seq-length 2048]

The first compares Fivefold's count with the published formulae (Korthikanti et al. 2022), in units
of s x b x h: sequence, micro-batch and hidden size. The second divides the model state of a rank by
the model's parameters, for each sharding.
"""

from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fivefold.check import check
from fivefold.config.config import Config
from fivefold.config.model import ModelConfig
from fivefold.config.presets import PRESETS
from fivefold.config.sharding import SHARDING
from fivefold.counts.policy import StatePolicy, engine_policy, megatron_policy
from fivefold.counts.state import model_state
from fivefold.description.activations import saved_activations, total
from fivefold.description.running import Running
from fivefold.units import table

MODEL, RANKS, LENGTH = "gpt3-175b", 8, 2048


@dataclass(frozen=True)
class Activations:
    """What a layer keeps in one configuration, in units of s x b x h bytes.

    Attributes:
        name: the configuration.
        published: by the formula for kernels that keep scores and dropout masks.
        same: Fivefold's count for such kernels.
        own: Fivefold's count for its own: fused attention, and masks that are made again.
    """

    name: str
    published: float
    same: float
    own: float


def activations(model: ModelConfig, tp: int, length: int) -> list[Activations]:
    """The six configurations of the paper's table 2.

    Args:
        model: a dense model with biases, GELU and four times wider MLPs, as in the paper.
        tp: tensor-parallel size.
        length: tokens of a sequence.
    """
    a, h, t = model.num_attention_heads, model.hidden_size, tp
    scores = 5 * a * length / h
    split: dict[str, Any] = {"tensor_model_parallel_size": tp}
    parts = split | {"sequence_parallel": True}
    selective = {"recompute_granularity": "selective", "recompute_modules": ("core_attn",)}
    rows: list[tuple[str, float, dict[str, Any]]] = [
        ("no parallelism", 34 + scores, {}),
        ("tensor parallel", 10 + 24 / t + scores / t, split),
        ("tensor + sequence parallel", (34 + scores) / t, parts),
        ("tensor parallel, selective recompute", 10 + 24 / t, split | selective),
        ("tensor + sequence parallel, selective", 34 / t, parts | selective),
        ("full recompute", 2, split | {"recompute_granularity": "full"}),
    ]
    dropping = replace(model, hidden_dropout=0.1, attention_dropout=0.1)
    return [
        Activations(
            name,
            published,
            _kept(dropping, length, values, plainly=True),
            _kept(dropping, length, values, plainly=False),
        )
        for name, published, values in rows
    ]


def _kept(model: ModelConfig, length: int, values: dict[str, Any], *, plainly: bool) -> float:
    """Bytes that an inner layer keeps of a token and a hidden feature.

    Args:
        model: the model.
        length: tokens of a sequence.
        values: settings of parallelism and recomputation.
        plainly: whether kernels keep scores and dropout masks.
    """
    values = {"seq_length": length, "global_batch_size": 1} | values
    config = Config(model).with_values(**values)
    check(config, config.parallel.tensor_model_parallel_size, planned=True)
    running = Running.of(config, fused_attention=not plainly, others=plainly)
    saved = saved_activations(model, 1, running)
    return total(saved).kept / model.hidden_size


_BF16 = {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
_FP8 = {"exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp8", "main_grads_dtype": "bf16"}
STATES: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "g bf16": {"main_grads_dtype": "bf16"},
    "m, v bf16": _BF16,
    "g, m, v bf16": {**_BF16, "main_grads_dtype": "bf16"},
    "g bf16, m, v fp8": _FP8,
    "and remainders": {**_FP8, "store_param_remainders": True},
    "or no masters": {**_FP8, "main_params_dtype": "bf16"},
}
"""The settings of the optimizer's state in each column: g gradients, m and v moments."""


def bytes_of_a_parameter(model: ModelConfig, dp: int) -> list[tuple[str, list[float]]]:
    """For each sharding: bytes of a parameter on a rank that holds all layers.

    Those of each of `STATES`, and Megatron-LM's with gradients in fp32; 0 where there are none.
    Blocks that are gathered for the time of their computation are left out.
    """
    rows = []
    for sharding in SHARDING.values():
        values = {"data_parallel_sharding_strategy": sharding.name, "global_batch_size": dp}
        config = Config(model).with_values(seq_length=128, **values)
        sizes = []
        for state in STATES.values():
            asked = config.with_values(use_precision_aware_optimizer=bool(state), **state)
            alone = asked.optimizer.store_param_remainders and sharding.splits_optimizer
            sizes.append(0.0 if alone else _each(asked, dp, engine_policy(asked)))
        theirs = None if sharding.splits_gradients else megatron_policy(sharding.splits_optimizer)
        sizes.append(_each(config, dp, theirs) if theirs else 0.0)
        rows.append((sharding.paper_name, sizes))
    return rows


def _each(config: Config, dp: int, policy: StatePolicy) -> float:
    state = model_state(check(config, dp, planned=True), 0, policy=policy)
    return (state.weights + state.gradients + state.optimizer) / state.parameters


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table, its head first."""
    head, *others = ("| " + " | ".join(row) + " |" for row in rows)
    return "\n".join([head, "|---" * len(rows[0]) + "|", *others])


def activation_rows(name: str, tp: int, length: int) -> list[tuple[str, ...]]:
    """The first table, its head first."""
    rows: list[tuple[str, ...]] = [("", "formula", "counted", "Fivefold's kernels")]
    for each in activations(PRESETS[name], tp, length):
        figures = (each.published, each.same, each.own)
        rows.append((each.name, *(f"{figure:.2f}" for figure in figures)))
    return rows


def parameter_rows(name: str, dp: int) -> list[tuple[str, ...]]:
    """The second table, its head first."""
    rows: list[tuple[str, ...]] = [("", *STATES, "Megatron-LM")]
    for sharding, sizes in bytes_of_a_parameter(PRESETS[name], dp):
        rows.append((sharding, *(f"{size:.2f}" if size else "-" for size in sizes)))
    return rows


def main() -> None:
    """Print both tables."""
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default=MODEL, choices=sorted(PRESETS))
    parser.add_argument("--tp", type=int, default=RANKS)
    parser.add_argument("--dp", type=int, default=RANKS)
    parser.add_argument("--seq-length", type=int, default=LENGTH)
    given = parser.parse_args()
    print(f"activations of a layer of {given.model}, tp {given.tp}, bytes / (s b h)")
    rows = activation_rows(given.model, given.tp, given.seq_length)
    print("\n".join(table(rows, right=(1, 2, 3))))
    print(f"\nbytes of a parameter, {given.dp} data-parallel ranks")
    rows = parameter_rows(given.model, given.dp)
    print("\n".join(table(rows, right=tuple(range(1, len(rows[0]))))))


if __name__ == "__main__":
    main()
