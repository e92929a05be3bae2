"""Causal sequence slices: keys and values passed to later slices, gradients passed back.

A slice attends to its own tokens and to those of earlier slices, so keys and values are kept for
the later slices. The later slices run their backwards first and accumulate gradients on what was
kept; the slice's own backward starts with these (Li et al., TeraPipe, 2021; Sun et al., Seq1F1B,
2024). Shapes: B batch, S tokens of a slice, L tokens up to its end, G key/value heads, D head
features.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge


@dataclass
class _KeptSlice:
    """A key or value of one slice and layer; later slices attend to `leaf`."""

    leaf: Tensor
    edge: GradientEdge | None = None


class KeysAndValues(Protocol):
    """Holds the keys and values of sequences of which attention sees one part at a time."""

    def join(self, site: str, k_BSGD: Tensor, v_BSGD: Tensor, /) -> tuple[Tensor, Tensor]:
        """Keys and values of all tokens up to the end of the part, both as [B, L, G, D].

        Args:
            site: names the layer.
            k_BSGD: keys of the part, [B, S, G, D].
            v_BSGD: values of the part, the same.
        """
        ...


class GrowingSequence:
    """Keys and values of sequences that grow by tokens: the cache of a decoder."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[Tensor, Tensor]] = {}

    def join(self, site: str, k_BSGD: Tensor, v_BSGD: Tensor, /) -> tuple[Tensor, Tensor]:
        """Add keys and values; return all so far, as in `KeysAndValues`."""
        if site in self._kept:
            k_BLGD, v_BLGD = self._kept[site]
            k_BSGD, v_BSGD = torch.cat((k_BLGD, k_BSGD), 1), torch.cat((v_BLGD, v_BSGD), 1)
        self._kept[site] = k_BSGD, v_BSGD
        return self._kept[site]


class SlicedSequence:
    """The keys and values of one microbatch in one stage, by sequence slice."""

    def __init__(self) -> None:
        self._kept: defaultdict[int, dict[tuple[str, str], _KeptSlice]] = defaultdict(dict)
        self._at = 0

    def begin(self, index: int) -> None:
        """Announce the forward, or the recomputation, of slice `index`."""
        self._at = index

    def join(self, site: str, k_BSGD: Tensor, v_BSGD: Tensor, /) -> tuple[Tensor, Tensor]:
        """Keys and values of all tokens up to the end of the current slice."""
        return self._join((site, "key"), k_BSGD), self._join((site, "value"), v_BSGD)

    def _join(self, name: tuple[str, str], own_BSGD: Tensor) -> Tensor:
        kept = self._kept[self._at].get(name)
        if kept is None:
            kept = _KeptSlice(own_BSGD.detach().requires_grad_())
            self._kept[self._at][name] = kept
        if torch.is_grad_enabled():
            kept.edge = get_gradient_edge(own_BSGD)
        earlier = [self._kept[index][name].leaf for index in range(self._at)]
        return torch.cat([*earlier, own_BSGD], dim=1) if earlier else own_BSGD

    def release(self, index: int) -> Iterator[tuple[GradientEdge, Tensor]]:
        """The point at which gradients left by later slices enter the backward of slice `index`.

        Frees what was kept of the slice.
        """
        for kept in self._kept.pop(index, {}).values():
            if kept.leaf.grad is not None:
                assert kept.edge is not None, "a backward without a forward"
                yield kept.edge, kept.leaf.grad
