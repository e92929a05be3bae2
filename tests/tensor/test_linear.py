"""Column- and row-parallel linears against plain ones, in fp64."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.audit.launches import Launches
from fivefold.mesh.collectives import all_reduce
from fivefold.model.eight_bit.fp8 import E5M2, RECIPES
from fivefold.model.eight_bit.linear import EightBit
from fivefold.model.layers import Linear, plain_column, plain_row
from fivefold.model.products import Kept, Products
from fivefold.tensor.deferred_weight import DeferredWeights, run_works
from fivefold.tensor.exchange import Exchange
from fivefold.tensor.linear import ColumnParallel, RowParallel
from fivefold.tensor.one_rank import LocalColumn
from tests.pool import run
from tests.tensor.ways import WAYS, exchanging, held_sum

T, H, F = 8, 6, 12
OPTIONS = list(product(WAYS, [False, True], [False, True]))
NAMES = [
    f"{way}, {'bias' if bias else 'no bias'}, dW {'late' if late else 'now'}"
    for way, bias, late in OPTIONS
]


def _in_way(rank: int, world: int, test: Callable[..., None], way: str, *options: Any) -> None:
    with exchanging(way) as exchange:
        test(rank, world, exchange, *options)


def _random(seed: int, *shape: int) -> Tensor:
    """The same on every rank, and not contiguous if it has two dims."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape[::-1], generator=generator, dtype=torch.float64).t()


def _linear(seed: int, features_in: int, features_out: int, bias: bool) -> Linear:
    linear = Linear(features_in, features_out, bias).double()
    for index, parameter in enumerate(linear.parameters()):
        parameter.data.copy_(_random(10 * seed + index, *parameter.shape))
    return linear


def _part_of(linear: Linear, rank: int, world: int, dim: int) -> Linear:
    """This rank's rows (dim 0) or columns (dim 1); a bias is cut along with the rows only."""
    weight = linear.weight.detach().chunk(world, dim)[rank]
    part = Linear(weight.shape[1], weight.shape[0], linear.bias is not None).double()
    part.weight.data.copy_(weight)
    if part.bias is not None and linear.bias is not None:
        bias = linear.bias.detach()
        part.bias.data.copy_(bias.chunk(world)[rank] if dim == 0 else bias)
    return part


def _backward(
    deferred: DeferredWeights, later: bool, outputs: Sequence[Tensor], grads: Sequence[Tensor]
) -> None:
    if not later:
        torch.autograd.backward(outputs, grads)
        return
    with deferred.collect() as works:
        torch.autograd.backward(outputs, grads)
    for _ in run_works(works):
        pass


def _close(ours: Tensor | None, true: Tensor | None) -> None:
    assert ours is not None and true is not None
    torch.testing.assert_close(ours, true, rtol=1e-12, atol=1e-12)


def _grads(linears: Sequence[Linear]) -> list[Tensor | None]:
    return [parameter.grad for linear in linears for parameter in linear.parameters()]


def _column(rank: int, world: int, exchange: Exchange, bias: bool, later: bool) -> None:
    deferred, sequence = DeferredWeights(), exchange.splits_tokens
    column = ColumnParallel(exchange, deferred)
    plain = [_linear(1, H, F, bias), _linear(2, H, 2 * F, bias)]
    parts = [_part_of(linear, rank, world, 0) for linear in plain]
    for microbatch in range(2):  # the second adds to the gradients of the first
        x = _random(50 + microbatch, T, H).requires_grad_()
        mine = (x.detach().chunk(world)[rank] if sequence else x.detach()).requires_grad_()
        true, ours = plain_column(x, *plain), column(mine, *parts)
        upstream = [_random(60 + i, *y.shape) for i, y in enumerate(true)]
        for y, whole in zip(ours, true, strict=True):
            _close(y, whole.chunk(world, 1)[rank])
        torch.autograd.backward(true, upstream)
        _backward(deferred, later, ours, [grad.chunk(world, 1)[rank] for grad in upstream])
        assert x.grad is not None
        _close(mine.grad, x.grad.chunk(world)[rank] if sequence else x.grad)
        for got, expected in zip(_grads(parts), _grads(plain), strict=True):
            assert expected is not None
            _close(got, expected.chunk(world)[rank])


@pytest.mark.parametrize("options", OPTIONS, ids=NAMES)
def test_columns(options: tuple[str, bool, bool]) -> None:
    run(2, _in_way, _column, *options)


def _row(rank: int, world: int, exchange: Exchange, bias: bool, later: bool) -> None:
    deferred, sequence = DeferredWeights(), exchange.splits_tokens
    row = RowParallel(exchange, deferred)
    plain = _linear(3, F, H, bias)
    part = _part_of(plain, rank, world, 1)
    for microbatch in range(2):
        x = _random(70 + microbatch, T, F).requires_grad_()
        mine = x.detach().chunk(world, 1)[rank].requires_grad_()
        true, ours = plain_row(x, plain), row(mine, part)
        upstream = _random(80, T, H)
        here = upstream.chunk(world)[rank] if sequence else upstream
        _close(ours, true.chunk(world)[rank] if sequence else true)
        true.backward(upstream)
        _backward(deferred, later, [ours], [here])
        assert x.grad is not None and plain.weight.grad is not None
        _close(mine.grad, x.grad.chunk(world, 1)[rank])
        _close(part.weight.grad, plain.weight.grad.chunk(world, 1)[rank])
    if plain.bias is not None and part.bias is not None:
        assert part.bias.grad is not None
        # Under sequence parallelism each rank has the part of its tokens: `install` names it.
        group = dist.group.WORLD if sequence else None
        _close(all_reduce(part.bias.grad.clone(), group), plain.bias.grad)


@pytest.mark.parametrize("options", OPTIONS, ids=NAMES)
def test_rows(options: tuple[str, bool, bool]) -> None:
    run(2, _in_way, _row, *options)


def _shared_heads(rank: int, world: int, exchange: Exchange, bias: bool, later: bool) -> None:
    """Two key heads over four ranks: all hold both, each uses the rows of one."""
    deferred, D, sequence = DeferredWeights(), 3, exchange.splits_tokens
    head = rank * 2 // world
    rows = slice(head * D, (head + 1) * D)
    column = ColumnParallel(exchange, deferred)
    plain = [_linear(4, H, F, bias), _linear(5, H, 2 * D, bias)]
    parts = [_part_of(plain[0], rank, world, 0), _part_of(plain[1], 0, 1, 0)]
    parts[1].used = rows
    for microbatch in range(2):
        x = _random(90 + microbatch, T, H).requires_grad_()
        mine = (x.detach().chunk(world)[rank] if sequence else x.detach()).requires_grad_()
        query, key = plain_column(x, *plain)
        ours = column(mine, *parts)
        _close(ours[1], key[:, rows])
        wanted = [_random(100 + r, T, D) for r in range(world)]
        # What every rank asks of the head that it uses, summed where two ranks share it.
        upstream = torch.zeros_like(key)
        for r, grad in enumerate(wanted):
            other = r * 2 // world
            upstream[:, other * D : (other + 1) * D] += grad
        of_query = _random(110, *query.shape)
        torch.autograd.backward((query, key), (of_query, upstream))
        _backward(deferred, later, ours, [of_query.chunk(world, 1)[rank], wanted[rank]])
        assert x.grad is not None
        _close(mine.grad, x.grad.chunk(world)[rank] if sequence else x.grad)
    for got, expected in zip(_grads(parts[1:]), _grads(plain[1:]), strict=True):
        assert got is not None
        outside = torch.ones(2 * D, dtype=torch.bool)
        outside[rows] = False
        assert not got[outside].any()
        _close(all_reduce(got.clone(), dist.group.WORLD), expected)


@pytest.mark.parametrize("options", OPTIONS[1::2], ids=NAMES[1::2])
def test_key_heads_that_ranks_share(options: tuple[str, bool, bool]) -> None:
    run(4, _in_way, _shared_heads, *options)


def _both_ways(exchange: Exchange, later: bool) -> list[Tensor]:
    deferred = DeferredWeights()
    column, row = ColumnParallel(exchange, deferred), RowParallel(exchange, deferred)
    up, gate, down = _linear(6, H, F, True), _linear(7, H, F, False), _linear(8, F, H, True)
    results = []
    for microbatch in range(3):
        x = _random(120 + microbatch, T, H).requires_grad_()
        y = row(torch.mul(*column(x, up, gate)), down)
        _backward(deferred, later, [y], [_random(130, *y.shape)])
        results += [y.detach(), x.grad]
    return results + _grads([up, gate, down])


def _same_bits(rank: int, world: int) -> None:
    for way in WAYS:
        with exchanging(way) as exchange:
            now, late = (_both_ways(exchange, later) for later in (False, True))
        assert all(torch.equal(a, b) for a, b in zip(now, late, strict=True))


def test_weight_gradients_put_off_are_the_same_bits() -> None:
    run(2, _same_bits)


@pytest.mark.parametrize("later", [False, True])
def test_later_microbatches_add_their_weight_gradients_in_the_product(later: bool) -> None:
    deferred = DeferredWeights()
    deferred.sums = [held_sum]
    column, row = LocalColumn(deferred), RowParallel(Exchange(None), deferred)
    up, gate, down = (
        _linear(n, *size, False) for n, size in ((6, (H, F)), (7, (H, F)), (8, (F, H)))
    )
    launched = []
    for microbatch in range(3):
        x = _random(120 + microbatch, T, H).requires_grad_()
        y, grad = row(torch.mul(*column(x, up, gate)), down), _random(130, T, H)
        with Launches() as seen:
            _backward(deferred, later, [y], [grad])
        launched.append(seen.count)
    assert launched[0] == launched[1] == launched[2]


class _Sevenfold(Products):
    """Products of another arithmetic: W stands for 7 W."""

    keeps_input = False

    def kept(self, x_TH: Tensor) -> Kept:
        return x_TH / 2, torch.tensor(2.0)  # a part of each rank, and one that all hold

    def gradient(self, grad_TF: Tensor) -> Kept:
        return (7 * grad_TF,)

    def output(self, x: Kept, weight_FH: Tensor, *into: Tensor | None) -> Tensor:
        return super().output(x, 7 * weight_FH, *into)

    def weight_gradient(self, grad: Kept, kept: Kept, onto_FH: Tensor | None = None) -> Tensor:
        return super().weight_gradient(grad, (kept[0] * kept[1],), onto_FH)


def _every_product_goes_through_the_seam(rank: int, world: int, exchange: Exchange) -> None:
    sequence = exchange.splits_tokens
    for later in (False, True):
        deferred = DeferredWeights()
        column, row = ColumnParallel(exchange, deferred), RowParallel(exchange, deferred)
        found = []
        for sevenfold in (False, True):
            parts = [_part_of(_linear(n, H, F, True), rank, world, 0) for n in (6, 7)]
            parts.append(_part_of(_linear(8, F, H, False), rank, world, 1))
            for part in parts:
                part.weight.data.mul_(1 if sevenfold else 7)
                part.multiply = _Sevenfold() if sevenfold else part.multiply
            x = _random(120, T // world if sequence else T, H).requires_grad_()
            y = row(torch.mul(*column(x, *parts[:2])), parts[2])
            _backward(deferred, later, [y], [_random(130, *y.shape)])
            factor = 1 if sevenfold else 7
            grads = [part.weight.grad for part in parts]
            found.append([y.detach(), x.grad, *(factor * g for g in grads if g is not None)])
        assert len(found[0]) == 5
        for ours, true in zip(*found, strict=True):
            _close(ours, true)


@pytest.mark.parametrize("way", WAYS)
def test_every_product_goes_through_the_seam(way: str) -> None:
    run(2, _in_way, _every_product_goes_through_the_seam, way)


def _no_gradient_of_the_input(rank: int, world: int, exchange: Exchange) -> None:
    column = ColumnParallel(exchange, DeferredWeights())
    part = _part_of(_linear(9, H, F, False), rank, world, 0)
    x = _random(140, T, H)
    (y,) = column(x.chunk(world)[rank], part)
    y.backward(torch.ones_like(y))
    _close(part.weight.grad, torch.ones(T, F // world).double().t() @ x)
    assert not x.requires_grad


def test_an_input_that_needs_no_gradient_gets_none() -> None:
    run(2, _in_way, _no_gradient_of_the_input, "parts")


def _eight_bits_in_parts(rank: int, world: int, recipe: str) -> None:
    products = EightBit(RECIPES[recipe], torch.float64, E5M2)
    found = []
    for way, keeps in product(("sp", "parts"), (False, True)):
        with exchanging(way) as exchange:
            deferred = DeferredWeights()
            column, row = ColumnParallel(exchange, deferred), RowParallel(exchange, deferred)
            parts = [_part_of(_linear(n, 40, 300, True), rank, world, 0) for n in (6, 7)]
            parts.append(_part_of(_linear(8, 300, 40, False), rank, world, 1))
            for part in parts:
                part.multiply = replace(products, keeps_input=keeps)
            x = _random(120, 7, 40).mul_(10 ** _random(121, 7, 40)).requires_grad_()
            y = row(torch.mul(*column(x * (rank + 1), *parts[:2])), parts[2])
            _backward(deferred, False, [y], [_random(130, *y.shape)])
            found.append([y.detach(), x.grad, *_grads(parts)])
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            assert one is not None and two is not None and torch.equal(one, two)


@pytest.mark.parametrize("recipe", sorted(RECIPES.keys() - {"tensorwise"}))
def test_parts_of_the_tokens_are_rounded_as_all_of_them(recipe: str) -> None:
    run(2, _eight_bits_in_parts, recipe)
