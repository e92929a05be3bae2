"""Delayed scales against a restatement in plain Python, over several steps."""

from dataclasses import dataclass, field
from itertools import product
from math import inf, isfinite, nan
from typing import Any

import pytest
import torch
from torch import Tensor

from fivefold.config.training import TrainingConfig
from fivefold.model.eight_bit.delayed import DelayedScaling
from fivefold.model.eight_bit.fp8 import E4M3, E5M2, by_kernel, multiply
from fivefold.model.eight_bit.groups import EightBitGroups
from fivefold.model.eight_bit.layers import eight_bit
from fivefold.model.eight_bit.linear import EightBit
from fivefold.model.eight_bit.rules import ScaledLayer
from fivefold.model.products import of_one_input
from tests.model.test_fp8 import BITS, _random, _rounded

CPU = torch.device("cpu")


@dataclass
class _Operand:
    """A tensor's history as a list, the latest step first."""

    dtype: torch.dtype
    length: int
    most_recent: bool
    margin: int
    scale: float = 1.0
    seen: float = 0.0
    history: list[float] = field(default_factory=list)

    def narrow(self, x: Tensor) -> Tensor:
        """What the bits stand for: with the scale of before, and larger numbers cut off."""
        self.seen = max(self.seen, *(abs(float(value)) for value in x.flatten()))
        inverse = float(torch.tensor(1.0) / torch.tensor(self.scale))
        out = torch.empty_like(x)
        for i, j in product(range(x.shape[0]), range(x.shape[1])):
            out[i, j] = _rounded(float(x[i, j]) * self.scale, self.dtype) * inverse
        return out

    def end_step(self) -> None:
        self.history = [self.seen, *self.history][: self.length]
        largest = self.history[0] if self.most_recent else max(self.history)
        if largest > 0:
            limit = torch.tensor(BITS[self.dtype][2] / 2**self.margin)
            self.scale = float(limit / torch.tensor(largest))
        self.seen = 0.0


def _scaling(training: TrainingConfig, *layers: ScaledLayer) -> DelayedScaling:
    return DelayedScaling(layers, {each.name: each.experts for each in layers}, training, CPU)


def _late(**settings: Any) -> TrainingConfig:
    return TrainingConfig(fp8_format="hybrid", fp8_recipe="delayed", **settings)


def _layers(training: TrainingConfig, scaling: DelayedScaling) -> list[EightBit]:
    products = eight_bit(training, torch.float64)
    assert products is not None
    return [EightBit(products.recipe, products.dtype, products.gradients, delayed=each)
            for _, each in scaling.of_layers()]  # fmt: skip


def _fitting(x: Tensor) -> Tensor:
    """The scale with which the largest element of a matrix just fits e4m3."""
    return torch.tensor(448.0) / x.abs().max().float()


@pytest.mark.parametrize("algorithm", ["most_recent", "max"])
@pytest.mark.parametrize(("length", "margin"), [(1, 0), (2, 1), (3, 0)])
@pytest.mark.parametrize("keeps", [False, True])
def test_steps_are_scaled_by_those_before(
    algorithm: Any, length: int, margin: int, keeps: bool
) -> None:
    """Two linear layers of one input, two microbatches a step, magnitudes that rise and fall."""
    training = _late(
        fp8_amax_history_len=length, fp8_amax_compute_algo=algorithm, fp8_margin=margin
    )
    scaling = _scaling(training, *(ScaledLayer(n, 0, True, None, 0, 1) for n in ("q", "k")))
    both = of_one_input(
        [
            EightBit(
                each.recipe, each.dtype, each.gradients, keeps_input=keeps, delayed=each.delayed
            )
            for each in _layers(training, scaling)
        ]
    )
    how = length, algorithm == "most_recent", margin
    x_, *w_ = (_Operand(E4M3, *how) for _ in range(3))
    g_ = [_Operand(E5M2, *how) for _ in range(2)]
    for step, factor in enumerate((1.0, 1e-3, 40.0, 0.5, 1e-2, 3.0)):
        scaling.begin()
        weights = [factor**0.5 * _random(4, 7, seed=10 * step + n) for n in range(2)]
        for microbatch in range(2):
            x, *grads = (
                factor * _random(5, size, seed=100 * step + 10 * microbatch + n)
                for n, size in ((3, 7), (4, 4), (5, 4))
            )
            leaves = [each.clone().requires_grad_() for each in (x, *weights)]
            ys = both[0].apply(both, leaves[0], leaves[1:], (None, None))
            torch.autograd.backward(ys, grads)
            narrow_x = x_.narrow(x)
            ws = [one.narrow(w) for one, w in zip(w_, weights, strict=True)]
            gs = [one.narrow(g) for one, g in zip(g_, grads, strict=True)]
            expected = [
                *(narrow_x @ w.t() for w in ws),
                gs[0] @ ws[0] + gs[1] @ ws[1],
                *(g.t() @ narrow_x for g in gs),
            ]
            for ours, true in zip((*ys, *(leaf.grad for leaf in leaves)), expected, strict=True):
                torch.testing.assert_close(ours, true, rtol=1e-12, atol=1e-12 * factor)
        scaling.agree(None)
        scaling.update()
        for each in (x_, *w_, *g_):
            each.end_step()
        stored = {name: piece.local for name, piece in scaling.stored(copies=True).items()}
        for name, operands in (("q", (x_, w_[0], g_[0])), ("k", (None, w_[1], g_[1]))):
            for row, one in enumerate(operands):
                if one is not None:
                    known = one.history + [0.0] * (length - len(one.history))
                    history = torch.tensor(known)
                    assert torch.equal(stored[f"fp8.{name}.amax_history"][row], history)
                    assert float(stored[f"fp8.{name}.scale"][row]) == one.scale
        assert (stored["fp8.k.scale"][0] == 1.0).all()  # its input is q's


@pytest.mark.skipif(
    not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm_v2", "CPU"),
    reason="this torch multiplies 8 bits on GPUs only",
)
@pytest.mark.parametrize("size", [(16, 32, 48), (5, 40, 17)])
def test_torch_multiplies_what_has_a_delayed_scale(size: tuple[int, int, int]) -> None:
    """PyTorch's product of 8-bit floats, here on a CPU: of inputs, and of gradients in e5m2."""
    m, n, k = size
    training = _late(fp8_margin=1)
    scaling = _scaling(training, ScaledLayer("up", 0, True, None, 0, 1))
    ((_, scales),) = scaling.of_layers()
    x, w, g = (_random(*s, seed=sum(s)).bfloat16() for s in ((m, k), (n, k), (m, n)))
    g, errors = g * 1e-5, []  # below the least number of e5m2, until the scale is known
    for _ in range(2):
        scaling.begin()
        narrow = [scales.quantised(x, 0, E4M3), scales.quantised(w, 1, E4M3)]
        grad = scales.quantised(g, 2, E5M2)
        for a, b in (narrow, (grad, narrow[1].t()), (grad.t(), narrow[0].t())):
            true = multiply(a, b, torch.float64)
            ours = by_kernel(a, b, fast=False).double()
            assert (ours - true).norm() <= 2**-8 * true.norm()
        errors.append(float((grad.wide(torch.float64) - g).norm() / g.norm()))
        scaling.agree(None)
        scaling.update()
    assert errors[1] < 0.1 < 0.3 < errors[0]


def test_experts_have_scales_of_their_own_and_those_without_rows_keep_theirs() -> None:
    training = _late()
    scaling = _scaling(training, ScaledLayer("up", 0, True, 5, 1, 3))
    (one,) = _layers(training, scaling)
    weight = _random(3, 4, 7).requires_grad_()
    scales = []
    for ends in ([2, 2, 6], [3, 5, 5]):
        scaling.begin()
        x = _random(ends[-1], 7, seed=ends[0]).requires_grad_()
        groups = EightBitGroups(one, ends)
        (y,) = groups.apply((groups,), x, (weight,), (None,))
        y.backward(torch.ones_like(y))
        scaling.agree(None)
        scaling.update()
        piece = scaling.stored(copies=True)["fp8.up.scale"]
        assert piece.shape == (3, 5) and piece.slices == (slice(0, 3), slice(1, 4))
        scales.append(piece.local.clone())
        rows = x.detach().tensor_split(ends)[:3]
        for expert, part in enumerate(rows):
            if len(part):
                assert scales[-1][0, expert] == _fitting(part)
    assert float(scales[0][0, 1]) == float(scales[0][2, 1]) == 1.0
    assert torch.equal(scales[1][:, 2][::2], scales[0][:, 2][::2])  # nothing new of the last
    assert all(scales[1][1, e] == _fitting(own) for e, own in enumerate(weight.detach()))


@pytest.mark.parametrize("bad", [inf, -inf, nan])
def test_what_is_not_finite_is_seen_and_not_remembered(bad: float) -> None:
    training = _late(fp8_amax_history_len=2, fp8_amax_compute_algo="max")
    scaling = _scaling(training, ScaledLayer("up", 0, True, None, 0, 1))
    (one,) = _layers(training, scaling)
    w, stored = _random(4, 7), scaling.stored(copies=True)
    for spoilt in (False, True):
        scaling.begin()
        x = _random(3, 7, seed=1)
        if spoilt:
            x[1, 2] = bad
        (y,) = one.apply((one,), x, (w,), (None,))
        assert bool(y.isfinite().all()) is not spoilt
        assert not spoilt or y[1].isnan().all()
        scaling.agree(None)
        scaling.update()
        kept = [piece.local.flatten().tolist() for piece in stored.values()]
        assert all(isfinite(value) for values in kept for value in values)
    history = stored["fp8.up.amax_history"].local
    assert history[0].tolist() == [0.0, float(_random(3, 7, seed=1).abs().max().float())]
    assert (history[1] == history[1, 0]).all() and not history[2].any()


def test_a_step_that_is_not_taken_leaves_nothing() -> None:
    """Neither does an evaluation; and what is larger than expected is cut off, not infinite."""
    training = _late()
    scaling = _scaling(training, ScaledLayer("up", 0, True, None, 0, 1))
    (one,) = _layers(training, scaling)
    w = _random(4, 7)
    for factor, taken in ((1.0, True), (1e6, False), (1.0, True)):
        scaling.begin()
        (y,) = one.apply((one,), factor * _random(3, 7, seed=1), (w,), (None,))
        assert y.isfinite().all()
        if taken:
            scaling.agree(None)
            scaling.update()
        if factor > 1:
            assert float(y.abs().max()) < 1e2
    scale = scaling.stored(copies=True)["fp8.up.scale"].local
    assert scale[0] == _fitting(_random(3, 7, seed=1))


def test_parts_of_a_layer_know_their_place() -> None:
    """What a rank has of the message, by name: of experts its own; of a stage that two ranks hold,
    as little twice as once; the second copy is not stored again."""
    every = {"a": None, "b": 3, "c": None}
    layers = [ScaledLayer("c", 0, True, None, 0, 1), ScaledLayer("b", 1, False, 3, 1, 2)]
    scaling = DelayedScaling(layers, every, _late(), CPU)
    for number, (_, scales) in enumerate(scaling.of_layers()):
        scales.seen.copy_(torch.arange(scales.seen.numel()).view_as(scales.seen) + 10 * number)
    before = scaling._seen.clone()
    scaling.agree(None)
    assert torch.equal(scaling._seen, before)
    assert scaling._places.tolist() == [12, 13, 14, 4, 5, 7, 8, 10, 11]
    assert {*scaling.stored(copies=False)} == {"fp8.c.scale", "fp8.c.amax_history"}
    assert scaling.stored(copies=True)["fp8.b.amax_history"].slices == (
        slice(0, 3),
        slice(1, 3),
        slice(0, 1),
    )
