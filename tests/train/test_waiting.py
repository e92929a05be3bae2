"""A step gives the device all of its work before it waits for a number, and a step that is refused
changes nothing, although the device alone knows of it in time."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fivefold.audit.watch import Watch
from fivefold.check import check
from fivefold.config.config import Config
from fivefold.mesh.slices import local_tensor
from fivefold.model.moe.grouped import group_ends
from fivefold.parallel_model import ParallelModel
from fivefold.pipeline.ir import Act
from fivefold.train.engine import Engine
from fivefold.train.step_result import StepResult
from tests.engines import own_batch
from tests.pool import run
from tests.verify.cases import (
    MIXTURE,
    MODELS,
    STAGES,
    STRATEGIES,
    chosen,
    config,
    flags,
    shared_groups,
)

pytestmark = pytest.mark.slow

FORWARD, UPDATE = "forward", "update"
METHODS = frozenset(
    (
        *("item", "tolist", "cpu", "numpy", "equal", "__array__"),
        *("__bool__", "__float__", "__int__", "__index__", "__complex__"),
    )
)
# Operations that end once the host knows a value, or how large the result is.
OPERATIONS = frozenset(
    {
        *("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select"),
        *("_unique2", "unique", "bincount"),
    }
)


class _Methods(TorchFunctionMode):
    """Notes the methods of tensors that wait, also those that need no operation on a CPU."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self._events = events

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "__name__", "") in METHODS:
            self._events.append(func.__name__)
        return func(*args, **(kwargs or {}))


class _Operations(Watch):
    """Notes the operations that wait, and those that update weights."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self._events = events

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        name = func.name().removeprefix("aten::").partition(".")[0]
        sized = name != "repeat_interleave" or kwargs.get("output_size") is not None
        if name in OPERATIONS or (name.startswith("index") and _has_mask(args)) or not sized:
            self._events.append(name)
        if "adam" in name:
            self._events.append(UPDATE)
        return super()._run(func, args, kwargs)


def _has_mask(args: Sequence[Any]) -> bool:
    indices = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else ()
    return any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in indices)


@contextmanager
def _forwards(engine: Engine, events: list[str]) -> Iterator[None]:
    @contextmanager
    def observe(act: Act) -> Iterator[None]:
        events.append(FORWARD)
        yield

    with patch.object(engine.model.executor, "observe", observe):
        yield


def _engine(rank: int, world: int, settings: Config) -> Engine:
    return Engine(check(settings, world), rank, torch.device("cpu"))


def _step(engine: Engine, step: int) -> StepResult:
    return engine.step(own_batch(engine, step))


def _events(rank: int, world: int, settings: Config) -> list[str]:
    """What the second step of a rank does that is of interest, in order."""
    events: list[str] = []

    def unseen(*arguments: Any) -> list[int] | None:
        """Where groups of rows end, which the kernel of a GPU reads by itself."""
        before = len(events)
        ends = group_ends(*arguments)
        del events[before:]
        return ends

    with shared_groups(), patch("fivefold.model.moe.grouped.group_ends", unseen):
        engine = _engine(rank, world, settings)
        _step(engine, 0)
        with _forwards(engine, events), _Methods(events), _Operations(events):
            result = _step(engine, 1)
    assert result.grad_norm > settings.optimizer.clip_grad, "nothing was clipped"
    return events


SHORT = flags() | {"num_layers": 2}
CASES = {
    "one rank": (1, "llama", SHORT),
    "one rank, bf16": (1, "gpt", SHORT | {"precision": "bf16"}),
    "ring": (2, "llama", SHORT | {"context_parallel_size": 2, "cp_comm_type": ("p2p",)}),
    "tp": (2, "llama tied", flags(tp=2, sequence=True) | {"num_layers": 2}),
    "two copies": (
        2,
        "llama tied",
        flags(pp=2, stages="Et|ttL") | {"pipeline_schedule": "dualpipe"},
    ),
    **{
        strategy: (
            4,
            "llama tied",
            flags(pp=2, dp=2, strategy=strategy, stages=STAGES[2, 2]),
        )
        for strategy in STRATEGIES
    },
    **{
        f"{strategy}, tp": (
            8,
            "llama tied",
            flags(tp=2, pp=2, dp=2, sequence=True, strategy=strategy, stages=STAGES[2, 2]),
        )
        for strategy in STRATEGIES
    },
}


@pytest.mark.parametrize(
    "case", chosen(CASES, "one rank, bf16", "ring", "tp", "two copies", "optim")
)
def test_nothing_waits_between_the_first_forward_and_the_last_update(case: str) -> None:
    world, model, values = CASES[case]
    for events in run(world, _events, config(MODELS[model], world, clip_grad=0.01, **values)):
        first, last = events.index(FORWARD), len(events) - events[::-1].index(UPDATE)
        assert set(events[first:last]) == {FORWARD, UPDATE}
        assert events[last:] == ["tolist"], "the result is read once, and that is seen"


_EP = {"expert_model_parallel_size": 2, "num_layers": 2, "moe_layer_freq": "[0,1]"}
_FIXED = _EP | {"moe_expert_rank_capacity_factor": 0.9}
EXPERTS = {
    "alltoall, ranks": (4, _FIXED | {"expert_tensor_parallel_size": 2}),
    "flex, ranks": (2, _FIXED | {"moe_token_dispatcher_type": "flex"}),
    "alltoall, experts": (
        2,
        _EP | {"moe_expert_capacity_factor": 0.9, "moe_pad_expert_input_to_capacity": True},
    ),
}


@pytest.mark.parametrize("case", chosen(EXPERTS, "flex, ranks", "alltoall, experts"))
def test_experts_that_get_a_fixed_number_of_rows_never_wait(case: str) -> None:
    world, values = EXPERTS[case]
    for events in run(world, _events, config(MIXTURE, world, clip_grad=0.01, **values)):
        first, last = events.index(FORWARD), len(events) - events[::-1].index(UPDATE)
        assert set(events[first:last]) == {FORWARD, UPDATE}


def test_experts_that_get_what_was_chosen_do_wait() -> None:
    for events in run(2, _events, config(MIXTURE, 2, clip_grad=0.01, **_EP)):
        assert "tolist" in events[: len(events) - events[::-1].index(UPDATE)]


def _spoil(model: ParallelModel) -> None:
    name, parameter = next((n, p) for n, p in model.parameters().items() if local_tensor(p).numel())
    assert parameter.grad is not None, name
    local_tensor(parameter.grad).view(-1)[-1] = float("nan")


def _bits(engine: Engine) -> dict[str, bytes]:
    tensors = {n: piece.local for n, piece in engine.optimizer.state_tensors().items()}
    tensors |= {n: local_tensor(p) for n, p in engine.parameters.items()}
    return {n: t.reshape(-1).view(torch.uint8).numpy().tobytes() for n, t in tensors.items()}


def _refused(rank: int, world: int, settings: Config) -> None:
    finish: Callable[[ParallelModel], None] = ParallelModel.finish_gradients

    def finish_badly(model: ParallelModel) -> None:
        finish(model)
        if rank == world - 1:
            _spoil(model)

    with shared_groups():
        ours, theirs = _engine(rank, world, settings), _engine(rank, world, settings)
        for engine in (ours, theirs):
            _step(engine, 0)
        before = _bits(ours)
        with patch.object(ParallelModel, "finish_gradients", finish_badly):
            assert not _step(ours, 1).finite
        assert _bits(ours) == before and ours.steps == 1
        grads = [local_tensor(p.grad) for p in ours.parameters.values() if p.grad is not None]
        assert len(grads) == len(ours.parameters)
        bad = sum(int((~grad.isfinite()).sum()) for grad in grads)
        assert bad == (rank == world - 1), "the gradients are those that were found"
        ours.optimizer.zero_grad()
        assert _step(ours, 1) == _step(theirs, 1)
        assert _bits(ours) == _bits(theirs) != before


@pytest.mark.parametrize("case", chosen(CASES, "one rank", "ring", "tp", "optim_grads_params"))
def test_a_refused_step_leaves_every_bit_and_its_gradients(case: str) -> None:
    world, model, values = CASES[case]
    run(world, _refused, config(MODELS[model], world, clip_grad=0.01, lr=1e-2, **values))
