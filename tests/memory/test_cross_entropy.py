"""Fused losses against the plain one in fp64, and what they hold meanwhile."""

from dataclasses import replace
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from fivefold.audit.holdings import DeviceLimit
from fivefold.config.memory import vocab_split_sizes
from fivefold.config.model import ModelConfig
from fivefold.errors import ConfigError
from fivefold.memory import cross_entropy as fused
from fivefold.memory.cross_entropy import LinearCrossEntropy, NativeCrossEntropy
from fivefold.mesh.collectives import all_gather
from fivefold.model.batch import Batch
from fivefold.model.loss import LossRule
from fivefold.model.transformer import Stage
from fivefold.tensor.deferred_weight import DeferredWeights
from fivefold.tensor.exchange import exchange_of
from fivefold.tensor.linear import ColumnParallel
from tests.model.models import LLAMA, batch_of, build
from tests.pool import run

MODEL = replace(LLAMA, num_layers=1, vocab_size=99, make_vocab_size_divisible_by=52)
T = 24
Z = 0.03
SPLITS = (7, 30)  # neither divides a vocabulary of 104, nor the 52 entries of one of two ranks
CASES = list(product(["native", "linear"], [0.0, 0.1], [False, True]))
NAMES = [f"{i}{', smoothed' * bool(s)}{', weighted' * w}" for i, s, w in CASES]


def _model(smoothing: float) -> ModelConfig:
    """With a cap and a bias where the loss is smoothed, too."""
    cap = 1.5 if smoothing else None
    return replace(MODEL, final_logit_softcapping=cap, lm_head_bias=bool(smoothing))


def _batch(weighted: bool) -> Batch:
    batch = batch_of(MODEL, [[5, 7], [12]])
    weights = torch.rand(batch.labels.shape, generator=torch.Generator().manual_seed(4))
    assert (batch.labels == -100).any()
    return replace(batch, loss_weights=weights.double() if weighted else None)


def _fuse(stage: Stage, impl: str, group: Any = None, sequence: bool = False) -> Stage:
    if impl == "linear":
        stage.head_loss = LinearCrossEntropy(group, sequence, DeferredWeights(), *SPLITS)
    elif impl == "native":
        stage.cross_entropy = NativeCrossEntropy(group)
    return stage


def _hidden() -> Tensor:
    generator = torch.Generator().manual_seed(3)
    x_TH = torch.randn(T, MODEL.hidden_size, generator=generator, dtype=torch.float64)
    return x_TH.requires_grad_()


def _backward(stage: Stage, x_TH: Tensor, batch: Batch) -> Tensor:
    at_a_time = {"LOGITS_AT_A_TIME": 5 * MODEL.padded_vocab_size, "LOSS_TOKENS": 10}
    with patch.multiple(fused, **at_a_time):
        loss = stage.loss([stage.norm(x_TH)], batch)
        (loss * 0.37).backward()
    return loss.detach()


def _close(ours: Tensor | None, true: Tensor | None) -> None:
    assert ours is not None and true is not None
    torch.testing.assert_close(ours, true, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("impl", "smoothing", "weighted"), CASES, ids=NAMES)
def test_fused_losses_are_the_loss(impl: str, smoothing: float, weighted: bool) -> None:
    plain = build(_model(smoothing), label_smoothing=smoothing, z_loss_coeff=Z)
    stage = _fuse(build(_model(smoothing), label_smoothing=smoothing, z_loss_coeff=Z), impl)
    x, own = _hidden(), _hidden()
    batch = _batch(weighted)
    _close(_backward(stage, own, batch), _backward(plain, x, batch))
    _close(own.grad, x.grad)
    _close(stage.z_sums[0], plain.z_sums[0])
    for name in ("lm_head.weight", "norm.weight", *["lm_head.bias"] * bool(smoothing)):
        _close(stage.get_parameter(name).grad, plain.get_parameter(name).grad)
    with torch.no_grad():
        _close(stage.loss([stage.norm(own)], batch), plain.loss([plain.norm(x)], batch))


@pytest.mark.parametrize("impl", ["plain", "native", "linear"])
def test_evaluations_have_no_z_loss(impl: str) -> None:
    with_z, without = (_fuse(build(MODEL, z_loss_coeff=z), impl) for z in (Z, 0.0))
    batch, x = _batch(weighted=False), _hidden()

    def loss(stage: Stage) -> float:
        with torch.no_grad():
            return float(stage.loss([stage.norm(x)], batch))

    assert loss(with_z) > loss(without) + 1.0
    assert loss(with_z.eval()) == loss(without.eval())


def _split(rank: int, world: int, impl: str, smoothing: float, sequence: bool) -> None:
    plain, stage = (
        build(_model(smoothing), label_smoothing=smoothing, z_loss_coeff=Z) for _ in range(2)
    )
    assert stage.lm_head is not None and plain.lm_head is not None
    for parameter in stage.lm_head.parameters():
        parameter.data = parameter.data.chunk(world)[rank].clone()
    stage.column = ColumnParallel(
        exchange_of(dist.group.WORLD, sequence_parallel=sequence), DeferredWeights()
    )
    _fuse(stage, impl, dist.group.WORLD, sequence)
    x, own = _hidden(), _hidden().detach()
    own = (own.chunk(world)[rank] if sequence else own).requires_grad_()
    batch = _batch(weighted=True)
    _close(_backward(stage, own, batch), _backward(plain, x, batch))
    _close(stage.z_sums[0], plain.z_sums[0])
    assert own.grad is not None and plain.lm_head.weight.grad is not None
    _close(all_gather(own.grad, dist.group.WORLD) if sequence else own.grad, x.grad)
    pairs = list(zip(stage.lm_head.parameters(), plain.lm_head.parameters(), strict=True))
    assert len(pairs) == (2 if smoothing else 1)
    for ours, true in pairs:
        assert true.grad is not None
        _close(ours.grad, true.grad.chunk(world)[rank])


@pytest.mark.parametrize("sequence", [False, True], ids=["tp", "sp"])
@pytest.mark.parametrize("impl", ["native", "linear"])
def test_fused_losses_of_a_split_vocabulary(impl: str, sequence: bool) -> None:
    run(2, _split, impl, 0.1, sequence)


class _Largest(TorchDispatchMode):
    """The most elements that any result in this context has, parameters apart."""

    elements = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else (result,):
            if isinstance(each, Tensor) and each.shape[:1] == (T,):
                self.elements = max(self.elements, each.numel())
        return result


def test_the_linear_loss_never_has_all_logits() -> None:
    for impl, expected in (
        ("plain", T * MODEL.padded_vocab_size),
        ("linear", T * MODEL.hidden_size),
    ):
        stage, x_TH = _fuse(build(MODEL), impl), _hidden()
        with _Largest() as largest:
            _backward(stage, x_TH, _batch(weighted=False))
        assert largest.elements == expected


def test_the_native_loss_keeps_its_gradient_in_the_memory_of_the_logits() -> None:
    for impl in ("plain", "native"):
        stage, x_TH = _fuse(build(MODEL), impl), _hidden()
        saved: list[Tensor] = []
        assert stage.norm is not None and stage.lm_head is not None
        logits = stage.lm_head(stage.norm(x_TH))
        before = logits.detach().clone()
        labels_T = _batch(weighted=False).labels.flatten()

        def note(tensor: Tensor, saved: list[Tensor] = saved) -> Tensor:
            saved.append(tensor)
            return tensor

        with saved_tensors_hooks(note, lambda tensor: tensor):
            loss = stage.cross_entropy(logits, labels_T, LossRule(MODEL.vocab_size))
        large = [tensor for tensor in saved if tensor.numel() == logits.numel()]
        assert [tensor.data_ptr() for tensor in large] == [logits.data_ptr()]
        assert torch.equal(logits, before) == (impl == "plain")
        (grad,) = torch.autograd.grad(loss, logits)
        assert (grad.data_ptr() == logits.data_ptr()) == (impl == "native")


def test_slices_of_the_vocabulary_are_set_by_megatrons_variables() -> None:
    assert vocab_split_sizes({}) == (3072, 3072)
    assert vocab_split_sizes({"LCE_GENERIC_BWD_VOCAB_SPLIT_SIZE": "512"}) == (3072, 512)
    wrong = {"LCE_GENERIC_FWD_VOCAB_SPLIT_SIZE": "0", "LCE_GENERIC_BWD_VOCAB_SPLIT_SIZE": "3k"}
    with pytest.raises(ConfigError) as error:
        vocab_split_sizes(wrong)
    assert all(
        f"{name} must be a positive number, not {text!r}" in str(error.value)
        for name, text in wrong.items()
    )


def test_gradients_are_those_of_finite_differences() -> None:
    """With everything at once: smoothing, weights, an ignored token and the z-loss; the native loss
    has one backward only."""
    stage = _fuse(build(MODEL, label_smoothing=0.1, z_loss_coeff=Z), "linear")
    labels_T, weights_T = torch.tensor([3, -100, 98]), torch.tensor([0.5, 1.0, 2.0]).double()
    x_TH = _hidden().detach()[:3].requires_grad_()
    with patch.multiple(fused, LOSS_TOKENS=2):
        torch.autograd.gradcheck(lambda x: stage.head_loss(stage, x, labels_T, weights_T), (x_TH,))


def _most_held(tokens: int) -> int:
    """Most bytes that the linear loss and its backward take, tokens and states not counted."""
    stage, x_TH = build(MODEL).bfloat16(), _hidden().detach().bfloat16()
    stage.head_loss = LinearCrossEntropy(
        None, False, DeferredWeights(), MODEL.vocab_size, MODEL.vocab_size
    )
    assert stage.lm_head is not None
    x_TH = x_TH.repeat(tokens // T, 1).requires_grad_()
    labels_T = torch.arange(tokens) % MODEL.vocab_size
    limit = DeviceLimit(1e9, {"there": [stage.lm_head.weight, x_TH, labels_T]}, [])
    before = limit.holdings.total
    with patch.object(fused, "LOSS_TOKENS", T), limit:
        stage.head_loss(stage, x_TH, labels_T, None).backward()
    return limit.holdings.peak - before


def test_a_token_more_takes_what_the_planner_counts() -> None:
    """With tiles of few tokens: the sum of the states' gradient, and that gradient."""
    states = 6 * MODEL.hidden_size  # in bf16, and in fp32: what `predict.memory.backward` has
    statistics = 3 * 4 + 4  # its log-sum-exp, weight, loss and scale
    each = (_most_held(80 * T) - _most_held(60 * T)) / (20 * T)
    assert states <= each <= states + statistics, each
