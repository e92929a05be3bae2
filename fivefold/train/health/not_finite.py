"""Finds the origin of infinities and NaNs in a step, an evaluation or a checkpoint.

All of it is collective, and none of it runs in a healthy step, where the gradient norm alone shows
every rank that all values are finite.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fivefold.config.model import ModelConfig
from fivefold.convert.load import fill_from_folder
from fivefold.convert.non_finite import spoilt
from fivefold.data.packing import Microbatch
from fivefold.errors import CheckpointError, Mistake
from fivefold.mesh.collectives import gather_objects
from fivefold.mesh.slices import Piece, local_tensor
from fivefold.optim.adamw import OPTIMIZER
from fivefold.pipeline.ir import Act
from fivefold.train.engine import Engine
from fivefold.units import few, several

SHOWN = 4  # ranks, or weights


@dataclass(frozen=True)
class _FirstNonFinite:
    """The first value on a rank that is not finite in a repeated step.

    Attributes:
        order: sort key among all ranks; the lowest is nearest to the cause.
        what: description of the value.
    """

    order: tuple[int, ...]
    what: str


def fill_finite(
    path: Path,
    model: ModelConfig,
    pieces: Mapping[str, Piece],
    adapter: Path | None = None,
    *,
    trained: bool = False,
) -> None:
    """`fill_from_folder`, with the same arguments, for weights that can be trained.

    Raises:
        CheckpointError: as for `fill_from_folder`, or a weight is an infinity or NaN.
    """
    fill_from_folder(path, model, pieces, adapter, trained=trained)
    if found := spoilt({name: piece.local for name, piece in pieces.items()}):
        kinds = "weights or moments" if trained else "weights"
        what = f"{path} holds {kinds} that are not finite, so that no loss would be"
        raise CheckpointError(Mistake(what, (few(found, SHOWN),)))


def locate_in_state(engine: Engine) -> list[str]:
    """A line for each rank with parameters or moments that are not finite."""
    state: dict[str, Tensor] = {  # moments first: they spoil parameters, not the reverse
        name.removeprefix(OPTIMIZER).replace(".", " of ", 1): piece.local
        for name, piece in engine.optimizer.state_tensors().items()
    }
    for name in engine.parameters:
        state[f"parameter {name}"] = engine.weight(name)
    return _lines(engine, gather_objects(spoilt(state), engine.groups.world))


def locate(engine: Engine, microbatches: Sequence[Microbatch]) -> tuple[list[str], bool]:
    """Lines that name the origin of values that are not finite, and whether the values failed to
    recur.

    If all parameters and moments are finite, the step is run once more while every module is
    watched. Gradients are lost.

    Args:
        engine: engine whose latest step was not finite, and did not update the weights.
        microbatches: microbatches of that step.
    """
    if in_state := locate_in_state(engine):
        return in_state, False
    gradients = {f"gradient of {name}": engine.optimizer.gradient(name) for name in engine.trained}
    sums = _lines(engine, gather_objects(spoilt(gradients), engine.groups.world))
    found, finite = _repeat(engine, microbatches)
    if finite:
        return [*sums, "run once more, the step is finite: the cause has gone"], True
    first = sorted((s.order, rank, s.what) for rank, s in enumerate(found) if s is not None)
    seen = [f"{_name(engine, rank)}: first in {what}" for _, rank, what in first[:SHOWN]]
    return seen or sums, False


def _repeat(
    engine: Engine, microbatches: Sequence[Microbatch]
) -> tuple[list[_FirstNonFinite | None], bool]:
    """The first value on each rank that is not finite when the step is repeated, if any."""
    engine.optimizer.zero_grad()
    executor = engine.model.executor
    watch, observed = _NonFiniteWatch(), executor.observe
    executor.observe = watch.observe
    try:
        eager = torch.compiler.set_stance("force_eager")
        with watch.watching(executor.stages), eager, engine.graphs.eagerly():
            result = engine.gradients(microbatches).read()
    finally:
        executor.observe = observed
    return gather_objects(watch.first, engine.groups.world), result.finite


class _NonFiniteWatch:
    """Records the first value that is not finite among inputs, outputs and gradients of modules."""

    def __init__(self) -> None:
        self.first: _FirstNonFinite | None = None
        self._act: Act | None = None
        self._looks = 0
        self._received = False  # its input came from another stage, whose rank knows more

    def observe(self, act: Act) -> AbstractContextManager[object]:
        """Record which pipeline action begins."""
        self._act = act
        return nullcontext()

    @contextmanager
    def watching(self, stages: Mapping[int, nn.Module]) -> Iterator[None]:
        """Watch every module of these stages."""
        with ExitStack() as stack:
            for stage in stages.values():
                for name, module in stage.named_modules():
                    for handle in self._hook(name, module):
                        stack.callback(handle.remove)
            yield

    def _hook(self, name: str, module: nn.Module) -> Iterator[Any]:
        whole = not name  # the stage itself

        def before(_: nn.Module, inputs: tuple[Any, ...]) -> None:
            for x in _tensors(inputs):
                self._look(x, f"the input of {name}", received=whole)

        def after(_: nn.Module, inputs: tuple[Any, ...], out: Any) -> None:
            for y in _tensors(out):
                scalar = whole and y.ndim < 2  # hidden states have rows
                self._look(y, "the loss" if scalar else f"the output of {name}")
                if y.requires_grad:
                    y.register_hook(backward)

        def backward(grad: Tensor) -> None:
            what = f"the gradient of the output of {name}"
            self._look(grad, what, received=whole, backward=True)

        yield module.register_forward_pre_hook(before)
        yield module.register_forward_hook(after)

    def _look(
        self, tensor: Tensor, what: str, *, received: bool = False, backward: bool = False
    ) -> None:
        self._looks += 1
        if self._received or (self.first is not None and not received) or _finite(tensor):
            return
        assert self._act is not None
        act = self._act.elementary[-1 if backward else 0]  # a pair has a forward and a backward
        here = (int(backward), act.mb, -act.stage if backward else act.stage)
        if received:  # what the last layer gave is what the stage gave, and was looked at before
            self._received = self.first is None or self.first.order[:3] == here
            self.first = None if self._received else self.first
        else:
            self.first = _FirstNonFinite((*here, self._looks), f"{what}, microbatch {act.mb}")


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values if isinstance(values, tuple) else (values,):
        if isinstance(value, Tensor) and value.is_floating_point():
            yield value


def _finite(tensor: Tensor) -> bool:
    return bool(local_tensor(tensor).isfinite().all())


def _lines(engine: Engine, found: Sequence[list[str]]) -> list[str]:
    lines = [f"{_name(engine, rank)}: {few(names, 1)}" for rank, names in enumerate(found) if names]
    more = len(lines) - SHOWN
    return [*lines[:SHOWN], *([f"and on {several(more, 'more rank')}"] if more > 0 else [])]


def _name(engine: Engine, rank: int) -> str:
    return f"rank {rank} {engine.layout.grid.name(rank)}"
