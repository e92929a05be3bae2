"""Weights that a forward uses twice: tied embeddings, and the ends of models that predict further
tokens. Of their gradients there are never three at once, whatever autograd would make."""

from itertools import product
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fivefold.check import check
from fivefold.config.config import Config
from fivefold.config.presets import PRESETS
from fivefold.mesh.slices import local_tensor
from fivefold.model.layers import Embedding
from fivefold.tensor.deferred_weight import DeferredWeights
from fivefold.tensor.vocabulary import VocabularyLookup
from fivefold.train.engine import Engine
from tests.engines import own_batch
from tests.pool import run
from tests.verify.cases import chosen, shared_groups

TIED = {"untie_embeddings_and_output_weights": False}
MTP = {"mtp_num_layers": 2}
LINEAR = {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "linear"}
AGAIN = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": (1,),
}


class _Sums(TorchDispatchMode):
    """Counts sums of two tensors of a shape that are made beside both."""

    def __init__(self, shapes: set[torch.Size]) -> None:
        super().__init__()
        self._shapes, self.made = shapes, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        if func is torch.ops.aten.add.Tensor:
            self.made += result.shape in self._shapes
        return result


@shared_groups()
def _sums(rank: int, world: int, settings: dict[str, Any]) -> int:
    """Sums of gradients of a table that a step makes beside both."""
    config = Config(PRESETS["debug-llama"]).with_values(
        seq_length=16, vocab_size=500, **{"global_batch_size": 2 * world} | settings
    )
    engine = Engine(check(config, world), rank, torch.device("cpu"))
    rows = own_batch(engine, 0)
    tables = ("embed_tokens.weight", "lm_head.weight")
    whole = {config.model.padded_vocab_size, config.model.padded_vocab_size // 2}
    shapes = {torch.Size((rows, config.model.hidden_size)) for rows in whole}
    assert any(
        name in tables and local_tensor(p).shape in shapes for name, p in engine.parameters.items()
    )
    with _Sums(shapes) as seen:
        engine.step(rows)
    return seen.made


USES = [TIED, MTP, TIED | MTP, TIED | LINEAR, MTP | LINEAR]
LAYOUTS = [
    {},
    {"precision": "bf16", "data_parallel_sharding_strategy": "optim", "micro_batch_size": 2},
    {"data_parallel_sharding_strategy": "optim_grads_params"} | AGAIN,
    {"data_parallel_sharding_strategy": "no_shard"},
    {"tensor_model_parallel_size": 2, "precision": "bf16"},
]
MADE = [*product(USES, LAYOUTS)]


@pytest.mark.parametrize("number", chosen(range(len(MADE)), *range(0, len(MADE), 3)))
def test_no_third_gradient_is_made(number: int) -> None:
    model, settings = MADE[number]
    assert run(2, _sums, model | settings) == [0, 0]


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_rows_of_a_frequent_token_are_not_rounded_away(precision: str) -> None:
    """Of 4,096 ones bf16 keeps 256, added one by one."""
    wide = torch.float32 if precision == "fp32" else torch.bfloat16
    embedding, deferred = Embedding(3, 8).to(wide), DeferredWeights()
    embedding.lookup = VocabularyLookup(None, False, deferred)
    for uses in (1, 2):  # the second one is added to the first
        embedding.weight.grad = None
        indices_T = torch.ones(4096, dtype=torch.long)
        rows = [embedding.lookup(indices_T, embedding) for _ in range(uses)]
        torch.stack(rows).sum().backward()
        assert embedding.weight.grad is not None
        torch.testing.assert_close(
            embedding.weight.grad[1].float(), torch.full((8,), 4096.0 * uses), rtol=1e-2, atol=0.0
        )
