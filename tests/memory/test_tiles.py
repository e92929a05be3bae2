"""A tiled MLP computes what the whole one does, one tile at a time, without rounding its sums."""

import gc
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fivefold.config.memory import MemoryConfig
from fivefold.memory.tiles import Tiles
from fivefold.model.context import Context
from fivefold.model.dropout import AdapterDropout
from fivefold.model.mlp import MLP
from tests.model.models import LLAMA

TOKENS, INNER = 50, 96
CONTEXT = Context(
    rows=1,
    rotary={},
    packing=None,
    dropout=None,
    part=None,
    sequence=None,
    routing={},
    token_ids_T=None,
    first_ids_B=torch.zeros(1, dtype=torch.int64),
    step=0,
)


def _mlp() -> MLP:
    torch.manual_seed(5)
    mlp = MLP(LLAMA, INNER).double()
    for parameter in mlp.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return mlp


def _gradients(mlp: MLP, dtype: torch.dtype, shards: int) -> list[Tensor]:
    """Output, then gradients of the input and of the weights."""
    mlp = deepcopy(mlp).to(dtype)
    x_TH, grad_TH = torch.randn(
        2, TOKENS, LLAMA.hidden_size, generator=torch.Generator().manual_seed(6)
    ).to(dtype)
    x_TH.requires_grad_()
    run: Any = Tiles(MemoryConfig(tiled_mlp_num_shards=shards)) if shards else MLP.__call__
    y_TH = run(mlp, x_TH, CONTEXT)
    y_TH.backward(grad_TH)
    return [y_TH.detach(), *(leaf.grad for leaf in (x_TH, *mlp.parameters()))]  # type: ignore[misc]


@pytest.mark.parametrize("shards", [1, 3, 50, 70])
def test_tiles_of_any_size_are_the_whole(shards: int) -> None:
    mlp = _mlp()
    for ours, true in zip(
        _gradients(mlp, torch.float64, shards), _gradients(mlp, torch.float64, 0), strict=True
    ):
        torch.testing.assert_close(ours, true, rtol=1e-12, atol=1e-12)


def test_sums_over_many_tiles_are_as_exact_as_one_product() -> None:
    mlp = _mlp()
    exact = _gradients(mlp.bfloat16(), torch.float64, 0)
    for ours, whole, true in zip(
        _gradients(mlp, torch.bfloat16, 50), _gradients(mlp, torch.bfloat16, 0), exact, strict=True
    ):
        assert (ours - true).norm() < 1.1 * (whole - true).norm()


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_tile_drops_what_the_whole_drops(ranks: int) -> None:
    """Of this rank's tokens, and of the same ones of every rank where these are gathered."""
    all_rows = torch.randperm(ranks * TOKENS)
    rows, key = all_rows[:TOKENS], torch.tensor(7)
    drop = AdapterDropout(rows, all_rows, 0.5, key, fused=False)
    x_NTF = torch.rand(ranks, TOKENS, 8) + 1
    whole, parts = drop.whole(x_NTF[0]), drop.part(x_NTF.flatten(0, 1), 3).view_as(x_NTF)
    for start, end in ((0, 17), (17, 34), (34, TOKENS)):
        tile, x_NtF = drop.of_tile(start, end), x_NTF[:, start:end]
        assert torch.equal(tile.whole(x_NtF[0]), whole[start:end])
        assert torch.equal(tile.part(x_NtF.flatten(0, 1), 3).view_as(x_NtF), parts[:, start:end])


class _Widest(TorchDispatchMode):
    """The most tokens in any result with the MLP's inner features."""

    tokens = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.dim() == 2 and result.shape[1] == INNER:
            self.tokens = max(self.tokens, len(result) if len(result) != LLAMA.hidden_size else 0)
        return result


def test_inner_features_of_one_tile_exist_at_a_time() -> None:
    mlp = _mlp()
    for shards, expected in ((0, TOKENS), (4, 13)):
        with _Widest() as widest:
            _gradients(mlp, torch.float64, shards)
        assert widest.tokens == expected


def test_sums_of_a_layer_are_freed_before_the_backward_of_all_layers_ends() -> None:
    mlp = _mlp().bfloat16()
    x_TH = torch.randn(TOKENS, LLAMA.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    before = {id(each) for each in _wide_weights(mlp)}
    y_TH = Tiles(MemoryConfig(tiled_mlp_num_shards=4))(mlp, x_TH, CONTEXT)
    y_TH.sum().backward()
    assert all(parameter.grad is not None for parameter in mlp.parameters())
    assert {id(each) for each in _wide_weights(mlp)} <= before, "what y_TH was made with keeps them"


def _wide_weights(mlp: MLP) -> list[Tensor]:
    """What there is of a weight's shape in fp32."""
    shapes = {parameter.shape for parameter in mlp.parameters()}
    tensors = [each for each in gc.get_objects() if type(each) is Tensor]
    return [each for each in tensors if each.dtype == torch.float32 and each.shape in shapes]
