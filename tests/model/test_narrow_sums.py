"""No gradient is added up row by row in bf16, which rounds away all but the first few hundred."""

from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fivefold.config.model import ModelConfig
from fivefold.model.init import initialise
from fivefold.model.moe.grouped import COLUMNS, ROWS, GroupedLinear, sums_of_groups
from fivefold.model.prediction import with_mtp_tokens
from fivefold.model.transformer import Stage
from fivefold.tensor.deferred_weight import DeferredWeights
from fivefold.tensor.install import install_deferral
from tests.model.models import FAMILIES, LLAMA, SINKS, batch_of

EXPERTS: dict[str, Any] = {"num_experts": 4, "moe_router_topk": 2}
MODELS = FAMILIES | {
    "experts with biases": replace(SINKS, **EXPERTS),
    "shared experts": replace(
        LLAMA, **EXPERTS, moe_shared_expert_intermediate_size=24, moe_shared_expert_gate=True
    ),
    "predictions": replace(LLAMA, mtp_num_layers=2),
    "adapters": replace(LLAMA, lora_rank=4, use_dora=True, lora_dropout=0.1, hidden_dropout=0.1),
}
ROW_BY_ROW = "index_add", "index_put", "scatter", "index_reduce", "embedding_dense"


class _Sums(TorchDispatchMode):
    """Names of operations that add rows of bf16 to rows of bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(name in str(func) for name in ROW_BY_ROW) and args[0].dtype == torch.bfloat16:
            self.narrow.add(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_no_rows_are_added_one_by_one_in_bf16(model: ModelConfig) -> None:
    stage = Stage(model).bfloat16()
    initialise(stage, seed=1)
    install_deferral(stage, DeferredWeights(), recomputes=False)
    batch = with_mtp_tokens(batch_of(model, [[5, 7], [12]]), model.mtp_num_layers)
    with _Sums() as sums:
        stage.objective(stage(None, batch)).backward()
    assert not sums.narrow


def test_the_gradient_of_an_experts_bias_counts_every_row() -> None:
    rows_E = torch.tensor([6000, 0, 2193])
    linear = GroupedLinear(3, 4, 5, bias=True).bfloat16()
    grad_TF = torch.rand(8193, 5, generator=torch.Generator().manual_seed(3)).bfloat16()
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.zero_()
    linear(torch.ones(8193, 4).bfloat16(), rows_E).backward(grad_TF)
    assert linear.bias is not None
    assert linear.bias.grad is not None
    expected = torch.stack([part.double().sum(0) for part in grad_TF.split(rows_E.tolist())])
    torch.testing.assert_close(linear.bias.grad.double(), expected, rtol=2**-8, atol=0.0)


@pytest.mark.parametrize("seed", range(20))
def test_groups_of_any_lengths_are_added_up(seed: int) -> None:
    random = Random(seed)
    sizes = 0, 1, ROWS - 1, ROWS, ROWS + 1, 2 * ROWS, random.randrange(3 * ROWS)
    rows = random.choices(sizes, k=random.randint(1, 6))
    features = random.choice((1, 3, COLUMNS, COLUMNS + 2))
    x_TF = torch.arange(sum(rows) * features).view(-1, features).double()
    expected = torch.stack([part.sum(0) for part in x_TF.split(rows)])
    assert torch.equal(sums_of_groups(x_TF, torch.tensor(rows)), expected)
