"""Fills the weights of a model with experts from those of a dense model, part by part."""

from collections.abc import Callable, Mapping, Sequence

import torch

from fivefold.config.model import ModelConfig
from fivefold.config.upcycling import dense_model, share_of_chosen, weight_scale
from fivefold.description.shape import parameter_shapes
from fivefold.mesh.slices import Piece
from fivefold.model.init import init_slice, initial_buffer

Fill = Callable[[Mapping[str, Piece]], None]
"""Fills pieces of a model's tensors in place, by their names."""

_EXPERTS, _ROUTER, _MLP = ".mlp.experts.", ".mlp.router.", ".mlp."


def upcycled(model: ModelConfig, granularity: int, seed: int, fill_dense: Fill) -> Fill:
    """A function that fills a model with experts, made from one that fills the dense model it
    starts from.

    Expert e is part e modulo G of the MLP, times `weight_scale`. Routers keep their initial values,
    except that the G parts of one MLP share a row, so that a token gets all of them.

    Args:
        model: the model with experts.
        granularity: G, parts into which the inner features of the MLP are cut.
        seed: seed of the initial weights.
        fill_dense: fills pieces of `dense_model`.
    """
    own, dense = (parameter_shapes(m) for m in (model, dense_model(model, granularity)))
    scale, of_bias = weight_scale(model, granularity), 1 / share_of_chosen(model)

    def fill(pieces: Mapping[str, Piece]) -> None:
        experts = {name: piece for name, piece in pieces.items() if _EXPERTS in name}
        rest = {n: p for n, p in pieces.items() if n not in experts and _ROUTER not in n}
        for name in pieces.keys() - experts.keys() - rest.keys():
            if name in own:
                _fill_router(name, pieces[name], model, granularity, seed)
            else:
                pieces[name].local.detach().fill_(initial_buffer(name, model))
        for part in range(granularity):  # of which a rank may hold several, all of one tensor
            there = {
                name: one
                for expert, piece in experts.items()
                if (name := expert.replace(_EXPERTS, _MLP))
                if (one := _first_of(piece, part, granularity, dense[name])) is not None
            }
            fill_dense(rest | there if part == 0 else there)
        for name, piece in experts.items():
            factor = of_bias if name.endswith("down_proj.bias") else scale
            _repeat(piece, granularity, factor)

    return fill


def _held(piece: Piece, part: int, granularity: int) -> list[int]:
    """Local indices of the experts that are this part of an MLP."""
    experts = range(piece.slices[0].start, piece.slices[0].stop) if piece.local.numel() else ()
    return [at for at, expert in enumerate(experts) if expert % granularity == part]


def _first_of(piece: Piece, part: int, granularity: int, shape: Sequence[int]) -> Piece | None:
    """The first local expert that is this part, as a piece of the MLP's tensor of this shape."""
    held = _held(piece, part, granularity)
    if not held:
        return None
    inner = zip(piece.slices[1:], piece.shape[1:], shape, strict=True)
    slices = [
        slice(own.start + first, own.stop + first)
        for own, size, whole in inner
        for first in (0 if size == whole else part * size,)
    ]
    return Piece(piece.local.detach()[held[0]], torch.Size(shape), tuple(slices))


def _repeat(piece: Piece, granularity: int, factor: float) -> None:
    """Scale each part of the MLP in place, and copy it to the other experts."""
    local = piece.local.detach()
    for part in range(granularity):
        if held := _held(piece, part, granularity):
            first, *others = held
            local[first].mul_(factor)
            for other in others:
                local[other].copy_(local[first])


def _fill_router(name: str, piece: Piece, model: ModelConfig, granularity: int, seed: int) -> None:
    """Give a router's tensor its initial values, the same row for the experts of each MLP."""
    if piece.local.numel():
        rows = torch.arange(piece.slices[0].start, piece.slices[0].stop) // granularity
        drawn = slice(int(rows[0]), int(rows[-1]) + 1), *piece.slices[1:]
        values = init_slice(name, piece.shape, drawn, model, seed)[rows - rows[0]]
        piece.local.detach().copy_(values)
