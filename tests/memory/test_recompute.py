"""What is recomputed is not kept, is made once again, and is no other."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from fivefold.config.memory import MemoryConfig
from fivefold.memory.recompute import install_recompute
from fivefold.model.transformer import Stage
from fivefold.tensor.deferred_weight import DeferredWeights, run_works
from fivefold.tensor.install import install_deferral
from tests.model.models import GPT, LLAMA, batch_of, build

MODEL = replace(LLAMA, num_layers=5)
NOTHING = MemoryConfig()
FULL = MemoryConfig(recompute_granularity="full")
SELECTIVE = MemoryConfig(
    recompute_granularity="selective", recompute_modules=("core_attn", "mlp", "layernorm")
)


def _stage(memory: MemoryConfig, model: Any = MODEL) -> tuple[Stage, DeferredWeights]:
    stage, deferred = build(model), DeferredWeights()
    recomputes = memory.recompute_granularity is not None
    install_deferral(stage, deferred, recomputes=recomputes)
    if recomputes:
        install_recompute(stage, memory)
    return stage, deferred


def _step(
    stage: Stage, deferred: DeferredWeights, between: Callable[[str], None] = lambda phase: None
) -> dict[str, Tensor]:
    loss = stage(None, batch_of(MODEL, [[5, 7], [12]]))
    between("F")
    with deferred.collect() as works:
        loss.backward()
    between("B")
    for _ in run_works(works):
        pass
    between("W")
    return {name: p.grad for name, p in stage.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("model", [MODEL, replace(GPT, num_layers=5)], ids=["llama", "gpt"])
@pytest.mark.parametrize(
    "memory",
    [FULL, replace(FULL, recompute_num_layers=(2,)), SELECTIVE],
    ids=["full", "in pairs", "selective"],
)
def test_gradients_are_the_same_to_the_last_bit(memory: MemoryConfig, model: Any) -> None:
    plain, again = _step(*_stage(NOTHING, model)), _step(*_stage(memory, model))
    assert plain.keys() == again.keys() == dict(build(model).named_parameters()).keys()
    assert all(torch.equal(again[name], grad) for name, grad in plain.items())


def _runs(stage: Stage, deferred: DeferredWeights, name: str) -> dict[str, int]:
    """How often modules of that name run in each phase of a step."""
    counts, phases = Counter[str](), {}

    def count(module: nn.Module, arguments: Any) -> None:
        counts["runs"] += 1

    for path, module in stage.named_modules():
        if path.endswith(name):
            module.register_forward_pre_hook(count)

    def between(done: str) -> None:
        phases[done] = counts.pop("runs", 0)

    _step(stage, deferred, between)
    return phases


EXPECTED: dict[str, tuple[MemoryConfig, str, dict[str, int]]] = {
    "nothing": (NOTHING, "mlp", {"F": 5, "B": 0, "W": 0}),
    "layers": (FULL, "self_attn", {"F": 5, "B": 5, "W": 0}),
    "pairs": (replace(FULL, recompute_num_layers=(2,)), "mlp", {"F": 5, "B": 5, "W": 0}),
    "the first three": (
        replace(FULL, recompute_method="block", recompute_num_layers=(3,)),
        "mlp",
        {"F": 5, "B": 3, "W": 0},
    ),
    "more than there are": (
        replace(FULL, recompute_method="block", recompute_num_layers=(9,)),
        "mlp",
        {"F": 5, "B": 5, "W": 0},
    ),
    "modules: the MLP": (SELECTIVE, "mlp", {"F": 5, "B": 5, "W": 0}),
    "modules: not the whole attention": (SELECTIVE, "self_attn", {"F": 5, "B": 0, "W": 0}),
    "modules: norms": (SELECTIVE, "input_layernorm", {"F": 5, "B": 5, "W": 0}),
}


@pytest.mark.parametrize("case", EXPECTED)
def test_everything_runs_once_more_and_never_for_deferred_weights(case: str) -> None:
    memory, name, expected = EXPECTED[case]
    assert _runs(*_stage(memory), name) == expected


def _kept(memory: MemoryConfig, name: str) -> int:
    """How many outputs of modules of that name are alive after the forward."""
    stage, deferred = _stage(memory)
    refs: list[StorageWeakRef] = []

    def note(module: nn.Module, arguments: Any, output: Tensor) -> None:
        refs.append(StorageWeakRef(output.untyped_storage()))

    for path, module in stage.named_modules():
        if path.startswith("layers.") and path.endswith(name):
            module.register_forward_hook(note)
    alive: dict[str, int] = {}

    def count(done: str) -> None:
        alive[done] = sum(not ref.expired() for ref in refs)

    _step(stage, deferred, count)
    return alive["F"]


def test_what_is_recomputed_is_not_kept() -> None:
    assert _kept(NOTHING, "input_layernorm") == 5
    assert _kept(SELECTIVE, "input_layernorm") == _kept(FULL, "input_layernorm") == 0
    assert _kept(SELECTIVE, "post_attention_layernorm") == 0
    assert _kept(replace(SELECTIVE, recompute_modules=("mlp",)), "input_layernorm") == 5
