"""Grouped linear layers that multiply 8-bit floats.

Shapes: T rows sorted by group, H input features, F output features, E groups.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from torch import Tensor

from fivefold.model.eight_bit.linear import EightBit
from fivefold.model.moe.grouped import copy_groups, group_ends
from fivefold.model.products import Kept, Products


@dataclass(frozen=True)
class EightBitGroups(Products):
    """`EightBit` for linear layers with W [E, F, H]: each group of rows is multiplied as if alone.

    Where no row shares a scale with another, the rows of all groups are quantised at once for the
    results and for dX, and some GPUs multiply them in one call.

    Attributes:
        each: products of a group.
        ends: end row of each group.
    """

    each: EightBit
    ends: list[int]
    apply = staticmethod(EightBit.apply)

    def reading_as(self, first: Products) -> "EightBitGroups":
        """The same, with the scales with which the first linear layer reads their input."""
        assert isinstance(first, EightBitGroups)
        return replace(self, each=self.each.reading_as(first.each))

    def input(self, x_TH: Tensor) -> tuple[Kept, Kept]:
        """The inputs of `each` for the rows of each group, one after the other, or of all at
        once."""
        if self._by_row:
            return self.each.taken(x_TH), tuple(chain(*map(self.each.kept, self._split(x_TH))))
        read = (each.input(x) for each, x in zip(self._every, self._split(x_TH), strict=True))
        taken, kept = zip(*read, strict=True)
        return tuple(chain(*taken)), tuple(chain(*kept))

    def gradient(self, grad_TF: Tensor) -> Kept:
        """The gradients that the products of each group need, one after the other, or of all at
        once."""
        if self._by_row:
            return self.each.gradient(grad_TF)
        each = zip(self._every, self._split(grad_TF), strict=True)
        return tuple(chain(*(one.gradient(grad) for one, grad in each)))

    def output(self, x: Kept, weight_EFH: Tensor, *_: Tensor | None) -> Tensor:
        """[T, H] -> [T, F], without a bias."""
        if self._by_row:
            return self.each.groups_output(x, weight_EFH, self.ends)
        y_TF = x[0].new_empty(self.ends[-1], weight_EFH.shape[1], dtype=self.each.dtype)
        pairs = zip(self._groups(x), self.each.by_group(weight_EFH), strict=True)
        for one, pair, out_TF in zip(self._every, pairs, self._split(y_TF), strict=True):
            one.output(*pair, out_TF=out_TF)
        return y_TF

    def input_gradient(
        self, grad: Kept, weight_EFH: Tensor, onto_TH: Tensor | None = None, *_: Tensor | None
    ) -> Tensor:
        """[T, F] -> [T, H], added to `onto_TH` if there is one."""
        if self._by_row:
            whole_TH = self.each.groups_gradient(grad, weight_EFH, self.ends)
            return whole_TH if onto_TH is None else onto_TH.add_(whole_TH)
        adds, grad_TH = onto_TH is not None, onto_TH
        if grad_TH is None:
            shape = self.ends[-1], weight_EFH.shape[2]
            grad_TH = grad[0].new_empty(shape, dtype=self.each.dtype)
        pairs = zip(self._groups(grad), self.each.by_group(weight_EFH), strict=True)
        for one, pair, rows_TH in zip(self._every, pairs, self._split(grad_TH), strict=True):
            each = (rows_TH, None) if adds else (None, rows_TH)
            one.input_gradient(*pair, *each)
        return grad_TH

    def weight_gradient(self, grad: Kept, kept: Kept, onto_EFH: Tensor | None = None) -> Tensor:
        """[E, F, H], zero for groups without rows; added to `onto_EFH` if there is one."""
        grads = self._weight_gradients(grad, kept)
        if onto_EFH is not None:
            for onto_FH, grad_FH in zip(onto_EFH.unbind(), grads, strict=True):
                onto_FH.add_(grad_FH)
            return onto_EFH
        first = next(grads)
        return copy_groups(chain((first,), grads), first.new_empty(len(self.ends), *first.shape))

    def write_weight_gradient(self, grad: Kept, kept: Kept, out_EFH: Tensor) -> None:
        """`weight_gradient` into `out_EFH`, in its dtype; what was there does not count."""
        copy_groups(self._weight_gradients(grad, kept), out_EFH)

    def _weight_gradients(self, grad: Kept, kept: Kept) -> Iterator[Tensor]:
        """[F, H] of each group in turn: all at once would take as much again as their sum."""
        grads = zip(*map(self._split, grad), strict=True) if self._by_row else self._groups(grad)
        for one, each, x in zip(self._every, grads, self._groups(kept), strict=True):
            yield one.weight_gradient(tuple(each), x)

    @property
    def _by_row(self) -> bool:
        """Whether no row shares a scale with another in the products for the results and dX."""
        return self.each.recipe.across == 1

    @property
    def _every(self) -> Iterator[EightBit]:
        """The products of each group."""
        return map(self.each.of_group, range(len(self.ends)))

    def _split(self, x: Tensor) -> tuple[Tensor, ...]:
        return x.tensor_split(self.ends)[: len(self.ends)]

    def _groups(self, kept: Kept) -> list[Kept]:
        """The kept inputs, by group."""
        size = len(kept) // len(self.ends)
        return [tuple(kept[at : at + size]) for at in range(0, len(kept), size)]


@dataclass(frozen=True)
class EightBitExperts:
    """The `products` seam of grouped linear layers.

    Attributes:
        each: products of a group.
    """

    each: EightBit

    def ends(self, x_TH: Tensor, rows_E: Tensor, weights: Sequence[Tensor]) -> list[int]:
        """End row of each group; the host waits for it."""
        return group_ends(rows_E)

    def products(self, rows_E: Tensor, ends: list[int] | None) -> EightBitGroups:
        """The products of these groups."""
        assert ends is not None
        return EightBitGroups(self.each, ends)
